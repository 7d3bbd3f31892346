"""The numbers of an audit: how well a score tells members from others, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

import numpy as np

RESAMPLES = 1000
TOGETHER = 50  # resamples that are computed at a time
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
    return float(_wins(members, others, np.ones((1, len(others)))).mean() / len(others))


def auc_estimate(
    members: np.ndarray, others: np.ndarray, rng: np.random.Generator, resamples: int = RESAMPLES
) -> Estimate:
    """The area under the ROC curve with its bootstrap interval: members and non-members are each drawn again.

    Args:
        members: The scores of samples that were trained on.
        others: The scores of samples that were not.
        rng: The random stream of the draws.
        resamples: The number of draws, a multiple of 50.

    Returns:
        The estimate. Its interval covers 95 % of the draws.
    """
    n, m = len(members), len(others)
    values = []
    for _ in range(resamples // TOGETHER):
        drawn_members, drawn_others = (rng.multinomial(k, np.full(k, 1 / k), TOGETHER) for k in (n, m))
        values.append((drawn_members * _wins(members, others, drawn_others)).sum(1) / (n * m))
    return Estimate(auc(members, others), *_interval(np.concatenate(values)), n + m)


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


def _wins(members: np.ndarray, others: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """For each member the weight of the non-members below it, and half the weight of those that are equal.

    Args:
        members: Scores `[n]`.
        others: Scores `[m]`.
        weights: Weights of the non-members `[draws, m]`.

    Returns:
        Sums of weights `[draws, n]`.
    """
    order = np.argsort(others)
    below = np.pad(weights[:, order].cumsum(1), ((0, 0), (1, 0)))
    left, right = (np.searchsorted(others[order], members, side=side) for side in ("left", "right"))
    sums: np.ndarray = (below[:, left] + below[:, right]) / 2
    return sums


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return float(low), float(high)
