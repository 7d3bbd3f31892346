"""The bank against plain numpy loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from protofed.bank import PrototypeBank, unit

torch.set_num_threads(1)
METRICS = ("squared", "euclidean", "cosine")

cases = st.tuples(
    st.integers(0, 2**31), st.integers(0, 12), st.integers(1, 6), st.integers(1, 5)
)  # seed, samples, classes, dimensions
quick = settings(max_examples=60, deadline=None)


def samples(seed: int, n: int, classes: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(n, dim, generator=rng, dtype=torch.float64)
    y = torch.randint(classes, (n,), generator=rng)
    weight = torch.randint(3, (n,), generator=rng).double() / 2
    return z, y, weight


def loop_bank(z: np.ndarray, y: np.ndarray, weight: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    means, counts = np.zeros((classes, z.shape[1])), np.zeros(classes)
    for c in range(classes):
        for i in range(len(y)):
            if y[i] == c:
                means[c] += weight[i] * z[i]
                counts[c] += weight[i]
        if counts[c] > 0:
            means[c] /= counts[c]
    return means, counts


def random_bank(seed: int, *shape: int) -> PrototypeBank:
    rng = torch.Generator().manual_seed(seed)
    counts = torch.randint(4, shape[:-1], generator=rng).double()
    return PrototypeBank(torch.randn(*shape, generator=rng, dtype=torch.float64) * (counts > 0)[..., None], counts)


@quick
@given(cases)
def test_from_embeddings_equals_a_loop(case):
    z, y, weight = samples(*case)
    for w in (None, weight):
        bank = PrototypeBank.from_embeddings(z, y, case[2], weight=w)
        means, counts = loop_bank(z.numpy(), y.numpy(), np.ones(len(y)) if w is None else w.numpy(), case[2])
        np.testing.assert_allclose(bank.means, means, atol=1e-12)
        np.testing.assert_allclose(bank.counts, counts, atol=1e-12)
        assert bank.known.tolist() == (counts > 0).tolist()
        assert (bank.num_classes, bank.dim) == (case[2], case[3])


@quick
@given(cases, st.integers(0, 12))
def test_combine_is_the_bank_of_the_concatenation(case, cut):
    z, y, weight = samples(*case)
    classes = case[2]
    cut = min(cut, len(y))
    first = PrototypeBank.from_embeddings(z[:cut], y[:cut], classes, weight[:cut])
    second = PrototypeBank.from_embeddings(z[cut:], y[cut:], classes, weight[cut:])
    whole = PrototypeBank.from_embeddings(z, y, classes, weight)
    for joined in (first.combine(second), second.combine(first)):
        torch.testing.assert_close(joined.means, whole.means)
        torch.testing.assert_close(joined.counts, whole.counts)
    empty = PrototypeBank.empty(classes, case[3], like=z)
    torch.testing.assert_close(whole.combine(empty).means, whole.means)


@quick
@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_stack_and_index_round_trip(seed, clients, classes, dim):
    banks = [random_bank(seed + i, classes, dim) for i in range(clients)]
    stacked = PrototypeBank.stack(banks)
    for i, bank in enumerate(banks):
        assert torch.equal(stacked[i].means, bank.means) and torch.equal(stacked[i].counts, bank.counts)
    assert torch.equal(stacked[torch.arange(clients)].means, stacked.means)
    assert stacked[1:].means.shape == (clients - 1, classes, dim)


@pytest.mark.parametrize("metric", METRICS)
@quick
@given(case=cases)
def test_nearest_equals_a_loop_and_is_never_unknown(metric, case):
    seed, n, classes, dim = case
    z, bank = samples(*case)[0], random_bank(seed + 1, classes, dim)
    if not bool(bank.known.any()):
        return
    found = bank.nearest(z, metric)
    distances = bank.distances(z, metric)
    assert bool(bank.known[found].all())
    assert bool(torch.isinf(distances[:, ~bank.known]).all())
    for i in range(n):
        naive = {}
        for c in range(classes):
            if bank.counts[c] > 0:
                p = bank.means[c].numpy()
                gap = z[i].numpy() - p
                naive[c] = {
                    "squared": gap @ gap,
                    "euclidean": np.sqrt(gap @ gap),
                    "cosine": 1 - z[i].numpy() @ p / np.linalg.norm(z[i]) / np.linalg.norm(p),
                }[metric]
                assert distances[i, c] == pytest.approx(naive[c], abs=1e-6)
        assert naive[int(found[i])] <= min(naive.values()) + 1e-6


def test_distances_of_a_stack():
    banks, z = random_bank(0, 3, 4, 5), samples(1, 6, 4, 5)[0]
    for metric in METRICS:
        torch.testing.assert_close(
            banks.distances(z, metric), torch.stack([banks[k].distances(z, metric) for k in range(3)])
        )
    with pytest.raises(ValueError, match="manhattan"):
        banks.distances(z, "manhattan")


def test_filled_from_and_restricted():
    here = PrototypeBank(torch.tensor([[1.0], [0.0], [0.0]]), torch.tensor([1.0, 0.0, 0.0]))
    other = PrototypeBank(torch.tensor([[5.0], [6.0], [0.0]]), torch.tensor([2.0, 3.0, 0.0]))
    filled = here.filled_from(other)
    assert filled.means.squeeze(1).tolist() == [1, 6, 0] and filled.counts.tolist() == [1, 3, 0]
    kept = other.restricted(torch.tensor([False, True, True]))
    assert kept.means.squeeze(1).tolist() == [0, 6, 0] and kept.counts.tolist() == [0, 3, 0]


def test_unit_and_its_gradient_at_zero():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    u = unit(x)
    torch.testing.assert_close(u, torch.tensor([[0.6, 0.8], [0.0, 0.0]], dtype=torch.float64))
    u.sum().backward()
    assert x.grad is not None and bool(torch.isfinite(x.grad).all())


def test_gradient_of_the_means():
    z, y, weight = samples(3, 7, 4, 3)
    z.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: PrototypeBank.from_embeddings(z, y, 5, weight).means, z)


def test_from_embeddings_under_vmap():
    rows = [samples(s, 6, 4, 3) for s in range(3)]
    z, y, weight = (torch.stack(part) for part in zip(*rows, strict=True))
    stacked = torch.func.vmap(lambda z, y, w: PrototypeBank.from_embeddings(z, y, 4, w))(z, y, weight)
    for k in range(3):
        alone = PrototypeBank.from_embeddings(z[k], y[k], 4, weight[k])
        torch.testing.assert_close(stacked[k].means, alone.means)
        torch.testing.assert_close(stacked[k].counts, alone.counts)


def test_is_a_pytree_of_two_leaves():
    leaves, spec = pytree.tree_flatten(random_bank(0, 2, 3))
    assert len(leaves) == 2
    assert isinstance(pytree.tree_unflatten(leaves, spec), PrototypeBank)


def test_errors():
    with pytest.raises(ValueError, match="expected z"):
        PrototypeBank.from_embeddings(torch.zeros(3, 2), torch.zeros(4, dtype=torch.long), 2)
    with pytest.raises(ValueError, match="empty list"):
        PrototypeBank.stack([])
    with pytest.raises(IndexError, match="no leading axis"):
        random_bank(0, 2, 3)[0]
