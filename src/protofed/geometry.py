"""The shape of the embedding space: how far classes stand apart for how wide they are."""

from __future__ import annotations

import torch
from torch import Tensor

from .bank import PrototypeBank, unit


def feature_space_separation(z: Tensor, y: Tensor, bank: PrototypeBank, epsilon: float = 1e-8) -> Tensor:
    """FSS: distance to the nearest other prototype over the mean distance of the class's samples to their own.

    Fed-ARPL Eq. 3, averaged over the known classes that have samples in `z`. With fewer than two known classes nothing
    is separated from anything: 0.
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
    """Mean silhouette coefficient of embeddings grouped by label; `metric` is `euclidean` or `cosine`.

    0 where it is undefined, as scikit-learn scores a group of one sample: a single class, or all classes of one sample.
    NaN for embeddings that are not finite.
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
    own = size[group] - 1
    inside = total.gather(1, group[:, None])[:, 0] / own.clamp_min(1)
    outside = torch.where(member > 0, torch.inf, total / size).amin(1)
    value = (outside - inside) / torch.maximum(outside, inside).clamp_min(1e-300)
    return float(torch.where(own > 0, value, 0.0).mean())


def _cosine(z: Tensor) -> Tensor:
    return (1 - unit(z) @ unit(z).T).clamp(0, 2)
