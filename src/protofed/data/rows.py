"""The choice of rows by class, which data sources, partitions and splits share."""

from __future__ import annotations

from itertools import pairwise

import numpy as np


def apportion(total: int, weights: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Whole numbers in proportion to weights.

    What exceeds the largest number of one entry goes to the others. Where `most` adds up to less than `total`, the
    result is `most`.

    Args:
        total: the sum of the numbers.
        weights: `[n]`.
        most: `[n]`, the largest number that each entry may have.

    Returns:
        `[n]`.

    >>> apportion(10, np.array([1.0, 1.0, 2.0]), np.array([9, 9, 4])).tolist()
    [3, 3, 4]
    """
    exact = total * weights / weights.sum()
    result = np.minimum(np.floor(exact).astype(np.int64), most)
    while (short := total - int(result.sum())) > 0 and (room := result < most).any():
        gap = np.where(room, exact - result, -np.inf)
        nearest = np.argsort(-gap, kind="stable")[: min(short, int(room.sum()))]
        result[nearest] += 1
    return result


def pick(ranks: np.ndarray, take: np.ndarray, rng: np.random.Generator | None = None) -> np.ndarray:
    """Choose rows by class.

    Args:
        ranks: `[n]`, the class of each row, as `ranked` numbers them.
        take: the number of rows of each class.
        rng: the stream to draw from; without it the first rows are taken.

    Returns:
        a mask `[n]`.

    >>> pick(np.array([0, 1, 0, 1]), np.array([1, 2])).tolist()
    [True, True, False, True]
    """
    order = np.arange(len(ranks)) if rng is None else rng.permutation(len(ranks))
    order = order[np.argsort(ranks[order], kind="stable")]
    sizes = np.bincount(ranks, minlength=len(take))
    rank = np.arange(len(ranks)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    mask = np.zeros(len(ranks), bool)
    mask[order[rank < np.repeat(take, sizes)]] = True
    return mask


def balanced(labels: np.ndarray, number: int, rng: np.random.Generator | None = None) -> np.ndarray:
    """Choose rows, the same number from each class as far as a class has them.

    Args:
        labels: `[n]`.
        number: the number of rows.
        rng: the stream to draw from; without it the first rows are taken.

    Returns:
        a mask `[n]`.

    >>> balanced(np.array([5, 5, 5, 7]), 3).tolist()
    [True, True, False, True]
    """
    ranks, sizes = ranked(labels)
    order = np.arange(len(sizes)) if rng is None else rng.permutation(len(sizes))
    take = np.empty_like(sizes)
    take[order] = apportion(number, np.ones(len(sizes)), sizes[order])
    return pick(ranks, take, rng)


def hold_out(labels: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Choose a stratified share of the rows, at least one and at most all but one (of two or more rows).

    The last row of a class is never held out, so that every held-out class is in the remaining rows too. Only where
    every class has a single row, one of them is held out.

    Args:
        labels: `[n]`.
        share: between 0 and 1.
        rng: the stream to draw from.

    Returns:
        a mask `[n]`.

    >>> int(hold_out(np.array([0] * 10 + [1] * 5), 0.2, np.random.default_rng(0)).sum())
    3
    """
    ranks, sizes = ranked(labels)
    target = min(max(round(share * len(labels)), 1), len(labels) - 1)
    order = rng.permutation(len(sizes))  # so that ties are broken at random
    take = np.empty_like(sizes)
    take[order] = apportion(target, sizes[order], sizes[order] - 1)
    if not take.any():
        take[order[0]] = 1
    return pick(ranks, take, rng)


def ranked(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the classes that occur.

    Args:
        labels: `[n]`.

    Returns:
        labels as 0, 1, … over the classes that occur, and how many rows each class has.

    >>> ranks, sizes = ranked(np.array([7, 3, 7]))
    >>> ranks.tolist(), sizes.tolist()
    ([1, 0, 1], [1, 2])
    """
    _, ranks, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    return ranks.reshape(-1), sizes.astype(np.int64)


def distribute(ranks: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Distribute random rows over clients; no row goes to two clients.

    Args:
        ranks: `[n]`, the class of each row, as `ranked` numbers them.
        counts: `[clients, classes]`, the number of rows of each class that a client gets.
        rng: the stream to draw from.

    Returns:
        the rows of each client, in ascending order.

    >>> [rows.tolist() for rows in distribute(np.array([0, 0, 1]), np.array([[2, 0], [0, 1]]), np.random.default_rng(0))]
    [[0, 1], [2]]
    """
    clients, classes = counts.shape
    order = rng.permutation(len(ranks))
    order = order[np.argsort(ranks[order], kind="stable")]
    sizes = np.bincount(ranks, minlength=classes)
    start = np.cumsum(sizes) - sizes
    owner = np.full(len(ranks), clients)  # rows of no client come last and are cut off
    for c in range(classes):
        owner[order[start[c] : start[c] + counts[:, c].sum()]] = np.repeat(np.arange(clients), counts[:, c])
    return gather(owner, clients)


def gather(owner: np.ndarray, clients: int) -> list[np.ndarray]:
    """The rows of each owner.

    Args:
        owner: `[n]`, the client of each row; rows of no client have another number.
        clients: the number of clients.

    Returns:
        the rows of each client, in ascending order.

    >>> [rows.tolist() for rows in gather(np.array([1, 0, 1, 9]), clients=2)]
    [[1], [0, 2]]
    """
    order = np.argsort(owner, kind="stable")
    cuts = np.searchsorted(owner[order], np.arange(clients + 1))
    return [order[a:b] for a, b in pairwise(cuts)]
