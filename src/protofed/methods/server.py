"""The server's side of a method: what it knows, what it keeps between rounds, and how it trains where it has labels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from torch.utils import _pytree as pytree
from typing_extensions import dataclass_transform

from ..bank import PrototypeBank
from ..parts import Batch, Epochs, Feed
from ..wire import Bundle
from .client import Loss, Network, Terms, Trained, Weights

S = TypeVar("S", bound=type)


@dataclass(frozen=True)
class Setup:
    """What a server knows before the first round.

    Where clients have different architectures, names of weights (here, in the server's state and in uploads) begin with
    the architecture's number, `"2:head.weight"`; a client sees its own without it.
    """

    num_classes: int
    dim: int
    num_clients: int
    weights: Weights  # the initial models' trained parameters and floating buffers
    seed: int
    architectures: tuple[int, ...] = ()  # the number of each client's


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def state(entry: S) -> S:
    """Class decorator: a frozen dataclass that a server may keep between rounds, on any device and on disk."""
    dataclass(frozen=True)(entry)  # it changes the class in place
    pytree.register_dataclass(entry)
    return entry


class State:
    """What a server keeps between rounds. Each part that goes down is an attribute of it."""

    @property
    def clients(self) -> PrototypeBank | None:
        """Every client's last prototypes `[N, C, d]`, where the server keeps them: for choosing diverse clients."""
        return None

    def audience(self, client: int, round: int) -> Hashable:
        """Clients of one audience are sent the same message, where not everything is broadcast."""
        return client

    def enlarged(self, start: Any) -> State:
        """The state when clients join that the server has heard nothing of.

        Args:
            start: The state before the first round of a federation that has the new clients after the others.

        Returns:
            By default the same state, which has no place for each client.
        """
        return self


@state
class Shared(State):
    """One bank, the weights of one model, or both."""

    bank: PrototypeBank | None = None
    weights: Weights = field(default_factory=dict)


class Measures(NamedTuple):
    """What the record says of a server's state after a round: numbers, and at the end of a run a note on how it went."""

    numbers: Mapping[str, float] = {}
    note: str = ""


@dataclass(frozen=True)
class Teacher:
    """A server that trains on labelled samples of its own, before the first round and after each.

    It is to the training core what a method is: it has a feed and terms, and begins from the weights it is given, which
    are those of the server's state. `learnt` makes the new state of what was trained.
    """

    epochs: int
    terms: Callable[[Network, Batch, Any, int], Terms | Loss]
    learnt: Callable[[Any, Trained, int], Any]
    feed: Feed = Epochs("weak")
    batch: int = 0  # its batch size; 0: that of the clients
    keeps_optimiser: bool = (
        False  # whether its optimiser's state is kept between rounds, as `optimiser` of the server's state
    )
    statistics: Literal["server", "all"] = "server"  # whose samples static batch norm's statistics are of

    def begin(self, weights: Weights, received: Any) -> Weights:
        return {**weights, **received.weights}

    def returned(self, trained: Trained, received: Any, round: int) -> Any:
        return self.learnt(received, trained, round)

    def remember(self, trained: Trained, received: Any, round: int) -> Bundle:
        return Bundle()
