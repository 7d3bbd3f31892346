"""FedAvg: the size-weighted mean of the clients' weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..parts import CE, Batch, Mean, Received, Reduce
from ..wire import Exchange
from .base import MODEL, Method, register
from .client import Network, Terms


@register("fedavg", paper="McMahan et al., AISTATS 2017")
@dataclass(frozen=True)
class FedAvg(Method):
    """Clients train the global model on their data; the server averages the weights by sample count."""

    exchange: ClassVar[Exchange] = MODEL

    reduce: Reduce = Mean("size")

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms:
        return CE()(net, net(batch.x), batch, received, round)
