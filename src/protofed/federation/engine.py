"""The plain engine: clients one after another. Short and obviously right; other engines are tested against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .. import seeds
from ..bank import PrototypeBank
from ..data.types import FederatedData, Samples
from ..evaluate import Scores, score_client
from ..methods.base import Method
from ..models.base import ModelSpec, Output
from ..wire import Bundle
from .local import ClientState, LocalSettings, Outcome, Skeleton, train_client


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
    ) -> None:
        self.method, self.data, self.local, self.seed, self.initial = method, data, local, seed, initial
        self.model = model
        self.skeleton = self._build()
        self.start = self.skeleton.initial_weights()
        self.clients: dict[int, ClientState] = {}

    def _build(self, *who: int) -> Skeleton:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.derive(self.seed, "initialisation", *who))
            return Skeleton(self.model.build(self.data.sample_shape, self.data.num_classes))

    def state(self, client: int) -> ClientState:
        """A client's state; one that has not taken part yet holds its initial model."""
        if client in self.clients:
            return self.clients[client]
        own = self.initial == "own" and self.method.private_model
        return ClientState(self._build(client).initial_weights() if own else self.start)

    def train(self, round: int, downloads: Mapping[int, Bundle]) -> dict[int, Outcome]:
        outcomes = {}
        for client, received in downloads.items():
            after, outcomes[client] = train_client(
                self.method,
                self.skeleton,
                self.state(client),
                self.data.clients[client],
                received,
                client=client,
                round=round,
                local=self.local,
                seed=self.seed,
                num_classes=self.data.num_classes,
            )
            if not self.method.private_model:
                after.weights = self.start  # the global model replaces it next round: nothing to keep
            if self.method.private_model or after.optimiser or after.memory != Bundle():
                self.clients[client] = after
        return outcomes

    def evaluate(self, server: Bundle, clients: Sequence[int], part: str = "test") -> list[Scores]:
        """Each client scored on its own test (or validation) samples, by the model it would use."""
        shared: dict[int, Output] = {}
        result = []
        for client in clients:
            data = self.data.clients[client]
            samples = data.test if part == "test" else data.validation
            assert samples is not None
            if self.method.private_model:
                weights: Mapping[str, Tensor] = self.state(client).weights
                z, logits = self.skeleton.outputs(weights, samples.take()[0])
            else:
                weights = {**self.start, **server.weights}
                z, logits = self._shared_outputs(shared, weights, samples)
            x, y = data.labelled.take()
            own = PrototypeBank.from_embeddings(self.skeleton.outputs(weights, x).embedding, y, self.data.num_classes)
            bank = self.method.evaluation_bank(server, own).restricted(data.classes)
            result.append(score_client(z, logits, samples.labels, bank, self.method.prototype_scores))
        return result

    def _shared_outputs(self, cache: dict[int, Output], weights: Mapping[str, Tensor], samples: Samples) -> Output:
        """One model for all: a central test set is run once, not once per client."""
        central = self.data.central_test
        if central is None or samples.x is not central.x:
            return self.skeleton.outputs(weights, samples.take()[0])
        if id(samples.x) not in cache:
            cache[id(samples.x)] = self.skeleton.outputs(weights, samples.x)
        whole = cache[id(samples.x)]
        return Output(whole.embedding[samples.index], whole.logits[samples.index])
