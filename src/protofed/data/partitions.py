"""Partitions: which client holds which training samples.

A partition is a frozen dataclass of its settings; `split` gives each client's row numbers, sorted. No sample belongs to
two clients. Where `complete` is true every sample belongs to one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..errors import ProtofedError
from ..registry import Registry
from .rows import distribute, gather, ranked


@dataclass(frozen=True)
class Partition:
    """Base of all partitions: `split` checks the arguments and the result of `rows`, which a partition defines."""

    name: ClassVar[str]
    complete: ClassVar[bool] = True
    by_groups: ClassVar[bool] = False
    """Whether clients follow from the data's group ids, so that their number may be left open."""

    def split(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Distribute the training samples over clients.

        Args:
            labels: the label of every sample.
            clients: the number of clients.
            rng: the stream to draw from.
            groups: the natural id (writer, room, patient) of every sample, where the data set has them.

        Returns:
            the row numbers of each client, sorted.

        >>> [len(rows) for rows in IID().split(np.zeros(10), 3, np.random.default_rng(0))]
        [4, 3, 3]
        """
        labels = np.asarray(labels)
        if clients < 1:
            raise ProtofedError(f"partition {self.name!r}: clients={clients}; at least one is needed")
        if len(labels) < clients:
            raise ProtofedError(f"partition {self.name!r}: {len(labels)} samples are too few for {clients} clients")
        rows = self.rows(labels, clients, rng, groups)
        for client, client_rows in enumerate(rows):
            if not len(client_rows):
                raise ProtofedError(
                    f"partition {self.name!r}: client {client} of {clients} is left without samples "
                    f"({len(labels)} samples in all); use fewer clients"
                )
        return [np.sort(client_rows) for client_rows in rows]

    def rows(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None
    ) -> list[np.ndarray]:
        """The row numbers of each client, in any order. The arguments are those of `split`."""
        raise TypeError(f"{type(self).__name__} defines no rows")


partitions: Registry[Partition] = Registry("partition")
register = partitions.register


@register("iid")
@dataclass(frozen=True)
class IID(Partition):
    """Every client draws from the same mix of classes; their sizes differ by at most one."""

    def rows(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None
    ) -> list[np.ndarray]:
        return np.array_split(rng.permutation(len(labels)), clients)


@register("n-way", "nway", "n-way-k-shot")
@dataclass(frozen=True)
class NWay(Partition):
    """n-way k-shot: client i holds n_i classes and k_i samples of each (FedProto, FedSAP).

    `draw="normal"` is FedSAP's: n ~ N(way, spread²) clipped to 1 … C, k ~ N(shot, shot_spread²). `draw="uniform"` is
    FedProto's as published: n uniform in max(2, n−s) … min(C−1, n+s), k uniform in k−s+1 … k+s.

    Each client's classes are drawn at random among those that still have k samples. Where too few classes
    remain, all clients choose again, each the classes with the most remaining samples, which succeeds whenever equal
    demands can be met at all.
    """

    complete: ClassVar[bool] = False

    way: float = 3.0
    shot: int = 15
    spread: float = 1.0
    shot_spread: float | None = None
    """The σ (or s) of the samples per class; by default it is `spread`."""
    draw: Literal["normal", "uniform"] = "normal"

    def __post_init__(self) -> None:
        require(math.isfinite(self.way) and self.way >= 1, f"way must be at least 1, got {self.way}")
        require(self.shot >= 1, f"shot must be at least 1, got {self.shot}")
        for key, value in (("spread", self.spread), ("shot_spread", self.shot_spread)):
            require(value is None or (math.isfinite(value) and value >= 0), f"{key} must be 0 or more, got {value}")
        require(self.draw in ("normal", "uniform"), f"draw must be 'normal' or 'uniform', got {self.draw!r}")

    def rows(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None
    ) -> list[np.ndarray]:
        ranks, sizes = ranked(labels)
        if self.way > len(sizes):
            raise ProtofedError(f"partition 'n-way': way={self.way:g}, but the data has {len(sizes)} classes")
        if self.shot > sizes.min():
            rarest = np.unique(labels)[sizes.argmin()]
            raise ProtofedError(
                f"partition 'n-way': shot={self.shot}, but class {rarest} has only {sizes.min()} training samples"
            )
        ways, shots = self.sizes(len(sizes), clients, rng)
        shots = np.minimum(shots, sizes.max())
        counts = _choose_at_random(ways, shots, sizes, rng)
        if counts is None:
            counts = _choose_largest_classes(ways, shots, sizes, rng)
        if counts is None:
            fits = len(labels) // int(ways.sum())
            raise ProtofedError(
                f"partition 'n-way': {clients} clients with way={self.way:g} and shot={self.shot} need "
                f"{int((ways * shots).sum()):,} samples in {int(ways.sum()):,} class shares; the training part has "
                f"{len(labels):,} in {len(sizes)} classes (shot={max(fits, 1)} is about what fits); "
                "lower shot, way or clients"
            )
        return distribute(ranks, counts, rng)

    def sizes(self, classes: int, clients: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The number of classes of each client, and the number of samples of each class.

        Args:
            classes: The number of classes in the data.
            clients: The number of clients.
            rng: The random stream.

        Returns:
            Both numbers for each client.
        """
        shot_spread = self.spread if self.shot_spread is None else self.shot_spread
        if self.draw == "normal":
            ways = np.rint(rng.normal(self.way, self.spread, clients)).astype(np.int64)
            shots = np.rint(rng.normal(self.shot, shot_spread, clients)).astype(np.int64)
        else:
            n, s, t = round(self.way), round(self.spread), round(shot_spread)
            high = max(min(classes - 1, n + s), 1)
            ways = rng.integers(min(max(2, n - s), high), high, clients, endpoint=True)
            shots = rng.integers(min(self.shot - t + 1, self.shot), self.shot + t, clients, endpoint=True)
        return np.clip(ways, 1, classes), np.maximum(shots, 1)


def _choose_at_random(
    ways: np.ndarray, shots: np.ndarray, sizes: np.ndarray, rng: np.random.Generator
) -> np.ndarray | None:
    """The numbers of samples `[client, class]` of classes drawn at random; None where too few classes remain."""
    remaining = sizes.copy()
    counts = np.zeros((len(ways), len(sizes)), np.int64)
    for client, (n, k) in enumerate(zip(ways, shots, strict=True)):
        eligible = np.flatnonzero(remaining >= k)
        if len(eligible) < n:
            return None
        classes = rng.choice(eligible, n, replace=False)
        counts[client, classes] = k
        remaining[classes] -= k
    return counts


def _choose_largest_classes(
    ways: np.ndarray, shots: np.ndarray, sizes: np.ndarray, rng: np.random.Generator
) -> np.ndarray | None:
    """The numbers of samples `[client, class]` of the classes with the most remaining samples; None where they do not fit.

    Clients that need the most samples of a class choose first, and ties are broken at random.
    """
    remaining = sizes.copy()
    counts = np.zeros((len(ways), len(sizes)), np.int64)
    for client in np.argsort(-shots, kind="stable"):
        shuffled = rng.permutation(len(sizes))
        classes = shuffled[np.argsort(-remaining[shuffled], kind="stable")][: ways[client]]
        if remaining[classes].min() < shots[client]:
            return None
        counts[client, classes] = shots[client]
        remaining[classes] -= shots[client]
    return counts


@register("dirichlet")
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class is shared out over the clients by Dir(α): the smaller α, the fewer clients hold most of a class.

    A client below `min_size` gets samples of the largest client's most frequent class, so nothing is drawn again and
    the split always ends.
    """

    alpha: float = 0.1
    min_size: int = 2

    def __post_init__(self) -> None:
        require(math.isfinite(self.alpha) and self.alpha > 0, f"alpha must be above 0, got {self.alpha}")
        require(self.min_size >= 1, f"min_size must be at least 1, got {self.min_size}")

    def rows(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None
    ) -> list[np.ndarray]:
        if clients * self.min_size > len(labels):
            raise ProtofedError(
                f"partition 'dirichlet': {clients} clients of at least min_size={self.min_size} need "
                f"{clients * self.min_size:,} samples; the training part has {len(labels):,}"
            )
        ranks, sizes = ranked(labels)
        ends = np.rint(np.cumsum(dirichlet(self.alpha, (len(sizes), clients), rng), axis=1) * sizes[:, None])
        ends[:, -1] = sizes
        counts = np.diff(ends.astype(np.int64), axis=1, prepend=0).T.copy()
        _fill_up(counts, self.min_size)
        return distribute(ranks, counts, rng)


def dirichlet(alpha: float, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Draw from the symmetric Dirichlet distribution.

    The draws are computed in logarithms, because at a small α every gamma draw of a row may underflow to 0: Gamma(α) is
    Gamma(α + 1) · U^(1/α).

    Args:
        alpha: α.
        shape: the number of draws, and the number of shares in each.
        rng: the stream to draw from.

    Returns:
        rows that add up to 1.

    >>> dirichlet(1e-9, (2, 3), np.random.default_rng(0)).sum(axis=1).tolist()
    [1.0, 1.0]
    """
    alpha = min(max(alpha, 1e-100), 1e15)
    log = np.log(rng.gamma(alpha + 1, size=shape)) + np.log1p(-rng.random(shape)) / alpha
    shares = np.exp(log - log.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


def _fill_up(counts: np.ndarray, least: int) -> None:
    """Move samples of the largest client's most frequent class to clients below the least size, in place."""
    sizes = counts.sum(axis=1)
    for poor in np.flatnonzero(sizes < least):
        while sizes[poor] < least:
            rich = sizes.argmax()
            c = counts[rich].argmax()
            number = min(least - sizes[poor], sizes[rich] - least, counts[rich, c])
            for client, change in ((rich, -number), (poor, number)):
                counts[client, c] += change
                sizes[client] += change


@register("pathological", "shards")
@dataclass(frozen=True)
class Pathological(Partition):
    """Each client holds at most `classes_per_client` classes.

    Every class is cut into equal shards, their number in proportion to its size and at least one. Each client gets
    shards of different classes. With fewer shards than classes, some classes are not used.
    """

    complete: ClassVar[bool] = False  # it is complete where clients · classes_per_client ≥ C

    classes_per_client: int = 2

    def __post_init__(self) -> None:
        require(self.classes_per_client >= 1, f"classes_per_client must be at least 1, got {self.classes_per_client}")

    def rows(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None
    ) -> list[np.ndarray]:
        ranks, sizes = ranked(labels)
        counts = np.zeros((clients, len(sizes)), np.int64)
        for c, holders in enumerate(class_holders("pathological", sizes, clients, self.classes_per_client, rng)):
            if len(holders):
                counts[holders, c] = sizes[c] // len(holders)
                counts[rng.permutation(holders)[: sizes[c] % len(holders)], c] += 1
        return distribute(ranks, counts, rng)


def shards(sizes: np.ndarray, clients: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """The number of shards of each class, `clients · k` in total; the class with the largest shards gets the next one.

    Args:
        sizes: the number of samples of each class.
        clients: the number of clients.
        k: the number of classes of a client.
        rng: the stream to draw from.

    Returns:
        at most as many shards of a class as there are clients.

    >>> shards(np.array([30, 30, 60]), 2, 2, np.random.default_rng(0)).tolist()
    [1, 1, 2]
    """
    numbers = np.zeros(len(sizes), np.int64)
    numbers[rng.permutation(len(sizes))[: clients * k]] = 1
    jitter = 1 + 1e-6 * rng.random(len(sizes))  # ties are broken at random
    for _ in range(clients * k - int(numbers.sum())):
        numbers[np.where(numbers < clients, sizes * jitter / np.maximum(numbers, 1), -1.0).argmax()] += 1
    return numbers


def class_holders(
    partition: str, sizes: np.ndarray, clients: int, classes_per_client: int, rng: np.random.Generator
) -> list[list[int]]:
    """The clients that hold each class, where every client holds so many classes.

    Args:
        partition: The partition's name, for the message of an error.
        sizes: The number of samples of each class.
        clients: The number of clients.
        classes_per_client: How many classes a client holds.
        rng: The stream to draw from.
    """
    k = classes_per_client
    if k > len(sizes):
        raise ProtofedError(f"partition '{partition}': classes_per_client={k}, but the data has {len(sizes)} classes")
    return hand_out(shards(sizes, clients, k, rng), clients, k, rng)


def hand_out(numbers: np.ndarray, clients: int, k: int, rng: np.random.Generator) -> list[list[int]]:
    """The clients that get a shard of each class: k different classes for each client, otherwise at random.

    A class with as many remaining shards as there are remaining clients must be given to the next client; then the rest
    always fits.

    Args:
        numbers: the number of shards of each class, as `shards` gives it.
        clients: the number of clients.
        k: the number of classes of a client.
        rng: the stream to draw from.

    Returns:
        for each class its clients.

    >>> hand_out(np.array([1, 1, 2]), 2, 2, np.random.default_rng(0))[2]
    [0, 1]
    """
    remaining = numbers.copy()
    holders: list[list[int]] = [[] for _ in numbers]
    for client in range(clients):
        urgent = remaining == clients - client
        weights = np.where(urgent, 0, remaining)
        open_slots = k - int(urgent.sum())
        drawn_classes = (
            rng.choice(len(remaining), open_slots, replace=False, p=weights / weights.sum())
            if open_slots
            else np.empty(0, np.int64)
        )
        for c in (*np.flatnonzero(urgent), *drawn_classes):
            holders[c].append(client)
            remaining[c] -= 1
    return holders


@register("circulant")
@dataclass(frozen=True)
class Circulant(Partition):
    """FedMatch's imbalanced clients: client i, of type i mod C, has half its samples from class i mod C.

    15 % come from each neighbouring class. Of ten classes, six more have 3 % each and the one farthest away 2 %; with
    another number of classes the last 20 % are shared equally. Clients are equally large, as large as the rarest class
    allows; unless all types are equally frequent, some samples stay unused.
    """

    complete: ClassVar[bool] = False

    def rows(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None
    ) -> list[np.ndarray]:
        ranks, sizes = ranked(labels)
        type_mixes = np.stack([np.roll(_circulant(len(sizes)), t) for t in range(len(sizes))])
        client_mixes = type_mixes[np.arange(clients) % len(sizes)]
        class_demand = client_mixes.sum(axis=0)
        size = (sizes[class_demand > 0] / class_demand[class_demand > 0]).min()
        # Because cumulative sums are rounded, no class is exceeded, and each count is within one of its exact share.
        ends = np.minimum(np.floor(np.cumsum(client_mixes * size, axis=0) + 1e-6), sizes).astype(np.int64)
        return distribute(ranks, np.diff(ends, axis=0, prepend=0), rng)


def _circulant(classes: int) -> np.ndarray:
    """The share of each class by its circular distance from the main class."""
    share = np.zeros(classes)
    for offset, part in ((0, 0.50), (1, 0.15), (-1, 0.15)):
        share[offset % classes] += part
    other_offsets = np.arange(2, classes - 1)
    if classes == 10:
        share[other_offsets] = np.where(other_offsets == 5, 0.02, 0.03)
    elif len(other_offsets):
        share[other_offsets] = 0.20 / len(other_offsets)
    return share / share.sum()


@register("natural")
@dataclass(frozen=True)
class Natural(Partition):
    """Each natural id (writer, room, patient) is a client, in the order of the ids.

    With fewer clients than ids, the ids are assigned round-robin: the j-th id goes to client j mod clients.
    """

    by_groups: ClassVar[bool] = True

    def rows(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None
    ) -> list[np.ndarray]:
        if groups is None:
            raise ProtofedError("partition 'natural' needs group ids (writer, room, patient); the data set has none")
        ids = np.unique(groups)
        if clients > len(ids):
            raise ProtofedError(f"partition 'natural': clients={clients}, but the data set has {len(ids)} group ids")
        return gather(self.owners(groups, ids, clients), clients)

    def owners(self, groups: np.ndarray, ids: np.ndarray, clients: int) -> np.ndarray:
        """The client of each sample by its group.

        Args:
            groups: the natural id of each sample.
            ids: the sorted ids of the training part.
            clients: the number of clients.

        Returns:
            the client's number, −1 for an id that is not among `ids`.
        """
        index = np.minimum(np.searchsorted(ids, groups), len(ids) - 1)
        return np.where(ids[index] == groups, index % clients, -1)


def require(condition: bool, message: str) -> None:
    """Raise a `ValueError`, which the registry turns into an error of one line, unless a condition holds."""
    if not condition:
        raise ValueError(message)
