"""Methods whose labels are at the server: how it trains, and what its model makes of the clients' samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor
from typing_extensions import Self

from .. import aggregate, losses
from ..parts import Batch, Epochs, Feed, Received, Reduced, Unlabelled
from .base import Method
from .checks import a_share, at_least_one, not_negative
from .client import Network, Terms, Trained, Weights
from .server import Setup, State, Teacher, state

VIEWS = Unlabelled(views=("weak", "strong"))


@state
class MovingModel(State):
    """A model that is moved by the clients' average with momentum."""

    weights: Weights
    velocity: Weights
    optimiser: Weights = field(default_factory=dict, kw_only=True)  # the server's own, where it is kept between rounds

    def moved(self, average: Weights, momentum: float) -> Self:
        """The state after a step of SGD (learning rate 1) from its weights to the clients' average."""
        weights, velocity = aggregate.with_momentum(self.weights, average, self.velocity, momentum)
        return replace(self, weights={**self.weights, **weights}, velocity={**self.velocity, **velocity})


@dataclass(frozen=True)
class TrainsAtServer(Method):
    """For methods whose server trains one model on its labels: how it does."""

    epochs_at_server: int = 5  # E at the server; at the clients it is `epochs`
    server_batch: int = 0  # the batch size at the server; 0: that of the clients
    keep_server_optimiser: bool = False  # whether its optimiser's state outlives a round, as in SemiFL's code
    server_statistics: Literal["server", "all"] = "server"  # whose samples make static batch norm's statistics

    def __post_init__(self) -> None:
        at_least_one(self, "epochs_at_server")
        not_negative(self, "server_batch")

    def teaching(self, terms: Callable[..., Terms], learnt: Callable[..., Any]) -> Teacher:
        """The server's training with these terms."""
        options = self.server_batch, self.keep_server_optimiser, self.server_statistics
        return Teacher(self.epochs_at_server, terms, learnt, Epochs("weak"), *options)


def probabilities(p: Tensor) -> Mapping[str, Tensor]:
    """What a client prepares once a round: the received model's probabilities for its unlabelled samples."""
    return {"p": p}


def judged(net: Network, x: Tensor, batch: Batch, received: Received) -> Tensor:
    """The received model's probabilities for a step's unlabelled samples: those prepared, or else for `x`."""
    if batch.prepared is not None:
        return batch.prepared["p"]
    return net.frozen(x, received.weights).logits.softmax(-1)


@dataclass(frozen=True)
class LabelsAtServer(TrainsAtServer):
    """For methods whose server trains one model on its labels, and moves it by the clients' average with momentum."""

    threshold: float = 0.95  # τ: confident from this probability on
    server_momentum: float = 0.5

    @property
    def feed(self) -> Feed:
        return replace(VIEWS, prepare=probabilities)

    def __post_init__(self) -> None:
        super().__post_init__()
        a_share(self, "threshold")
        if not 0 <= self.server_momentum < 1:
            raise ValueError("server_momentum must be at least 0 and below 1")

    @property
    def teacher(self) -> Teacher:
        return self.teaching(cross_entropy, with_trained_weights)

    def start(self, setup: Setup) -> MovingModel:
        return MovingModel(setup.weights, {})

    def update(self, state: Any, reduced: Reduced, round: int, setup: Setup) -> Any:
        return state.moved(reduced.weights, self.server_momentum)


def cross_entropy(net: Network, batch: Batch, state: State, round: int) -> Terms:
    """What a server with labels learns from."""
    return {"ce": losses.cross_entropy(net(batch.x).logits, batch.y, weight=batch.weight)}


def with_trained_weights(state: MovingModel, trained: Trained, round: int) -> MovingModel:
    """The state with the model that the server trained."""
    return replace(state, weights={**state.weights, **trained.weights})
