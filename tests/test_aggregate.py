"""Every server rule against plain loops, with clients that miss classes and classes nobody holds."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from protofed import aggregate
from protofed.bank import PrototypeBank, unit

torch.set_num_threads(1)

N, C, D = 6, 5, 4
seeds = pytest.mark.parametrize("seed", range(5))


def make(seed: int, clients: int = N, classes: int = C, dim: int = D) -> PrototypeBank:
    """Class 0 is held by nobody, class 1 by one client, the others by some."""
    rng = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 9, (clients, classes), generator=rng).double()
    counts = counts * (torch.rand(clients, classes, generator=rng) < 0.6)
    counts[:, 0] = 0
    counts[:, 1] = 0
    counts[seed % clients, 1] = 3
    means = torch.randn(clients, classes, dim, generator=rng, dtype=torch.float64)
    return PrototypeBank(means * (counts > 0)[..., None], counts)


def holders(banks: PrototypeBank, c: int) -> list[int]:
    return [k for k in range(len(banks.counts)) if banks.counts[k, c] > 0]


def loop(banks: PrototypeBank, rule: Callable[[list[list[float]], list[float]], list[float]]) -> PrototypeBank:
    """`rule` makes one prototype from the holders' prototypes and counts."""
    means, counts = torch.zeros(C, D, dtype=torch.float64), torch.zeros(C, dtype=torch.float64)
    for c in range(C):
        who = holders(banks, c)
        if who:
            rows = [banks.means[k, c].tolist() for k in who]
            means[c] = torch.tensor(rule(rows, [float(banks.counts[k, c]) for k in who]), dtype=torch.float64)
            counts[c] = sum(float(banks.counts[k, c]) for k in who)
    return PrototypeBank(means, counts)


def on_sphere(row: list[float]) -> list[float]:
    norm = math.sqrt(sum(v * v for v in row))
    return [v / norm for v in row]


