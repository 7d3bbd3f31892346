"""From a data set and a partition to what each client holds: labelled, unlabelled, validation and test rows.

The four pools of a client are disjoint, and so are the clients. Every draw has a stream of its own, so asking for a
validation part or for fewer labels leaves the partition and the test rows as they were. The labels that clients and the
server can reach are those of labelled rows alone: in the shared tensor every other row has none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
import torch

from ..errors import ProtofedError, unknown
from ..seeds import numpy_stream
from .partitions import Natural, Partition, partitions
from .rows import apportion, balanced, hold_out, pick, ranked
from .types import UNKNOWN, ClientData, Dataset, FederatedData, Samples, Unlabelled

log = logging.getLogger("protofed")

Test = Literal["central", "local"]
Labels = Literal["all", "client", "server"]
Pool = Literal["own", "open"]


def federate(
    dataset: Dataset,
    partition: Partition | str,
    clients: int | None = None,
    *,
    seed: int,
    test: Test = "central",
    test_share: float = 0.2,
    validation_share: float = 0.0,
    labels: Labels = "all",
    labels_per_class: int = 5,
    server_labels: int = 0,
    server_label_noise: float = 0.0,
    unlabelled_limit: int | None = None,
    unlabelled: Pool = "own",
    open_share: float = 0.5,
) -> FederatedData:
    """Deal a data set to clients.

    `clients` may be left out with the natural partition only: one client for each group id.

    `test="central"` scores a client on the rows of the data set's test part whose class is in its training data; a data
    set without a test part gives up `test_share` of its training part before it is dealt. `test="local"` holds out
    `test_share` of each client's own rows (with the natural partition: the test rows of its own group ids, where it has
    some); the central test set is then the data set's test part, or else all clients' test rows together.

    `validation_share` of what then remains is each client's validation part, with labels. Of the rest, `labels="all"`
    are labelled; or `labels_per_class` of each class (`"client"`); or none (`"server"`). What is not labelled is
    unlabelled, at most `unlabelled_limit` rows a client. `unlabelled="open"` mixes samples of other classes than the
    client's into them (`_mixed`), so that they are `open_share` of its unlabelled rows. Samples that the data set has
    without labels are dealt evenly and come on top, up to the limit.

    `server_labels` class-balanced rows go to the server before anything is dealt; `server_label_noise` is the share of
    them whose label is replaced by another class.
    """
    _check(test, labels, test_share, validation_share, labels_per_class, server_labels, unlabelled_limit)
    _check_pools(labels, unlabelled, open_share, server_labels, server_label_noise, dataset.num_classes)
    dataset.check()
    partition = partitions.make(partition) if isinstance(partition, str) else partition
    x, y = dataset.x_train, dataset.y_train.numpy()
    rows = np.arange(len(y))
    truth = y  # of every row of x, for `held_back`
    if labels != "all" and dataset.x_unlabelled is not None:
        x = torch.cat([x, dataset.x_unlabelled])
        truth = np.concatenate([y, np.full(len(dataset.x_unlabelled), UNKNOWN)])
    shown = torch.full((len(x),), UNKNOWN)

    def reveal(rows: np.ndarray) -> Samples:
        """Labelled samples. This alone writes labels where others can read them."""
        index = torch.from_numpy(rows.astype(np.int64))
        shown[index] = dataset.y_train[index]
        return Samples(x, shown, index)

    central: Samples | None = None
    if dataset.x_test is not None and dataset.y_test is not None:
        central = Samples(dataset.x_test, dataset.y_test, torch.arange(len(dataset.y_test)))
    elif test == "central":
        if len(rows) < 2:
            raise ProtofedError(f"{dataset.name}: one sample cannot be split into a training and a test part")
        held = hold_out(y, test_share, numpy_stream(seed, "holdout"))
        central, rows = reveal(rows[held]), rows[~held]

    server: Samples | None = None
    if server_labels:
        chosen = _server_rows(y[rows], server_labels, numpy_stream(seed, "server labels"), dataset.name)
        server, rows = reveal(rows[chosen]), rows[~chosen]
        _confuse(server, server_label_noise, dataset.num_classes, numpy_stream(seed, "server label noise"))

    groups = None if dataset.group_train is None else dataset.group_train.numpy()[rows]
    if clients is None:
        if not isinstance(partition, Natural):
            raise ProtofedError(f"partition {partition.name!r} needs a number of clients")
        clients = 1 if groups is None else len(np.unique(groups))
    own = [rows[r] for r in partition.split(y[rows], clients, numpy_stream(seed, "partition"), groups)]

    own_test: list[Samples] | None = None
    if test == "local":
        own_test, own = _local_test(dataset, partition, own, test_share, seed, reveal)
        if central is None:
            central = reveal(np.sort(np.concatenate([t.index.numpy() for t in own_test])))

    validations: list[Samples | None] = []
    labelled: list[Samples] = []
    pools: list[np.ndarray] = []
    classes = np.zeros((len(own), dataset.num_classes), bool)
    own_limit = unlabelled_limit
    if unlabelled_limit is not None and unlabelled == "open":
        own_limit = unlabelled_limit - int(open_share * unlabelled_limit + 1e-9)  # the rest is for other classes
    for client, train in enumerate(own):
        validation: Samples | None = None
        if validation_share:
            stream = numpy_stream(seed, "validation", client)
            held = _own_share(y[train], validation_share, stream, client, "validation")
            validation, train = reveal(train[held]), train[~held]
        validations.append(validation)
        classes[client, y[train]] = True
        known, rest = _hide_labels(train, y, labels, labels_per_class, own_limit, numpy_stream(seed, "labels", client))
        labelled.append(reveal(known))
        pools.append(rest)
    if unlabelled == "open":
        nobodys = (shown[: len(y)] == UNKNOWN).numpy()
        nobodys[np.concatenate(pools)] = False
        spare = np.flatnonzero(nobodys)
        pools = _mixed(pools, spare, y, classes, open_share, unlabelled_limit, numpy_stream(seed, "open"), dataset.name)
    if len(x) > len(y):
        pools = _filled(pools, len(y), len(x), unlabelled_limit, numpy_stream(seed, "without labels"))

    parts: list[ClientData] = []
    rows_of_classes: dict[bytes, Samples] = {}  # clients with the same classes share one list of test rows
    for client, has in enumerate(classes):
        if own_test is not None:
            tested = own_test[client]
        else:
            assert central is not None
            key = has.tobytes()
            if key not in rows_of_classes:
                rows_of_classes[key] = central.subset(torch.from_numpy(np.flatnonzero(has[central.labels.numpy()])))
            tested = rows_of_classes[key]
            if not len(tested):
                raise ProtofedError(
                    f"{dataset.name}: the test part has no sample of client {client}'s classes "
                    f"{np.flatnonzero(has).tolist()}"
                )
        pool = None if labels == "all" else Unlabelled(x, torch.from_numpy(pools[client]))
        parts.append(ClientData(labelled[client], tested, torch.from_numpy(has), pool, validations[client]))
    return FederatedData(
        parts,
        dataset.num_classes,
        dataset.sample_shape,
        central,
        server,
        [None if labels == "all" else torch.from_numpy(truth[pool]) for pool in pools],
        dataset.class_names,
        dataset.name,
        dataset.class_values,
        _client_names(dataset, partition, len(parts)),
        dataset.mean,
        dataset.std,
        dataset.kind,
        dataset.flips,
    )


def _confuse(samples: Samples, share: float, classes: int, rng: np.random.Generator) -> None:
    """Symmetric label noise, in place: a share of the labels becomes another class, each as likely."""
    wrong = rng.choice(len(samples), round(share * len(samples)), replace=False)
    index = samples.index[torch.from_numpy(wrong)]
    samples.y[index] = (samples.y[index] + torch.from_numpy(rng.integers(1, classes, len(wrong)))) % classes


def _mixed(
    pools: list[np.ndarray],
    spare: np.ndarray,
    y: np.ndarray,
    classes: np.ndarray,
    share: float,
    limit: int | None,
    rng: np.random.Generator,
    name: str,
) -> list[np.ndarray]:
    """Unlabelled rows with those of other classes than the client's among them: `share` of them, rounded down.

    They are rows that nobody holds, as long as there are enough. Where there are not, every client gives up the same part
    of its own rows to the others, at most `share`; what nobody can use of them it keeps. A client with every class gets
    nothing.
    """
    foreign = ~classes & (np.bincount(y, minlength=classes.shape[1]) > 0)
    if not foreign.any():
        raise ProtofedError(
            f"{name}: unlabelled='open' needs classes that a client does not have, but every client has all of them; "
            "use another partition"
        )
    stacks: list[list[np.ndarray]] = []  # of each holder, by class; nobody is the last holder
    for rows in (*pools, spare):
        rows = rng.permutation(rows)
        rows = rows[np.argsort(y[rows], kind="stable")]
        stacks.append(np.split(rows, np.cumsum(np.bincount(y[rows], minlength=classes.shape[1]))[:-1]))
    held = np.array([[len(rows) for rows in holder] for holder in stacks])
    own = held[:-1].sum(1)

    def wanted(keep: np.ndarray) -> np.ndarray:
        want = np.floor(share / (1 - share) * keep + 1e-9).astype(np.int64) * foreign.any(1)
        return want if limit is None else np.minimum(want, limit - own)

    want = wanted(own)
    given, received = _exchange(held, np.append(np.zeros_like(own), len(spare)), foreign, want)
    if received.sum() < want.sum():
        part = min((1 - share) * (1 + received.sum() / own.sum()), 1)
        keep = np.ceil(part * own - 1e-9).astype(np.int64)
        most = wanted(keep)
        want = apportion(min(most.sum(), received.sum() + (own - keep).sum()), most, most)
        given, received = _exchange(held, np.append(own - keep, len(spare)), foreign, want)
    if not received.any():
        raise ProtofedError(
            f"{name}: unlabelled='open', but not one sample of a class its client does not have is to be had: "
            f"{len(spare)} samples are nobody's, and {own.sum()} are in unlabelled pools"
        )
    short = received.sum(1) < want
    if short.any():
        log.warning(
            "%s: open_share=%g asks for %d samples of classes their client does not have, and %d were to be had; "
            "%d of %d clients have fewer",
            *(name, share, want.sum(), received.sum(), short.sum(), len(pools)),
        )
    mixed = [
        [rows[n:] for rows, n in zip(*holder, strict=True)] for holder in zip(stacks[:-1], given[:-1], strict=True)
    ]
    for c in range(classes.shape[1]):
        moved = rng.permutation(np.concatenate([holder[c][:n] for holder, n in zip(stacks, given[:, c], strict=True)]))
        for pool, rows in zip(mixed, np.split(moved, np.cumsum(received[:, c])[:-1]), strict=True):
            pool.append(rows)
    return [np.sort(np.concatenate(pool)) for pool in mixed]


def _exchange(
    held: np.ndarray, most: np.ndarray, foreign: np.ndarray, want: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """How many samples of each class every holder gives and every client receives, as many as can be (a maximum flow).

    A holder has `held [holder, class]` and gives at most `most`; a client takes `foreign` classes only, `want` in all,
    and as evenly over the classes as that lets it.
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_flow

    (holders, classes), clients = held.shape, len(want)
    giver, of_class = 1 + np.arange(holders), 1 + holders + np.arange(classes)
    taker, last = 1 + holders + classes + np.arange(clients), 1 + holders + classes + clients
    useful = foreign & (held.sum(0) > 0)
    even = -(-want // np.maximum(useful.sum(1), 1))
    while True:
        edges = (
            np.broadcast_arrays(0, giver, most),
            np.broadcast_arrays(giver[:, None], of_class, held),
            np.broadcast_arrays(of_class, taker[:, None], useful * even[:, None]),
            np.broadcast_arrays(taker, last, want),
        )
        start, end, capacity = (np.concatenate([edge[i].ravel() for edge in edges]) for i in range(3))
        found = maximum_flow(csr_matrix((capacity.astype(np.int32), (start, end)), (last + 1, last + 1)), 0, last)
        if found.flow_value == want.sum() or (even >= want).all():
            break
        even = 2 * even
    return found.flow[giver][:, of_class].toarray(), -found.flow[taker][:, of_class].toarray()


def _filled(
    pools: list[np.ndarray], start: int, stop: int, limit: int | None, rng: np.random.Generator
) -> list[np.ndarray]:
    """Rows `start … stop` dealt evenly on top of the pools, as far as the limit lets them."""
    dealt = np.array_split(start + rng.permutation(stop - start), len(pools))
    rooms = [None if limit is None else max(limit - len(pool), 0) for pool in pools]
    return [np.concatenate([pool, np.sort(more[:room])]) for pool, more, room in zip(pools, dealt, rooms, strict=True)]


def _client_names(dataset: Dataset, partition: Partition, clients: int) -> tuple[str, ...]:
    """Natural clients are called what their groups are called, where each has one."""
    if not isinstance(partition, Natural) or dataset.group_train is None or not dataset.group_names:
        return ()
    ids = dataset.group_train.unique().tolist()
    return tuple(dataset.group_names[i] for i in ids) if len(ids) == clients else ()


def _hide_labels(
    train: np.ndarray, y: np.ndarray, labels: Labels, per_class: int, limit: int | None, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Labelled rows and unlabelled rows."""
    if labels == "all":
        return train, train[:0]
    if labels == "client":
        ranks, sizes = ranked(y[train])
        shown = pick(ranks, np.minimum(sizes, per_class), rng)
    else:
        shown = np.zeros(len(train), bool)
    rest = train[~shown]
    if limit is not None and len(rest) > limit:
        rest = np.sort(rng.choice(rest, limit, replace=False))
    return train[shown], rest


def _local_test(
    dataset: Dataset,
    partition: Partition,
    own: list[np.ndarray],
    share: float,
    seed: int,
    reveal: Callable[[np.ndarray], Samples],
) -> tuple[list[Samples], list[np.ndarray]]:
    """Each client's test rows, and what remains of its training rows."""
    y = dataset.y_train.numpy()
    given: list[np.ndarray] = [np.empty(0, np.int64)] * len(own)
    if isinstance(partition, Natural) and dataset.group_train is not None and dataset.group_test is not None:
        ids = np.unique(dataset.group_train.numpy()[np.concatenate(own)])
        owner = partition.owners(dataset.group_test.numpy(), ids, len(own))
        given = [np.flatnonzero(owner == client) for client in range(len(own))]
    tests, remaining = [], []
    for client, rows in enumerate(own):
        if len(given[client]) and dataset.x_test is not None and dataset.y_test is not None:
            tests.append(Samples(dataset.x_test, dataset.y_test, torch.from_numpy(given[client])))
            remaining.append(rows)
        else:
            held = _own_share(y[rows], share, numpy_stream(seed, "split", client), client, "test")
            tests.append(reveal(rows[held]))
            remaining.append(rows[~held])
    return tests, remaining


def _own_share(labels: np.ndarray, share: float, rng: np.random.Generator, client: int, part: str) -> np.ndarray:
    if len(labels) < 2:
        raise ProtofedError(
            f"client {client} has {len(labels)} sample left; a {part} part of its own needs at least 2 "
            "(fewer clients or a larger min_size give it more)"
        )
    return hold_out(labels, share, rng)


def _server_rows(labels: np.ndarray, number: int, rng: np.random.Generator, name: str) -> np.ndarray:
    classes = len(np.unique(labels))
    if number < classes:
        raise ProtofedError(f"{name}: server_labels={number} is less than one label for each of {classes} classes")
    if number >= len(labels):
        raise ProtofedError(f"{name}: server_labels={number} leaves nothing of {len(labels)} training samples")
    return balanced(labels, number, rng)


def _check(
    test: str,
    labels: str,
    test_share: float,
    validation_share: float,
    labels_per_class: int,
    server_labels: int,
    unlabelled_limit: int | None,
) -> None:
    if test not in get_args(Test):
        raise unknown("test:", test, get_args(Test))
    if labels not in get_args(Labels):
        raise unknown("labels:", labels, get_args(Labels))
    for message, wrong in (
        (f"test_share={test_share}: expected a share between 0 and 1", not 0 < test_share < 1),
        (f"validation_share={validation_share}: expected 0 or a share below 1", not 0 <= validation_share < 1),
        (f"labels_per_class={labels_per_class}: expected at least 1", labels_per_class < 1),
        (f"server_labels={server_labels}: expected 0 or more", server_labels < 0),
        (
            f"unlabelled_limit={unlabelled_limit}: expected 0 or more",
            unlabelled_limit is not None and unlabelled_limit < 0,
        ),
        (
            "labels='server' needs server_labels, a number of labelled samples above 0",
            labels == "server" and not server_labels,
        ),
    ):
        if wrong:
            raise ProtofedError(message)


def _check_pools(
    labels: str, unlabelled: str, open_share: float, server_labels: int, server_label_noise: float, classes: int
) -> None:
    if unlabelled not in get_args(Pool):
        raise unknown("unlabelled:", unlabelled, get_args(Pool))
    for message, wrong in (
        (f"open_share={open_share}: expected a share between 0 and 1", not 0 < open_share < 1),
        (
            "unlabelled='open' needs unlabelled samples, but labels='all' leaves none",
            unlabelled == "open" and labels == "all",
        ),
        (
            f"server_label_noise={server_label_noise}: expected a share from 0 to 1",
            not 0 <= server_label_noise <= 1,
        ),
        (
            f"server_label_noise={server_label_noise} needs server_labels, a number of labelled samples above 0",
            server_label_noise > 0 and not server_labels,
        ),
        (f"server_label_noise={server_label_noise} needs at least 2 classes", server_label_noise > 0 and classes < 2),
    ):
        if wrong:
            raise ProtofedError(message)
