"""The plain engine: clients one after another. Short and obviously right; other engines are tested against it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from .. import seeds, wire
from ..bank import PrototypeBank
from ..data.types import ClientData, FederatedData
from ..errors import ProtofedError
from ..evaluate import Board, Confusion, Confusions, Scores
from ..methods.base import Method
from ..methods.client import Weights
from ..models import norm
from ..models.base import ModelSpec, Output, parameter_count
from ..models.convolution import LeanConv2d, with_convolutions
from ..models.precision import with_precision
from ..models.quick import with_quick_layers
from ..models.skeleton import Skeleton, piece_size
from ..wire import Bundle, Message
from . import judge
from .batches import ClientSizes, Task, every_sample
from .judge import Evaluation, SampleSet, samples_of
from .local import ClientState, MemoryStates, Outcome, train_client, trained_client, with_memory
from .visits import LoadedModel, PlainVisit, TakenSamples

SERVER = -1  # the server's number among the random streams
DECODED = 2  # how many decoded messages are kept; most often all clients are sent the same one


class Messages(Protocol):
    """Encoded messages by number."""

    def __getitem__(self, audience: int, /) -> Message: ...


@dataclass(frozen=True)
class Downloads:
    """The messages of a broadcast: one for each audience, and the audience of each client, in the order of the clients."""

    round: int
    messages: Messages
    audience: Mapping[int, int]
    purpose: str = "train"
    serial: int = field(default_factory=count().__next__)
    """A number that no other downloads have; it identifies a decoded message."""
    common: int | None = None
    """The number of a message of stacks that all clients are sent, each without what is in its own place."""

    @cached_property
    def clients(self) -> list[int]:
        """The clients that are sent a message."""
        return list(self.audience)

    def __getitem__(self, client: int) -> Message:
        """The whole message of a client, as it travels to a site elsewhere."""
        message = self.messages[self.audience[client]]
        if self.common is None:
            return message
        return wire.encode(wire.decode(message).with_others(self._stacks, client))

    @cached_property
    def _stacks(self) -> Bundle:
        assert self.common is not None
        return wire.decode(self.messages[self.common])

    def only(self, clients: Sequence[int]) -> Downloads:
        """The same downloads for some of the clients."""
        return replace(self, audience={c: self.audience[c] for c in clients})


class Taught(NamedTuple):
    """The server's state after its own training (None where it became NaN), the loss terms, and the reason of a failure."""

    state: Any
    terms: Mapping[str, float]
    failure: str


def in_order(clients: Iterable[int], outcomes: Iterable[tuple[int, Outcome]]) -> Iterator[tuple[int, Outcome]]:
    """Outcomes in the order of the clients, because the last bits of a sum depend on it.

    An outcome that arrives before its turn waits.
    """
    waiting: dict[int, Outcome] = {}
    turn = iter(clients)
    client = next(turn, None)
    for early, outcome in outcomes:
        waiting[early] = outcome
        while client in waiting:
            yield client, waiting.pop(client)
            client = next(turn, None)


