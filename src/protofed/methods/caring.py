"""CARING: FedAvg that weighs a client's model by one of two values, chosen from how well it does locally."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar

from ..wire import Bundle
from .base import Received, Setup, Trained, Upload, register, weighted_average
from .fedavg import FedAvg

ROUNDING = 1e-9  # a client exactly at the mean must not fall below it by the last bit


@register("caring")
@dataclass(frozen=True)
class Caring(FedAvg):
    """FedAvg whose shares are `high` for clients at or above the round's mean local accuracy, `low` for the others."""

    paper: ClassVar[str] = "Li et al., IEEE TMC 2023"
    travels: ClassVar[tuple[str, ...]] = ("weights", "scalars.performance")
    required: ClassVar[tuple[str, ...]] = ("weights", "scalars.performance")

    low: float = 0.3
    high: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise ValueError("expected 0 < low ≤ high")

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        (_, logits), batch = trained.outputs()
        hits = (logits.argmax(-1) == batch.y) * batch.weight
        performance = float(hits.sum()) / float(batch.weight.sum())
        return Bundle(weights=trained.weights, scalars={"performance": performance})

    def shares(self, uploads: Sequence[Upload]) -> list[float]:
        """Each client's weight in the average."""
        performance = [u.content.scalars["performance"] for u in uploads]
        least = fmean(performance) - ROUNDING
        return [self.high if p >= least else self.low for p in performance]

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        return replace(state, weights={**state.weights, **weighted_average(uploads, self.shares(uploads))})
