"""Server-only: what labels at the server are worth by themselves. The floor of methods with labels at the server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..wire import Exchange, bank, weights
from .base import Method, register
from .checks import at_least_one
from .client import Trained
from .semifl import cross_entropy
from .server import Shared, Teacher


@register("server-only")
@dataclass(frozen=True)
class ServerOnly(Method):
    """The server trains on its own labels and asks no client: what labels at the server are worth by themselves."""

    exchange: ClassVar[Exchange] = Exchange(down=(weights(), bank()), keeps_model=False)

    epochs_at_server: int = 5

    def __post_init__(self) -> None:
        at_least_one(self, "epochs_at_server")

    @property
    def teacher(self) -> Teacher:
        return Teacher(self.epochs_at_server, cross_entropy, self.learnt)

    def learnt(self, state: Shared, trained: Trained, round: int) -> Shared:
        """The server's model, and the prototypes of its labelled samples."""
        return replace(state, weights={**state.weights, **trained.weights}, bank=trained.bank())
