"""Partitions: what holds for every split, whatever the labels, the number of clients and the seed."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.data.partitions import (
    IID,
    Circulant,
    Dirichlet,
    Natural,
    NWay,
    Partition,
    Pathological,
    dirichlet,
    partitions,
)
from protofed.data.rows import apportion, balanced, hold_out
from protofed.data.uneven import ExtendedDirichlet, Quantity
from protofed.errors import ProtofedError

quick = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def balanced_labels(classes: int = 10, each: int = 100) -> np.ndarray:
    return rng(7).permutation(np.repeat(np.arange(classes), each))


def counts(rows: list[np.ndarray], labels: np.ndarray) -> np.ndarray:
    return np.stack([np.bincount(labels[r], minlength=labels.max() + 1) for r in rows])


def assert_sound(rows: list[np.ndarray], labels: np.ndarray, clients: int, complete: bool) -> None:
    assert len(rows) == clients
    together = np.concatenate(rows)
    assert len(np.unique(together)) == len(together), "a sample belongs to two clients"
    assert together.min() >= 0 and together.max() < len(labels)
    assert all(len(r) for r in rows)
    assert all((np.diff(r) > 0).all() for r in rows), "rows are sorted"
    if complete:
        assert len(together) == len(labels)


@st.composite
def any_labels(draw: st.DrawFn) -> np.ndarray:
    """Unbalanced labels, of which some numbers may be missing."""
    sizes = draw(st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(lambda s: sum(s) >= 20))
    return rng(draw(seeds)).permutation(np.repeat(np.arange(len(sizes)), sizes))


@quick
@given(any_labels(), st.integers(1, 20), seeds)
def test_iid_sizes_differ_by_one(labels: np.ndarray, clients: int, seed: int) -> None:
    rows = IID().split(labels, clients, rng(seed))
    assert_sound(rows, labels, clients, complete=True)
    sizes = [len(r) for r in rows]
    assert max(sizes) - min(sizes) <= 1


@quick
@given(
    any_labels(),
    st.integers(1, 12),
    st.sampled_from([1e-300, 1e-8, 1e-3, 0.05, 0.1, 1.0, 100.0, 1e300]),
    st.data(),
    seeds,
)
def test_dirichlet_is_complete_and_keeps_the_least_size(
    labels: np.ndarray, clients: int, alpha: float, data: st.DataObject, seed: int
) -> None:
    least = data.draw(st.integers(1, len(labels) // clients))
    rows = Dirichlet(alpha=alpha, min_size=least).split(labels, clients, rng(seed))
    assert_sound(rows, labels, clients, complete=True)
    assert min(len(r) for r in rows) >= least


@quick
@given(any_labels(), st.integers(1, 12), st.integers(1, 12), seeds)
def test_pathological(labels: np.ndarray, clients: int, k: int, seed: int) -> None:
    classes = len(np.unique(labels))
    partition = Pathological(classes_per_client=k)
    if k > classes:
        with pytest.raises(ProtofedError, match=f"classes_per_client={k}, but the data has {classes} classes"):
            partition.split(labels, clients, rng(seed))
        return
    try:
        rows = partition.split(labels, clients, rng(seed))
    except ProtofedError as error:
        assert "is left without samples" in str(error) and clients * k > len(labels) / 4
        return
    assert_sound(rows, labels, clients, complete=clients * k >= classes)
    assert max(len(np.unique(labels[r])) for r in rows) <= k


@quick
@given(st.integers(1, 15), st.integers(1, 30), st.integers(30, 80), seeds)
def test_pathological_gives_every_client_k_classes_of_balanced_data(
    classes: int, clients: int, each: int, seed: int
) -> None:
    labels = balanced_labels(classes, each)
    k = 1 + seed % classes
    rows = Pathological(classes_per_client=k).split(labels, clients, rng(seed))
    assert_sound(rows, labels, clients, complete=clients * k >= classes)
    assert {len(np.unique(labels[r])) for r in rows} == {k}
    held = (counts(rows, labels) > 0).any(0).sum()
    assert held == min(classes, clients * k)


@quick
@given(
    st.integers(2, 12),
    st.integers(1, 15),
    st.integers(1, 20),
    st.floats(0, 3),
    st.sampled_from(["normal", "uniform"]),
    seeds,
)
def test_n_way(classes: int, clients: int, shot: int, spread: float, draw: str, seed: int) -> None:
    labels = balanced_labels(classes, 400)
    way = 1 + seed % classes
    partition = NWay(way=way, shot=shot, spread=spread, draw=draw)  # type: ignore[arg-type]
    rows = partition.split(labels, clients, rng(seed))
    assert_sound(rows, labels, clients, complete=False)
    for row in counts(rows, labels):
        assert len(set(row[row > 0])) == 1, "one k for all classes of a client"
    ways, shots = partition.sizes(classes, clients, rng(seed))
    assert ((counts(rows, labels) > 0).sum(1) == ways).all()
    assert (counts(rows, labels).max(1) == shots).all()
    if draw == "uniform" and classes > 2:
        s = round(spread)
        high = min(classes - 1, way + s)
        assert ways.min() >= min(max(2, way - s), high) and ways.max() <= high
        assert shots.min() >= max(1, min(shot, shot - s + 1)) and shots.max() <= shot + s


def test_n_way_draws_have_the_asked_moments() -> None:
    ways, shots = NWay(way=20, shot=100, spread=2, shot_spread=5).sizes(100, 20_000, rng())
    assert ways.mean() == pytest.approx(20, abs=0.1) and ways.std() == pytest.approx(2, abs=0.1)
    assert shots.mean() == pytest.approx(100, abs=0.2) and shots.std() == pytest.approx(5, abs=0.2)


@quick
@given(st.integers(1, 10), st.integers(1, 12), st.integers(1, 12), seeds)
def test_n_way_fits_whenever_equal_demands_can(way: int, shot: int, clients: int, seed: int) -> None:
    labels = balanced_labels(10, 12)
    fits = clients * way <= 10 * min(12 // shot, clients)
    partition = NWay(way=way, shot=shot, spread=0)
    if fits:
        rows = partition.split(labels, clients, rng(seed))
        assert_sound(rows, labels, clients, complete=False)
        assert ((counts(rows, labels) > 0).sum(1) == way).all()
    else:
        with pytest.raises(ProtofedError, match=rf"need {clients * way * shot:,} samples.*has 120 in 10 classes"):
            partition.split(labels, clients, rng(seed))


def test_n_way_refuses_what_cannot_be() -> None:
    labels = np.repeat([0, 1, 2], [50, 50, 20])
    with pytest.raises(ProtofedError, match="way=4, but the data has 3 classes"):
        NWay(way=4, shot=5).split(labels, 2, rng())
    with pytest.raises(ProtofedError, match="shot=30, but class 2 has only 20 training samples"):
        NWay(way=2, shot=30).split(labels, 2, rng())


def test_circulant_shares_are_fedmatchs() -> None:
    labels = balanced_labels(10, 1000)
    table = counts(Circulant().split(labels, 20, rng()), labels)
    expected = np.array([250, 75, 15, 15, 15, 10, 15, 15, 15, 75])
    for client, row in enumerate(table):
        assert np.abs(row - np.roll(expected, client % 10)).max() <= 1
    assert table.sum() == 10_000


@quick
@given(st.integers(1, 14), st.integers(1, 25), seeds)
def test_circulant_for_any_number_of_classes(classes: int, clients: int, seed: int) -> None:
    labels = balanced_labels(classes, 100)
    rows = Circulant().split(labels, clients, rng(seed))
    assert_sound(rows, labels, clients, complete=False)
    if classes >= 4:
        assert (counts(rows, labels).argmax(1) == np.arange(clients) % classes).all()
    sizes = [len(r) for r in rows]
    assert max(sizes) - min(sizes) <= classes


@quick
@given(any_labels(), st.integers(1, 12), st.sampled_from(["dirichlet", "log-normal"]), st.data(), seeds)
def test_quantity_skews_sizes_and_not_classes(
    labels: np.ndarray, clients: int, draw: str, data: st.DataObject, seed: int
) -> None:
    least = data.draw(st.integers(1, len(labels) // clients))
    spread = data.draw(st.sampled_from([1e-6, 0.1, 1.0, 50.0]))
    partition = Quantity(draw, alpha=spread, sigma=spread, min_size=least)  # type: ignore[arg-type]
    rows = partition.split(labels, clients, rng(seed))
    assert_sound(rows, labels, clients, complete=True)
    assert min(len(r) for r in rows) >= least
    table, sizes = counts(rows, labels), np.bincount(labels)
    exact = np.outer(table.sum(1), sizes) / len(labels)
    assert (np.abs(table - exact) < 2).all()


def test_quantity_sizes_follow_their_law() -> None:
    labels = balanced_labels(10, 5000)
    sizes = [[len(r) for r in Quantity(alpha=0.5).split(labels, 20, rng(s))] for s in range(60)]
    shares = np.array(sizes) / len(labels)
    assert shares.mean() == pytest.approx(1 / 20)
    assert shares.var() == pytest.approx((1 / 20) * (19 / 20) / (20 * 0.5 + 1), rel=0.15)
    logs = np.log([len(r) for r in Quantity("log-normal", sigma=0.7).split(balanced_labels(2, 200_000), 400, rng())])
    assert logs.std() == pytest.approx(0.7, abs=0.05)
    equal = [len(r) for r in Quantity("log-normal", sigma=0).split(labels, 20, rng())]
    assert set(equal) == {2500}
    with pytest.raises(
        ProtofedError, match="2 clients of at least min_size=9 need 18 samples; the training part has 10"
    ):
        Quantity(min_size=9).split(np.zeros(10, int), 2, rng())


@quick
@given(st.integers(1, 12), st.integers(1, 20), st.sampled_from([1e-6, 0.1, 1.0, 100.0]), seeds)
def test_extended_dirichlet_gives_every_client_exactly_k_classes(
    classes: int, clients: int, alpha: float, seed: int
) -> None:
    labels, k = balanced_labels(classes, 40), 1 + seed % classes
    rows = ExtendedDirichlet(k, alpha).split(labels, clients, rng(seed))
    assert_sound(rows, labels, clients, complete=clients * k >= classes)
    assert {len(np.unique(labels[r])) for r in rows} == {k}
    assert (counts(rows, labels) > 0).any(0).sum() == min(classes, clients * k)


def test_extended_dirichlet_shares_a_class_by_alpha() -> None:
    labels = balanced_labels(2, 4000)
    shares = np.array([counts(ExtendedDirichlet(2, 0.3).split(labels, 5, rng(s)), labels) for s in range(300)]) / 4000
    assert shares.mean() == pytest.approx(0.2)
    assert shares.var() == pytest.approx(0.2 * 0.8 / (5 * 0.3 + 1), rel=0.1)
    with pytest.raises(ProtofedError, match="classes_per_client=3, but the data has 2 classes"):
        ExtendedDirichlet(3).split(labels, 5, rng())
    with pytest.raises(ProtofedError, match="8 clients would hold class 0, which has 4 training samples"):
        ExtendedDirichlet(2).split(balanced_labels(2, 4), 8, rng())


@quick
@given(st.lists(st.integers(-5, 30), min_size=10, max_size=80), st.integers(1, 10), seeds)
def test_natural_deals_ids_round(ids: list[int], clients: int, seed: int) -> None:
    groups, labels = np.asarray(ids), np.zeros(len(ids), np.int64)
    known = np.unique(groups)
    if clients > len(known):
        with pytest.raises(ProtofedError, match=f"clients={clients}, but the data set has {len(known)} group ids"):
            Natural().split(labels, clients, rng(seed), groups)
        return
    rows = Natural().split(labels, clients, rng(seed), groups)
    assert_sound(rows, labels, clients, complete=True)
    for client, r in enumerate(rows):
        assert set(groups[r]) == set(known[client::clients])


def test_natural_needs_ids() -> None:
    with pytest.raises(ProtofedError, match="needs group ids"):
        Natural().split(np.zeros(4, int), 2, rng())


@pytest.mark.parametrize("name", partitions.names())
def test_the_seed_decides(name: str) -> None:
    labels, groups = balanced_labels(), np.arange(1000) % (5 if name == "domains" else 40)
    options = {"shot": 20} if name == "n-way" else {}
    partition = partitions.make(name, options)
    first, again, other = (partition.split(labels, 10, rng(s), groups) for s in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    if name != "natural":
        assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", partitions.names())
def test_one_client_and_too_many(name: str) -> None:
    labels = balanced_labels(5, 6)
    partition = partitions.make(name, {"way": 2, "shot": 2, "spread": 0} if name == "n-way" else {})
    assert len(partition.split(labels, 1, rng(), np.zeros(30, int))) == 1
    with pytest.raises(ProtofedError, match="30 samples are too few for 31 clients"):
        partition.split(labels, 31, rng(), np.arange(30))
    with pytest.raises(ProtofedError, match="clients=0"):
        partition.split(labels, 0, rng(), np.arange(30))


def test_an_empty_client_is_named() -> None:
    class Careless(Partition):
        name = "careless"

        def rows(self, *_: object) -> list[np.ndarray]:
            return [np.array([0]), np.array([], int)]

    with pytest.raises(ProtofedError, match="'careless': client 1 of 2 is left without samples"):
        Careless().split(np.zeros(5, int), 2, rng())


def test_dirichlet_always_ends_with_many_clients() -> None:
    labels = balanced_labels(10, 5000)
    start = time.perf_counter()
    for alpha in (0.05, 1e-3, 1e-12):
        rows = Dirichlet(alpha=alpha, min_size=10).split(labels, 500, rng())
        assert_sound(rows, labels, 500, complete=True)
        assert min(len(r) for r in rows) >= 10
    assert time.perf_counter() - start < 20
    with pytest.raises(ProtofedError, match="min_size=101 need 50,500 samples; the training part has 50,000"):
        Dirichlet(min_size=101).split(labels, 500, rng())


def test_dirichlet_draws_follow_their_law() -> None:
    """Mean 1/K, and variance (1/K)(1 − 1/K)/(Kα + 1), down to an α where every gamma draw underflows."""
    for alpha in (1e-200, 1e-5, 0.1, 1.0, 50.0):
        shares = dirichlet(alpha, (20_000, 4), rng(3))
        assert np.isfinite(shares).all() and np.allclose(shares.sum(1), 1)
        assert np.allclose(shares.mean(0), 0.25, atol=0.015)
        assert np.allclose(shares.var(0), 0.25 * 0.75 / (4 * alpha + 1), rtol=0.06)


def test_a_smaller_alpha_is_more_skewed() -> None:
    labels = balanced_labels(10, 500)
    main = [counts(Dirichlet(alpha=a).split(labels, 20, rng(1)), labels) for a in (0.05, 1.0, 100.0)]
    top = [(t.max(1) / t.sum(1)).mean() for t in main]
    assert top[0] > 0.6 > top[1] > 0.2 > top[2]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dirichlet", {"alpha": 0}, "alpha must be above 0"),
        ("dirichlet", {"alpha": "nan"}, "alpha must be above 0"),
        ("dirichlet", {"min_size": 0}, "min_size must be at least 1"),
        ("n-way", {"way": 0}, "way must be at least 1"),
        ("n-way", {"shot": 0}, "shot must be at least 1"),
        ("n-way", {"spread": -1}, "spread must be 0 or more"),
        ("n-way", {"draw": "gauss"}, "draw='gauss'"),
        ("pathological", {"classes_per_client": 0}, "classes_per_client must be at least 1"),
        ("quantity", {"alpha": 0}, "alpha must be above 0"),
        ("quantity", {"sigma": -1}, "sigma must be 0 or more"),
        ("quantity", {"min_size": 0}, "min_size must be at least 1"),
        ("extended-dirichlet", {"alpha": "inf"}, "alpha must be above 0"),
        ("extended-dirichlet", {"classes_per_client": 0}, "classes_per_client must be at least 1"),
        ("dirichlet", {"alfa": 1}, "did you mean 'alpha'"),
        ("dirichlett", {}, "did you mean 'dirichlet'"),
    ],
)
def test_wrong_settings_are_named(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ProtofedError, match=message):
        partitions.make(name, options)


def test_settings_are_converted() -> None:
    assert partitions.make("n_way", {"way": "4", "shot": "50"}) == NWay(way=4, shot=50)
    assert partitions.names() == [
        *(
            "circulant",
            "dirichlet",
            "domains",
            "extended-dirichlet",
            "iid",
            "n-way",
            "natural",
            "pathological",
            "quantity",
        )
    ]


@quick
@given(st.lists(st.integers(1, 50), min_size=1, max_size=10), st.integers(0, 600))
def test_apportion(most: list[int], total: int) -> None:
    caps = np.asarray(most)
    result = apportion(total, caps.astype(float), caps)
    assert result.sum() == min(total, caps.sum())
    assert (result <= caps).all() and (result >= 0).all()


@quick
@given(any_labels(), st.integers(1, 200), seeds)
def test_balanced_takes_the_same_of_each(labels: np.ndarray, number: int, seed: int) -> None:
    mask = balanced(labels, number, rng(seed))
    assert mask.sum() == min(number, len(labels))
    taken = np.array([mask[labels == c].sum() for c in np.unique(labels)])
    spare = np.array([(~mask)[labels == c].any() for c in np.unique(labels)])
    assert (taken[spare] >= taken.max() - 1).all()


@quick
@given(any_labels(), st.floats(0.01, 0.99), seeds)
def test_hold_out_is_stratified_and_leaves_every_class(labels: np.ndarray, share: float, seed: int) -> None:
    held = hold_out(labels, share, rng(seed))
    assert 1 <= held.sum() < len(labels)
    sizes = np.bincount(labels)
    out = np.bincount(labels[held], minlength=len(sizes))
    if sizes.max() > 1:
        assert ((sizes - out)[sizes > 0] >= 1).all()
    ample = sizes * min(share, 1 - share) > len(sizes) + 1
    if (sizes > 3).all() and share < 0.5:
        assert (np.abs(out - share * sizes)[ample] <= 2).all()
