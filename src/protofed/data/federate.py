"""From a data set and a partition to what each client holds: labelled, unlabelled, validation and test rows.

The four pools of a client are disjoint, and so are the clients. Every draw has a stream of its own, so a validation
part or fewer labels do not change the partition and the test rows. Clients and the server can read the labels of
labelled rows only: in the shared tensor every other row has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch

from ..errors import ProtofedError, unknown
from ..seeds import numpy_stream
from .domains import Domains, domain_names
from .open_pools import mix_foreign
from .partitions import Natural, Partition, partitions
from .remarks import groups_without_match, remarks
from .rows import balanced, hold_out, pick, ranked
from .scaling import Scaler, apart
from .types import UNKNOWN, ClientData, Dataset, FederatedData, Samples, Unlabelled, name_of
from .words import some

Test = Literal["central", "local"]
Labels = Literal["all", "client", "server"]
Pool = Literal["own", "open"]
Scope = Literal["own", "all"]


@dataclass(frozen=True)
class Split:
    """The settings of `federate` that say what each client holds; see there."""

    test: Test = "central"
    test_share: float = 0.2
    validation_share: float = 0.0
    labels: Labels = "all"
    labels_per_class: int = 5
    server_labels: int = 0
    server_label_noise: float = 0.0
    unlabelled_limit: int | None = None
    unlabelled: Pool = "own"
    open_share: float = 0.5
    scope: Scope = "own"

    def __post_init__(self) -> None:
        for key, value, choices in (
            ("test", self.test, get_args(Test)),
            ("labels", self.labels, get_args(Labels)),
            ("unlabelled", self.unlabelled, get_args(Pool)),
            ("scope", self.scope, get_args(Scope)),
        ):
            if value not in choices:
                raise unknown(f"{key}:", value, choices)
        problem = next((message for message, wrong in self._rules() if wrong), None)
        if problem is not None:
            raise ProtofedError(problem)

    def _rules(self) -> Iterator[tuple[str, bool]]:
        """The message of each possible mistake in the settings, and whether it applies."""
        limit, noise = self.unlabelled_limit, self.server_label_noise
        yield f"test_share={self.test_share}: expected a share between 0 and 1", not 0 < self.test_share < 1
        yield (
            f"validation_share={self.validation_share}: expected 0 or a share below 1",
            not 0 <= self.validation_share < 1,
        )
        yield f"labels_per_class={self.labels_per_class}: expected at least 1", self.labels_per_class < 1
        yield f"server_labels={self.server_labels}: expected 0 or more", self.server_labels < 0
        yield f"unlabelled_limit={limit}: expected 0 or more", limit is not None and limit < 0
        yield (
            "labels='server' needs server_labels, a number of labelled samples above 0",
            self.labels == "server" and not self.server_labels,
        )
        yield (
            "scope='all' is for the central test set; with test='local' a client is tested on rows of its own",
            self.scope == "all" and self.test == "local",
        )
        yield f"open_share={self.open_share}: expected a share between 0 and 1", not 0 < self.open_share < 1
        yield (
            "unlabelled='open' needs unlabelled samples, but labels='all' leaves none",
            self.unlabelled == "open" and self.labels == "all",
        )
        yield f"server_label_noise={noise}: expected a share from 0 to 1", not 0 <= noise <= 1
        yield (
            f"server_label_noise={noise} needs server_labels, a number of labelled samples above 0",
            noise > 0 and not self.server_labels,
        )

    @property
    def own_limit(self) -> int | None:
        """The most unlabelled rows of its own classes that a client may have; an open pool leaves room for other classes."""
        if self.unlabelled_limit is None or self.unlabelled == "own":
            return self.unlabelled_limit
        return self.unlabelled_limit - int(self.open_share * self.unlabelled_limit + 1e-9)


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
    scope: Scope = "own",
) -> FederatedData:
    """Distribute a data set over clients.

    Samples that the data set has without labels are distributed evenly and added to the clients' unlabelled rows, up to
    the limit, unless `labels="all"`.

    Args:
        dataset: the data set.
        partition: which rows go to which client: a partition, or the name of one.
        clients: the number of clients. It may be left out with the partitions `natural` and `domains` only: one client
            for each group id.
        seed: every draw has a stream of its own that follows from the seed and the purpose of the draw.
        test: `"central"` scores a client on the rows of the data set's test part whose class is in its training data; a
            data set without a test part gives up `test_share` of its training part first; with the partition `domains`
            they are rows of the client's own domain. `"local"` holds
            out `test_share` of each client's own rows (with the natural partition: the test rows of its own group ids,
            where it has some); the central test set is then the data set's test part, or else all clients' test rows
            together.
        test_share: see `test`.
        validation_share: the share of what then remains that is each client's validation part, with labels.
        labels: which of the other rows are labelled: `"all"`, `labels_per_class` of each class (`"client"`), or none
            (`"server"`). What is not labelled is unlabelled.
        labels_per_class: see `labels`.
        server_labels: the number of class-balanced rows that go to the server, before clients get any.
        server_label_noise: the share of them whose label is replaced by another class.
        unlabelled_limit: the most unlabelled rows a client may have.
        unlabelled: `"open"` mixes samples of other classes than the client's into its unlabelled rows.
        open_share: the share of a client's unlabelled rows that are of other classes, with `unlabelled="open"`.
        scope: with `test="central"`, whether a client is scored on the classes of its own training data or on all of them.

    Returns:
        what each client and the server hold. `federate(data, "dirichlet", clients=20, seed=1234)`
    """
    split = Split(
        test,
        test_share,
        validation_share,
        labels,
        labels_per_class,
        server_labels,
        server_label_noise,
        unlabelled_limit,
        unlabelled,
        open_share,
        scope,
    )
    if server_label_noise > 0 and dataset.num_classes < 2:
        raise ProtofedError(f"server_label_noise={server_label_noise} needs at least 2 classes")
    dataset.check()
    partition = partitions.make(partition) if isinstance(partition, str) else partition
    dataset = apart(dataset, held_out=dataset.x_test is None or test == "local")
    rows = _Rows(dataset, with_unlabelled=labels != "all")
    central, training = _central_test(dataset, rows, split, seed)
    server, training = _server_part(dataset, rows, training, split, seed)
    client_rows = _client_rows(dataset, partition, clients, training, seed)
    domains = _domains(dataset, partition, client_rows)
    names, notes = _client_names(dataset, partition, training, len(client_rows), domains)
    local: list[Samples] | None = None
    if test == "local":
        local, client_rows, more = _local_tests(dataset, rows, partition, client_rows, test_share, seed, names)
        notes = (*notes, *more)
        if central is None:
            central = rows.reveal(np.sort(np.concatenate([part.index.numpy() for part in local])))
    assert central is not None
    scaler = Scaler.of(dataset, rows.x)
    held_out = [part.index.numpy() for part in (central, *(local or ())) if part.x is rows.x]
    scaler.without(np.unique(np.concatenate([np.empty(0, np.int64), *held_out])), len(rows.y))
    notes = (*notes, *remarks(dataset, rows.x, client_rows, [central] if local is None else local, names))
    shares = [
        _client_share(dataset, rows, training, split, seed, client, names)
        for client, training in enumerate(client_rows)
    ]
    pools = _unlabelled_pools(dataset, rows, shares, split, seed)
    tests = _tests_by_classes(dataset, central, shares, names, domains, scope) if local is None else local
    parts = [
        ClientData(
            share.labelled,
            tested,
            torch.from_numpy(share.classes),
            None if labels == "all" else Unlabelled(rows.x, torch.from_numpy(pool)),
            share.validation,
        )
        for share, tested, pool in zip(shares, tests, pools, strict=True)
    ]
    data = FederatedData(
        parts,
        dataset.num_classes,
        dataset.sample_shape,
        central,
        server,
        [None if labels == "all" else torch.from_numpy(rows.truth[pool]) for pool in pools],
        dataset.class_names,
        dataset.name,
        dataset.class_values,
        names,
        scaler.mean,
        scaler.std,
        dataset.kind,
        dataset.flips,
        columns=dataset.columns,
        remarks=notes,
    )
    return scaler.by_site(data, client_rows)


def without_test_rows(
    dataset: Dataset,
    partition: Partition | str,
    clients: int | None = None,
    *,
    seed: int,
    test: Test = "central",
    test_share: float = 0.2,
    server_labels: int = 0,
) -> Dataset:
    """The data set without a test part, and without the training rows that `federate` would hold out for testing.

    Whoever has to choose by anything but test rows is given this.

    Args:
        dataset: the data set.
        partition: as for `federate`.
        clients: as for `federate`.
        seed: as for `federate`.
        test: as for `federate`.
        test_share: as for `federate`.
        server_labels: as for `federate`.

    Returns:
        the other rows. `without_test_rows(data, "natural", seed=1234, test="local")`
    """
    split = Split(test, test_share, server_labels=server_labels)
    dataset.check()
    partition = partitions.make(partition) if isinstance(partition, str) else partition
    dataset = apart(dataset, held_out=dataset.x_test is None or test == "local")
    rows = _Rows(dataset, with_unlabelled=False)
    _, kept = _central_test(dataset, rows, split, seed)
    if test == "local":
        _, training = _server_part(dataset, rows, kept, split, seed)
        client_rows = _client_rows(dataset, partition, clients, training, seed)
        domains = _domains(dataset, partition, client_rows)
        names, _ = _client_names(dataset, partition, training, len(client_rows), domains)
        tests, _, _ = _local_tests(dataset, rows, partition, client_rows, test_share, seed, names)
        held_out = [part.index.numpy() for part in tests if part.x is rows.x]
        kept = np.setdiff1d(kept, np.concatenate([*held_out, kept[:0]]))
    index = torch.from_numpy(kept)
    return replace(
        dataset,
        x_train=dataset.x_train[index],
        y_train=dataset.y_train[index],
        group_train=None if dataset.group_train is None else dataset.group_train[index],
        x_test=None,
        y_test=None,
        group_test=None,
        sequence_train=None if dataset.sequence_train is None else dataset.sequence_train[index],
    )


class _Rows:
    """The rows that are distributed: those of the training part, and then those that the data set has without labels."""

    def __init__(self, dataset: Dataset, with_unlabelled: bool) -> None:
        self.x, self.y = dataset.x_train, dataset.y_train.numpy()
        self.truth = self.y  # the label of every row of x, which clients never see
        if with_unlabelled and dataset.x_unlabelled is not None:
            self.x = torch.cat([self.x, dataset.x_unlabelled])
            self.truth = np.concatenate([self.y, np.full(len(dataset.x_unlabelled), UNKNOWN)])
        self.visible = torch.full((len(self.x),), UNKNOWN)  # the labels that clients and server can read

    def reveal(self, rows: np.ndarray) -> Samples:
        """Labelled samples. Only this method writes labels where clients and the server can read them."""
        index = torch.from_numpy(rows.astype(np.int64))
        self.visible[index] = torch.from_numpy(self.y)[index]
        return Samples(self.x, self.visible, index)

    def spare(self, pools: Sequence[np.ndarray]) -> np.ndarray:
        """The training rows that are not labelled and in none of these pools."""
        free = (self.visible[: len(self.y)] == UNKNOWN).numpy()
        free[np.concatenate(pools)] = False
        return np.flatnonzero(free)


@dataclass(frozen=True)
class _Share:
    """One client's part of the training rows."""

    validation: Samples | None
    labelled: Samples
    unlabelled: np.ndarray  # row numbers
    classes: np.ndarray  # bool [C]: the classes in its training data


