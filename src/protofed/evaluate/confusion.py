"""Confusion matrices: counts of true and predicted classes, and the measures that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

PREDICTIONS = ("head", "prototype", "mix")
"""The predictions of a client: by the classifier head, by the nearest prototype, and by both, where a method mixes them."""
SINGLE = PREDICTIONS[:2]
"""Those by one of the two alone, which are measured of every method that has them."""
DENSE = 4  # pairs are counted in a whole table where it has at most so many cells for each sample, and otherwise sorted
CELLS = 2**21  # the most cells of a table of clients and classes


@dataclass(frozen=True, eq=False)
class Confusion:
    """A sparse confusion matrix: rows `(true, predicted, count)` of the pairs that occur."""

    rows: np.ndarray

    @classmethod
    def of(cls, y: ArrayLike, predicted: ArrayLike) -> Confusion:
        """Count the pairs of true and predicted class.

        Args:
            y: The true class of each sample, a whole number from 0 on.
            predicted: The predicted class of each sample.

        Returns:
            The confusion. `Confusion.of([0, 1], [0, 0]).correct` is 1.
        """
        true, guessed = np.asarray(y, dtype=np.int64), np.asarray(predicted, dtype=np.int64)
        size = int(max(true.max(initial=0), guessed.max(initial=0))) + 1
        pairs, counts = _counted(true * size + guessed, size * size)
        return cls(np.stack([pairs // size, pairs % size, counts], axis=1))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Confusion) and np.array_equal(self.rows, other.rows)

    @property
    def correct(self) -> int:
        """The number of samples whose class was predicted."""
        true, predicted, count = self.rows.T
        return int(count[true == predicted].sum())

    @property
    def samples(self) -> int:
        """The number of samples."""
        return int(self.rows[:, 2].sum())

    def macro_f1(self) -> float:
        """The mean over the classes that occur, as truth or as prediction, of 2·hits / (true + predicted)."""
        true, predicted, count = self.rows.T
        size = int(self.rows[:, :2].max()) + 1
        in_truth = np.bincount(true, count, size)
        in_prediction = np.bincount(predicted, count, size)
        hits = np.bincount(true, count * (true == predicted), size)
        total = in_truth + in_prediction
        occurs = total > 0
        return float((2 * hits[occurs] / total[occurs]).mean())

    def balanced_accuracy(self) -> float:
        """The mean over the true classes of the share of their samples that was predicted right."""
        true, predicted, count = self.rows.T
        samples = np.bincount(true, count)
        hits = np.bincount(true, count * (true == predicted))
        occurs = samples > 0
        return float((hits[occurs] / samples[occurs]).mean())

    def mean_absolute_error(self, values: Sequence[float]) -> float:
        """The mean of |predicted − true|, where `values` are the numbers that classes stand for."""
        true, predicted, count = self.rows.T
        number = np.asarray(values, dtype=np.float64)
        return float((np.abs(number[predicted] - number[true]) * count).sum() / count.sum())


@dataclass(frozen=True, eq=False)
class Confusions:
    """The sparse confusion matrices of many clients: client k's are the rows `begin[k]` to `end[k]` of one array.

    Clients whose matrices are the same may share rows. A client without predictions has no row.
    """

    rows: np.ndarray
    begin: np.ndarray
    end: np.ndarray

    @classmethod
    def of(cls, owner: np.ndarray, y: np.ndarray, predicted: np.ndarray, clients: int) -> Confusions:
        """Count the pairs of true and predicted class of each client.

        Args:
            owner: The number of the client that each sample belongs to.
            y: The true class of each sample.
            predicted: The predicted class of each sample.
            clients: The number of clients.

        Returns:
            The confusions. `Confusions.of(owner, y, predicted, 3)[1]` is the second client's.
        """
        size = int(max(y.max(initial=0), predicted.max(initial=0))) + 1
        pairs, counts = _counted((owner * size + y) * size + predicted, clients * size * size)
        owners, pair = np.divmod(pairs, size * size)
        edges = np.searchsorted(owners, np.arange(clients + 1))
        return cls(np.stack([pair // size, pair % size, counts], axis=1), edges[:-1], edges[1:])

    @classmethod
    def joined(cls, parts: Sequence[Confusions]) -> Confusions:
        """The confusions of several groups of clients, one group after another."""
        starts = np.cumsum([0, *(len(part.rows) for part in parts)])
        shifted = list(zip(parts, starts, strict=False))
        begin, end = ([getattr(p, edge) + start for p, start in shifted] for edge in ("begin", "end"))
        return cls(np.concatenate([p.rows for p in parts]), np.concatenate(begin), np.concatenate(end))

    @classmethod
    def listed(cls, confusions: Sequence[Confusion | None]) -> Confusions:
        """The confusions of a list, in which an object that occurs several times is kept once."""
        distinct = {id(c): c.rows for c in confusions if c is not None}
        ends = np.cumsum([0, *(len(rows) for rows in distinct.values())])
        place = {key: (ends[k], ends[k + 1]) for k, key in enumerate(distinct)}
        edges = np.array([place.get(id(c), (0, 0)) for c in confusions], dtype=np.int64).reshape(-1, 2)
        return cls(np.concatenate([np.empty((0, 3), np.int64), *distinct.values()]), edges[:, 0], edges[:, 1])

    def __len__(self) -> int:
        return len(self.begin)

    def __getitem__(self, client: int) -> Confusion | None:
        """One client's confusion; None where it has no predictions."""
        begin, end = self.begin[client], self.end[client]
        return Confusion(self.rows[begin:end]) if end > begin else None

    def taken(self, clients: np.ndarray) -> Confusions:
        """The confusions of some of the clients, in this order."""
        return Confusions(self.rows, self.begin[clients], self.end[clients])

    def where(self, present: np.ndarray) -> Confusions:
        """The same confusions without those of the clients that are not `present`."""
        return Confusions(self.rows, self.begin, np.where(present, self.end, self.begin))

    @property
    def present(self) -> np.ndarray:
        """Whether each client has predictions."""
        return self.end > self.begin

    @property
    def correct(self) -> np.ndarray:
        """The number of right predictions of each client."""
        true, predicted, count = self.rows.T
        return self._sums(count * (true == predicted))

    @property
    def samples(self) -> np.ndarray:
        """The number of samples of each client."""
        return self._sums(self.rows[:, 2])

    def _sums(self, values: np.ndarray) -> np.ndarray:
        """Each client's sum of a value of each row."""
        total = np.concatenate([[0], np.cumsum(values)])
        return total[self.end] - total[self.begin]

    def macro_f1(self) -> np.ndarray:
        """Each client's `Confusion.macro_f1`, to the last bit; 0 where it has no predictions."""
        begins, ends = np.zeros((2, len(self.rows) + 1), dtype=np.int64)
        begins[self.begin] = 1
        np.maximum.at(ends, self.begin, self.end)
        begin = np.flatnonzero(begins)  # clients that share rows are computed once
        end, which = ends[begin], np.searchsorted(begin, self.begin)
        size = int(max(self.rows[:, k].max(initial=0) for k in range(2))) + 1
        piece = max(1, CELLS // size)
        parts = [self._f1(begin[k : k + piece], end[k : k + piece], size) for k in range(0, len(begin), piece)]
        return np.where(self.present, np.concatenate([np.empty(0), *parts])[which], 0.0)

    def _f1(self, begin: np.ndarray, end: np.ndarray, size: int) -> np.ndarray:
        """The macro F1 of some segments of the rows."""
        lengths = np.maximum(end - begin, 0)
        segment = np.repeat(np.arange(len(begin)), lengths)
        places = np.arange(len(segment)) + np.repeat(begin - np.cumsum(lengths) + lengths, lengths)
        true, predicted, count = np.ascontiguousarray(self.rows.take(places, axis=0).T)

        def table(classes: np.ndarray, values: np.ndarray) -> np.ndarray:
            return np.bincount(segment * size + classes, values, len(begin) * size).reshape(-1, size)

        hits = table(true, count * (true == predicted))
        total = table(true, count) + table(predicted, count)
        occurs = total > 0
        numbers = occurs.sum(1)
        result = np.zeros(len(begin))
        for number in np.unique(
            numbers[numbers > 0]
        ):  # rows of one length are summed in the order of a single client's
            rows = numbers == number
            chosen = occurs[rows]
            ratio = 2 * hits[rows][chosen] / total[rows][chosen]
            result[rows] = ratio.reshape(-1, number).mean(1)
        return result

    def mean_absolute_error(self, values: Sequence[float]) -> list[float]:
        """Each client's `Confusion.mean_absolute_error`."""
        errors: dict[int, float] = {}
        for client, begin in enumerate(self.begin.tolist()):
            confusion = self[client] if begin not in errors else None
            if confusion is not None:
                errors[begin] = confusion.mean_absolute_error(values)
        return [errors[begin] for begin in self.begin.tolist()]


def _counted(keys: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers below `bins` that occur, in ascending order, and how often each does."""
    if bins > DENSE * len(keys):
        return np.unique(keys, return_counts=True)
    counts = np.bincount(keys, minlength=bins)
    present = np.flatnonzero(counts)
    return present, counts[present]
