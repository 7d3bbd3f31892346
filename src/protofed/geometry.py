"""The shape of the embedding space: how far classes stand apart for how wide they are."""

from __future__ import annotations

import torch
from torch import Tensor

from .bank import PrototypeBank, unit


def feature_space_separation(z: Tensor, y: Tensor, bank: PrototypeBank, epsilon: float = 1e-8) -> Tensor:
    """FSS: distance to the nearest other prototype over the mean distance of the class's samples to their own.

    Fed-ARPL Eq. 3, averaged over the known classes that have samples in `z`. With fewer than two known classes nothing
    is separated from anything, and the value is 0.

    Args:
        z: embeddings `[n, d]`.
        y: labels `[n]`.
        bank: the prototypes of the same space.
        epsilon: is added to the radius of a class, which may be 0.

    Returns:
        a scalar; the larger, the further classes stand apart for how wide they are.

    >>> z, y = torch.tensor([[0.0], [2.0], [10.0], [12.0]]), torch.tensor([0, 0, 1, 1])
    >>> feature_space_separation(z, y, PrototypeBank.from_embeddings(z, y, 2))
    tensor(10.)
    """
    known = bank.known
    means = torch.where(known[:, None], bank.means, 0.0)
    apart = torch.cdist(means, means)
    other = known[None, :] & ~torch.eye(len(known), dtype=torch.bool, device=known.device)
    nearest = torch.where(other, apart, float("inf")).amin(-1)

    radius = PrototypeBank.from_embeddings(torch.linalg.vector_norm(z - means[y], dim=-1)[:, None], y, len(known))
    scored = known & radius.known & (known.sum() > 1)
    ratio = torch.where(scored, nearest, 0.0) / (radius.means[:, 0] + epsilon)
    return ratio.sum() / scored.sum().clamp_min(1)


def silhouette(z: Tensor, y: Tensor, metric: str = "euclidean") -> float:
    """The mean silhouette coefficient of embeddings grouped by label.

    Args:
        z: embeddings `[n, d]`.
        y: labels `[n]`.
        metric: `euclidean` or `cosine`.

    Returns:
        a number from −1 to 1. It is 0 where the coefficient is undefined (a single class, or all classes of one sample),
        as scikit-learn scores a group of one sample; and NaN for embeddings that are not finite.

    >>> round(silhouette(torch.tensor([[0.0], [1.0], [10.0], [11.0]]), torch.tensor([0, 0, 1, 1])), 3)
    0.9
    """
    if metric not in ("euclidean", "cosine"):
        raise ValueError(f"metric must be euclidean or cosine, not {metric!r}")
    if not bool(torch.isfinite(z).all()):
        return float("nan")
    classes, group = torch.unique(y, return_inverse=True)
    if len(classes) < 2 or len(classes) >= len(y):
        return 0.0
    z = z.detach().double()
    # by matrix product, which double precision can afford
    apart = torch.cdist(z, z, compute_mode="use_mm_for_euclid_dist") if metric == "euclidean" else _cosine(z)
    apart.fill_diagonal_(0)
    member = torch.nn.functional.one_hot(group, len(classes)).double()
    size = member.sum(0)
    total = apart @ member  # from each sample to all of each class
    others = size[group] - 1  # of the sample's own class
    inside = total.gather(1, group[:, None])[:, 0] / others.clamp_min(1)
    outside = torch.where(member > 0, torch.inf, total / size).amin(1)
    value = (outside - inside) / torch.maximum(outside, inside).clamp_min(1e-300)
    return float(torch.where(others > 0, value, 0.0).mean())


def _cosine(z: Tensor) -> Tensor:
    """The cosine distance of every pair of rows."""
    return (1 - unit(z) @ unit(z).T).clamp(0, 2)
