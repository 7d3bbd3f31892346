"""The plain engine: clients one after another. Short and obviously right; other engines are tested against it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from .. import seeds, wire
from ..bank import PrototypeBank
from ..data.types import FederatedData, Samples
from ..evaluate import Scores, Snapshot, score_client, silhouette, vote
from ..methods.base import Method
from ..models.base import ModelSpec, Output
from ..wire import Bundle, Message
from .convolution import LeanConv2d, with_convolutions
from .local import ClientState, Outcome, Skeleton, Task, client_size, train_client
from .optimiser import LocalSettings
from .server import train_server

SHAPE_SAMPLES = 300  # of a client's test samples, for silhouette and snapshots
SNAPSHOT_CLIENTS = 6


@dataclass(frozen=True)
class Judging:
    """How clients are evaluated."""

    part: Literal["test", "validation"] = "test"
    candidates: Literal["own", "all"] = "own"
    """The nearest prototype is chosen among the classes of the client's training data, or among all known ones."""
    votes: bool = False
    """Also give each client's class probabilities on the central test set."""
    silhouette: int = 0
    """Of how many clients the silhouette of the embedding space is measured too."""
    snapshot: bool = False
    """Also give some clients' embeddings, with the prototypes they are compared with."""


class Engine(Protocol):
    """Who trains the clients. It holds their states; the round itself is the same for every engine.

    Messages come and go encoded, so an engine may pass them on to another process as they are. Client c has the
    architecture `owner[c]`, which starts from `starts[owner[c]]`.
    """

    starts: tuple[Mapping[str, Tensor], ...]
    owner: tuple[int, ...]
    dim: int
    parameters: tuple[int, ...]

    def train(self, round: int, downloads: Mapping[int, Message]) -> dict[int, Outcome]:
        """Train the clients that were sent something; each client's state afterwards is kept."""
        ...

    def train_server(self, state: Bundle, round: int) -> tuple[Bundle | None, Mapping[str, float], str]:
        """The server's state after training on its own data, its loss terms, and what failed (then there is no state)."""
        ...

    def evaluate(self, server: Bundle, clients: Sequence[int], how: Judging = Judging()) -> list[Scores]:  # noqa: B008
        """Each client scored on its own test (or validation) samples, by the model it would use."""
        ...

    def export(self) -> dict[int, ClientState]:
        """The states worth saving: those of clients that took part and keep something."""
        ...

    def restore(self, states: Mapping[int, ClientState]) -> None: ...

    def close(self) -> None: ...


