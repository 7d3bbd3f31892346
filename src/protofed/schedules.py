"""λ_t: how the weight of a loss term grows over the rounds t = 1…T; and how a learning rate falls."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import ProtofedError, unknown

SHAPES = ("constant", "linear", "cosine", "sigmoid", "step")
STEEPNESS = 10.0


class ScheduleError(ProtofedError, ValueError):
    """A schedule that makes no sense. It is also a ValueError, so that a settings parser reports it as a bad setting."""


@dataclass(frozen=True)
class Ramp:
    """A weight that is 0 up to and including round `start` and `maximum` from round `end` on.

    FedSAP Eq. 7, FedAPA Eq. 11.

    In between, with x = (t − start) / (end − start):
    - `linear`: x
    - `cosine`: (1 − cos πx) / 2
    - `sigmoid`: the logistic curve of steepness 10 about x = ½, rescaled to run from exactly 0 to exactly 1
    - `step`: 0 up to and including the middle of the ramp, then 1
    each times `maximum`. `constant` is `maximum` in every round. `end == start` is a jump after round `start`.
    """

    shape: str
    start: int
    end: int
    maximum: float

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ScheduleError(str(unknown("schedule shape", str(self.shape), SHAPES)))
        if self.end < self.start:
            raise ScheduleError(f"schedule end={self.end} lies before start={self.start}; expected end ≥ start")
        if not 0 <= self.maximum < math.inf:
            raise ScheduleError(f"schedule maximum={self.maximum}; expected a number ≥ 0")

    def __call__(self, round: float) -> float:
        """The weight in a round; rounds are counted from 1."""
        if self.shape == "constant":
            return float(self.maximum)
        if round <= self.start:
            return 0.0
        if round >= self.end:
            return float(self.maximum)
        return self.maximum * self._share((round - self.start) / (self.end - self.start))

    def _share(self, x: float) -> float:
        if self.shape == "linear":
            return x
        if self.shape == "cosine":
            return (1 - math.cos(math.pi * x)) / 2
        if self.shape == "sigmoid":
            low, high = _logistic(0.0), _logistic(1.0)
            return (_logistic(x) - low) / (high - low)
        return float(x > 0.5)

    def values(self, rounds: int) -> list[float]:
        """The weights of rounds 1 to `rounds`.

        >>> Ramp("linear", start=0, end=4, maximum=1.0).values(5)
        [0.25, 0.5, 0.75, 1.0, 1.0]
        """
        return [self(t) for t in range(1, rounds + 1)]


Weight = float | Ramp
"""The weight of a loss term: a number, or a schedule over the rounds."""


def weight_at(weight: Weight, round: int) -> float:
    """The weight of a loss term in a round.

    Args:
        weight: a number, or a schedule.
        round: counted from 1.

    Returns:
        the number.

    >>> weight_at(0.5, round=7), weight_at(ramp("linear", 0, 10, 1.0), round=7)
    (0.5, 0.7)
    """
    return weight(round) if isinstance(weight, Ramp) else weight


def ramp(shape: str, start: int, end: int, maximum: float) -> Ramp:
    """A weight that grows over the rounds; `Ramp` says how.

    Args:
        shape: `constant`, `linear`, `cosine`, `sigmoid` or `step`.
        start: the last round in which the weight is 0.
        end: the first round in which the weight is `maximum`.
        maximum: the largest weight.

    Returns:
        a function of the round. `ramp("cosine", 0, 50, 1.0)` is FedAPA's.

    >>> fedsap = ramp("linear", start=20, end=100, maximum=0.7)
    >>> fedsap(20), round(fedsap(60), 2), fedsap(150)
    (0.0, 0.35, 0.7)
    """
    return Ramp(shape, start, end, maximum)


def cosine_decay(round: float, rounds: int) -> float:
    """The factor of a learning rate that falls along a cosine: ½(1 + cos(π(t − 1)/T)), as in SemiFL and Fed-ARPL.

    Args:
        round: t, counted from 1.
        rounds: T.

    Returns:
        1 in the first round, and nearly 0 in the last.

    >>> cosine_decay(1, 100), cosine_decay(51, 100)
    (1.0, 0.5)
    """
    return (1 + math.cos(math.pi * (round - 1) / rounds)) / 2


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-STEEPNESS * (x - 0.5)))
