"""Data with few labels: who can read which label, pools with foreign classes, noise at the server, scale and kind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protofed.data import Dataset, FederatedData, federate, load
from protofed.data.partitions import IID, Dirichlet, Natural, NWay, Partition, Pathological
from protofed.data.types import UNKNOWN
from protofed.errors import ProtofedError
from protofed.experiment.build import prepare_data
from protofed.experiment.settings import resolve

CLASSES = 6


def toy(train: int = 360, test: int = 60, without: int = 0, groups: int = 4) -> Dataset:
    """Feature 0 of a sample is its row number and feature 1 its class (−1: nobody knows), so it can be traced."""
    rng = np.random.default_rng(5)
    y = rng.permutation(np.arange(train) % CLASSES)
    y_test = np.arange(test) % CLASSES
    return Dataset.from_arrays(
        np.stack([np.arange(train), y], 1).astype(np.float32),
        y,
        np.stack([10_000 + np.arange(test), y_test], 1).astype(np.float32) if test else None,
        y_test if test else None,
        num_classes=CLASSES,
        group_train=(y * groups // CLASSES + (np.arange(train) % 10 == 0)) % groups,
        x_unlabelled=np.stack([train + np.arange(without), np.full(without, -1)], 1) if without else None,
        name="toy",
    )


def pool(data: FederatedData, client: int) -> tuple[Tensor, Tensor]:
    """Rows of a client's unlabelled pool, and their true classes."""
    unlabelled, truth = data.clients[client].unlabelled, data.held_back[client]
    assert unlabelled is not None and truth is not None
    return unlabelled.index, truth


