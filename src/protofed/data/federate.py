"""From a data set and a partition to what each client holds: labelled, unlabelled, validation and test rows.

The four pools of a client are disjoint, and so are the clients. Every draw has a stream of its own, so asking for a
validation part or for fewer labels leaves the partition and the test rows as they were.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ..errors import ProtofedError, unknown
from ..seeds import numpy_stream
from .partitions import Natural, Partition, partitions
from .rows import balanced, hold_out, pick, ranked
from .types import ClientData, Dataset, FederatedData, Samples, Unlabelled

Test = Literal["central", "local"]
Labels = Literal["all", "client", "server"]


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
    unlabelled_limit: int | None = None,
) -> FederatedData:
    """Deal a data set to clients.

    `clients` may be left out with the natural partition only: one client for each group id.

    `test="central"` scores a client on the rows of the data set's test part whose class is in its training data; a data
    set without a test part gives up `test_share` of its training part before it is dealt. `test="local"` holds out
    `test_share` of each client's own rows (with the natural partition: the test rows of its own group ids, where it has
    some); the central test set is then the data set's test part, or else all clients' test rows together.

    `validation_share` of what then remains is each client's validation part, with labels. Of the rest, `labels="all"`
    are labelled; or `labels_per_class` of each class (`"client"`); or none (`"server"`). What is not labelled is
    unlabelled, at most `unlabelled_limit` rows a client. `server_labels` class-balanced rows go to the server before
    anything is dealt.
    """
    _check(test, labels, test_share, validation_share, labels_per_class, server_labels, unlabelled_limit)
    dataset.check()
    partition = partitions.make(partition) if isinstance(partition, str) else partition
    y = dataset.y_train.numpy()
    rows = np.arange(len(y))

    central: Samples | None = None
    if dataset.x_test is not None and dataset.y_test is not None:
        central = _samples(dataset.x_test, dataset.y_test, np.arange(len(dataset.y_test)))
    elif test == "central":
        if len(rows) < 2:
            raise ProtofedError(f"{dataset.name}: one sample cannot be split into a training and a test part")
        held = hold_out(y, test_share, numpy_stream(seed, "holdout"))
        central, rows = _samples(dataset.x_train, dataset.y_train, rows[held]), rows[~held]

    server: Samples | None = None
    if server_labels:
        chosen = _server_rows(y[rows], server_labels, numpy_stream(seed, "server labels"), dataset.name)
        server, rows = _samples(dataset.x_train, dataset.y_train, rows[chosen]), rows[~chosen]

    groups = None if dataset.group_train is None else dataset.group_train.numpy()[rows]
    if clients is None:
        if not isinstance(partition, Natural):
            raise ProtofedError(f"partition {partition.name!r} needs a number of clients")
        clients = 1 if groups is None else len(np.unique(groups))
    own = [rows[r] for r in partition.split(y[rows], clients, numpy_stream(seed, "partition"), groups)]

    own_test: list[Samples] | None = None
    if test == "local":
        own_test, own = _local_test(dataset, partition, own, test_share, seed)
        if central is None:
            together = np.sort(np.concatenate([t.index.numpy() for t in own_test]))
            central = _samples(dataset.x_train, dataset.y_train, together)

    parts: list[ClientData] = []
    held_back: list[Tensor | None] = []
    rows_of_classes: dict[bytes, Samples] = {}  # clients with the same classes share one list of test rows
    for client, train in enumerate(own):
        validation: Samples | None = None
        if validation_share:
            held = _own_share(
                y[train], validation_share, numpy_stream(seed, "validation", client), client, "validation"
            )
            validation, train = _samples(dataset.x_train, dataset.y_train, train[held]), train[~held]
        classes = np.zeros(dataset.num_classes, bool)
        classes[y[train]] = True
        labelled, rest = _hide_labels(
            train, y, labels, labels_per_class, unlabelled_limit, numpy_stream(seed, "labels", client)
        )
        if own_test is not None:
            tested = own_test[client]
        else:
            assert central is not None
            key = classes.tobytes()
            if key not in rows_of_classes:
                rows_of_classes[key] = central.subset(torch.from_numpy(np.flatnonzero(classes[central.labels.numpy()])))
            tested = rows_of_classes[key]
            if not len(tested):
                raise ProtofedError(
                    f"{dataset.name}: the test part has no sample of client {client}'s classes "
                    f"{np.flatnonzero(classes).tolist()}"
                )
        unlabelled = None if rest is None else Unlabelled(dataset.x_train, torch.from_numpy(rest))
        parts.append(
            ClientData(
                _samples(dataset.x_train, dataset.y_train, labelled),
                tested,
                torch.from_numpy(classes),
                unlabelled,
                validation,
            )
        )
        held_back.append(None if rest is None else torch.from_numpy(y[rest]))
    return FederatedData(
        parts,
        dataset.num_classes,
        dataset.sample_shape,
        central,
        server,
        held_back,
        dataset.class_names,
        dataset.name,
        dataset.class_values,
        _client_names(dataset, partition, len(parts)),
    )


def _client_names(dataset: Dataset, partition: Partition, clients: int) -> tuple[str, ...]:
    """Natural clients are called what their groups are called, where each has one."""
    if not isinstance(partition, Natural) or dataset.group_train is None or not dataset.group_names:
        return ()
    ids = dataset.group_train.unique().tolist()
    return tuple(dataset.group_names[i] for i in ids) if len(ids) == clients else ()


def _hide_labels(
    train: np.ndarray, y: np.ndarray, labels: Labels, per_class: int, limit: int | None, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray | None]:
    """Labelled rows and, unless all are labelled, unlabelled rows."""
    if labels == "all":
        return train, None
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
    dataset: Dataset, partition: Partition, own: list[np.ndarray], share: float, seed: int
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
            tests.append(_samples(dataset.x_test, dataset.y_test, given[client]))
            remaining.append(rows)
        else:
            held = _own_share(y[rows], share, numpy_stream(seed, "split", client), client, "test")
            tests.append(_samples(dataset.x_train, dataset.y_train, rows[held]))
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


def _samples(x: Tensor, y: Tensor, rows: np.ndarray) -> Samples:
    return Samples(x, y, torch.from_numpy(rows.astype(np.int64)))


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
