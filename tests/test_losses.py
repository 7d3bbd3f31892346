"""Every loss against a double Python loop, alone and under vmap, with padding, unknown classes and empty banks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from protofed import losses
from protofed.bank import PrototypeBank, unit

torch.set_num_threads(1)

N, C, D, PEERS = 7, 5, 4, 3


# --- inputs -----------------------------------------------------------------------------------------------------------
def make_bank(rng: torch.Generator, *lead: int, known: str = "some") -> PrototypeBank:
    counts = torch.randint(1, 5, (*lead, C), generator=rng).double()
    if known == "some":
        counts = counts * (torch.rand(*lead, C, generator=rng) < 0.6)
    elif known == "none":
        counts = counts * 0
    means = torch.randn(*lead, C, D, generator=rng, dtype=torch.float64)
    return PrototypeBank(means * (counts > 0)[..., None], counts)


def make(seed: int, known: str = "some") -> tuple[Tensor, Tensor, PrototypeBank, PrototypeBank, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(N, D, generator=rng, dtype=torch.float64)
    y = torch.randint(C, (N,), generator=rng)
    weight = torch.randint(3, (N,), generator=rng).double() / 2
    return z, y, make_bank(rng, known=known), make_bank(rng, PEERS, known=known), weight


def soft(y: Tensor) -> Tensor:
    """Class probabilities that depend on the labels, with no zero entry."""
    return torch.softmax(2.0 * (y[:, None] == torch.arange(C)).double() + torch.arange(C) * 0.1, -1)


# --- naive loops ------------------------------------------------------------------------------------------------------
def dot(a: Tensor, b: Tensor) -> float:
    return sum(float(s) * float(t) for s, t in zip(a, b, strict=True))


def cos(a: Tensor, b: Tensor) -> float:
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def log_softmax(scores: dict[int, float]) -> dict[int, float]:
    return {c: s - math.log(sum(math.exp(t) for t in scores.values())) for c, s in scores.items()}


def average(pairs: list[tuple[float, float]]) -> float:
    """Of (value, weight)."""
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total > 0 else 0.0


def known(bank: PrototypeBank) -> list[int]:
    return [c for c in range(C) if bank.counts[c] > 0]


def each(z, y, bank, weight, value: Callable[[int, int], float]) -> float:
    return average([(value(i, int(y[i])), float(weight[i])) for i in range(len(y)) if int(y[i]) in known(bank)])


def naive_alignment(z, y, bank, banks, weight, over: int = D) -> float:
    return each(
        z, y, bank, weight, lambda i, c: sum((float(z[i, k]) - float(bank.means[c, k])) ** 2 for k in range(D)) / over
    )


def naive_proxy(z, y, bank, banks, weight, scale: float = 32.0) -> float:
    def value(i: int, c: int) -> float:
        return -log_softmax({k: scale * cos(z[i], bank.means[k]) for k in known(bank)})[c]

    return each(z, y, bank, weight, value)


def naive_uniformity(z, y, bank, banks, weight) -> float:
    values = []
    for i in range(len(y)):
        if known(bank):
            log_p = log_softmax({c: cos(z[i], bank.means[c]) / 0.1 for c in known(bank)})
            values.append((-sum(log_p.values()) / len(log_p), float(weight[i])))
    return average(values)


def naive_peers(z, y, bank, banks, weight) -> float:
    terms = []
    for j in range(len(banks.counts)):
        if any(int(y[i]) in known(banks[j]) and weight[i] > 0 for i in range(len(y))):
            terms.append(naive_proxy(z, y, banks[j], None, weight, scale=1 / 0.5))
    return sum(terms) / len(terms) if terms else 0.0


def naive_distance(z, y, bank, banks, weight, metric: str = "mean", target: Callable[[Tensor], Tensor] | None = None):
    def d(a: Tensor, b: Tensor) -> float:
        square = dot(a - b, a - b)
        return {"mean": square / D, "squared": square, "euclidean": math.sqrt(square)}[metric]

    top = bottom = 0.0
    for i in range(len(y)):
        log_p = log_softmax({c: -d(z[i], bank.means[c]) for c in known(bank)})
        for c in known(bank):
            share = float(target(y)[i, c]) if target else float(y[i] == c)
            top -= float(weight[i]) * share * log_p[c]
            bottom += float(weight[i]) * share
    return top / bottom if bottom > 0 else 0.0


HEAD = torch.randn(D, C, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
ACCEPTED = (torch.arange(20, dtype=torch.float64) % 3) / 2


def logits_of(z: Tensor) -> Tensor:
    return z @ HEAD.to(z.dtype)


def spoilt_like(z: Tensor, values: Tensor) -> Tensor:
    """Numbers beside each sample that do not depend on it, but are NaN where it is."""
    return torch.where(z.detach().isnan().any(-1, keepdim=True), torch.nan, values.to(z.dtype))


def targets_of(z: Tensor, y: Tensor) -> Tensor:
    return spoilt_like(z, soft(y))


def accepted_of(z: Tensor) -> Tensor:
    return spoilt_like(z, ACCEPTED[: len(z), None]).squeeze(-1)


def naive_logits(z: Tensor, i: int) -> dict[int, float]:
    return {c: sum(float(z[i, k]) * float(HEAD[k, c]) for k in range(D)) for c in range(C)}


def naive_cross_entropy(z, y, bank, banks, weight) -> float:
    return average([(-log_softmax(naive_logits(z, i))[int(y[i])], float(weight[i])) for i in range(len(y))])


def naive_pseudo(z, y, bank, banks, weight) -> float:
    """Over all samples, not only over the accepted ones."""
    pairs = []
    for i in range(len(y)):
        value = -log_softmax(naive_logits(z, i))[int(y[i])]
        pairs.append((value * float(ACCEPTED[i]), float(weight[i])))
    return average(pairs)


def naive_divergence(z, y, bank, banks, weight) -> float:
    pairs = []
    for i in range(len(y)):
        log_p, p = log_softmax(naive_logits(z, i)), soft(y)[i].tolist()
        value = sum(p[c] * (math.log(p[c]) - log_p[c]) for c in range(C))
        pairs.append((value * float(ACCEPTED[i]), float(weight[i])))
    return average(pairs)


def naive_contrast(z, y, bank, banks, weight, temperature: float = 0.5) -> float:
    def value(i: int, own: int) -> float:
        others = {("sample", j): cos(z[i], z[j]) for j in range(len(y)) if j != i and weight[j] > 0}
        others |= {("prototype", c): cos(z[i], bank.means[c]) for c in known(bank)}
        log_p = log_softmax({key: v / temperature for key, v in others.items()})
        positive = [k for k in log_p if (k[0] == "sample" and int(y[k[1]]) == own) or k == ("prototype", own)]
        return -sum(log_p[k] for k in positive) / len(positive)

    return each(z, y, bank, weight, value)


def naive_soft_labels(z, y, bank, banks, weight, temperature: float = 5.0) -> float:
    def value(i: int, own: int) -> float:
        teacher = log_softmax({c: float(SOFT[own, c]) / temperature for c in range(C)})
        log_p = log_softmax({c: v / temperature for c, v in naive_logits(z, i).items()})
        return sum(math.exp(teacher[c]) * (teacher[c] - log_p[c]) for c in range(C))

    return each(z, y, bank, weight, value)


SOFT = torch.randn(C, C, generator=torch.Generator().manual_seed(98), dtype=torch.float64)

# name: (ours, naive), each of (z, y, bank, banks, weight)
LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[..., float]]] = {
    "alignment": (lambda z, y, b, bs, w: losses.alignment(z, y, b, weight=w), naive_alignment),
    "alignment sum": (
        lambda z, y, b, bs, w: losses.alignment(z, y, b, reduction="sum", weight=w),
        lambda *a: naive_alignment(*a, over=1),
    ),
    "proxy": (lambda z, y, b, bs, w: losses.proxy(z, y, b, weight=w), naive_proxy),
    "prototype_cross_entropy": (
        lambda z, y, b, bs, w: losses.prototype_cross_entropy(z, y, b, weight=w),
        lambda *a: naive_proxy(*a, scale=10.0),
    ),
    "uniformity": (lambda z, y, b, bs, w: losses.uniformity(z, b, weight=w), naive_uniformity),
    "peer_contrast": (lambda z, y, b, bs, w: losses.peer_contrast(z, y, bs, weight=w), naive_peers),
    "consistency": (
        lambda z, y, b, bs, w: losses.consistency(z, y, b, weight=w),
        lambda z, y, b, bs, w: each(z, y, b, w, lambda i, c: 1 - cos(z[i], b.means[c])),
    ),
}
LOSSES |= {
    "supervised_contrast": (lambda z, y, b, bs, w: losses.supervised_contrast(z, y, b, weight=w), naive_contrast),
    "soft_labels": (
        lambda z, y, b, bs, w: losses.soft_labels(
            logits_of(z), y, torch.where(b.known[:, None], SOFT.to(z.dtype), torch.nan), b.known, weight=w
        ),
        naive_soft_labels,
    ),
}
WITHOUT_BANK: dict[str, tuple[Callable[..., Tensor], Callable[..., float]]] = {
    "cross_entropy": (lambda z, y, b, bs, w: losses.cross_entropy(logits_of(z), y, weight=w), naive_cross_entropy),
    "pseudo_cross_entropy": (
        lambda z, y, b, bs, w: losses.pseudo_cross_entropy(logits_of(z), y, accepted_of(z), weight=w),
        naive_pseudo,
    ),
    "divergence": (
        lambda z, y, b, bs, w: losses.divergence(targets_of(z, y), logits_of(z), accepted_of(z), weight=w),
        naive_divergence,
    ),
}
LOSSES |= WITHOUT_BANK
for _metric in ("mean", "squared", "euclidean"):
    LOSSES[f"distance {_metric}"] = (
        lambda z, y, b, bs, w, m=_metric: losses.distance_cross_entropy(z, y, b, metric=m, weight=w),
        lambda *a, m=_metric: naive_distance(*a, metric=m),
    )
    LOSSES[f"distance {_metric} soft"] = (
        lambda z, y, b, bs, w, m=_metric: losses.distance_cross_entropy(z, soft(y), b, metric=m, weight=w),
        lambda *a, m=_metric: naive_distance(*a, metric=m, target=soft),
    )

every = pytest.mark.parametrize("name", LOSSES)
with_bank = pytest.mark.parametrize("name", [name for name in LOSSES if name not in WITHOUT_BANK])
levels = pytest.mark.parametrize("level", ["some", "all", "none"])


def value_and_gradients(loss, z, y, bank, banks, weight):
    z = z.detach().requires_grad_()
    m, ms = (b.means.detach().requires_grad_() for b in (bank, banks))
    value = loss(z, y, PrototypeBank(m, bank.counts), PrototypeBank(ms, banks.counts), weight)
    grads = torch.autograd.grad(value, (z, m, ms), allow_unused=True)
    return value.detach(), *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, (z, m, ms), strict=True))


# --- values -----------------------------------------------------------------------------------------------------------
@every
@levels
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_loop(name, level, seed):
    ours, naive = LOSSES[name]
    z, y, bank, banks, weight = make(seed, level)
    for w, given in ((torch.ones(N), None), (weight, weight), (weight * 0, weight * 0), (weight > 0, weight > 0)):
        assert float(ours(z, y, bank, banks, given)) == pytest.approx(naive(z, y, bank, banks, w), abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_cross_entropy(seed):
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(N, C, generator=rng, dtype=torch.float64, requires_grad=True)
    _, y, _, _, weight = make(seed)
    each = torch.nn.functional.cross_entropy(logits, y, reduction="none")
    torch.testing.assert_close(losses.cross_entropy(logits, y), each.mean())
    torch.testing.assert_close(losses.cross_entropy(logits, y, weight), (each * weight).sum() / weight.sum())
    assert torch.autograd.gradcheck(lambda x: losses.cross_entropy(x, y, weight), logits)
    nothing = losses.cross_entropy(logits, y, weight * 0)
    assert float(nothing.detach()) == 0 and not bool(torch.autograd.grad(nothing, logits)[0].any())


@every
def test_unknown_rows_are_read_by_nothing(name):
    """Not even a NaN in the row of an unknown class changes a value or a gradient."""
    ours, _ = LOSSES[name]
    z, y, bank, banks, weight = make(1)
    assert not bool(bank.known.all())
    spoilt = [PrototypeBank(torch.where(b.known[..., None], b.means, torch.nan), b.counts) for b in (bank, banks)]
    for clean, dirty in zip(
        value_and_gradients(ours, z, y, bank, banks, weight),
        value_and_gradients(ours, z, y, *spoilt, weight),
        strict=True,
    ):
        torch.testing.assert_close(clean, dirty, rtol=0, atol=0)


@every
def test_unknown_classes_get_no_gradient(name):
    ours, _ = LOSSES[name]
    z, y, bank, banks, weight = make(1)
    _, _, to_bank, to_banks = value_and_gradients(ours, z, y, bank, banks, weight)
    assert not bool(to_bank[~bank.known].any()) and not bool(to_banks[~banks.known].any())


# --- padding ----------------------------------------------------------------------------------------------------------
@every
@levels
@pytest.mark.parametrize("filler", [0.0, 1e200, math.nan])
def test_padding_changes_nothing(name, level, filler):
    ours, _ = LOSSES[name]
    z, y, bank, banks, _ = make(2, level)
    weight = torch.tensor([1.0, 1.0, 0.5, 1.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    padded = (
        torch.cat([z, torch.full((3, D), filler, dtype=torch.float64)]),
        torch.cat([y, torch.tensor([0, C - 1, 2])]),
    )
    bare = value_and_gradients(ours, z, y, bank, banks, weight)
    full = value_and_gradients(ours, *padded, bank, banks, torch.cat([weight, torch.zeros(3)]))
    torch.testing.assert_close(full[0], bare[0])
    torch.testing.assert_close(full[1][:N], bare[1])
    assert not bool(full[1][N:].any())
    torch.testing.assert_close(full[2:], bare[2:])


@every
def test_no_weight_is_weight_one(name):
    ours, _ = LOSSES[name]
    z, y, bank, banks, _ = make(3)
    torch.testing.assert_close(
        value_and_gradients(ours, z, y, bank, banks, None),
        value_and_gradients(ours, z, y, bank, banks, torch.ones(N)),
    )


# --- where there is nothing to learn from -----------------------------------------------------------------------------
@with_bank
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_known_gives_zero_and_zero_gradients(name, dtype):
    ours, _ = LOSSES[name]
    z, y, bank, banks, weight = make(4, "none")
    bank, banks = (PrototypeBank(b.means.to(dtype), b.counts.to(dtype)) for b in (bank, banks))
    with torch.autograd.set_detect_anomaly(True):  # nor is any NaN on the way hidden by a mask
        parts = value_and_gradients(ours, z.to(dtype), y, bank, banks, weight)
    assert not any(bool(part.any()) for part in parts)


@pytest.mark.parametrize(
    "name", [n for n in LOSSES if n != "uniformity" and " soft" not in n and n not in WITHOUT_BANK]
)
def test_no_sample_of_a_known_class_gives_zero(name):
    """Other than in an empty bank, the softmax has known classes here, only not those of the batch."""
    ours, _ = LOSSES[name]
    z, _, bank, banks, weight = make(4, "all")
    y = torch.full((N,), 3)
    bank, banks = (b.restricted(torch.arange(C) != 3) for b in (bank, banks))
    for part in value_and_gradients(ours, z, y, bank, banks, weight):
        assert not bool(part.any())


@every
def test_zero_embeddings_have_finite_gradients(name):
    ours, _ = LOSSES[name]
    _, y, bank, banks, weight = make(5)
    for part in value_and_gradients(ours, torch.zeros(N, D, dtype=torch.float64), y, bank, banks, weight):
        assert bool(torch.isfinite(part).all())


@every
def test_embeddings_on_their_prototypes_have_finite_gradients(name):
    ours, _ = LOSSES[name]
    _, y, bank, banks, weight = make(5, "all")
    for part in value_and_gradients(ours, bank.means[y], y, bank, banks, weight):
        assert bool(torch.isfinite(part).all())


# --- precision --------------------------------------------------------------------------------------------------------
PRECISION = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-4, torch.float64: 1e-9}


@every
@levels
@pytest.mark.parametrize("dtype", PRECISION)
def test_every_precision(name, level, dtype):
    """The value is that of the same numbers in double precision, and neither padding nor an unknown row is read."""
    ours, _ = LOSSES[name]
    z, y, bank, banks, weight = make(2, level)
    z, bank, banks = z.to(dtype), *(PrototypeBank(b.means.to(dtype), b.counts.to(dtype)) for b in (bank, banks))
    exact = ours(z.double(), y, *(PrototypeBank(b.means.double(), b.counts.double()) for b in (bank, banks)), weight)
    spoilt = [PrototypeBank(torch.where(b.known[..., None], b.means, torch.nan), b.counts) for b in (bank, banks)]
    dirty = torch.where((weight > 0)[:, None], z, torch.nan)
    value, to_z, *_ = value_and_gradients(ours, dirty, y, *spoilt, weight)
    assert float(value) == pytest.approx(float(exact), rel=PRECISION[dtype], abs=PRECISION[dtype])
    assert bool(torch.isfinite(to_z).all()) and not bool(to_z[weight == 0].any())
    if dtype != torch.float16:  # which cannot hold the slope of a cosine at zero, a million
        for part in value_and_gradients(ours, torch.zeros_like(z), y, bank, banks, weight):
            assert bool(torch.isfinite(part).all())


@pytest.mark.parametrize("dtype", PRECISION)
def test_a_zero_row_stays_zero(dtype):
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=dtype, requires_grad=True)
    rows = unit(x)
    assert rows.dtype == dtype and rows[0].tolist() == [0, 0]
    torch.testing.assert_close(rows[1].double(), torch.tensor([0.6, 0.8], dtype=torch.float64), rtol=1e-2, atol=0)
    (gradient,) = torch.autograd.grad(rows.sum(), x)
    assert bool(torch.isfinite(gradient[1]).all()) and not bool(gradient.isnan().any())


# --- vmap -------------------------------------------------------------------------------------------------------------
def stack_of_clients():
    clients = [make(s, k) for s, k in ((10, "some"), (11, "none"), (12, "all"), (13, "some"))]
    z, y, weight = (torch.stack([c[i] for c in clients]) for i in (0, 1, 4))
    bank, banks = (PrototypeBank.stack([c[i] for c in clients]) for i in (2, 3))
    weight[3] = 0  # a client that has only padding in this step
    return z, y, bank, banks, weight


@every
def test_vmap_equals_one_client_at_a_time(name):
    ours, _ = LOSSES[name]
    z, y, bank, banks, weight = stack_of_clients()
    together = torch.func.vmap(ours)(z, y, bank, banks, weight)
    gradients = torch.func.vmap(torch.func.grad(ours))(z, y, bank, banks, weight)
    for k in range(len(z)):
        value, gradient, *_ = value_and_gradients(ours, z[k], y[k], bank[k], banks[k], weight[k])
        torch.testing.assert_close(together[k], value)
        torch.testing.assert_close(gradients[k], gradient)


@every
def test_vmap_with_one_bank_for_all(name):
    ours, _ = LOSSES[name]
    z, y, bank, banks, _ = stack_of_clients()
    together = torch.func.vmap(ours, in_dims=(0, 0, None, None, None))(z, y, bank[0], banks[0], None)
    alone = torch.stack([ours(z[k], y[k], bank[0], banks[0], None) for k in range(len(z))])
    torch.testing.assert_close(together, alone)


def test_cross_entropy_and_proximal_under_vmap():
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(3, N, C, generator=rng)
    y = torch.randint(C, (3, N), generator=rng)
    weight = torch.tensor([[1.0] * N, [0.0] * N, [1.0] * 3 + [0.0] * (N - 3)])
    together = torch.func.vmap(losses.cross_entropy)(logits, y, weight)
    alone = [losses.cross_entropy(*row) for row in zip(logits, y, weight, strict=True)]
    torch.testing.assert_close(together, torch.stack(alone))
    there = {"a": torch.zeros(N, C), "b": torch.ones(2)}
    near = torch.func.vmap(losses.proximal, in_dims=(0, None))({"a": logits}, there)
    torch.testing.assert_close(near, (logits**2).sum((1, 2)) / 2)


# --- gradients --------------------------------------------------------------------------------------------------------
@every
@pytest.mark.parametrize("level", ["some", "all"])
def test_gradcheck(name, level):
    ours, _ = LOSSES[name]
    z, y, bank, banks, weight = make(6, level)
    inputs = [t.requires_grad_() for t in (z, bank.means, banks.means)]

    def of(z: Tensor, m: Tensor, ms: Tensor) -> Tensor:
        return ours(z, y, PrototypeBank(m, bank.counts), PrototypeBank(ms, banks.counts), weight)

    assert torch.autograd.gradcheck(of, inputs)


def test_gradient_through_a_soft_target():
    z, y, bank, _, weight = make(7)
    target = soft(y).requires_grad_()
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda z, t: losses.distance_cross_entropy(z, t, bank, weight=weight), (z, target))


# --- the rest ---------------------------------------------------------------------------------------------------------
def test_one_hot_targets_equal_labels():
    z, y, bank, _, weight = make(8)
    hot = torch.nn.functional.one_hot(y, C).double()
    for metric in ("mean", "squared", "euclidean"):
        torch.testing.assert_close(
            losses.distance_cross_entropy(z, hot, bank, metric, weight),
            losses.distance_cross_entropy(z, y, bank, metric, weight),
        )


def test_proxy_is_prototype_cross_entropy_of_another_scale():
    z, y, bank, _, weight = make(8)
    torch.testing.assert_close(
        losses.proxy(z, y, bank, scale=4.0, weight=weight),
        losses.prototype_cross_entropy(z, y, bank, temperature=0.25, weight=weight),
    )


@pytest.mark.parametrize("level", ["some", "all", "none"])
def test_softmaxes(level):
    z, _, bank, banks, _ = make(9, level)
    for p in (losses.prototype_softmax(z, bank), losses.distance_softmax(z, bank)):
        assert not bool(p[:, ~bank.known].any())
        torch.testing.assert_close(p.sum(-1), torch.full((N,), float(bank.known.any()), dtype=torch.float64))
    if level != "none":
        for i in range(N):
            log_p = log_softmax({c: -dot(z[i] - bank.means[c], z[i] - bank.means[c]) / D for c in known(bank)})
            for c, value in log_p.items():
                assert float(losses.distance_softmax(z, bank)[i, c]) == pytest.approx(math.exp(value))
    torch.testing.assert_close(
        losses.distance_softmax(z, banks), torch.stack([losses.distance_softmax(z, banks[j]) for j in range(PEERS)])
    )
    torch.testing.assert_close(
        losses.prototype_softmax(z, banks), torch.stack([losses.prototype_softmax(z, banks[j]) for j in range(PEERS)])
    )


def test_peers_that_know_nothing_do_not_count():
    z, y, _, banks, weight = make(6)
    empty = PrototypeBank.stack([*(banks[j] for j in range(PEERS)), PrototypeBank.empty(C, D, like=z)])
    torch.testing.assert_close(
        losses.peer_contrast(z, y, empty, weight=weight), losses.peer_contrast(z, y, banks, weight=weight)
    )
    assert float(losses.peer_contrast(z, y, banks[:0])) == 0


def test_sharpen():
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([[0.25, 0.09, 0.04, 0.0]], dtype=torch.float64) / 0.38
    torch.testing.assert_close(losses.sharpen(p, 0.5)[:1], expected)
    torch.testing.assert_close(losses.sharpen(p, 0.5)[1:], p[1:])
    torch.testing.assert_close(losses.sharpen(0.2 * p, 0.5), losses.sharpen(p, 0.5))  # a factor is taken out
    torch.testing.assert_close(losses.sharpen(p, 1.0), p)
    cold = losses.sharpen(p, 1e-4)
    torch.testing.assert_close(cold[0], torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))
    q = torch.rand(3, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    for temperature in (0.5, 1.0, 3.0):
        assert torch.autograd.gradcheck(lambda q, t=temperature: losses.sharpen(q, t), q)
        p.requires_grad_()
        (gradient,) = torch.autograd.grad((losses.sharpen(p, temperature) ** 2).sum(), p)
        assert bool(torch.isfinite(gradient).all())


def test_proximal():
    w = {"a": torch.tensor([1.0, 2.0], requires_grad=True), "b": torch.tensor([[3.0]])}
    there = {"a": torch.tensor([0.0, 4.0]), "b": torch.tensor([[1.0]]), "extra": torch.zeros(1)}
    loss = losses.proximal(w, there)
    assert float(loss.detach()) == pytest.approx((1 + 4 + 4) / 2)
    assert torch.autograd.grad(loss, w["a"])[0].tolist() == [1.0, -2.0]
    assert float(losses.proximal({}, there)) == 0


def test_large_scale_does_not_overflow():
    z, y, bank, _, _ = make(6, "all")
    value = losses.proxy(z.float(), y, PrototypeBank(bank.means.float(), bank.counts.float()), scale=1e4)
    assert bool(torch.isfinite(value))


def test_bad_names():
    z, y, bank, _, _ = make(0)
    with pytest.raises(ValueError, match="reduction must be mean or sum, not 'max'"):
        losses.alignment(z, y, bank, reduction="max")
    with pytest.raises(ValueError, match="not 'cosine'"):
        losses.distance_cross_entropy(z, y, bank, metric="cosine")
