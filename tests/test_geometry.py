"""Feature-space separation and silhouette against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from protofed.bank import PrototypeBank
from protofed.geometry import feature_space_separation, silhouette

torch.set_num_threads(1)


def case(seed: int, n: int = 40, classes: int = 6, dim: int = 4) -> tuple[torch.Tensor, torch.Tensor, PrototypeBank]:
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(n, dim, generator=rng, dtype=torch.float64)
    y = torch.randint(classes - 1, (n,), generator=rng)  # the last class has no samples
    counts = torch.randint(3, (classes,), generator=rng).double()
    means = torch.randn(classes, dim, generator=rng, dtype=torch.float64)
    return z, y, PrototypeBank(means, counts)


def loop_separation(z: np.ndarray, y: np.ndarray, means: np.ndarray, counts: np.ndarray, epsilon: float) -> float:
    ratios = []
    for c in range(len(means)):
        others = [np.linalg.norm(means[c] - means[j]) for j in range(len(means)) if j != c and counts[j] > 0]
        own = [np.linalg.norm(z[i] - means[c]) for i in range(len(y)) if y[i] == c]
        if counts[c] > 0 and others and own:
            ratios.append(min(others) / (np.mean(own) + epsilon))
    return float(np.mean(ratios)) if ratios else 0.0


@pytest.mark.parametrize("seed", range(20))
def test_separation_equals_a_loop(seed):
    z, y, bank = case(seed)
    expected = loop_separation(z.numpy(), y.numpy(), bank.means.numpy(), bank.counts.numpy(), 1e-8)
    assert float(feature_space_separation(z, y, bank)) == pytest.approx(expected)


@pytest.mark.parametrize("known", [0, 1])
def test_separation_needs_two_known_classes(known):
    z, y, bank = case(0)
    few = PrototypeBank(bank.means, (torch.arange(6) < known).double())
    assert float(feature_space_separation(z, y, few)) == 0


def test_separation_under_vmap():
    rows = [case(seed) for seed in range(4)]
    z, y = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
    banks = PrototypeBank.stack([r[2] for r in rows])
    together = torch.func.vmap(feature_space_separation)(z, y, banks)
    torch.testing.assert_close(together, torch.stack([feature_space_separation(*r) for r in rows]))


def test_separation_grows_as_classes_part():
    z, y, _ = case(1)
    centres = torch.randn(6, 4, dtype=torch.float64)
    scores = []
    for scale in (0.0, 2.0, 10.0):
        moved = z + scale * centres[y]
        scores.append(float(feature_space_separation(moved, y, PrototypeBank.from_embeddings(moved, y, 6))))
    assert scores == sorted(scores) and scores[2] > 2 * scores[1]


def loop_silhouette(z: np.ndarray, y: np.ndarray, metric: str) -> float:
    def distance(a: np.ndarray, b: np.ndarray) -> float:
        if metric == "cosine":
            return float(1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        return float(np.linalg.norm(a - b))

    scores = []
    for i in range(len(y)):
        near = {
            c: [distance(z[i], z[j]) for j in range(len(y)) if j != i and y[j] == c] for c in sorted(set(y.tolist()))
        }
        own = near.pop(int(y[i]))
        if not own:
            scores.append(0.0)
            continue
        a, b = np.mean(own), min(np.mean(d) for d in near.values())
        scores.append((b - a) / max(a, b))
    return float(np.mean(scores))


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("seed", range(5))
def test_silhouette_equals_a_loop(seed, metric):
    z, y, _ = case(seed, n=25)
    y[0] = 5  # a class of one sample
    assert silhouette(z, y, metric) == pytest.approx(loop_silhouette(z.numpy(), y.numpy(), metric))


def test_silhouette_where_it_is_undefined():
    z, y, _ = case(0)
    assert silhouette(z, torch.zeros_like(y)) == 0
    assert silhouette(z, torch.arange(len(z))) == 0
    assert silhouette(z[:0], y[:0]) == 0
    assert math.isnan(silhouette(z / 0, y))
    with pytest.raises(ValueError, match="manhattan"):
        silhouette(z, y, "manhattan")


def test_silhouette_takes_embeddings_with_a_gradient():
    z, y, _ = case(0)
    assert silhouette(z.float().requires_grad_(), y) == pytest.approx(silhouette(z, y), abs=1e-5)
