"""Partitions that make clients uneven in one respect alone: in their sizes, or in how a class is shared by its holders."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..errors import ProtofedError
from .partitions import Partition, class_holders, dirichlet, register, require
from .rows import apportion, distribute, ranked


@register("quantity")
@dataclass(frozen=True)
class Quantity(Partition):
    """Quantity skew: clients differ in size and not in their mix of classes (Li et al., NIID-Bench, ICDE 2022).

    `draw="dirichlet"` takes the sizes from Dir(α), as NIID-Bench does: the smaller α, the more unequal. `"log-normal"`
    takes them in proportion to exp(σ·N(0, 1)). No client has fewer than `min_size` samples, and in a client no class
    has more than one sample more or fewer than its share.
    """

    draw: Literal["dirichlet", "log-normal"] = "dirichlet"
    alpha: float = 0.5
    sigma: float = 1.0
    min_size: int = 2

    def __post_init__(self) -> None:
        require(
            self.draw in ("dirichlet", "log-normal"), f"draw must be 'dirichlet' or 'log-normal', got {self.draw!r}"
        )
        require(math.isfinite(self.alpha) and self.alpha > 0, f"alpha must be above 0, got {self.alpha}")
        require(math.isfinite(self.sigma) and self.sigma >= 0, f"sigma must be 0 or more, got {self.sigma}")
        require(self.min_size >= 1, f"min_size must be at least 1, got {self.min_size}")

    def rows(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None
    ) -> list[np.ndarray]:
        spare = len(labels) - clients * self.min_size
        if spare < 0:
            raise ProtofedError(
                f"partition 'quantity': {clients} clients of at least min_size={self.min_size} need "
                f"{clients * self.min_size:,} samples; the training part has {len(labels):,}"
            )
        if self.draw == "dirichlet":
            weights = dirichlet(self.alpha, (1, clients), rng)[0]
        else:
            normal = self.sigma * rng.standard_normal(clients)
            weights = np.exp(normal - normal.max())
        sizes = self.min_size + apportion(spare, weights, np.full(clients, spare))
        # The rows of each class at even distances from 0 to 1: any interval has each class by its share, up to one row.
        ranks, class_sizes = ranked(labels)
        order = rng.permutation(len(labels))
        order = order[np.argsort(ranks[order], kind="stable")]
        rank_in_class = np.arange(len(labels)) - np.repeat(np.cumsum(class_sizes) - class_sizes, class_sizes)
        position = (rank_in_class + np.repeat(rng.random(len(class_sizes)), class_sizes)) / class_sizes[ranks[order]]
        return np.split(order[np.argsort(position, kind="stable")], np.cumsum(sizes)[:-1])


@register("extended-dirichlet", "exdirichlet")
@dataclass(frozen=True)
class ExtendedDirichlet(Partition):
    """Extended Dirichlet: exactly `classes_per_client` classes a client, and each class by Dir(α) over its holders.

    The strategy of Li and Lyu, "Convergence Analysis of Sequential Federated Learning on Heterogeneous Data" (NeurIPS
    2023): first classes are allotted to clients, every class to at least one where there are enough clients, then the
    samples of a class to its holders. Every holder gets at least one sample of the class here, so that it holds it.
    """

    complete: ClassVar[bool] = False  # it is complete where clients · classes_per_client ≥ C

    classes_per_client: int = 2
    alpha: float = 0.5

    def __post_init__(self) -> None:
        require(self.classes_per_client >= 1, f"classes_per_client must be at least 1, got {self.classes_per_client}")
        require(math.isfinite(self.alpha) and self.alpha > 0, f"alpha must be above 0, got {self.alpha}")

    def rows(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None
    ) -> list[np.ndarray]:
        ranks, sizes = ranked(labels)
        counts = np.zeros((clients, len(sizes)), np.int64)
        for c, holders in enumerate(class_holders("extended-dirichlet", sizes, clients, self.classes_per_client, rng)):
            spare = sizes[c] - len(holders)
            if spare < 0:
                raise ProtofedError(
                    f"partition 'extended-dirichlet': {len(holders)} clients would hold class {np.unique(labels)[c]}, "
                    f"which has {sizes[c]} training samples; use fewer clients or classes_per_client"
                )
            if holders:
                shares = dirichlet(self.alpha, (1, len(holders)), rng)[0]
                counts[holders, c] = 1 + apportion(spare, shares, np.full(len(holders), spare))
        return distribute(ranks, counts, rng)
