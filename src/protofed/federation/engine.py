"""The plain engine: clients one after another. Short and obviously right; other engines are tested against it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import seeds, wire
from ..bank import PrototypeBank
from ..data.types import ClientData, FederatedData, Samples
from ..errors import ProtofedError
from ..evaluate import Scores
from ..methods.base import Method
from ..models.base import ModelSpec, Output, parameter_count
from ..models.convolution import LeanConv2d, with_convolutions
from ..models.skeleton import Skeleton
from ..wire import Bundle, Message
from . import judge
from .batches import Task
from .judge import Evaluation, SampleSet, samples_of
from .local import ClientState, MemoryStates, Outcome, train_client, trained_client, with_memory

SERVER = -1  # the server's number among the random streams
DECODED = 2  # messages that stay decoded: most often all clients are sent the same one


class Messages(Protocol):
    """Encoded messages by number."""

    def __getitem__(self, audience: int, /) -> Message: ...


@dataclass(frozen=True)
class Downloads:
    """What clients are sent: one message for each audience, and who belongs to which, in the order of the clients."""

    round: int
    messages: Messages
    audience: Mapping[int, int]
    purpose: str = "train"
    serial: int = field(default_factory=count().__next__)
    """What tells these from all others, so that a message decoded for them is not taken for another's."""

    @property
    def clients(self) -> list[int]:
        """Who is sent something."""
        return list(self.audience)

    def __getitem__(self, client: int) -> Message:
        return self.messages[self.audience[client]]

    def only(self, clients: Sequence[int]) -> Downloads:
        """Those of some of the clients."""
        return replace(self, audience={c: self.audience[c] for c in clients})


class Taught(NamedTuple):
    """The server's state after its own training (none where that went to NaN), loss terms, and what failed."""

    state: Any
    terms: Mapping[str, float]
    failure: str


def in_order(clients: Iterable[int], outcomes: Iterable[tuple[int, Outcome]]) -> Iterator[tuple[int, Outcome]]:
    """Outcomes in the order of the clients, because a sum depends on it; one that comes too early waits for its turn."""
    waiting: dict[int, Outcome] = {}
    turn = iter(clients)
    client = next(turn, None)
    for early, outcome in outcomes:
        waiting[early] = outcome
        while client in waiting:
            yield client, waiting.pop(client)
            client = next(turn, None)


