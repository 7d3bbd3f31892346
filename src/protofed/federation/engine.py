"""The plain engine: clients one after another. Short and obviously right; other engines are tested against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .. import seeds, wire
from ..bank import PrototypeBank
from ..data.types import FederatedData
from ..evaluate import Scores, score_client
from ..methods.base import Method
from ..models.base import ModelSpec, Output
from ..wire import Bundle
from .local import ClientState, Outcome, Skeleton, Task, train_client
from .optimiser import LocalSettings


class Engine(Protocol):
    """Who trains the clients. It holds their states; the round itself is the same for every engine.

    Messages come and go encoded, so an engine may pass them on to another process as they are.
    """

    skeleton: Skeleton
    start: Mapping[str, Tensor]

    def train(self, round: int, downloads: Mapping[int, bytes]) -> dict[int, Outcome]:
        """Train the clients that were sent something; each client's state afterwards is kept."""
        ...

    def evaluate(self, server: Bundle, clients: Sequence[int], part: str = "test") -> list[Scores]:
        """Each client scored on its own test (or validation) samples, by the model it would use."""
        ...

    def export(self) -> dict[int, ClientState]:
        """The states worth saving: those of clients that took part and keep something."""
        ...

    def restore(self, states: Mapping[int, ClientState]) -> None: ...

    def close(self) -> None: ...


class PlainEngine:
    """Holds the clients' states and trains those it is told to."""

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
    ) -> None:
        self.channels_last = channels_last
        self.task = Task(method, local, seed, data.num_classes)
        self.method, self.model, self.data = method, model, data
        self.device = data.clients[0].labelled.x.device
        self.own_start = initial == "own" and method.private_model
        self.skeleton = self._build()
        self.start: Mapping[str, Tensor] = self.skeleton.weights()
        self.clients: dict[int, ClientState] = {}

    def _build(self, *who: int) -> Skeleton:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.derive(self.task.seed, "initialisation", *who))
            module = self.model.build(self.data.sample_shape, self.data.num_classes)
        return Skeleton(module.to(self.device), self.channels_last)

    def state(self, client: int) -> ClientState:
        """A client's state; one that has not taken part yet holds its initial model."""
        if client in self.clients:
            return self.clients[client]
        return ClientState(self._build(client).weights() if self.own_start else self.start)

    def keep(self, client: int, state: ClientState) -> None:
        if not self.method.private_model:
            state.weights = self.start  # the global model replaces it next round: nothing to keep
        if self.method.private_model or state.optimiser or not state.memory.empty:
            self.clients[client] = state  # a dict keeps the tensors; shared memory takes a copy

    def train(self, round: int, downloads: Mapping[int, bytes]) -> dict[int, Outcome]:
        outcomes = {}
        arrived: dict[int, Bundle] = {}
        for client, message in downloads.items():
            if id(message) not in arrived:  # the same for all: decoded once
                arrived[id(message)] = wire.decode(message, f"server's message to client {client}").to(self.device)
            data = self.data.clients[client]
            after, upload, terms, failure = train_client(
                self.task, self.skeleton, self.state(client), data, arrived[id(message)], client, round
            )
            encoded = None if upload is None else wire.encode(upload)
            if isinstance(self.clients, dict) and upload is not None:
                after.weights = self.skeleton.weights() if self.method.private_model else self.start
                after.memory = after.memory.copied()
            self.keep(client, after)
            outcomes[client] = Outcome(encoded, len(data.labelled), terms, failure)
        return outcomes

    def evaluate(self, server: Bundle, clients: Sequence[int], part: str = "test") -> list[Scores]:
        shared: dict[int, Output] = {}
        result = []
        server = server.to(self.device)
        if not self.method.private_model:
            self.skeleton.load({**self.start, **server.weights})
        for client in clients:
            data = self.data.clients[client]
            samples = data.test if part == "test" else data.validation
            assert samples is not None
            if self.method.private_model:
                self.skeleton.load(self.state(client).weights)
                z, logits = self.skeleton.outputs(samples.take()[0])
            elif self.data.central_test is not None and samples.x is self.data.central_test.x:
                # one model for all: a central test set is run once, not once per client
                if id(samples.x) not in shared:
                    shared[id(samples.x)] = self.skeleton.outputs(samples.x)
                z, logits = (t[samples.index] for t in shared[id(samples.x)])
            else:
                z, logits = self.skeleton.outputs(samples.take()[0])
            x, y = data.labelled.take()
            own = PrototypeBank.from_embeddings(self.skeleton.outputs(x).embedding, y, self.data.num_classes)
            bank = self.method.evaluation_bank(server, own).restricted(data.classes)
            result.append(score_client(z, logits, samples.labels, bank, self.method.prototype_scores))
        return result

    def export(self) -> dict[int, ClientState]:
        return self.clients

    def restore(self, states: Mapping[int, ClientState]) -> None:
        self.clients = {
            c: ClientState({k: v.to(self.device) for k, v in s.weights.items()}, s.optimiser, s.memory.to(self.device))
            for c, s in states.items()
        }

    def close(self) -> None:
        """Nothing to release."""
