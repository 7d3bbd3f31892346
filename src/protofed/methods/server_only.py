"""Server-only: what labels at the server are worth by themselves. The floor of methods with labels at the server."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..bank import PrototypeBank
from ..wire import Exchange, bank, weights
from .at_server import TrainsAtServer, cross_entropy
from .base import register
from .client import Trained, Weights
from .server import Setup, Shared, Teacher, state


@state
class ServerModel(Shared):
    """The server's model and prototypes, and its optimiser's state where that is kept between rounds."""

    optimiser: Weights = field(default_factory=dict)


@register("server-only")
@dataclass(frozen=True)
class ServerOnly(TrainsAtServer):
    """The server trains on its own labels and asks no client: what labels at the server are worth by themselves."""

    exchange: ClassVar[Exchange] = Exchange(down=(weights(), bank()), keeps_model=False)

    @property
    def teacher(self) -> Teacher:
        return self.teaching(cross_entropy, self.learnt)

    def start(self, setup: Setup) -> ServerModel:
        return ServerModel(PrototypeBank.empty(setup.num_classes, setup.dim), setup.weights)

    def learnt(self, state: ServerModel, trained: Trained, round: int) -> ServerModel:
        """The server's model, and the prototypes of its labelled samples."""
        return replace(state, weights={**state.weights, **trained.weights}, bank=trained.bank())
