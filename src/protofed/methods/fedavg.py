"""FedAvg: the size-weighted mean of the clients' weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from .. import losses
from ..wire import Bundle
from .base import Batch, Method, Network, Received, Setup, Trained, Upload, register, weighted_average


@register("fedavg")
@dataclass(frozen=True)
class FedAvg(Method):
    """Clients train the global model on their data; the server averages the weights by sample count."""

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    travels: ClassVar[tuple[str, ...]] = ("weights",)
    required: ClassVar[tuple[str, ...]] = ("weights",)
    private_model: ClassVar[bool] = False

    def server_start(self, setup: Setup) -> Bundle:
        return Bundle(weights=setup.weights)

    def send(self, state: Bundle, client: int, round: int) -> Bundle:
        return state

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> dict[str, Tensor]:
        _, logits = network(batch.x)
        return {"ce": losses.cross_entropy(logits, batch.y, weight=batch.weight)}

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        return Bundle(weights=trained.weights)

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        return replace(state, weights={**state.weights, **weighted_average(uploads)})
