"""WiFederated: FedAvg, after which each client fine-tunes the global model on its own data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import register
from .fedavg import FedAvg


@register("wifederated")
@dataclass(frozen=True)
class WiFederated(FedAvg):
    """FedAvg; a client is evaluated by a copy of the global model that it has fine-tuned."""

    paper: ClassVar[str] = "Hernandez and Bulut, IEEE Internet of Things Journal 2022"

    fine_tune: int = 5  # epochs

    def __post_init__(self) -> None:
        if self.fine_tune < 0:
            raise ValueError("fine_tune must be 0 or more epochs (0 is FedAvg)")

    @property
    def tuning_epochs(self) -> int:
        return self.fine_tune
