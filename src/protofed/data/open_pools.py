"""Open pools: unlabelled samples of classes that their client does not have, mixed in among those of its own classes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from ..errors import ProtofedError
from .rows import apportion

log = logging.getLogger("protofed")


def mix_foreign(
    pools: Sequence[np.ndarray],
    spare: np.ndarray,
    y: np.ndarray,
    classes: np.ndarray,
    share: float,
    limit: int | None,
    rng: np.random.Generator,
    name: str,
) -> list[np.ndarray]:
    """Mix foreign rows, of classes that a client does not have, into its unlabelled rows: `share` of them, rounded down.

    Rows that nobody holds are used first. Where they are too few, every client gives the same part of its own rows to
    the others, at most `share`; it keeps rows that nobody can use. A client that has every class receives nothing.

    Args:
        pools: each client's unlabelled rows, all of its own classes.
        spare: the rows that nobody holds.
        y: the label of every row.
        classes: `[clients, C]`, which classes a client has.
        share: of a client's unlabelled rows, the share that is to be of other classes.
        limit: the most unlabelled rows a client may have.
        rng: the stream to draw from.
        name: the data set's, for messages.

    Returns:
        each client's unlabelled rows, in order.
    """
    foreign = ~classes & (np.bincount(y, minlength=classes.shape[1]) > 0)
    if not foreign.any():
        raise ProtofedError(
            f"{name}: unlabelled='open' needs classes that a client does not have, but every client has all of them; "
            "use another partition"
        )
    holdings = [
        _by_class(rows, y, classes.shape[1], rng) for rows in (*pools, spare)
    ]  # the last holding is the spare rows
    holding_sizes = np.array([[len(rows) for rows in holding] for holding in holdings])
    pool_sizes = holding_sizes[:-1].sum(1)

    def wanted(keep: np.ndarray) -> np.ndarray:
        """The number of foreign rows that each client takes in addition to `keep` rows of its own."""
        demand = np.floor(share / (1 - share) * keep + 1e-9).astype(np.int64) * foreign.any(1)
        return demand if limit is None else np.minimum(demand, limit - pool_sizes)

    demand = wanted(pool_sizes)
    gifts, receipts = _exchange(holding_sizes, np.append(np.zeros_like(pool_sizes), len(spare)), foreign, demand)
    if receipts.sum() < demand.sum():
        part = min((1 - share) * (1 + receipts.sum() / pool_sizes.sum()), 1)
        keep = np.ceil(part * pool_sizes - 1e-9).astype(np.int64)
        most = wanted(keep)
        demand = apportion(min(most.sum(), receipts.sum() + (pool_sizes - keep).sum()), most, most)
        gifts, receipts = _exchange(holding_sizes, np.append(pool_sizes - keep, len(spare)), foreign, demand)
    if not receipts.any():
        raise ProtofedError(
            f"{name}: unlabelled='open', but not one sample of a class its client does not have is to be had: "
            f"{len(spare)} samples are nobody's, and {pool_sizes.sum()} are in unlabelled pools"
        )
    short_clients = receipts.sum(1) < demand
    if short_clients.any():
        log.warning(
            "%s: open_share=%g asks for %d samples of classes their client does not have, and %d were to be had; "
            "%d of %d clients have fewer",
            *(name, share, demand.sum(), receipts.sum(), short_clients.sum(), len(pools)),
        )
    return _hand_over(holdings, gifts, receipts, rng)


def _by_class(rows: np.ndarray, y: np.ndarray, classes: int, rng: np.random.Generator) -> list[np.ndarray]:
    """The rows of each class, in random order."""
    rows = rng.permutation(rows)
    rows = rows[np.argsort(y[rows], kind="stable")]
    return np.split(rows, np.cumsum(np.bincount(y[rows], minlength=classes))[:-1])


def _hand_over(
    holdings: Sequence[Sequence[np.ndarray]], gifts: np.ndarray, receipts: np.ndarray, rng: np.random.Generator
) -> list[np.ndarray]:
    """Each client's rows after the exchange. A holder gives away the first rows of each class."""
    pools = [
        [rows[n:] for rows, n in zip(*holder, strict=True)] for holder in zip(holdings[:-1], gifts[:-1], strict=True)
    ]
    for c in range(gifts.shape[1]):
        offered = np.concatenate([holding[c][:n] for holding, n in zip(holdings, gifts[:, c], strict=True)])
        parts = np.split(rng.permutation(offered), np.cumsum(receipts[:, c])[:-1])
        for pool, rows in zip(pools, parts, strict=True):
            pool.append(rows)
    return [np.sort(np.concatenate(pool)) for pool in pools]


def _exchange(
    holding_sizes: np.ndarray, supply: np.ndarray, foreign: np.ndarray, demand: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of samples of each class that holders give and clients receive, by a maximum flow.

    A holder has `holding_sizes [holder, class]` rows and gives at most `supply`. A client takes rows of `foreign`
    classes only, `demand` in total, as evenly over the classes as possible.
    """
    from scipy.sparse import csr_matrix  # imported late, because it is slow to load
    from scipy.sparse.csgraph import maximum_flow

    (holders, classes), clients = holding_sizes.shape, len(demand)
    giver, of_class = 1 + np.arange(holders), 1 + holders + np.arange(classes)
    receiver, sink = 1 + holders + classes + np.arange(clients), 1 + holders + classes + clients
    useful = foreign & (holding_sizes.sum(0) > 0)
    per_class = -(-demand // np.maximum(useful.sum(1), 1))
    while True:
        edges = (
            np.broadcast_arrays(0, giver, supply),
            np.broadcast_arrays(giver[:, None], of_class, holding_sizes),
            np.broadcast_arrays(of_class, receiver[:, None], useful * per_class[:, None]),
            np.broadcast_arrays(receiver, sink, demand),
        )
        start, end, capacity = (np.concatenate([edge[i].ravel() for edge in edges]) for i in range(3))
        result = maximum_flow(csr_matrix((capacity.astype(np.int32), (start, end)), (sink + 1, sink + 1)), 0, sink)
        if result.flow_value == demand.sum() or (per_class >= demand).all():
            break
        per_class = 2 * per_class
    return result.flow[giver][:, of_class].toarray(), -result.flow[receiver][:, of_class].toarray()
