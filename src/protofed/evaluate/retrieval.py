"""Retrieval: whether the nearest embeddings of a sample are of its class."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bank import PrototypeBank
from ..errors import ProtofedError

KS = (1, 5)
QUERIES = 256  # of which distances are computed at a time
METRICS = ("cosine", "squared")


def retrieval(
    z: Tensor,
    y: Tensor,
    gallery: tuple[Tensor, Tensor] | None = None,
    ks: tuple[int, ...] = KS,
    metric: str = "cosine",
) -> dict[str, float]:
    """Search a gallery for the class of each query.

    Args:
        z: The queries' embeddings `[n, d]`.
        y: Their classes `[n]`.
        gallery: Embeddings `[m, d]` and classes `[m]` that are searched; without it each query searches the others.
        ks: How many of the nearest are looked at.
        metric: `"cosine"` or `"squared"` distance. What is equally near comes in the order of the gallery.

    Returns:
        `map`, the mean average precision: for a query the mean, over all samples of its class in the gallery, of the share
        of that class among all that are at least as near; and for each k `recall<k>`, the share of queries with one of
        their class among the k nearest. Queries without a sample of their class in the gallery are left out; where none
        is left, there are no figures.

    >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    >>> retrieval(z, torch.tensor([0, 0, 1, 1]), ks=(1,))
    {'map': 1.0, 'recall1': 1.0}
    """
    if metric not in METRICS:
        raise ProtofedError(f"metric={metric!r}: expected one of {', '.join(METRICS)}")
    if z.ndim != 2 or len(z) != len(y) or (gallery is not None and gallery[0].shape[1:] != z.shape[1:]):
        raise ProtofedError(
            f"retrieval: expected embeddings [n, d] and classes [n], got {list(z.shape)}, {list(y.shape)}"
        )
    searched, classes = (z, y) if gallery is None else gallery
    bank = PrototypeBank(searched, torch.ones(len(searched), device=z.device))  # a sample is a prototype of itself
    precision: list[Tensor] = []
    hits: dict[int, list[Tensor]] = {k: [] for k in ks}
    for rows in torch.arange(len(z), device=z.device).split(QUERIES):
        distances = bank.distances(z[rows], metric)
        if gallery is None:
            distances[torch.arange(len(rows), device=z.device), rows] = torch.inf  # the query itself comes last
        order = distances.argsort(dim=1, stable=True)
        right = (classes[order] == y[rows, None]).double()
        if gallery is None:
            right[:, -1] = 0
        right = right[right.sum(1) > 0]
        places = torch.arange(1, right.shape[1] + 1, device=z.device, dtype=right.dtype)
        precision.append((right * right.cumsum(1) / places).sum(1) / right.sum(1))
        for k in ks:
            hits[k].append(right[:, :k].amax(1) if len(right) else right.new_zeros(0))
    if not sum(map(len, precision)):
        return {}
    return {"map": float(torch.cat(precision).mean()), **{f"recall{k}": float(torch.cat(hits[k]).mean()) for k in ks}}
