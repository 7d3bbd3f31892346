"""Local: each client alone. The floor every federated method must beat."""

from __future__ import annotations

from dataclasses import dataclass

from ..parts import CE, Batch, Received
from .base import Method, register
from .client import Network, Terms


@register("local")
@dataclass(frozen=True)
class Local(Method):
    """Each client trains on its own data and nothing travels."""

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms:
        return CE()(net, net(batch.x), batch, received, round)