def mean_rule(rows: list[list[float]], counts: list[float]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def weighted_rule(rows: list[list[float]], counts: list[float]) -> list[float]:
    return [sum(n * v for n, v in zip(counts, column, strict=True)) / sum(counts) for column in zip(*rows, strict=True)]


def normalised_rule(rows: list[list[float]], counts: list[float]) -> list[float]:
    return on_sphere(mean_rule([on_sphere(row) for row in rows], counts))


def median_rule(rows: list[list[float]], counts: list[float]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def trimmed_rule(trim: float) -> Callable[[list[list[float]], list[float]], list[float]]:
    def rule(rows: list[list[float]], counts: list[float]) -> list[float]:
        cut = min(math.ceil(trim * N - 1e-9), (len(rows) - 1) // 2)
        kept = [sorted(column)[cut : len(rows) - cut] for column in zip(*rows, strict=True)]
        return [sum(column) / len(column) for column in kept]

    return rule


def scores_of_krum(rows: list[list[float]], attackers: float) -> list[float]:
    """Krum's scores by brute force: over every set of n - f - 2 others the least sum of squared distances."""
    n = len(rows)
    near = max(1, n - max(0, min(math.ceil(attackers * N - 1e-9), (n - 3) // 2)) - 2)
    scores = []
    for i in range(n):
        away = [sum((a - b) ** 2 for a, b in zip(rows[i], rows[j], strict=True)) for j in range(n) if j != i]
        scores.append(min((sum(some) for some in itertools.combinations(away, near)), default=0.0))
    return scores


def krum_rule(rows: list[list[float]], counts: list[float]) -> list[float]:
    scores = scores_of_krum(rows, 0.2)
    return mean_rule([row for row, score in zip(rows, scores, strict=True) if score <= min(scores) + 1e-12], counts)


def multi_krum_rule(rows: list[list[float]], counts: list[float]) -> list[float]:
    scores, taken = scores_of_krum(rows, 0.2), len(rows) - min(math.ceil(0.2 * N - 1e-9), (len(rows) - 1) // 2)
    last = sorted(scores)[taken - 1]
    return mean_rule([row for row, score in zip(rows, scores, strict=True) if score <= last + 1e-12], counts)


def bounded_rule(factor: float) -> Callable[[list[list[float]], list[float]], list[float]]:
    def rule(rows: list[list[float]], counts: list[float]) -> list[float]:
        norms = [math.sqrt(sum(v * v for v in row)) for row in rows]
        bound = factor * statistics.median_low(norms)
        return mean_rule([[v * min(1.0, bound / n) for v in row] for row, n in zip(rows, norms, strict=True)], counts)

    return rule


RULES = {
    "mean": (aggregate.mean, mean_rule),
    "weighted_mean": (aggregate.weighted_mean, weighted_rule),
    "normalised_mean": (aggregate.normalised_mean, normalised_rule),
    "median": (aggregate.median, median_rule),
    "trimmed_mean": (aggregate.trimmed_mean, trimmed_rule(0.1)),
    "trimmed_mean 0.34": (lambda b: aggregate.trimmed_mean(b, 0.34), trimmed_rule(0.34)),
    "trimmed_mean 0": (lambda b: aggregate.trimmed_mean(b, 0.0), mean_rule),
    "krum": (aggregate.krum, krum_rule),
    "multi_krum": (aggregate.multi_krum, multi_krum_rule),
    "bounded_mean": (aggregate.bounded_mean, bounded_rule(1.0)),
    "bounded_mean 1.5": (lambda b: aggregate.bounded_mean(b, 1.5), bounded_rule(1.5)),
}
every = pytest.mark.parametrize("name", RULES)


def same(a: PrototypeBank, b: PrototypeBank) -> None:
    torch.testing.assert_close(a.means, b.means)
    torch.testing.assert_close(a.counts, b.counts)


def spoilt(bank: PrototypeBank) -> PrototypeBank:
    return PrototypeBank(torch.where(bank.known[..., None], bank.means, torch.nan), bank.counts)


# --- one bank of many -------------------------------------------------------------------------------------------------
@every
@seeds
def test_equals_a_loop(name, seed):
    rule, naive = RULES[name]
    banks = make(seed)
    same(rule(banks), loop(banks, naive))
    same(rule(spoilt(banks)), loop(banks, naive))  # rows of unknown classes are read by nothing


@every
def test_one_client_and_no_client(name):
    rule, _ = RULES[name]
    alone = make(1)[:1]
    result = rule(alone)
    expected = alone.normalised() if name == "normalised_mean" else alone
    same(result, expected[0])
    nobody = PrototypeBank.stack([PrototypeBank.empty(C, D)] * 3)
    assert not bool(rule(nobody).known.any()) and not bool(rule(nobody).means.any())


@every
def test_order_of_clients_does_not_matter(name):
    rule, _ = RULES[name]
    banks = make(2)
    same(rule(banks), rule(banks[torch.randperm(N, generator=torch.Generator().manual_seed(0))]))


@every
def test_gradients(name):
    rule, _ = RULES[name]
    banks = make(3)
    means = banks.means.requires_grad_()
    assert torch.autograd.gradcheck(lambda m: rule(PrototypeBank(m, banks.counts)).means[banks.known.any(0)], means)


def test_weighted_mean_is_combine():
    banks = make(4)
    whole = banks[0]
    for k in range(1, N):
        whole = whole.combine(banks[k])
    same(aggregate.weighted_mean(banks), whole)


# --- robust rules -----------------------------------------------------------------------------------------------------
ROBUST = {
    "median": aggregate.median,
    "trimmed_mean": lambda b: aggregate.trimmed_mean(b, 0.4),
    "geometric_median": aggregate.geometric_median,
    "krum": lambda b: aggregate.krum(b, 0.4),
    "multi_krum": lambda b: aggregate.multi_krum(b, 0.4),
    "bounded_mean": aggregate.bounded_mean,
}
robust = pytest.mark.parametrize("rule", ROBUST)
numbers = st.floats(-3, 3).map(lambda v: round(v, 3))


def one_class(rows) -> PrototypeBank:
    means = torch.as_tensor(np.array(rows), dtype=torch.float64)[:, None]
    return PrototypeBank(means, torch.ones(len(means), 1, dtype=torch.float64))


@robust
@pytest.mark.parametrize("size", [1e6, 1e30])
def test_robust_rules_withstand_an_outlier(rule, size):
    rng = torch.Generator().manual_seed(0)
    means = torch.randn(9, C, D, generator=rng)
    means[4] = size
    bank = ROBUST[rule](PrototypeBank(means, torch.ones(9, C)))
    assert float(bank.means.abs().max()) < 5


@robust
@examples(max_examples=60, deadline=None)
@given(st.data(), st.integers(7, 12), st.sampled_from([1.0, 30.0, 1e5, 1e30]), st.booleans())
def test_fewer_attackers_than_are_assumed_stay_powerless(rule, data, n, size, together):
    """Whatever 2 of 7 and more send, in one place or in several: the result stays where the honest ones are.

    Rules of coordinates stay in their box. The geometric median is at most 2·(n - f) / (n - 2f) honest radii away
    (Minsker, 2015). Krum takes vectors of which each has a majority of honest neighbours; bounded vectors are not
    longer than an honest one.
    """
    honest = np.array(data.draw(st.lists(st.tuples(numbers, numbers), min_size=n - 2, max_size=n - 2)))
    places = np.array(data.draw(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=2)))
    lies = size * (places[:1].repeat(2, 0) if together else places)
    result = ROBUST[rule](one_class(np.concatenate([lies, honest]))).means[0].numpy()
    assert np.isfinite(result).all()
    if rule in ("median", "trimmed_mean"):
        assert (result >= honest.min(0) - 1e-9).all() and (result <= honest.max(0) + 1e-9).all()
    elif rule == "bounded_mean":
        assert np.linalg.norm(result) <= np.linalg.norm(honest, axis=1).max() + 1e-9
    else:
        centre = honest.mean(0)
        radius = np.linalg.norm(honest - centre, axis=1).max()
        assert np.linalg.norm(result - centre) <= 1e-6 + radius * (2 * (n - 2) / (n - 4) if "geo" in rule else 2 * n)


@robust
@examples(max_examples=40, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=9), st.integers(0, 99), st.tuples(numbers, numbers))
def test_robust_rules_do_not_depend_on_order_and_move_with_the_clients(rule, rows, seed, by):
    rows = np.array(rows)
    result = ROBUST[rule](one_class(rows)).means[0].numpy()
    shuffled = np.random.default_rng(seed).permutation(rows)
    np.testing.assert_allclose(ROBUST[rule](one_class(shuffled)).means[0].numpy(), result, atol=1e-9)
    moved = ROBUST[rule](one_class(rows + np.array(by))).means[0].numpy()
    if rule in ("median", "trimmed_mean", "geometric_median"):  # a tie of Krum's may be broken by the last bit
        np.testing.assert_allclose(moved, result + np.array(by), atol=1e-5)
    grown = ROBUST[rule](one_class(4 * rows)).means[0].numpy()  # 4 is exact in binary, so that ties stay ties
    np.testing.assert_allclose(grown, 4 * result, atol=1e-5)


@seeds
@pytest.mark.parametrize("rule", ["krum", "multi_krum"])
def test_krum_moves_with_the_clients(rule, seed):
    rows = np.random.default_rng(seed).normal(size=(8, 3))
    moved = ROBUST[rule](one_class(rows + 5.0)).means
    torch.testing.assert_close(moved, ROBUST[rule](one_class(rows)).means + 5.0)


@seeds
def test_the_geometric_median_has_the_least_sum_of_distances(seed):
    """Against scipy's minimiser, from many starts; every value near the least is as good."""
    banks = make(seed, clients=9)
    result, longer = aggregate.geometric_median(banks), aggregate.geometric_median(banks, steps=2000)
    for c in range(C):
        points = banks.means[holders(banks, c), c].numpy()

        def value(y, points=points):
            return float(np.linalg.norm(points - y, axis=1).sum())

        if len(points):
            starts = [*points, points.mean(0)]
            least = min(min(value(y), minimize(value, y, method="Nelder-Mead").fun) for y in starts)
            assert value(result.means[c].numpy()) <= least * 1.002 + 1e-9
            assert value(longer.means[c].numpy()) <= least * (1 + 1e-5) + 1e-9


def test_gradients_of_the_geometric_median():
    banks = make(3, clients=5)
    means = banks.means.requires_grad_()
    few = lambda m: aggregate.geometric_median(PrototypeBank(m, banks.counts), steps=4).means[banks.known.any(0)]  # noqa: E731
    assert torch.autograd.gradcheck(few, means)


@robust
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_robust_rules_keep_the_precision_and_half_is_near_single(rule, dtype):
    banks = make(1)
    expected = ROBUST[rule](PrototypeBank(banks.means.to(dtype).float(), banks.counts.float())).means
    result = ROBUST[rule](PrototypeBank(banks.means.to(dtype), banks.counts.float()))
    assert result.means.dtype == dtype and result.counts.dtype == torch.float32
    torch.testing.assert_close(result.means.float(), expected, rtol=2e-2, atol=2e-2)


@robust
def test_long_rows_in_half_precision_do_not_overflow(rule):
    means = torch.full((5, 1, 8), 200.0, dtype=torch.float16)  # the square of 200 is no number of float16
    means[0] = -60000.0
    result = ROBUST[rule](PrototypeBank(means, torch.ones(5, 1))).means
    assert bool(torch.isfinite(result).all()) and float(result.max()) <= 201


@seeds
def test_of_two_holders_the_shorter_one_is_taken(seed):
    banks = make(seed)
    result = aggregate.shorter_of_two(spoilt(banks), aggregate.mean(banks))
    two = 0
    for c in range(C):
        who = holders(banks, c)
        expected = aggregate.mean(banks).means[c]
        if len(who) == 2:
            two += 1
            expected = min((banks.means[k, c] for k in who), key=lambda row: float(row.norm()))
        torch.testing.assert_close(result.means[c], expected)
    same_norm = one_class([[1.0, 2.0], [2.0, -1.0]])
    torch.testing.assert_close(
        aggregate.shorter_of_two(same_norm, same_norm[0]).means, torch.tensor([[1.5, 0.5]]).double()
    )
    alone = one_class([[3.0, 4.0]])
    assert torch.equal(aggregate.shorter_of_two(alone, alone[0]).means, alone.means[0])


def test_all_attackers_may_hold_one_class():
    """4 of 20 clients lie, and all 4 are among the 10 that hold a class: 0.2 of its holders would be 2."""
    means = torch.randn(20, 1, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    means[:4] = 1e3
    counts = torch.zeros(20, 1, dtype=torch.float64)
    counts[:10] = 1
    for rule in (lambda b: aggregate.trimmed_mean(b, 0.2), aggregate.krum, aggregate.multi_krum):
        assert float(rule(PrototypeBank(means, counts)).means.abs().max()) < 5


def test_few_holders_are_protected():
    """One of three or four holders lies, though 0.2 of them is less than one."""
    lie = [-1e6, 1e6]
    for honest in ([[1.0, 1.0], [1.1, 1.0]], [[1.0, 1.0], [1.1, 1.0], [1.0, 1.1]]):
        for rule in (aggregate.median, aggregate.krum, aggregate.multi_krum, aggregate.geometric_median):
            assert float((rule(one_class([lie, *honest])).means - 1).abs().max()) < 0.3
        trimmed = aggregate.trimmed_mean(one_class([lie, *honest]), 0.2).means
        assert float((trimmed - 1).abs().max()) < 0.3


@pytest.mark.parametrize("rule", [aggregate.krum, aggregate.multi_krum])
def test_krum_refuses_a_majority_of_attackers(rule):
    with pytest.raises(ValueError, match=r"attackers=0\.5: expected a share"):
        rule(make(0), 0.5)


def test_bounds_are_above_zero():
    with pytest.raises(ValueError, match="factor=0"):
        aggregate.bounded_mean(make(0), 0)


def test_trim_takes_whole_clients_off():
    """⌈0.29 · 100⌉ is 29 and ⌈0.28 · 100⌉ 28, though in binary the products lie just beside."""
    for trim in (0.28, 0.29):
        values, cut = torch.zeros(100, 1, 1), round(100 * trim)
        values[:cut] = -1e6
        values[-cut:] = 3e6
        assert float(aggregate.trimmed_mean(PrototypeBank(values, torch.ones(100, 1)), trim).means) == 0
        values[cut] = -72.0
        left = float(aggregate.trimmed_mean(PrototypeBank(values, torch.ones(100, 1)), trim).means)
        assert left == pytest.approx(-72.0 / (100 - 2 * cut))
    with pytest.raises(ValueError, match=r"below 0\.5"):
        aggregate.trimmed_mean(make(0), 0.5)


def test_a_single_bank_is_no_stack():
    with pytest.raises(ValueError, match=r"stack of banks \[N, C, d\]"):
        aggregate.mean(make(0)[0])


# --- personalised -----------------------------------------------------------------------------------------------------
def loop_personalised(banks: PrototypeBank, temperature: float) -> PrototypeBank:
    n, classes, dim = banks.means.shape
    means, counts = torch.zeros(n, classes, dim, dtype=torch.float64), torch.zeros(n, classes, dtype=torch.float64)
    for c in range(classes):
        who = holders(banks, c)
        for i in range(n):
            if i in who:
                own = banks.means[i, c]
                likeness = [float(own @ banks.means[j, c] / own.norm() / banks.means[j, c].norm()) for j in who]
                total = sum(math.exp(s / temperature) for s in likeness)
                for j, s in zip(who, likeness, strict=True):
                    means[i, c] += math.exp(s / temperature) / total * banks.means[j, c]
                counts[i, c] = banks.counts[i, c]
            elif who:
                for j in who:
                    means[i, c] += banks.means[j, c] / len(who)
                    counts[i, c] += banks.counts[j, c] / len(who)
    return PrototypeBank(means, counts)


@seeds
@pytest.mark.parametrize("temperature", [0.5, 0.05])
def test_personalised_equals_a_loop(seed, temperature):
    banks = make(seed)
    expected = loop_personalised(banks, temperature)
    for block in (1, 4, N, 100):
        same(aggregate.personalised(banks, temperature, block), expected)
        same(aggregate.personalised(spoilt(banks), temperature, block), expected)
    assert expected.known[:, 1:].all() and not expected.known[:, 0].any()


@seeds
def test_pad_equals_a_loop(seed):
    banks = make(seed)
    padded, average = aggregate.pad(spoilt(banks)), aggregate.mean(banks)
    for k in range(N):
        for c in range(C):
            if banks.counts[k, c] > 0:
                assert torch.equal(padded.means[k, c], banks.means[k, c])
                assert padded.counts[k, c] == banks.counts[k, c]
            else:
                torch.testing.assert_close(padded.means[k, c], average.means[c])
                mean_count = float(average.counts[c]) / max(len(holders(banks, c)), 1)
                assert float(padded.counts[k, c]) == pytest.approx(mean_count)


def test_personalised_at_the_ends_of_the_temperature():
    banks = PrototypeBank(torch.randn(N, C, D, dtype=torch.float64), torch.ones(N, C, dtype=torch.float64))
    hot, cold = aggregate.personalised(banks, 1e9), aggregate.personalised(banks, 1e-5)
    torch.testing.assert_close(hot.means, aggregate.mean(banks).means.expand(N, C, D))
    torch.testing.assert_close(cold.means, banks.means)


def test_gradients_of_personalised():
    banks = make(3, clients=4, dim=3)
    means = banks.means.requires_grad_()
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way from the class nobody holds
        aggregate.personalised(banks).means.sum().backward()
    assert torch.autograd.gradcheck(
        lambda m: aggregate.personalised(PrototypeBank(m, banks.counts), block=2).means, means
    )


# --- refine -----------------------------------------------------------------------------------------------------------
def sphere(seed: int, clients: int = N, classes: int = 12, dim: int = D) -> PrototypeBank:
    return make(seed, clients, classes, dim).normalised()


def naive_refine(banks: PrototypeBank, start: PrototypeBank, steps, lr, margin, separation, momentum) -> Tensor:
    known = [c for c in range(start.num_classes) if start.counts[c] > 0]
    w = start.means.clone().requires_grad_()
    optimiser = torch.optim.SGD([w], lr=lr, momentum=momentum)
    for _ in range(steps):
        loss = torch.zeros((), dtype=w.dtype)
        u = w / w.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        for c in known:
            for k in holders(banks, c):
                loss = loss + 1 - banks.means[k, c] @ u[c]
            for other in known:
                if other != c:
                    loss = loss + separation * torch.relu(u[c] @ u[other] - margin)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    means = torch.zeros_like(start.means)
    means[known] = unit(w.detach())[known]
    return means


@seeds
@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 5, "lr": 0.01, "margin": 0.3, "separation": 0.5, "momentum": 0.9},
        {"steps": 3, "lr": 0.1, "margin": 0.1, "separation": 2.0, "momentum": 0.5},
        {"steps": 0, "lr": 0.01, "margin": 0.3, "separation": 0.5, "momentum": 0.9},
    ],
)
def test_refine_equals_autograd_and_torch_sgd(seed, settings):
    banks = sphere(seed)
    start = aggregate.normalised_mean(banks)
    # As after a round in which nobody reported the class: the old prototype is there, no client's is.
    start.means[0], start.counts[0] = unit(torch.ones(D).double()), 1
    # And a class some client reports that the start does not know takes no part.
    start = start.restricted(torch.arange(start.num_classes) != 5)
    expected = naive_refine(banks, start, **settings)
    for block in (1, 5, 512):
        result = aggregate.refine(spoilt(banks), spoilt(start), **settings, block=block)
        torch.testing.assert_close(result.means, expected)
        assert torch.equal(result.counts, start.counts)
    norms = result.means.norm(dim=-1)
    torch.testing.assert_close(norms, start.known.double())


def test_refine_defaults_are_the_papers():
    banks = sphere(0)
    start = aggregate.normalised_mean(banks)
    torch.testing.assert_close(aggregate.refine(banks, start).means, naive_refine(banks, start, 5, 0.01, 0.3, 0.5, 0.9))


def test_refine_from_off_the_sphere():
    banks = make(1)
    start = aggregate.mean(banks)
    settings = {"steps": 4, "lr": 0.05, "margin": 0.2, "separation": 0.5, "momentum": 0.9}
    torch.testing.assert_close(aggregate.refine(banks, start, **settings).means, naive_refine(banks, start, **settings))


def test_separation_lowers_the_largest_cosine():
    rng = torch.Generator().manual_seed(0)
    common = torch.randn(1, 1, 16, generator=rng)
    banks = PrototypeBank(unit(common + 0.5 * torch.randn(5, 20, 16, generator=rng)), torch.ones(5, 20))
    start = aggregate.normalised_mean(banks)

    def largest(bank: PrototypeBank) -> float:
        return float((bank.means @ bank.means.T - 2 * torch.eye(20)).max())

    before = largest(start)
    apart = [largest(aggregate.refine(banks, start, steps=s, separation=0.5)) for s in (1, 5, 20)]
    assert before > apart[0] > apart[1] > apart[2]
    assert largest(aggregate.refine(banks, start, separation=0.0)) == pytest.approx(before, abs=0.02)


def test_refine_leaves_its_inputs_alone():
    banks = sphere(2)
    start = aggregate.normalised_mean(banks)
    kept = start.means.clone(), banks.means.clone()
    aggregate.refine(banks, start)
    assert torch.equal(start.means, kept[0]) and torch.equal(banks.means, kept[1])


def test_refine_knows_nothing():
    banks = PrototypeBank.stack([PrototypeBank.empty(C, D)] * 2)
    result = aggregate.refine(banks, PrototypeBank.empty(C, D))
    assert not bool(result.known.any()) and not bool(result.means.any())


# --- blends -----------------------------------------------------------------------------------------------------------
@seeds
@pytest.mark.parametrize("rule", [aggregate.blend, aggregate.momentum_blend])
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_blend_equals_a_loop(seed, rule, share):
    first, second = make(seed)[0], make(seed + 100)[1]
    result = rule(spoilt(first), spoilt(second), share)
    for c in range(C):
        a, b = bool(first.counts[c] > 0), bool(second.counts[c] > 0)
        assert bool(result.known[c]) == (a or b)
        if a or b:
            left = share if a and b else float(a)
            torch.testing.assert_close(result.means[c], left * first.means[c] + (1 - left) * second.means[c])
            torch.testing.assert_close(result.counts[c], left * first.counts[c] + (1 - left) * second.counts[c])


def test_float32_stays_float32():
    banks = make(0)
    banks = PrototypeBank(banks.means.float(), banks.counts.float())
    start = aggregate.normalised_mean(banks)
    results = [rule(banks) for rule, _ in RULES.values()]
    results += [aggregate.personalised(banks), aggregate.pad(banks), aggregate.refine(banks, start)]
    results += [aggregate.blend(start, banks[0], 0.5)]
    assert all(b.means.dtype == b.counts.dtype == torch.float32 for b in results)


# --- a stack of federations -------------------------------------------------------------------------------------------
def stacked(seeds_of: list[int]) -> PrototypeBank:
    return PrototypeBank.stack([make(seed) for seed in seeds_of])


VMAPPED = {
    **{name: rule for name, (rule, _) in RULES.items()},
    "geometric_median": aggregate.geometric_median,
    "shorter_of_two": lambda banks: aggregate.shorter_of_two(banks, aggregate.mean(banks)),
    "personalised": aggregate.personalised,
    "pad": aggregate.pad,
    "refine": lambda banks: aggregate.refine(banks.normalised(), aggregate.normalised_mean(banks), margin=0.0),
    "blend": lambda banks: aggregate.blend(banks[0], banks[1], 0.3),
    "momentum_blend": lambda banks: aggregate.momentum_blend(banks[0], banks[1], 0.7),
}


@pytest.mark.parametrize("name", VMAPPED)
def test_every_rule_runs_under_vmap(name):
    """Several federations at once, each with other classes missing, equal to one after another."""
    rule = VMAPPED[name]
    together = torch.func.vmap(rule)(stacked([1, 2, 3]))
    for k, seed in enumerate([1, 2, 3]):
        same(together[k], rule(make(seed)))
