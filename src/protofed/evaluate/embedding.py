"""What an embedding is worth without its head: retrieval and few-shot accuracy, of each client and of all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..geometry import silhouette
from .few_shot import WAY, few_shot
from .retrieval import KS, retrieval

SHOTS = (1, 5)
EMBEDDING = ("map", *(f"recall{k}" for k in KS), *(f"shot{k}" for k in SHOTS))
"""The measures of a client's embedding: mean average precision, recall@k, and few-shot accuracies."""
POOLED = tuple(f"pooled_{name}" for name in EMBEDDING if not name.startswith("shot"))
"""The measures of a search among all clients' embeddings together."""
POOLED_SILHOUETTE = "pooled_silhouette"


@dataclass(frozen=True, eq=False)
class Pool:
    """Embeddings of some of a client's test samples, and of some of its training samples, with their classes."""

    queries: np.ndarray
    query_classes: np.ndarray
    gallery: np.ndarray
    gallery_classes: np.ndarray

    @classmethod
    def of(cls, z: Tensor, y: Tensor, gallery: Tensor, classes: Tensor) -> Pool:
        """A pool of embeddings `z` and classes `y` of test samples, and of training samples."""
        return cls(*(t.detach().cpu().numpy() for t in (z, y, gallery, classes)))


@dataclass(frozen=True, eq=False)
class Drawn:
    """Embeddings of a few of a client's test samples, with their classes."""

    z: np.ndarray
    y: np.ndarray


def embedding_measures(z: Tensor, y: Tensor, gallery: tuple[Tensor, Tensor], seed: int = 0) -> dict[str, float]:
    """Measure a client's embedding.

    Args:
        z: Embeddings of its test samples `[n, d]`.
        y: Their classes `[n]`.
        gallery: Embeddings and classes of its training samples, which are searched; where there is none of them, each test
            sample searches the others.
        seed: What the few-shot episodes follow from.

    Returns:
        The measures of `EMBEDDING` that the samples allow. Few-shot episodes have five classes, or as many as there are.
    """
    measures = retrieval(z, y, gallery if len(gallery[1]) else None)
    for shot in SHOTS:
        classes = int((torch.bincount(y) > shot).sum())
        if classes > 1:
            measures[f"shot{shot}"] = few_shot(z, y, min(WAY, classes), shot, seed=seed).accuracy
    return measures


def pooled_silhouette(drawn: Sequence[Drawn]) -> dict[str, float]:
    """The silhouette of all clients' test samples together, each embedded by its own client and grouped by class.

    It is high where classes stand apart in one space that clients share. The mean of the clients' own silhouettes can be
    high where each client has a space of its own, so the two can order methods differently.

    Args:
        drawn: Embeddings of some of each client's test samples.

    Returns:
        The measure by its name; nothing where there are no embeddings, or where they are not finite.
    """
    if not drawn:
        return {}
    z, y = (torch.from_numpy(np.concatenate([getattr(d, name) for d in drawn])) for name in ("z", "y"))
    value = silhouette(z, y)
    return {POOLED_SILHOUETTE: value} if np.isfinite(value) else {}


def pooled_measures(pools: Sequence[Pool]) -> dict[str, float]:
    """Search the training samples of all clients, each embedded by its own client, for the class of every test sample.

    Args:
        pools: The embeddings of some clients.

    Returns:
        The measures of `POOLED`. They are high where the clients' embeddings are one space.
    """
    if not pools:
        return {}
    columns = ("queries", "query_classes", "gallery", "gallery_classes")
    z, y, gallery, classes = (torch.from_numpy(np.concatenate([getattr(p, name) for p in pools])) for name in columns)
    return {f"pooled_{name}": value for name, value in retrieval(z, y, (gallery, classes)).items()}
