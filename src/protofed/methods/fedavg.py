"""FedAvg: the size-weighted mean of the clients' weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .. import losses
from .base import Batch, Network, Received, SharedModel, register


@register("fedavg")
@dataclass(frozen=True)
class FedAvg(SharedModel):
    """Clients train the global model on their data; the server averages the weights by sample count."""

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> dict[str, Tensor]:
        _, logits = network(batch.x)
        return {"ce": losses.cross_entropy(logits, batch.y, weight=batch.weight)}
