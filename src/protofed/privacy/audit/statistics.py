"""The numbers of an audit: how well a score tells members from others, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

import numpy as np

RESAMPLES = 1000
SHARE = 0.95  # of the resamples lie in an interval
FALSE_POSITIVES = 0.01
ENOUGH = 100  # non-members, of whom one may then be taken for a member


@dataclass(frozen=True)
class Estimate:
    """A number between 0 and 1, of which 0.5 is what a guess gives, with its interval and the samples behind it."""

    value: float
    low: float
    high: float
    samples: int

    @property
    def beyond_guessing(self) -> bool:
        """Whether the whole interval lies above 0.5."""
        return self.low > 0.5


def auc(members: np.ndarray, others: np.ndarray) -> float:
    """The area under the ROC curve: how often a member has the higher score than a non-member; a tie counts half.

    Args:
        members: The scores of samples that were trained on.
        others: The scores of samples that were not.

    Returns:
        A number from 0 to 1; a guess gives 0.5.

    >>> auc(np.array([3.0, 2.0]), np.array([1.0, 2.0]))
    0.875
    """
    return float(_wins(members, others).mean())


def auc_estimate(
    members: np.ndarray, others: np.ndarray, rng: np.random.Generator, resamples: int = RESAMPLES
) -> Estimate:
    """The area under the ROC curve with its bootstrap interval: members and non-members are each drawn again.

    Args:
        members: The scores of samples that were trained on.
        others: The scores of samples that were not.
        rng: The random stream of the draws.
        resamples: The number of draws.

    Returns:
        The estimate. Its interval covers 95 % of the draws.
    """
    wins = _wins(members, others).astype(np.float32)
    n, m = wins.shape
    drawn_members = rng.multinomial(n, np.full(n, 1 / n), resamples).astype(np.float32)
    drawn_others = rng.multinomial(m, np.full(m, 1 / m), resamples).astype(np.float32)
    values = np.einsum("rm,rm->r", drawn_members @ wins, drawn_others) / (n * m)
    return Estimate(float(wins.mean(dtype=np.float64)), *_interval(values), n + m)


def mean_estimate(values: np.ndarray, rng: np.random.Generator, resamples: int = RESAMPLES) -> Estimate:
    """The mean of some numbers between 0 and 1 with its bootstrap interval; the arguments are those of `auc_estimate`."""
    draws = rng.integers(len(values), size=(resamples, len(values)))
    return Estimate(float(values.mean()), *_interval(values[draws].mean(1)), len(values))


def true_positives(members: np.ndarray, others: np.ndarray, rate: float = FALSE_POSITIVES) -> float | None:
    """The share of members above the score that at most a share `rate` of non-members is above.

    Args:
        members: The scores of samples that were trained on.
        others: The scores of samples that were not.
        rate: The share of false positives that is allowed.

    Returns:
        The share of true positives, or None where there are too few samples to tell.

    >>> true_positives(np.arange(200.0), np.arange(100.0))
    0.505
    """
    if len(others) < ENOUGH:
        return None
    threshold = np.sort(others)[::-1][floor(rate * len(others))]
    return float((members > threshold).mean())


def _wins(members: np.ndarray, others: np.ndarray) -> np.ndarray:
    """For each pair 1 where the member has the higher score, and a half where the scores are equal."""
    wins: np.ndarray = (members[:, None] > others) + 0.5 * (members[:, None] == others)
    return wins


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return float(low), float(high)
