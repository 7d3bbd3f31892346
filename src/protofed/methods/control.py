"""Controls: a method around any other, which says how much of its gain is the exchange.

`own`: every client is a federation of one, with a server of its own; the loss is the same, and nothing is exchanged.
`shuffled`: everything is exchanged, but each class is given the prototype of another one.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch

from .. import seeds
from ..bank import PrototypeBank
from ..errors import ProtofedError
from ..parts import Batch, Each, Feed, Predict, Received, Reduce, Reduced, Running
from ..wire import Bundle, Exchange
from ..wire.exchange import Part
from .base import Method
from .client import Loss, Network, Terms, Trained, Weights
from .server import Measures, Setup, State, Teacher, state

Kind = Literal["", "own", "shuffled"]


def controlled(method: Method, kind: Kind, seed: int) -> Method:
    """A method as the setting `control` has it.

    Args:
        method: The method itself.
        kind: Which control; without one it is the method itself.
        seed: The run's seed.

    Returns:
        The method, or its control.

    Raises:
        ProtofedError: One line that says why the method has no such control.
    """
    if not kind:
        return method
    exchange = method.exchange
    if not exchange.up:
        raise ProtofedError(
            f"control={kind}: clients of {method.name} return nothing, so there is no exchange to control"
        )
    if kind == "own":
        if method.teacher is not None:
            raise ProtofedError(
                f"control=own: {method.name} learns from labels at the server, and a client alone has none of them"
            )
        return Own(method)
    if not exchange.prototypes:
        raise ProtofedError(f"control=shuffled: {method.name} sends no prototypes; control=own is for any exchange")
    return Shuffled(method, seed)


def has_control(method: Method) -> bool:
    """Whether a method's clients send and are sent prototypes, and would have some without the others: `control=own`."""
    returns = any(part.kind == "bank" for part in method.exchange.up)
    return method.exchange.prototypes and returns and method.teacher is None


@dataclass(frozen=True)
class Control(Method):
    """A method around another one, which does everything as that one does."""

    method: Method

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.method.name)  # the name of the method inside

    @property
    def exchange(self) -> Exchange:
        return self.method.exchange

    @property
    def feed(self) -> Feed:
        return self.method.feed

    @property
    def reduce(self) -> Reduce:
        return self.method.reduce

    @property
    def predict(self) -> Predict:
        return self.method.predict

    @property
    def teacher(self) -> Teacher | None:
        return self.method.teacher

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms | Loss:
        return self.method.terms(net, batch, received, round)

    def begin(self, weights: Weights, received: Received) -> Weights:
        return self.method.begin(weights, received)

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        return self.method.returned(trained, received, round)

    def remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        return self.method.remember(trained, received, round)

    def start(self, setup: Setup) -> Any:
        return self.method.start(setup)

    def update(self, state: Any, reduced: Reduced, round: int, setup: Setup) -> Any:
        return self.method.update(state, reduced, round, setup)

    def describe(self, state: Any, round: int) -> Measures:
        return self.method.describe(state, round)


# --- control=own ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class OwnServers(Exchange):
    """The messages between each client and a server of its own. Nothing of them would travel."""

    inner: Exchange = Exchange()

    @classmethod
    def of(cls, exchange: Exchange) -> OwnServers:
        """The exchange of a federation of one, in which there are no other clients."""

        def alone(part: Part) -> Part:
            shape = tuple(1 if size == "clients" else size for size in part.shape)
            return replace(part, each=True, others=False, shape=shape)

        return cls(tuple(map(alone, exchange.down)), exchange.up, exchange.keeps_model, False, exchange)

    def audience(self, state: Any, client: int, round: int, names: Collection[str] | None = None) -> Hashable:
        return client

    def own_message(self, state: Any, client: int, round: int, names: Collection[str] | None = None) -> Bundle:
        return self.inner.message(state.servers[client], 0, round, names)


@state
class Servers(State):
    """The state of each client's own server."""

    servers: tuple[Any, ...]

    def enlarged(self, start: Servers) -> Servers:
        """A new client has a new server."""
        return Servers((*self.servers, *start.servers[len(self.servers) :]))


