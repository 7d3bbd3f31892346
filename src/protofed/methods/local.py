"""Local: each client alone. The floor every federated method must beat."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import losses
from .base import Batch, Method, Network, Received, register


@register("local")
@dataclass(frozen=True)
class Local(Method):
    """Each client trains on its own data and nothing travels."""

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> dict[str, Tensor]:
        _, logits = network(batch.x)
        return {"ce": losses.cross_entropy(logits, batch.y, weight=batch.weight)}
