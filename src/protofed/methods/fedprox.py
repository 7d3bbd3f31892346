"""FedProx: FedAvg with a proximal term that keeps a client near the global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .. import losses
from .base import Batch, Network, Received, register
from .fedavg import FedAvg


@register("fedprox")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg + μ/2·‖w − w_t‖²."""

    paper: ClassVar[str] = "Li et al., MLSys 2020"

    mu: float = 0.01

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise ValueError("mu must be 0 or more (0 is FedAvg)")

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> dict[str, Tensor]:
        terms = super().client_loss(network, batch, received, round)
        return {**terms, "prox": self.mu * losses.proximal(network.params, received.weights)}