class Engine(Protocol):
    """The part of a federation that trains the clients and holds their states. The round is the same for every engine.

    Messages are passed in encoded form, so an engine may send them on to another process or to another host. Client c
    has the architecture `owner[c]`, whose initial weights are `starts[owner[c]]`.
    """

    starts: tuple[Mapping[str, Tensor], ...]
    owner: tuple[int, ...]
    dim: int
    parameters: tuple[int, ...]

    def train(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        """Train the clients that were sent a message, and keep each client's new state.

        Args:
            downloads: The messages of this round.

        Returns:
            Each client with the outcome of its training, in the order of the downloads.
        """
        ...

    def teach(self, state: Any, round: int) -> Taught:
        """Train the server's own model, where the method has a teacher.

        Args:
            state: The server's state.
            round: The round, 0 before the first one.

        Returns:
            The new state, or the reason why there is none.
        """
        ...

    def evaluate(self, downloads: Downloads, options: Evaluation) -> Mapping[int, Scores]:
        """Score each client on its own samples, by its own model and the message it is sent.

        Args:
            downloads: What the clients are sent for the evaluation.
            options: Which samples are scored, and what is measured beside accuracy.

        Returns:
            The scores of every client.
        """
        ...

    def export(self) -> Mapping[int, ClientState]:
        """The states that a checkpoint needs: those of clients that took part and keep something."""
        ...

    def restore(self, states: Mapping[int, ClientState]) -> None:
        """Replace the clients' states by those of a checkpoint."""

    def close(self) -> None:
        """Release processes and memory."""


@runtime_checkable
class SharedStore(Protocol):
    """A store of clients' states in memory that several processes share, with the clients' models side by side."""

    def holders(self, clients: Iterable[int]) -> frozenset[int]:
        """Those of the clients that have a state."""
        ...

    def for_training(self, clients: Sequence[int]) -> Mapping[int, ClientState]:
        """The states of those of some clients of one architecture that have one, as far as training reads them."""
        ...

    def stacked(self, clients: Sequence[int], start: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The models of some clients of one architecture with a leading axis; `start` for those that have none."""
        ...


@dataclass(frozen=True)
class ArchitectureInputs:
    """Everything that the engine of one architecture is made of: the method, the model, the clients' data and the task."""

    method: Method
    model: ModelSpec
    data: FederatedData
    task: Task
    own_start: bool = False  # whether each client starts from initial weights of its own

    def build(self, *client: int) -> torch.nn.Module:
        """The network with its initial weights: those that all clients share, or those of one `client`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.derive(self.task.seed, "initialisation", *client))
            network = self.model.build(self.data.sample_shape, self.data.num_classes)
        return with_precision(network, self.task.local.precision)


class PlainEngine:
    """Trains clients of one architecture one after another, and holds their states."""

    def __init__(
        self, inputs: ArchitectureInputs, network: torch.nn.Module, channels_last: bool = False, lean: bool = False
    ) -> None:
        """
        Args:
            inputs: The method, the model, the data and the task.
            network: A network with the weights that all clients start from; the engine trains in it.
            channels_last: Whether images and convolutions have their channels last in memory.
            lean: Whether convolutions are replaced by `LeanConv2d`.
        """
        self.inputs, self.channels_last, self.lean = inputs, channels_last, lean
        self.method, self.task, self.data = inputs.method, inputs.task, inputs.data
        self.device = self.data.clients[0].labelled.x.device
        self.skeleton = self._skeleton(network)
        self.dim = self.skeleton.dim
        self.start: Mapping[str, Tensor] = self.skeleton.weights()
        self.starts: tuple[Mapping[str, Tensor], ...] = (self.start,)
        self.owner: tuple[int, ...] = (0,) * len(self.data.clients)
        self.parameters: tuple[int, ...] = (parameter_count(self.skeleton.module),)
        sizes = {"classes": self.data.num_classes, "dim": self.dim, "clients": len(self.data.clients)}
        self.expected = self.method.exchange.expected("down", sizes, self.start)
        self.states: MutableMapping[int, ClientState] = MemoryStates()
        self.decoded: dict[tuple[int, int], Bundle] = {}
        self.central: dict[tuple[int, int], Output] = {}  # outputs of the central test set that other processes gave
        self.families: dict[str, np.ndarray] = {}  # for each set of samples: who has the same samples and classes

    @cached_property
    def sizes(self) -> ClientSizes:
        """How many samples the clients have."""
        return ClientSizes(self.method.feed, self.data)

    def _skeleton(self, module: torch.nn.Module) -> Skeleton:
        module = with_convolutions(module, LeanConv2d) if self.lean else module
        if self.channels_last:
            module = with_quick_layers(module, flatten_only=self.lean)
        return Skeleton(module.to(self.device), self.channels_last)

    def message(self, downloads: Downloads, client: int) -> Bundle:
        """The message a client was sent, decoded and checked. A message to several clients is decoded once."""
        whole = downloads.purpose == "train" and downloads.common is None
        own = self._decoded(downloads, downloads.audience[client], client, whole)
        if downloads.common is None:
            return own
        return own.with_others(self._decoded(downloads, downloads.common, client, False), client)

    def _decoded(self, downloads: Downloads, number: int, client: int, whole: bool) -> Bundle:
        """The message of that number, decoded and checked; `whole` says whether it has all parts that a client needs."""
        key = downloads.serial, number
        if key in self.decoded:
            self.decoded[key] = self.decoded.pop(key)  # what was read last is kept longest
        else:
            while len(self.decoded) >= DECODED:
                self.decoded.pop(next(iter(self.decoded)))
            expected = self.expected if whole else replace(self.expected, partial=True)
            source = f"server's message to {self.data.name_of(client)}"
            self.decoded[key] = wire.decode(downloads.messages[number], source, expected).to(self.device)
        return self.decoded[key]

    def state(self, client: int) -> ClientState:
        """The state that a client trains from. A client that has not taken part yet has its initial model."""
        return self.trained_from([client])[0]

    def trained_from(self, clients: Sequence[int]) -> list[ClientState]:
        """The states that some clients train from."""
        states = self.states
        held = states.for_training(clients) if isinstance(states, SharedStore) else states
        return [self._begun(client, held.get(client)) for client in clients]

    def _begun(self, client: int, stored: ClientState | None) -> ClientState:
        """A client's state with the model that it has, or begins with."""
        if stored is not None:
            return stored if stored.weights else replace(stored, weights=self.start)
        if not self.inputs.own_start:
            return ClientState(self.start)
        return ClientState(self._skeleton(self.inputs.build(client)).weights())

    def groups(self, clients: Sequence[int]) -> list[list[int]]:
        """The groups of clients that are trained together, and thus by one process. Worker processes share whole groups."""
        return [[client] for client in clients]

    def train(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        """Train the clients one after another and keep their states."""
        for client in downloads.clients:
            state = self.state(client)
            received = with_memory(self.message(downloads, client), state.memory)
            data = self.data.clients[client]
            destination = client, downloads.round, self.states.__setitem__
            holder = self._optimiser_holder()
            if holder is not None:
                state = replace(state, optimiser=self.states[holder].optimiser)
            outcome = train_client(self.task, self.skeleton, state, data, received, *destination)
            if holder not in (None, client) and not outcome.failure:
                self.states[holder] = replace(self.states[holder], optimiser={})
            yield client, outcome

    def _optimiser_holder(self) -> int | None:
        """With a shared optimiser, the client that trained last, which has its state; None before the first one."""
        if not self.task.local.shared_optimiser:
            return None
        return next((client for client, state in self.states.items() if state.optimiser), None)

    def teach(self, state: Any, round: int) -> Taught:
        """Train the server's model as a client's is trained: with the teacher's loss, on the server's samples, and with
        the server's state in the place of a message."""
        teacher, samples = self.method.teacher, self.data.server
        assert teacher is not None
        if samples is None:
            raise ProtofedError(
                f"{self.task.name} trains at the server: set server_labels, the number of its labelled samples"
            )
        all_classes = torch.ones(self.data.num_classes, dtype=torch.bool, device=samples.x.device)
        local, keeps = self.task.local, teacher.keeps_optimiser
        local = replace(local, shared_optimiser=False, keep_optimiser=keeps)
        local = replace(local, epochs=teacher.epochs, batch=teacher.batch or local.batch)
        task = replace(self.task, learner=teacher, local=local, held_back=())
        kept = on_device(dict(state.optimiser), self.device) if keeps else {}
        server_data, start = ClientData(samples, samples, all_classes), ClientState(self.start, kept)
        state = on_device(state, self.device)
        training = trained_client(task, self.skeleton, start, server_data, state, SERVER, round)
        if training.trained is None:
            return Taught(None, training.terms, training.failure)
        if teacher.statistics == "all" and norm.collects(self.skeleton.module):
            self.skeleton.collect(every_sample(self.data))
        new_state = teacher.returned(training.trained, state, round)
        if keeps:
            new_state = replace(new_state, optimiser=training.optimiser)
        return Taught(on_device(new_state, "cpu", copied=True), training.terms, "")

    # --- evaluation -----------------------------------------------------------------------------------------------
    @property
    def model_for_each(self) -> bool:
        """Whether each client is evaluated by a model of its own: a private one, the global one after local tuning, or one
        that holds the client's own prototypes."""
        predict = self.method.predict
        return self.method.exchange.keeps_model or predict.tuning > 0 or predict.common > 0

    def evaluate(self, downloads: Downloads, options: Evaluation) -> Board:
        """Score the clients, one model after another."""
        candidates, taken = judge.Candidates(self.method.predict, options), TakenSamples()
        boards = []
        for clients in self._sharers(downloads):
            message, model = self._loaded(downloads, clients[0], options, taken)
            boards.append(self._scored(clients, PlainVisit(clients[0], message, model, self.kept_bank), candidates))
        return Board.joined(boards, downloads.clients)

    def _scored(self, clients: Sequence[int], visit: PlainVisit, candidates: judge.Candidates) -> Board:
        """The scores of clients that share the model and the message of a visit."""
        predict, data, options = self.method.predict, self.data, candidates.options
        if options.one_by_one(predict):
            return Board.of({c: judge.score(replace(visit, client=c), predict, data, options) for c in clients})
        counting = judge.Counting(predict, data, options, candidates)
        entries: list[tuple[Confusion, Confusion | None]] = []
        members: list[Sequence[int]] = []
        shaped, shapes = options.shaped, dict[int, dict[str, Any]]()
        silhouettes: dict[Any, float] = {}
        for family in self._families(clients, options):
            for client in family:
                head, prototype, shared = counting.confusions(replace(visit, client=client))
                entries.append((head, prototype))
                members.append(family if shared else [client])
                for member in [member for member in members[-1] if member < shaped]:
                    one = replace(visit, client=member)
                    shapes[member] = judge.shape(one, predict, data, options, silhouettes)
                if shared:
                    break
        which = np.repeat(np.arange(len(entries)), [len(family) for family in members])
        by_head, by_prototype = (Confusions.listed([entry[k] for entry in entries]).taken(which) for k in range(2))
        return Board([client for family in members for client in family], by_head, by_prototype, shapes)

    def _families(self, clients: Sequence[int], options: Evaluation) -> list[list[int]]:
        """Groups of clients with the same test samples and the same classes."""
        if len(clients) < 2:
            return [list(clients)] if clients else []
        if options.part not in self.families:
            numbers: dict[Any, int] = {}
            keys = (self._family_key(client, options.part) for client in range(len(self.data.clients)))
            self.families[options.part] = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
        if not self.families[options.part].any():
            return [list(clients)]
        numbers_of_clients = self.families[options.part][clients]
        order = np.argsort(numbers_of_clients, kind="stable")
        edges = np.flatnonzero(np.diff(numbers_of_clients[order])) + 1
        return [family.tolist() for family in np.split(np.asarray(clients)[order], edges)]

    def _family_key(self, client: int, part: SampleSet) -> Any:
        if getattr(self.data.clients[client], part) is None:
            return client
        samples = samples_of(self.data, client, part)
        return id(samples.index), id(samples.y), self.data.clients[client].class_bytes

    def visits(self, downloads: Downloads, options: Evaluation) -> Iterator[judge.Visit]:
        """Every client with its model loaded. A visit is valid until the next one begins."""
        taken = TakenSamples()
        for clients in self._sharers(downloads):
            message, model = self._loaded(downloads, clients[0], options, taken)
            for client in clients:
                yield PlainVisit(client, message, model, self.kept_bank)

    def _sharers(self, downloads: Downloads) -> list[list[int]]:
        """Groups of clients that are evaluated by the same model and were sent the same message."""
        own, audience = self.own_models(downloads.clients), downloads.audience
        single, others = [], downloads.clients
        if any(map(audience.__contains__, own)):
            single = [[client] for client in others if client in own]
            others = [client for client in others if client not in own]
        sharers: dict[int, list[int]] = {number: [] for number in dict.fromkeys(audience.values())}
        if len(sharers) == 1:  # most often all clients are sent the same
            sharers = dict.fromkeys(sharers, others)
        else:
            for client in others:
                sharers[audience[client]].append(client)
        return [*single, *filter(None, sharers.values())]

    def own_models(self, clients: Collection[int]) -> Collection[int]:
        """The clients that are evaluated by another model than the others: not by a global one, nor by the initial one."""
        if not self.model_for_each:
            return ()
        if self.inputs.own_start or self.method.predict.tuning:
            return frozenset(clients)
        return self.states.holders(clients) if isinstance(self.states, SharedStore) else self.states

    def _loaded(
        self, downloads: Downloads, client: int, options: Evaluation, taken: TakenSamples
    ) -> tuple[Bundle, LoadedModel]:
        """The message to a client, and the model by which it is evaluated."""
        message = self._load(self.message(downloads, client), client)
        model = LoadedModel(self.skeleton, self.data, not self.model_for_each or options.votes, taken)
        model.central = self.central.get((downloads.serial, downloads.audience[client]))
        return message, model

    def shares(self, downloads: Downloads, options: Evaluation) -> tuple[list[int], list[list[int]]]:
        """How an evaluation can be shared out.

        Returns:
            The clients that need no pass over samples of their own, because they share a model and test samples with
            others; and groups of the others. Each group can be evaluated by another process, with the same bits.
        """
        alike, groups = [], []
        candidates = judge.Candidates(self.method.predict, options)
        for clients in self._sharers(downloads):
            if len(clients) == 1:
                groups.append(clients)
                continue
            received = self.message(downloads, clients[0])
            for family in self._families(clients, options):
                own = options.one_by_one(self.method.predict) or not self._shares_tests(family, options)
                if options.prototypes and not own:
                    own = not candidates.of(received, self._empty_bank, self.data.clients[family[0]])[1]
                if own:
                    groups += [[client] for client in family]
                else:
                    alike += family
        return alike, groups

    def _shares_tests(self, family: Sequence[int], options: Evaluation) -> bool:
        test = self.data.central_test
        return len(family) > 1 or (test is not None and samples_of(self.data, family[0], options.part).x is test.x)

    def _empty_bank(self) -> PrototypeBank:
        return PrototypeBank.empty(self.data.num_classes, self.dim)

    def central_pieces(self, downloads: Downloads, options: Evaluation) -> list[tuple[int, int]]:
        """The pieces in which the central test set is run by shared models: a client with the model, and a first row."""
        test, pieces = self.data.central_test, []
        for clients in [] if self.model_for_each or test is None else self._sharers(downloads):
            if test is not None and any(samples_of(self.data, c, options.part).x is test.x for c in clients):
                pieces += [(clients[0], row) for row in range(0, len(test.x), piece_size(test.x))]
        return pieces

    def run_piece(self, downloads: Downloads, client: int, row: int) -> Output:
        """The outputs of one piece of the central test set."""
        assert self.data.central_test is not None
        self._load(self.message(downloads, client), client)
        x = self.data.central_test.x
        return self.skeleton.outputs(x[row : row + piece_size(x)])

    def kept_bank(self, client: int) -> PrototypeBank | None:
        """A client's prototypes under the model by which it is evaluated, where training has computed them."""
        predict = self.method.predict
        return None if predict.tuning or predict.common or client not in self.states else self.states[client].bank

    def _load(self, message: Bundle, client: int) -> Bundle:
        """Load the model by which a client is evaluated, and return what it was sent."""
        if self.method.predict.common:
            message, weights = self.begun(message, client)
            self.skeleton.load(weights)
        elif not self.model_for_each:
            self.skeleton.load({**self.start, **message.weights})
        elif not self.method.predict.tuning:
            self.skeleton.load(self.state(client).weights)
        else:
            state, received = ClientState(self.start), with_memory(message, Bundle())
            data = self.data.clients[client]
            training = trained_client(self.tuning, self.skeleton, state, data, received, client, round=0)
            if training.failure:  # tuning became NaN, so the model that was sent is evaluated
                self.skeleton.load({**self.start, **message.weights})
        return message

    def begun(self, message: Bundle, client: int) -> tuple[Bundle, Weights]:
        """The guided model that a client would begin the next round with, and the message with the prototypes it holds."""
        state = self.state(client)
        weights = self.method.begin(state.weights, with_memory(message, state.memory))
        return judge.as_held(message, weights), weights

    @property
    def tuning(self) -> Task:
        """The task of training before an evaluation. It is round 0, so it has random streams of its own."""
        local = replace(self.task.local, keep_optimiser=False, shared_optimiser=False)
        local = replace(local, epochs=self.method.predict.tuning)
        return replace(self.task, local=local)

    # --- states ---------------------------------------------------------------------------------------------------
    def export(self) -> Mapping[int, ClientState]:
        """The states of all clients that have one."""
        return self.states

    def restore(self, states: Mapping[int, ClientState]) -> None:
        """Replace the clients' states by copies on the engine's device."""
        for client, state in states.items():
            weights = {k: v.to(self.device) for k, v in state.weights.items()}
            bank = None if state.bank is None else on_device(state.bank, self.device, copied=True)
            self.states[client] = ClientState(weights, state.optimiser, state.memory.to(self.device), bank)

    def close(self) -> None:
        """There is nothing to release."""


def on_device(value: Any, device: torch.device | str, copied: bool = False) -> Any:
    """A tree of tensors on a device; with `copied`, every tensor is a copy."""
    move: Callable[[Any], Any] = lambda v: v.to(device, copy=copied) if isinstance(v, Tensor) else v  # noqa: E731
    return torch.utils._pytree.tree_map(move, value)
