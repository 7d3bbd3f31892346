"""The confusion matrix: counts of true and predicted classes, and the measures that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

PREDICTIONS = ("head", "prototype")
"""The predictions of a client: by the classifier head, and by the nearest prototype."""


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
        pairs, counts = np.unique(true * size + guessed, return_counts=True)
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