def walk(value: Any) -> Iterator[Tensor]:
    """Every tensor that can be reached from a value."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from walk(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from walk(item)


PARTITIONS: list[Partition] = [
    IID(),
    Dirichlet(alpha=0.2, min_size=6),
    Pathological(classes_per_client=2),
    NWay(way=2, shot=20, spread=0),
    Natural(),
]


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(PARTITIONS),
    st.integers(1, 4),
    st.sampled_from(["central", "local"]),
    st.booleans(),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from(["client", "server"]),
    st.sampled_from(["own", "open"]),
    st.sampled_from([0.1, 0.3, 0.5, 0.8]),
    st.sampled_from([None, 0, 7, 20]),
    st.sampled_from([0, 13]),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 10**6),
)
@pytest.mark.slow
def test_pools_are_disjoint_and_no_hidden_label_is_reachable(
    partition: Partition,
    clients: int,
    test: str,
    has_test: bool,
    validation: float,
    labels: str,
    unlabelled: str,
    share: float,
    limit: int | None,
    without: int,
    noise: float,
    seed: int,
) -> None:
    dataset = toy(test=60 if has_test else 0, without=without)
    options: dict[str, Any] = {
        "test": test,
        "validation_share": validation,
        "labels": labels,
        "labels_per_class": 2,
        "server_labels": 12,
        "server_label_noise": noise,
        "unlabelled_limit": limit,
    }
    try:
        data = federate(dataset, partition, clients, seed=seed, unlabelled=unlabelled, open_share=share, **options)
    except ProtofedError as error:
        assert unlabelled == "open" and ("every client has all" in str(error) or "not one sample" in str(error))
        return
    own = federate(dataset, partition, clients, seed=seed, **options)
    assert data.central_test is not None and data.server is not None
    # the rest of the partition is what it is without foreign classes
    for a, b in zip(data.clients, own.clients, strict=True):
        assert torch.equal(a.labelled.index, b.labelled.index) and torch.equal(a.test.index, b.test.index)
        assert torch.equal(a.classes, b.classes)
        assert a.validation is None or (b.validation and torch.equal(a.validation.index, b.validation.index))
    assert torch.equal(data.server.index, own.server.index) and torch.equal(data.server.labels, own.server.labels)

    used = [data.server.index]
    for i, client in enumerate(data.clients):
        used += [p.index for p in (client.labelled, client.validation) if p is not None] + [pool(data, i)[0]]
        if test == "local":
            used.append(client.test.index)
        rows, truth = pool(data, i)
        assert client.unlabelled is not None
        assert torch.equal(client.unlabelled.take()[:, 0].long(), rows)
        assert torch.equal(client.unlabelled.take()[:, 1].long(), truth), "what is held back is the truth, in order"
        assert limit is None or len(rows) <= limit
        known = truth != UNKNOWN
        assert torch.equal(known, rows < 360)
        foreign = ~client.classes[truth[known]]
        if unlabelled == "own":
            assert not foreign.any()
        else:
            assert int(foreign.sum()) <= share * int(known.sum()) + 1e-6
        for samples in (client.labelled, client.validation, client.test):
            assert samples is None or not len(samples) or int(samples.labels.min()) >= 0
            if samples is not None and samples.x is client.unlabelled.x:
                assert torch.equal(samples.labels, samples.take()[0][:, 1].long())
    if not has_test and test == "central":
        used.append(data.central_test.index)
    together = torch.cat(used)
    assert len(together.unique()) == len(together)
    without_dealt = sum(int((pool(data, i)[1] == UNKNOWN).sum()) for i in range(len(data.clients)))
    assert without_dealt == without or limit is not None

    hidden = torch.cat([pool(data, i)[0] for i in range(len(data.clients))])
    nobodys = torch.ones(360 + without, dtype=torch.bool)
    nobodys[together] = False
    if test == "local" and not has_test:
        assert torch.equal(data.central_test.index, torch.cat([c.test.index for c in data.clients]).sort().values)
    for reachable in (*data.clients, data.server, data.central_test):
        for tensor in walk(reachable):
            if tensor.dtype == torch.int64 and len(tensor) == 360 + without and tensor is not data.central_test.index:
                assert bool((tensor[hidden] == UNKNOWN).all() and (tensor[nobodys] == UNKNOWN).all())
            assert tensor is not dataset.y_train
    assert not any(tensor is t for t in data.held_back for c in data.clients for tensor in walk(c))


def test_the_walk_above_finds_the_labels_it_looks_at() -> None:
    data = federate(toy(), IID(), 2, seed=0, labels="client", labels_per_class=2)
    labels = [t for t in walk(data.clients[0]) if t.dtype == torch.int64 and len(t) == 360]
    assert labels and all(int((t != UNKNOWN).sum()) == 2 * 2 * CLASSES for t in labels)


# --- pools with foreign classes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", ["client", "server"])
@pytest.mark.parametrize(("share", "foreign"), [(0.5, 24), (0.25, 8), (0.2, 6), (0.75, 72)])
def test_rows_that_nobody_holds_come_first(labels: str, share: float, foreign: int) -> None:
    dataset = toy(train=3000)
    own_rows = 24 + (6 if labels == "server" else 0)  # 2 classes of 15
    foreign = foreign if labels == "client" else {24: 30, 8: 10, 6: 7, 72: 90}[foreign]
    options: dict[str, Any] = {"labels": labels, "labels_per_class": 3, "server_labels": 12, "seed": 3}
    partition = NWay(way=2, shot=15, spread=0)
    own = federate(dataset, partition, 5, **options)
    data = federate(dataset, partition, 5, unlabelled="open", open_share=share, **options)
    for i, client in enumerate(data.clients):
        rows, truth = pool(data, i)
        before, _ = pool(own, i)
        assert len(before) == own_rows and bool(torch.isin(before, rows).all()), "nothing of its own is given away"
        assert int((~client.classes[truth]).sum()) == foreign and len(rows) == own_rows + foreign
        assert client.classes.sum() == 2 and torch.equal(rows, rows.sort().values)
        # foreign classes are mixed, not all of one
        per_class = torch.bincount(truth, minlength=CLASSES)[~client.classes]
        assert int(per_class.max() - per_class.min()) <= max(4, foreign // 8)


@pytest.mark.parametrize(("share", "foreign"), [(0.5, 27), (0.1, 5), (0.9, 48)])
def test_where_all_rows_are_dealt_clients_exchange_them(share: float, foreign: int) -> None:
    dataset = toy(train=360)
    data = federate(
        dataset,
        Pathological(classes_per_client=2),
        6,
        seed=1,
        labels="client",
        labels_per_class=3,
        unlabelled="open",
        open_share=share,
    )
    assert sum(len(pool(data, i)[0]) for i in range(6)) == 360 - 6 * 2 * 3, "rows move; none comes or goes"
    for i, client in enumerate(data.clients):
        _, truth = pool(data, i)
        assert int((~client.classes[truth]).sum()) == foreign and len(truth) == 54


def test_spare_rows_and_others_pools_together() -> None:
    dataset = toy(train=360)
    # 12 clients × 2 classes × 12 rows = 288 dealt, 72 nobody's; 240 unlabelled, so 40 % can be had with 88 moved rows
    data = federate(
        dataset,
        NWay(way=2, shot=12, spread=0),
        12,
        seed=2,
        labels="client",
        labels_per_class=2,
        unlabelled="open",
        open_share=0.4,
    )
    sizes = [len(pool(data, i)[0]) for i in range(12)]
    foreign = [int((~c.classes[pool(data, i)[1]]).sum()) for i, c in enumerate(data.clients)]
    for n, f in zip(sizes, foreign, strict=True):
        assert f <= 0.4 * n + 1e-9 and f + 1 > 0.4 * (n + 1) - 1e-9, "the share, rounded down"
    assert 240 + 72 - sum(sizes) <= 12 and max(sizes) - min(sizes) <= 6


def test_what_the_limit_left_over_is_spare_and_the_limit_holds() -> None:
    options: dict[str, Any] = {"labels": "client", "labels_per_class": 3, "unlabelled_limit": 21, "seed": 1}
    data = federate(toy(), Pathological(classes_per_client=2), 6, unlabelled="open", open_share=1 / 3, **options)
    for i, client in enumerate(data.clients):
        _, truth = pool(data, i)
        assert len(truth) == 21 and int((~client.classes[truth]).sum()) == 7


def test_nobody_gives_more_than_the_share_and_what_lacks_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    # client 0: 100 rows of class 0; client 1: 20 of class 1
    y = np.repeat([0, 1], [100, 20])
    x = np.stack([np.arange(120), y], 1)
    dataset = Dataset.from_arrays(x, y, x[[0, -1]], y[[0, -1]], group_train=y, name="uneven")
    with caplog.at_level(logging.WARNING, "protofed"):
        data = federate(dataset, Natural(), seed=0, labels="client", labels_per_class=10, unlabelled="open")
    truths = [pool(data, i)[1] for i in range(2)]
    # client 1 has 10 unlabelled rows and gives 5; client 0 gives as many as client 1 may take
    assert [torch.bincount(t, minlength=2).tolist() for t in truths] == [[85, 5], [5, 5]]
    (record,) = caplog.records
    assert record.getMessage() == (
        "uneven: open_share=0.5 asks for 50 samples of classes their client does not have, and 10 were to be had; "
        "1 of 2 clients have fewer"
    )


def test_a_client_with_every_class_gets_nothing_and_is_not_emptied(caplog: pytest.LogCaptureFixture) -> None:
    y = np.concatenate([np.arange(60) % 3, np.zeros(60, int)])
    group = np.repeat([0, 1], 60)
    dataset = Dataset.from_arrays(np.stack([y, y], 1), y, np.eye(3)[:, :2], np.arange(3), group_train=group)
    with caplog.at_level(logging.WARNING, "protofed"):
        data = federate(dataset, Natural(), seed=0, labels="client", labels_per_class=2, unlabelled="open")
    assert torch.bincount(pool(data, 0)[1], minlength=3).sum() == 27, "half of 54 at most"
    counts = torch.bincount(pool(data, 1)[1], minlength=3)
    assert counts[0] == 58 and counts[1:].sum() == 27 and len(caplog.records) == 1


def test_no_warning_where_the_share_is_met(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "protofed"):
        federate(toy(), Pathological(classes_per_client=2), 6, seed=1, labels="client", unlabelled="open")
    assert not caplog.records


def test_the_same_seed_gives_the_same_pools() -> None:
    def rows(seed: int) -> list[list[int]]:
        options: dict[str, Any] = {"labels": "client", "unlabelled": "open"}
        data = federate(toy(without=9), Pathological(classes_per_client=2), 6, seed=seed, **options)
        return [pool(data, i)[0].tolist() for i in range(6)]

    assert rows(1) == rows(1) != rows(2)


# --- samples without labels -------------------------------------------------------------------------------------------


def test_samples_without_labels_are_dealt_evenly_on_top() -> None:
    dataset = toy(without=50)
    data = federate(dataset, IID(), 4, seed=0, labels="client", labels_per_class=2)
    plain = federate(replace(dataset, x_unlabelled=None), IID(), 4, seed=0, labels="client", labels_per_class=2)
    given_rows = []
    for i in range(4):
        rows, truth = pool(data, i)
        given_rows.append(rows[truth == UNKNOWN])
        assert torch.equal(rows[truth != UNKNOWN], pool(plain, i)[0]), "the rest is as it was"
    assert sorted(map(len, given_rows)) == [12, 12, 13, 13]
    assert torch.cat(given_rows).sort().values.tolist() == list(range(360, 410))
    assert given_rows[0].tolist() != list(range(360, 373)), "shuffled"
    assert torch.equal(data.class_counts(unlabelled=True), plain.class_counts(unlabelled=True))
    assert len({client.labelled.x.data_ptr() for client in data.clients}) == 1, "one tensor for all"


def test_with_all_labels_they_are_left_out() -> None:
    dataset = toy(without=50)
    data = federate(dataset, IID(), 4, seed=0)
    assert data.clients[0].labelled.x is dataset.x_train
    assert all(client.unlabelled is None for client in data.clients) and data.held_back == [None] * 4


def test_they_fill_what_the_limit_leaves() -> None:
    # 90 rows a client, 78 of them unlabelled
    for limit, expected in ((85, (78, 7)), (60, (60, 0)), (1000, (78, 100))):
        data = federate(toy(without=400), IID(), 4, seed=0, labels="client", labels_per_class=2, unlabelled_limit=limit)
        for i in range(4):
            unknown = pool(data, i)[1] == UNKNOWN
            assert (int((~unknown).sum()), int(unknown.sum())) == expected


def test_samples_without_labels_are_checked() -> None:
    x, y = np.zeros((4, 3)), np.array([0, 1, 0, 1])
    for wrong, message in (
        (np.zeros((2, 5)), r"an unlabelled sample has shape \(5,\), a training sample \(3,\)"),
        (np.full((2, 3), np.nan), "the unlabelled samples hold NaN or infinity"),
        (np.array([["a"] * 3]), "x_unlabelled must be numbers"),
    ):
        with pytest.raises(ProtofedError, match=message):
            Dataset.from_arrays(x, y, x_unlabelled=wrong)


# --- noise at the server ----------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1), st.integers(CLASSES, 200), st.integers(0, 10**6))
def test_as_many_labels_are_wrong_as_the_share_says(share: float, number: int, seed: int) -> None:
    dataset = toy()
    data = federate(dataset, IID(), 2, seed=seed, server_labels=number, server_label_noise=share)
    assert data.server is not None
    truth = dataset.y_train[data.server.index]
    assert int((data.server.labels != truth).sum()) == round(share * number)
    assert int(data.server.labels.min()) >= 0 and int(data.server.labels.max()) < CLASSES
    clean = federate(dataset, IID(), 2, seed=seed, server_labels=number)
    assert clean.server is not None and torch.equal(clean.server.labels, truth)
    assert torch.equal(clean.server.index, data.server.index)
    for a, b in zip(data.clients, clean.clients, strict=True):
        assert torch.equal(a.labelled.index, b.labelled.index) and torch.equal(a.labelled.labels, b.labelled.labels)
    for reachable in (*data.clients, data.server):
        for tensor in walk(reachable):
            if tensor.dtype == torch.int64 and len(tensor) == 360:
                assert torch.equal(tensor[data.server.index], data.server.labels), "the clean label is nowhere"


def test_a_wrong_label_is_any_other_class_alike_and_the_data_set_stays_clean() -> None:
    dataset = toy(train=12_000)
    before = dataset.y_train.clone()
    data = federate(dataset, IID(), 2, seed=0, server_labels=9000, server_label_noise=1.0)
    assert data.server is not None and torch.equal(dataset.y_train, before)
    shift = torch.bincount((data.server.labels - before[data.server.index]) % CLASSES, minlength=CLASSES)
    assert shift[0] == 0 and bool(((shift[1:] - 1800).abs() < 200).all())


# --- bad settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unlabelled": "opn", "labels": "client"}, "did you mean 'open'"),
        ({"unlabelled": "open"}, "unlabelled='open' needs unlabelled samples, but labels='all' leaves none"),
        ({"unlabelled": "open", "labels": "client"}, "every client has all of them; use another partition"),
        ({"open_share": 0.0}, "open_share=0.0: expected a share between 0 and 1"),
        ({"open_share": 1.0}, "open_share=1.0: expected a share between 0 and 1"),
        ({"server_label_noise": 1.5}, "server_label_noise=1.5: expected a share from 0 to 1"),
        ({"server_label_noise": 0.5}, "server_label_noise=0.5 needs server_labels"),
        (
            {"partition": Pathological(classes_per_client=2), "labels": "client", "labels_per_class": 500}
            | {"unlabelled": "open"},
            "not one sample of a class its client does not have is to be had: 0 samples are nobody's, and 0 are in",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtofedError, match=message) as caught:
        federate(toy(), options.pop("partition", "iid"), 6, seed=0, **options)
    assert "\n" not in str(caught.value)


def test_noise_needs_a_class_to_go_to() -> None:
    x, y = np.zeros((9, 2)), np.zeros(9, int)
    dataset = Dataset.from_arrays(x, y, x, y)
    with pytest.raises(ProtofedError, match="needs at least 2 classes"):
        federate(dataset, IID(), 1, seed=0, server_labels=2, server_label_noise=0.5)


def test_the_general_keys_reach_the_data() -> None:
    given_keys = {
        "data": toy(),
        "partition": {"name": "pathological", "classes_per_client": 2},
        "clients": 6,
        "labels": "client",
        "server_labels": 60,
        "server_label_noise": 0.25,
        "unlabelled_limit": 20,
        "unlabelled": "open",
        "open_share": 0.4,
    }
    data = prepare_data(resolve("fedproto", given_keys))
    for i, client in enumerate(data.clients):
        _, truth = pool(data, i)
        assert len(truth) == 20 and int((~client.classes[truth]).sum()) == 8
    assert data.server is not None
    assert int((data.server.labels != toy().y_train[data.server.index]).sum()) == 15
    no_limit = prepare_data(resolve("fedproto", {**given_keys, "unlabelled_limit": 0, "unlabelled": "own"}))
    assert sum(len(pool(no_limit, i)[0]) for i in range(6)) == 300 - 6 * 2 * 5
    for key, value in (("open_share", 1), ("server_label_noise", 2), ("unlabelled_limit", -1), ("unlabelled", "no")):
        with pytest.raises(ProtofedError, match=key):
            resolve("fedproto", {**given_keys, key: value})


# --- scale, kind, mirror images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5, 4), (7,), (2, 9)])
def test_mean_and_deviation_undo_the_standardisation(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = [rng.normal(3, 2, (n, *shape)).astype(np.float32) for n in (20, 6, 11)]
    x[0][:, 0] = 4.0  # a channel that never changes keeps its scale
    raw = Dataset.from_arrays(x[0], np.arange(20) % 2, x[1], np.arange(6) % 2, x_unlabelled=x[2])
    assert raw.mean is None and raw.std is None
    once = raw.standardised()
    half = replace(raw, mean=torch.full(shape[:1], 3.0), std=torch.full(shape[:1], 2.0))  # as if x had been 2x + 3
    turned = (-1, *[1] * (len(shape) - 1))
    for data, factor, offset in ((once, 1, 0), (once.standardised(), 1, 0), (half.standardised(), 2, 3)):
        assert data.mean is not None and data.std is not None and data.mean.shape == data.std.shape == shape[:1]
        for part, values in zip((data.x_train, data.x_test, data.x_unlabelled), x, strict=True):
            assert part is not None
            back = part * data.std.reshape(turned) + data.mean.reshape(turned)
            assert torch.allclose(back, factor * torch.from_numpy(values) + offset, atol=1e-4)
    axes = (0, *range(2, len(shape) + 1))
    assert once.mean is not None and torch.allclose(once.mean, torch.from_numpy(x[0].mean(axes)), atol=1e-5)
    assert once.std is not None and float(once.std[0]) == 1


def test_what_the_data_set_knows_of_itself_goes_with_the_federation() -> None:
    data = load("digits")
    assert data.mean is not None and data.mean.shape == (1,) and data.flips is False and data.kind == "auto"
    federated = federate(replace(data, kind="csi"), IID(), 2, seed=0)
    assert federated.mean is data.mean and federated.std is data.std
    assert federated.kind == "csi" and federated.flips is False
    moved = federated.to("cpu")
    assert moved.mean is not None and torch.equal(moved.mean, data.mean) and moved.flips is False
    assert load("digits", standardise=False).mean is None


def test_tokens_are_not_scaled() -> None:
    tokens = Dataset(torch.arange(12).reshape(4, 3), torch.tensor([0, 1, 0, 1]), num_classes=2)
    assert tokens.standardised() is tokens and tokens.mean is None


def test_the_simulator_says_that_it_is_csi() -> None:
    data = load("csi-sim", rooms=1, people=2, windows_per_class=1, packets=4, subcarriers=4)
    assert data.kind == "csi" and data.flips is None and data.mean is not None and data.mean.shape == (1,)
