"""The phases of Fed-ARPL: what a server in phases keeps, and when the next phase begins."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, arange, zeros

from ..bank import PrototypeBank
from .at_server import MovingModel
from .server import state


@state
class Phases(MovingModel):
    """The global model and prototypes, which phase the federation is in, and what decides on the next one."""

    prototypes: PrototypeBank  # P_g
    phase: int = 1
    threshold: float = 1.0  # τ; until the server has trained nothing is sure enough: no probability is above 1
    history: Tensor = field(default_factory=lambda: zeros(0))  # the last scores that the next phase waits for
    fss: float | None = None
    gcplca: float | None = None
    began: int | None = None  # the first round of phase 3
    own: PrototypeBank | None = None  # P_s, the server's own, in phase 3

    @property
    def bank(self) -> PrototypeBank | None:
        """The prototypes are sent from phase 2 on."""
        return self.prototypes if self.phase > 1 else None


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