def _central_test(dataset: Dataset, rows: _Rows, split: Split, seed: int) -> tuple[Samples | None, np.ndarray]:
    """The test set that all clients share, where there is one already, and the training rows that remain."""
    training = np.arange(len(rows.y))
    if dataset.x_test is not None and dataset.y_test is not None:
        return Samples(dataset.x_test, dataset.y_test, torch.arange(len(dataset.y_test))), training
    if split.test == "local":
        return None, training
    if len(training) < 2:
        raise ProtofedError(f"{dataset.name}: one sample cannot be split into a training and a test part")
    mask = hold_out(rows.y, split.test_share, numpy_stream(seed, "holdout"))
    return rows.reveal(training[mask]), training[~mask]


def _server_part(
    dataset: Dataset, rows: _Rows, training: np.ndarray, split: Split, seed: int
) -> tuple[Samples | None, np.ndarray]:
    """The server's labelled samples, and the training rows that remain."""
    if not split.server_labels:
        return None, training
    stream = numpy_stream(seed, "server labels")
    mask = _server_rows(rows.y[training], split.server_labels, stream, dataset.name)
    server = rows.reveal(training[mask])
    _confuse(server, split.server_label_noise, dataset.num_classes, numpy_stream(seed, "server label noise"))
    return server, training[~mask]