class PlainEngine:
    """Holds the clients' states and trains those it is told to. All have one architecture."""

    def __init__(
        self,
        method: Method,
        model: ModelSpec,
        data: FederatedData,
        local: LocalSettings,
        *,
        seed: int,
        initial: str = "same",
        channels_last: bool = False,
        lean: bool = False,
    ) -> None:
        self.channels_last, self.lean = channels_last, lean
        self.task = Task(method, local, seed, data.num_classes, data.augmentation, data.held_back)
        self.method, self.model, self.data = method, model, data
        self.device = data.clients[0].labelled.x.device
        self.own_start = initial == "own" and method.private_model
        self.skeleton = self._build()
        self.dim = self.skeleton.dim
        self.start: Mapping[str, Tensor] = method.expand(self.skeleton.weights(), self.skeleton.params)
        self.starts: tuple[Mapping[str, Tensor], ...] = (self.start,)
        self.owner: tuple[int, ...] = (0,) * len(data.clients)
        self.parameters: tuple[int, ...] = (sum(p.numel() for p in self.skeleton.module.parameters()),)
        self.clients: MutableMapping[int, ClientState] = {}
        self.last: tuple[Message, Bundle] | None = None

    def arrived(self, message: Message, client: int) -> Bundle:
        """What a client was sent. Most often all are sent the same object, which is decoded once."""
        if self.last is None or self.last[0] is not message:
            self.last = (message, wire.decode(message, f"server's message to client {client}").to(self.device))
        return self.last[1]

    def _build(self, *who: int) -> Skeleton:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.derive(self.task.seed, "initialisation", *who))
            module = self.model.build(self.data.sample_shape, self.data.num_classes)
        if self.lean:
            module = with_convolutions(module, LeanConv2d)
        return Skeleton(module.to(self.device), self.channels_last)

    def state(self, client: int) -> ClientState:
        """A client's state; one that has not taken part yet holds its initial model."""
        if client in self.clients:
            return self.clients[client]
        if not self.own_start:
            return ClientState(self.start)
        return ClientState(self.method.expand(self._build(client).weights(), self.skeleton.params))

    def keep(self, client: int, state: ClientState) -> None:
        if not self.method.private_model:
            state.weights = self.start  # the global model replaces it next round: nothing to keep
        if self.method.private_model or state.optimiser or not state.memory.empty:
            self.clients[client] = state  # a dict keeps the tensors; shared memory takes a copy

    def train(self, round: int, downloads: Mapping[int, Message]) -> dict[int, Outcome]:
        outcomes = {}
        for client, message in downloads.items():
            data, received = self.data.clients[client], self.arrived(message, client)
            done = train_client(self.task, self.skeleton, self.state(client), data, received, client, round)
            encoded = None if done.upload is None else wire.encode(done.upload)
            after = done.state
            if isinstance(self.clients, dict) and encoded is not None:
                private = self.method.private_model
                after.weights = {n: v.clone() for n, v in after.weights.items()} if private else self.start
                after.memory = after.memory.copied()
            self.keep(client, after)
            size = client_size(self.method, data)
            outcomes[client] = Outcome(encoded, size, done.terms, done.failure, done.pseudo)
        return outcomes

    def train_server(self, state: Bundle, round: int) -> tuple[Bundle | None, Mapping[str, float], str]:
        done = train_server(
            self.task, self.skeleton, self.data, Bundle(weights=self.start), state.to(self.device), round
        )
        after = None if done.upload is None else done.upload.copied().to("cpu")  # the module's own tensors
        return after, done.terms, done.failure

    # --- evaluation -----------------------------------------------------------------------------------------------
    @property
    def model_for_each(self) -> bool:
        """Whether clients are evaluated by models of their own: private ones, or the global one tuned by each."""
        return self.method.private_model or self.method.tuning_epochs > 0

    def evaluate(self, server: Bundle, clients: Sequence[int], how: Judging = Judging()) -> list[Scores]:  # noqa: B008
        result = []
        server = server.to(self.device)
        shared: dict[int, Output] | None = None if self.model_for_each and not how.votes else {}
        if not self.model_for_each:
            self.skeleton.load(self.method.collapse({**self.start, **server.weights}))
        for client in clients:
            data = self.data.clients[client]
            if self.model_for_each:
                self._load(server, client)
                shared = {} if how.votes else None
            x, y = data.labelled.take()
            own = PrototypeBank.from_embeddings(self.skeleton.outputs(x).embedding, y, self.data.num_classes)
            output = self._outputs(samples_of(self.data, client, how), shared)
            shown = self.data.central_test if how.votes else None
            central = None if shown is None else self._outputs(shown, shared)
            result.append(self._score(server, client, own, output, central, how))
        return result

    def _load(self, server: Bundle, client: int) -> None:
        """Put the model a client is evaluated by into the module."""
        if not self.method.tuning_epochs:
            self.skeleton.load(self.method.collapse(self.state(client).weights))
            return
        state, sent = ClientState(self.start), self.method.send(server, client, 0)
        done = train_client(self.tuning, self.skeleton, state, self.data.clients[client], sent, client, round=0)
        if done.failure:  # tuning went to NaN: what was sent is the best there is
            self.skeleton.load(self.method.collapse({**self.start, **sent.weights}))

    @property
    def tuning(self) -> Task:
        """Training before evaluation, with random streams of its own (round 0)."""
        local = replace(self.task.local, epochs=self.method.tuning_epochs, keep_optimiser=False)
        return replace(self.task, local=local)

    def _outputs(self, samples: Samples, shared: dict[int, Output] | None) -> Output:
        """With `shared`, the central test set is run as a whole and once, for all who need some of its rows."""
        central = self.data.central_test
        if shared is None or central is None or samples.x is not central.x:
            return self.skeleton.outputs(samples.take()[0])
        if id(samples.x) not in shared:
            shared[id(samples.x)] = self.skeleton.outputs(samples.x)
        return Output(*(t[samples.index] for t in shared[id(samples.x)]))

    def _score(
        self, server: Bundle, client: int, own: PrototypeBank, output: Output, central: Output | None, how: Judging
    ) -> Scores:
        scored_by = self.method.prototype_scores
        bank = self.method.evaluation_bank(server, own)
        known = bank.restricted(self.data.clients[client].classes) if how.candidates == "own" else bank
        y = samples_of(self.data, client, how).labels
        scores = score_client(output.embedding, output.logits, y, known, scored_by)
        votes: np.ndarray | None = None if central is None else vote(central.embedding, central.logits, bank, scored_by)
        scores = replace(scores, votes=votes)
        pictured = how.snapshot and client < SNAPSHOT_CLIENTS
        if client >= how.silhouette and not pictured:
            return scores
        # evenly spread over the test set, which may be sorted by class
        rows = torch.linspace(0, len(y) - 1, min(len(y), SHAPE_SAMPLES), device=y.device).round().long()
        z, y = output.embedding[rows], y[rows]
        return replace(
            scores,
            silhouette=silhouette(z, y) if client < how.silhouette else None,
            snapshot=Snapshot.of(z, y, bank) if pictured else None,
        )

    # --- states ---------------------------------------------------------------------------------------------------
    def export(self) -> dict[int, ClientState]:
        return dict(self.clients)

    def restore(self, states: Mapping[int, ClientState]) -> None:
        self.clients = {
            c: ClientState({k: v.to(self.device) for k, v in s.weights.items()}, s.optimiser, s.memory.to(self.device))
            for c, s in states.items()
        }

    def close(self) -> None:
        """Nothing to release."""


def samples_of(data: FederatedData, client: int, how: Judging) -> Samples:
    own = data.clients[client]
    samples = own.test if how.part == "test" else own.validation
    assert samples is not None
    return samples
