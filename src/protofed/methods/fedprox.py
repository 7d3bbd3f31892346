"""FedProx: FedAvg with a proximal term that keeps a client near the global model."""

from __future__ import annotations

from dataclasses import dataclass

from ..parts import CE, Batch, Proximal, Received, terms_of
from ..schedules import Weight
from .base import register
from .checks import not_negative
from .client import Network, Terms
from .fedavg import FedAvg


@register("fedprox", paper="Li et al., MLSys 2020")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg + μ/2·‖w − w_t‖²."""

    mu: Weight = 0.01  # 0 is FedAvg

    def __post_init__(self) -> None:
        not_negative(self, "mu")

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms:
        return terms_of((CE(), Proximal(self.mu)), net, net(batch.x), batch, received, round)