def _client_rows(
    dataset: Dataset, partition: Partition, clients: int | None, training: np.ndarray, seed: int
) -> list[np.ndarray]:
    """The training rows of each client."""
    groups = None if dataset.group_train is None else dataset.group_train.numpy()[training]
    if clients is None:
        if not partition.by_groups:
            raise ProtofedError(f"partition {partition.name!r} needs a number of clients")
        clients = 1 if groups is None else len(np.unique(groups))
    labels = dataset.y_train.numpy()[training]
    return [training[share] for share in partition.split(labels, clients, numpy_stream(seed, "partition"), groups)]


def _client_share(
    dataset: Dataset, rows: _Rows, training: np.ndarray, split: Split, seed: int, client: int, names: Sequence[str]
) -> _Share:
    """A client's training rows as validation, labelled and unlabelled rows."""
    validation: Samples | None = None
    if split.validation_share:
        stream = numpy_stream(seed, "validation", client)
        mask = _own_share(rows.y[training], split.validation_share, stream, name_of(client, names), "validation")
        validation, training = rows.reveal(training[mask]), training[~mask]
    classes = np.zeros(dataset.num_classes, bool)
    classes[rows.y[training]] = True
    labelled, unlabelled = _hide_labels(training, rows.y, split, numpy_stream(seed, "labels", client))
    return _Share(validation, rows.reveal(labelled), unlabelled, classes)


