"""CARING: FedAvg that weighs a client's model by one of two values, chosen from how well it does locally."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar

from ..parts import CE, Batch, Each, Received, Reduce, Reduced, Upload, weighted_average
from ..wire import Bundle, Exchange, number, weights
from .base import Method, register
from .client import Network, Terms, Trained
from .server import Setup, Shared

ROUNDING = 1e-9  # a client exactly at the mean must not fall below it by the last bit


@register("caring", paper="Li et al., IEEE TMC 2023")
@dataclass(frozen=True)
class Caring(Method):
    """FedAvg whose shares are `high` for clients at or above the round's mean local accuracy, `low` for the others."""

    exchange: ClassVar[Exchange] = Exchange(
        (weights(),), (weights(), number("performance", most=1.0)), keeps_model=False
    )
    reduce: ClassVar[Reduce] = Each()

    low: float = 0.3
    high: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise ValueError("expected 0 < low ≤ high")

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms:
        return CE()(net, net(batch.x), batch, received, round)

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        (_, logits), batch = trained.outputs()
        hits = (logits.argmax(-1) == batch.y) * batch.weight
        performance = float(hits.sum()) / float(batch.weight.sum())
        return Bundle(weights=trained.weights, scalars={"performance": performance})

    def shares(self, uploads: Sequence[Upload]) -> list[float]:
        """Each client's weight in the average."""
        performance = [u.content.scalars["performance"] for u in uploads]
        least = fmean(performance) - ROUNDING
        return [self.high if p >= least else self.low for p in performance]

    def update(self, state: Shared, reduced: Reduced, round: int, setup: Setup) -> Shared:
        shares = {u.client: s for u, s in zip(reduced.uploads, self.shares(reduced.uploads), strict=True)}
        average = weighted_average(reduced.uploads, lambda upload: shares[upload.client])
        return replace(state, weights={**state.weights, **average})
