"""Every server rule against plain loops, with clients that miss classes and classes nobody holds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
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
        cut = int(trim * len(rows) + 1e-9)
        kept = [sorted(column)[cut : len(rows) - cut] for column in zip(*rows, strict=True)]
        return [sum(column) / len(column) for column in kept]

    return rule


RULES = {
    "mean": (aggregate.mean, mean_rule),
    "weighted_mean": (aggregate.weighted_mean, weighted_rule),
    "normalised_mean": (aggregate.normalised_mean, normalised_rule),
    "median": (aggregate.median, median_rule),
    "trimmed_mean": (aggregate.trimmed_mean, trimmed_rule(0.1)),
    "trimmed_mean 0.34": (lambda b: aggregate.trimmed_mean(b, 0.34), trimmed_rule(0.34)),
    "trimmed_mean 0": (lambda b: aggregate.trimmed_mean(b, 0.0), mean_rule),
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


@pytest.mark.parametrize("rule", [aggregate.median, lambda b: aggregate.trimmed_mean(b, 0.2)])
def test_robust_rules_withstand_an_outlier(rule):
    rng = torch.Generator().manual_seed(0)
    means = torch.randn(9, C, D, generator=rng)
    means[4] = 1e6
    bank = rule(PrototypeBank(means, torch.ones(9, C)))
    assert float(bank.means.abs().max()) < 5


def test_trim_takes_whole_clients_off():
    """⌊0.29 · 100⌋ is 29, though in binary the product falls just below."""
    values = torch.zeros(100, 1, 1)
    values[:29] = -1e6
    values[-29:] = 3e6
    assert float(aggregate.trimmed_mean(PrototypeBank(values, torch.ones(100, 1)), 0.29).means) == 0
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
