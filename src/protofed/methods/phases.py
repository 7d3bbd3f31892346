"""When the next phase of a run begins: once a score has been high and steady, or has stopped changing (Fed-ARPL)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, arange


@dataclass(frozen=True)
class Transition:
    """A rule on the last scores. With a `rate` it asks that they hardly change, otherwise for their mean and deviation."""

    score: str  # what is looked at, by name
    window: int  # rounds
    mean: float  # at least
    deviation: float  # at most
    rate: float | None = None  # the largest change a round, as a share of the score

    @property
    def span(self) -> int:
        """How many scores the rule looks at."""
        return self.window if self.rate is None else 2 * self.window - 1

    def due(self, history: Tensor) -> str:
        """Why the next phase begins; empty where it does not."""
        if len(history) < self.span:
            return ""
        scores = history.double()
        if self.rate is None:
            mean, deviation = float(scores.mean()), float(scores.std(unbiased=False))
            met = mean >= self.mean and deviation <= self.deviation
            return f"mean {mean:.4g} and deviation {deviation:.4g} over {len(scores)} rounds" if met else ""
        most = float(rates(scores, (len(scores) + 1) // 2).max())
        return f"changed by at most {most:.2%} a round over {len(scores)} rounds" if most <= self.rate else ""

    def waiting(self, last: float | None) -> str:
        """What was waited for in vain, and the last score."""
        rule = f"mean of at least {self.mean:g} and a deviation of at most {self.deviation:g}"
        if self.rate is not None:
            rule = f"rate of change of at most {self.rate:g}"
        value = "" if last is None else f"; its last value is {last:.4g}"
        return f"{self.score} never had a {rule} over a window of {self.window} rounds{value}"


def rates(scores: Tensor, window: int) -> Tensor:
    """For each window of scores: the least-squares slope of the scores over the rounds, divided by their mean."""
    runs = scores.unfold(0, window, 1)
    t = arange(window, dtype=scores.dtype, device=scores.device)
    t = t - t.mean()
    return ((runs @ t) / (t @ t)).abs() / runs.mean(-1).abs().clamp_min(1e-12)