class Engine(Protocol):
    """Who trains the clients. It holds their states; the round itself is the same for every engine.

    Messages come and go encoded, so an engine may pass them on to another process or to another host as they are. Client
    c has the architecture `owner[c]`, which starts from `starts[owner[c]]`.
    """

    starts: tuple[Mapping[str, Tensor], ...]
    owner: tuple[int, ...]
    dim: int
    parameters: tuple[int, ...]

    def train(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        """Train the clients that were sent something, in their order; each client's state afterwards is kept."""
        ...

    def teach(self, state: Any, round: int) -> Taught:
        """The server's own training."""
        ...

    def evaluate(self, downloads: Downloads, how: Evaluation) -> dict[int, Scores]:
        """Each client scored on its own samples, by its own model and what it is sent."""
        ...

    def export(self) -> Mapping[int, ClientState]:
        """The states worth saving: those of clients that took part and keep something."""
        ...

    def restore(self, states: Mapping[int, ClientState]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Inputs:
    """What an engine is made for: one method and one set of clients, of one architecture."""

    method: Method
    model: ModelSpec
    data: FederatedData
    task: Task
    own_start: bool = False  # each client starts from a model of its own

    def build(self, *who: int) -> torch.nn.Module:
        """The network with its initial weights, those of all or of one client."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.derive(self.task.seed, "initialisation", *who))
            return self.model.build(self.data.sample_shape, self.data.num_classes)


class PlainEngine:
    """Trains the clients it is told to, one after another, and holds their states. All have one architecture."""

    def __init__(
        self, inputs: Inputs, network: torch.nn.Module, channels_last: bool = False, lean: bool = False
    ) -> None:
        """`network` has the weights that all clients start from; the engine makes it its own."""
        self.inputs, self.channels_last, self.lean = inputs, channels_last, lean
        self.method, self.task, self.data = inputs.method, inputs.task, inputs.data
        self.device = self.data.clients[0].labelled.x.device
        self.skeleton = self._skeleton(network)
        self.dim = self.skeleton.dim
        self.start: Mapping[str, Tensor] = self.skeleton.weights()
        self.starts: tuple[Mapping[str, Tensor], ...] = (self.start,)
        self.owner: tuple[int, ...] = (0,) * len(self.data.clients)
        self.parameters: tuple[int, ...] = (parameter_count(self.skeleton.module),)
        sizes = {"classes": self.data.num_classes, "dim": self.dim, "others": len(self.data.clients) - 1}
        self.expected = self.method.exchange.expected("down", sizes, self.start)
        self.states: MutableMapping[int, ClientState] = MemoryStates()
        self.decoded: dict[tuple[int, int], Bundle] = {}

    def _skeleton(self, module: torch.nn.Module) -> Skeleton:
        module = with_convolutions(module, LeanConv2d) if self.lean else module
        return Skeleton(module.to(self.device), self.channels_last)

    def message(self, downloads: Downloads, client: int) -> Bundle:
        """What a client was sent, checked. What several are sent is decoded once."""
        key = downloads.serial, downloads.audience[client]
        if key not in self.decoded:
            while len(self.decoded) >= DECODED:
                self.decoded.pop(next(iter(self.decoded)))
            expected = self.expected if downloads.purpose == "train" else replace(self.expected, partial=True)
            source = f"server's message to client {client}"
            self.decoded[key] = wire.decode(downloads[client], source, expected).to(self.device)
        return self.decoded[key]

    def state(self, client: int) -> ClientState:
        """A client's state; one that has not taken part yet holds its initial model."""
        if client in self.states:
            kept = self.states[client]
            return kept if kept.weights else replace(kept, weights=self.start)
        if not self.inputs.own_start:
            return ClientState(self.start)
        return ClientState(self._skeleton(self.inputs.build(client)).weights())

    def groups(self, clients: Sequence[int]) -> list[list[int]]:
        """Clients that are trained together, and so by one process. Worker processes share out whole groups."""
        return [[client] for client in clients]

    def train(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        for client in downloads.clients:
            state = self.state(client)
            received = with_memory(self.message(downloads, client), state.memory)
            data = self.data.clients[client]
            where = client, downloads.round, self.states.__setitem__
            yield client, train_client(self.task, self.skeleton, state, data, received, *where)

    def teach(self, state: Any, round: int) -> Taught:
        """The server's training is a client's, with the teacher's loss, the server's samples and its state in place of a
        message."""
        teacher, samples = self.method.teacher, self.data.server
        assert teacher is not None
        if samples is None:
            raise ProtofedError(
                f"{self.task.name} trains at the server: set server_labels, the number of its labelled samples"
            )
        everything = torch.ones(self.data.num_classes, dtype=torch.bool, device=samples.x.device)
        local = replace(self.task.local, epochs=teacher.epochs, keep_optimiser=False)
        task = replace(self.task, learner=teacher, local=local, held_back=())
        own, start = ClientData(samples, samples, everything), ClientState(self.start)
        state = on_device(state, self.device)
        done = trained_client(task, self.skeleton, start, own, state, SERVER, round)
        if done.trained is None:
            return Taught(None, done.terms, done.failure)
        after = teacher.returned(done.trained, state, round)
        return Taught(on_device(after, "cpu", copied=True), done.terms, "")

    # --- evaluation -----------------------------------------------------------------------------------------------
    @property
    def model_for_each(self) -> bool:
        """Whether clients are evaluated by models of their own: private ones, or the global one tuned by each."""
        return self.method.exchange.keeps_model or self.method.predict.tuning > 0

    def evaluate(self, downloads: Downloads, how: Evaluation) -> dict[int, Scores]:
        scores = {v.client: judge.score(v, self.method.predict, self.data, how) for v in self.visits(downloads, how)}
        return {client: scores[client] for client in downloads.clients}

    def visits(self, downloads: Downloads, how: Evaluation) -> Iterator[judge.Visit]:
        """Every client with its model loaded, which lasts until the next one is asked for."""
        together: dict[int, list[int]] = {}
        for client, audience in downloads.audience.items():
            together.setdefault(client if self.model_for_each else audience, []).append(client)
        for clients in together.values():
            message = self.message(downloads, clients[0])
            self._load(message, clients[0])
            model = LoadedModel(self.skeleton, self.data, not self.model_for_each or how.votes)
            for client in clients:
                bank = None if self.method.predict.tuning or client not in self.states else self.states[client].bank
                yield PlainVisit(client, message, model, bank)

    def _load(self, message: Bundle, client: int) -> None:
        """Put the model a client is evaluated by into the module."""
        if not self.model_for_each:
            self.skeleton.load({**self.start, **message.weights})
        elif not self.method.predict.tuning:
            self.skeleton.load(self.state(client).weights)
        else:
            state, received = ClientState(self.start), with_memory(message, Bundle())
            data = self.data.clients[client]
            done = trained_client(self.tuning, self.skeleton, state, data, received, client, round=0)
            if done.failure:  # tuning went to NaN: what was sent is the best there is
                self.skeleton.load({**self.start, **message.weights})

    @property
    def tuning(self) -> Task:
        """Training before evaluation, with random streams of its own (round 0)."""
        local = replace(self.task.local, epochs=self.method.predict.tuning, keep_optimiser=False)
        return replace(self.task, local=local)

    # --- states ---------------------------------------------------------------------------------------------------
    def export(self) -> Mapping[int, ClientState]:
        return self.states

    def restore(self, states: Mapping[int, ClientState]) -> None:
        for client, state in states.items():
            weights = {k: v.to(self.device) for k, v in state.weights.items()}
            bank = None if state.bank is None else on_device(state.bank, self.device, copied=True)
            self.states[client] = ClientState(weights, state.optimiser, state.memory.to(self.device), bank)

    def close(self) -> None:
        """Nothing to release."""


def on_device(value: Any, device: torch.device | str, copied: bool = False) -> Any:
    """A tree of tensors on a device, each a tensor of its own where copies are asked for."""
    move: Callable[[Any], Any] = lambda v: v.to(device, copy=copied) if isinstance(v, Tensor) else v  # noqa: E731
    return torch.utils._pytree.tree_map(move, value)


@dataclass
class LoadedModel:
    """The model in a skeleton over sets of samples. With `whole`, the central test set is run once for all who need rows
    of it."""

    skeleton: Skeleton
    data: FederatedData
    whole: bool
    central: Output | None = field(default=None)

    def outputs(self, samples: Samples) -> Output:
        test = self.data.central_test
        if not self.whole or test is None or samples.x is not test.x:
            return self.skeleton.outputs(samples.take()[0])
        if self.central is None:
            self.central = self.skeleton.outputs(samples.x)
        return Output(*(t[samples.index] for t in self.central))


@dataclass
class PlainVisit:
    """One client, whose model is loaded. Its prototypes are those that training left, where they are this model's."""

    client: int
    received: Bundle
    model: LoadedModel
    bank: PrototypeBank | None

    def outputs(self, samples: SampleSet) -> Output:
        return self.model.outputs(samples_of(self.model.data, self.client, samples))

    @cached_property
    def _own_bank(self) -> PrototypeBank:
        if self.bank is not None:
            return self.bank
        z, y = self.outputs("labelled").embedding, samples_of(self.model.data, self.client, "labelled").labels
        return PrototypeBank.from_embeddings(z, y, self.model.data.num_classes)

    def own_bank(self) -> PrototypeBank:
        return self._own_bank