def _unlabelled_pools(
    dataset: Dataset, rows: _Rows, shares: Sequence[_Share], split: Split, seed: int
) -> list[np.ndarray]:
    """Each client's unlabelled rows, with rows of other classes and samples without labels by the settings."""
    pools = [share.unlabelled for share in shares]
    if split.unlabelled == "open":
        classes = np.stack([share.classes for share in shares])
        stream = numpy_stream(seed, "open")
        spare = rows.spare(pools)
        pools = mix_foreign(
            pools, spare, rows.y, classes, split.open_share, split.unlabelled_limit, stream, dataset.name
        )
    if len(rows.x) > len(rows.y):
        stream = numpy_stream(seed, "without labels")
        pools = _with_unlabelled(pools, len(rows.y), len(rows.x), split.unlabelled_limit, stream)
    return pools


def _domains(dataset: Dataset, partition: Partition, client_rows: Sequence[np.ndarray]) -> list[int] | None:
    """The domain of each client, where the partition gives each one."""
    if not isinstance(partition, Domains) or dataset.group_train is None:
        return None
    return [int(dataset.group_train[rows[0]]) for rows in client_rows]


def _tests_by_classes(
    dataset: Dataset,
    central: Samples,
    shares: Sequence[_Share],
    names: Sequence[str],
    domains: Sequence[int] | None,
    scope: Scope,
) -> list[Samples]:
    """For each client the rows of the central test set whose class is in its training data, or all of them; of its own
    domain alone where it has one."""
    tests: dict[tuple[int | None, bytes], Samples] = {}  # clients with the same classes share one list of test rows
    labels = central.labels.numpy()
    groups = dataset.group_test if central.x is dataset.x_test else dataset.group_train
    own_groups = None if domains is None or groups is None else groups[central.index].numpy()
    keys = [(None if domains is None else domains[c], share.classes.tobytes()) for c, share in enumerate(shares)]
    for client, (share, key) in enumerate(zip(shares, keys, strict=True)):
        if key not in tests:
            mask = share.classes[labels] if scope == "own" else np.ones(len(labels), bool)
            mask = mask if own_groups is None else mask & (own_groups == key[0])
            tests[key] = central.subset(torch.from_numpy(np.flatnonzero(mask)))
        if not len(tests[key]):
            classes = [dataset.class_name(c) for c in np.flatnonzero(share.classes).tolist()]
            raise ProtofedError(
                f"{dataset.name}: the test part has no sample of the classes of {name_of(client, names)}: {some(classes)}"
            )
    return [tests[key] for key in keys]


def _confuse(samples: Samples, share: float, classes: int, rng: np.random.Generator) -> None:
    """Add symmetric label noise in place: a share of the labels becomes another class, and all are equally likely."""
    wrong = rng.choice(len(samples), round(share * len(samples)), replace=False)
    index = samples.index[torch.from_numpy(wrong)]
    samples.y[index] = (samples.y[index] + torch.from_numpy(rng.integers(1, classes, len(wrong)))) % classes


