"""Choosing rows by class: shared by the data sources, the partitions and the splits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np


def apportion(total: int, weights: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Whole numbers that add up to `total`, in proportion to `weights` and none above `most`.

    What one entry cannot take goes to the others; where `most` adds up to less than `total`, the result is `most`.
    """
    exact = total * weights / weights.sum()
    result = np.minimum(np.floor(exact).astype(np.int64), most)
    while (short := total - int(result.sum())) > 0 and (room := result < most).any():
        gap = np.where(room, exact - result, -np.inf)
        nearest = np.argsort(-gap, kind="stable")[: min(short, int(room.sum()))]
        result[nearest] += 1
    return result


def pick(ranks: np.ndarray, take: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
    """Bool mask of `take[c]` rows of each class: random ones, or without `rng` the first ones."""
    order = np.arange(len(ranks)) if rng is None else rng.permutation(len(ranks))
    order = order[np.argsort(ranks[order], kind="stable")]
    sizes = np.bincount(ranks, minlength=len(take))
    rank = np.arange(len(ranks)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = np.zeros(len(ranks), bool)
    chosen[order[rank < np.repeat(take, sizes)]] = True
    return chosen


def balanced(labels: np.ndarray, number: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Bool mask of `number` rows, the same from each class as far as a class has them; without `rng` the first ones."""
    ranks, sizes = ranked(labels)
    order = np.arange(len(sizes)) if rng is None else rng.permutation(len(sizes))
    take = np.empty_like(sizes)
    take[order] = apportion(number, np.ones(len(sizes)), sizes[order])
    return pick(ranks, take, rng)


def hold_out(labels: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Bool mask of a stratified share of the rows, at least one and at most all but one (of two or more rows).

    The last row of a class stays, so that no held-out class is unknown to what remains. Only where every class has a
    single row does one of them go.
    """
    ranks, sizes = ranked(labels)
    target = min(max(round(share * len(labels)), 1), len(labels) - 1)
    order = rng.permutation(len(sizes))  # ties fall to a random class, not always to the first
    take = np.empty_like(sizes)
    take[order] = apportion(target, sizes[order], sizes[order] - 1)
    if not take.any():
        take[order[0]] = 1
    return pick(ranks, take, rng)


def ranked(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels as 0, 1, … over the classes that occur, and how many rows each has."""
    _, ranks, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    return ranks.reshape(-1), sizes.astype(np.int64)


def deal(ranks: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Rows for each client, `counts[client, class]` random ones of each class; no row is dealt twice."""
    clients, classes = counts.shape
    order = rng.permutation(len(ranks))
    order = order[np.argsort(ranks[order], kind="stable")]
    sizes = np.bincount(ranks, minlength=classes)
    start = np.cumsum(sizes) - sizes
    owner = np.full(len(ranks), clients)  # what is nobody's comes last and is cut off
    for c in range(classes):
        owner[order[start[c] : start[c] + counts[:, c].sum()]] = np.repeat(np.arange(clients), counts[:, c])
    return gather(owner, clients)


def gather(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    """The rows of each owner, in ascending order."""
    order = np.argsort(owner, kind="stable")
    cuts = np.searchsorted(owner[order], np.arange(clients + 1))
    return [order[a:b] for a, b in pairwise(cuts)]
