"""WiFederated: FedAvg, after which each client fine-tunes the global model on its own data."""

from __future__ import annotations

from dataclasses import dataclass

from ..parts import Head, Predict
from .base import register
from .checks import not_negative
from .fedavg import FedAvg


@register("wifederated", paper="Hernandez and Bulut, IEEE Internet of Things Journal 2022")
@dataclass(frozen=True)
class WiFederated(FedAvg):
    """FedAvg; a client is evaluated by a copy of the global model that it has fine-tuned."""

    fine_tune: int = 5  # epochs; 0 is FedAvg

    def __post_init__(self) -> None:
        not_negative(self, "fine_tune")

    @property
    def predict(self) -> Predict:
        return Head(tuning=self.fine_tune)