def _with_unlabelled(
    pools: list[np.ndarray], start: int, stop: int, limit: int | None, rng: np.random.Generator
) -> list[np.ndarray]:
    """The pools with rows `start … stop` evenly added to them, up to the limit."""
    additions = np.array_split(start + rng.permutation(stop - start), len(pools))
    capacities = [None if limit is None else max(limit - len(pool), 0) for pool in pools]
    return [
        np.concatenate([pool, np.sort(addition[:capacity])])
        for pool, addition, capacity in zip(pools, additions, capacities, strict=True)
    ]


def _client_names(
    dataset: Dataset, partition: Partition, training: np.ndarray, clients: int, domains: Sequence[int] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of natural clients, which are those of their groups, and a remark where a group has no training row left.

    There are no names where the groups have none.
    """
    if domains is not None and dataset.group_names:
        return domain_names(dataset.group_names, domains), ()
    if not isinstance(partition, Natural) or dataset.group_train is None or not dataset.group_names:
        return (), ()
    groups = dataset.group_train.numpy()
    names = [dataset.group_names[i] for i in np.unique(groups[training]).tolist()]
    shares = [names[client::clients] for client in range(clients)]
    lost = [dataset.group_name(g) for g in np.setdiff1d(groups, groups[training]).tolist()]
    remark = f"{dataset.name}: a site all of whose rows are held out for tests: {some(lost)}"
    joined = tuple(" + ".join(s[:3]) + (f" + {len(s) - 3} more" if len(s) > 3 else "") for s in shares)
    return joined, (remark,) if lost else ()


def _hide_labels(
    training: np.ndarray, y: np.ndarray, split: Split, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Labelled rows and unlabelled rows."""
    if split.labels == "all":
        return training, training[:0]
    if split.labels == "client":
        ranks, sizes = ranked(y[training])
        mask = pick(ranks, np.minimum(sizes, split.labels_per_class), rng)
    else:
        mask = np.zeros(len(training), bool)
    unlabelled, limit = training[~mask], split.own_limit
    if limit is not None and len(unlabelled) > limit:
        unlabelled = np.sort(rng.choice(unlabelled, limit, replace=False))
    return training[mask], unlabelled


def _local_tests(
    dataset: Dataset,
    rows: _Rows,
    partition: Partition,
    client_rows: Sequence[np.ndarray],
    share: float,
    seed: int,
    names: Sequence[str],
) -> tuple[list[Samples], list[np.ndarray], tuple[str, ...]]:
    """Each client's test rows, what remains of its training rows, and remarks about sites that are in one part alone."""
    notes: tuple[str, ...] = ()
    group_tests: list[np.ndarray] = [np.empty(0, np.int64)] * len(client_rows)
    if isinstance(partition, Natural) and dataset.group_train is not None and dataset.group_test is not None:
        ids = np.unique(dataset.group_train.numpy()[np.concatenate(client_rows)])
        owner = partition.owners(dataset.group_test.numpy(), ids, len(client_rows))
        if (owner < 0).all():
            strange, known = (
                some([dataset.group_name(i) for i in np.unique(g).tolist()]) for g in (dataset.group_test, ids)
            )
            raise ProtofedError(
                f"{dataset.name}: no test row is of a site that trains; tests have {strange}, training {known}"
            )
        group_tests = [np.flatnonzero(owner == client) for client in range(len(client_rows))]
        notes = tuple(groups_without_match(dataset, owner, len(client_rows), names))
    tests, remaining = [], []
    for client, training in enumerate(client_rows):
        if len(group_tests[client]) and dataset.x_test is not None and dataset.y_test is not None:
            tests.append(Samples(dataset.x_test, dataset.y_test, torch.from_numpy(group_tests[client])))
            remaining.append(training)
        else:
            stream = numpy_stream(seed, "split", client)
            mask = _own_share(rows.y[training], share, stream, name_of(client, names), "test")
            tests.append(rows.reveal(training[mask]))
            remaining.append(training[~mask])
    return tests, remaining, notes


def _own_share(labels: np.ndarray, share: float, rng: np.random.Generator, client: str, part: str) -> np.ndarray:
    if len(labels) < 2:
        raise ProtofedError(
            f"{client} has {len(labels)} sample left; a {part} part of its own needs at least 2 "
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