@dataclass(frozen=True)
class Own(Control):
    """`control=own`: the same loss with the client's own prototypes. Every client is a federation of one."""

    @property
    def exchange(self) -> Exchange:
        return OwnServers.of(self.method.exchange)

    @property
    def reduce(self) -> Reduce:
        return Each()

    def start(self, setup: Setup) -> Servers:
        first = {k: self.method.start(_alone(setup, k)) for k in dict.fromkeys(_owners(setup))}
        return Servers(tuple(first[k] for k in _owners(setup)))

    def update(self, state: Servers, reduced: Reduced, round: int, setup: Setup) -> Servers:
        """Each upload is reduced by itself, as the method reduces many."""
        shared = any(part.kind == "weights" and not part.each for part in self.method.exchange.down)
        owners, servers = _owners(setup), list(state.servers)
        for upload in reduced.uploads:
            server = servers[upload.client]
            running = Running(self.method.reduce, server.weights if shared else {})
            running.add([upload._replace(client=0)])
            alone = _alone(setup, owners[upload.client])
            servers[upload.client] = self.method.update(server, running.result(), round, alone)
        return Servers(tuple(servers))

    def describe(self, state: Servers, round: int) -> Measures:
        """The mean over the servers."""
        measures = [self.method.describe(server, round) for server in state.servers]
        names = dict.fromkeys(name for m in measures for name in m.numbers)
        values = {name: [m.numbers[name] for m in measures if name in m.numbers] for name in names}
        return Measures({name: sum(v) / len(v) for name, v in values.items()}, measures[0].note)


def _owners(setup: Setup) -> tuple[int, ...]:
    """The number of each client's architecture."""
    return setup.architectures or (0,) * setup.num_clients


def _alone(setup: Setup, architecture: int) -> Setup:
    """What the server of one client knows. Of several architectures it has that client's weights alone."""
    mine = {name: value for name, value in setup.weights.items() if name.startswith(f"{architecture}:")}
    return replace(setup, num_clients=1, weights=mine or setup.weights, architectures=(architecture,))


# --- control=shuffled -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Shuffled(Control):
    """`control=shuffled`: each class is given another one's prototype; predictions are made by the client's own.

    What else a message has for each class, as soft labels, is given to the same wrong class. Weights stay as they are.
    """

    seed: int

    @property
    def predict(self) -> Predict:
        return replace(self.method.predict, prefers="alone")

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms | Loss:
        return self.method.terms(net, batch, self.shuffled(received), round)

    def begin(self, weights: Weights, received: Received) -> Weights:
        return self.method.begin(weights, self.shuffled(received))

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        return self.method.returned(trained, self.shuffled(received), round)

    def remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        return self.method.remember(trained, self.shuffled(received), round)

    def shuffled(self, received: Received) -> Received:
        """What was received, with another class's values for each class."""
        by_class = {part.name for part in self.method.exchange.down if part.shape[:1] == ("classes",)}

        def wrong(bank: PrototypeBank) -> PrototypeBank:
            order = derangement(bank.num_classes, self.seed).to(bank.means.device)
            return PrototypeBank(bank.means[..., order, :], bank.counts[..., order])

        def rows(name: str, value: torch.Tensor) -> torch.Tensor:
            return value[derangement(len(value), self.seed).to(value.device)] if name in by_class else value

        return replace(
            received,
            bank=None if received.bank is None else wrong(received.bank),
            banks={name: wrong(bank) for name, bank in received.banks.items()},
            tensors={name: rows(name, value) for name, value in received.tensors.items()},
        )


@lru_cache(maxsize=8)
def derangement(classes: int, seed: int) -> torch.Tensor:
    """An order of the classes in which none keeps its place: they are passed on along one circle.

    Args:
        classes: Their number, at least 2.
        seed: The run's seed.

    Returns:
        For each class the one whose prototype it is given. `derangement(2, 0)` is `[1, 0]`.
    """
    if classes < 2:
        raise ProtofedError("control=shuffled: there is one class, and no other one whose prototype it could be given")
    circle = torch.randperm(classes, generator=seeds.torch_stream(seed, "control"))
    order = torch.empty_like(circle)
    order[circle] = circle.roll(-1)
    return order
