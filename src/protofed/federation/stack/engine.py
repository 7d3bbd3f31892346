"""The engine that stacks clients: who is trained with whom, and how a stack is evaluated."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...bank import PrototypeBank
from ...data.types import FederatedData
from ...methods.client import Weights
from ...models.base import Output
from ...models.convolution import UnfoldConv2d, with_convolutions
from ...models.skeleton import Skeleton
from ...parts import Received
from ...wire import Bundle
from ..engine import Downloads, PlainEngine
from ..judge import Evaluation, SampleSet, Visit, samples_of
from ..local import ClientState, Outcome, finished, with_memory
from .batches import padded
from .outputs import StackedOutputs, stacked_outputs
from .training import Job, train_stack

T = TypeVar("T")


class StackEngine(PlainEngine):
    """Trains the chosen clients as stacks of at most `largest`."""

    largest = 256
    unfold = False

    def use_unfold(self, on: bool) -> StackEngine:
        """Convolutions as unfold and matrix product in place of grouped convolution."""
        if on and not self.unfold:
            self.unfold = on
            self.skeleton = Skeleton(with_convolutions(self.skeleton.module, UnfoldConv2d))
        return self

    def train(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        jobs = self.jobs(downloads)
        outcomes: dict[int, Outcome] = {}
        for group in self._stacks(jobs, _stackable(jobs)):
            for job, done in zip(group, train_stack(self.task, self.skeleton, group, downloads.round), strict=True):
                where = job.client, downloads.round, self.states.__setitem__
                outcomes[job.client] = finished(self.task, done, job.data, job.received, *where)
        yield from ((client, outcomes[client]) for client in downloads.clients)

    def jobs(self, downloads: Downloads) -> list[Job]:
        """Every client's part. Clients of one audience that remember nothing hold the very same."""
        jobs = []
        shared: dict[int, Received] = {}
        for client, audience in downloads.audience.items():
            state = self.state(client)
            received = shared.get(audience) if state.memory.empty else None
            if received is None:
                received = with_memory(self.message(downloads, client), state.memory)
                if state.memory.empty:
                    shared[audience] = received
            jobs.append(Job(client, state, self.data.clients[client], received))
        return jobs

    def visits(self, downloads: Downloads, how: Evaluation) -> Iterator[Visit]:
        if not self.model_for_each:
            yield from super().visits(downloads, how)  # one model: nothing to stack
            return
        tensors = [id(samples_of(self.data, c, how.part).x) for c in downloads.clients]
        for clients in self._stacks(downloads.clients, tensors):
            models = self._models(downloads.only(clients))
            weights = {name: torch.stack([own[name] for own in models]) for name in self.skeleton.slots}
            group = VisitedStack(self.skeleton, weights, self.data, clients)
            for k, client in enumerate(clients):
                bank = None if self.method.predict.tuning or client not in self.states else self.states[client].bank
                yield StackedVisit(client, self.message(downloads, client), group, k, bank)

    def _stacks(self, items: Sequence[T], keys: Sequence[Hashable]) -> list[list[T]]:
        """Stacks of at most `largest`, each of items with one key."""
        groups: dict[Hashable, list[T]] = {}
        for item, key in zip(items, keys, strict=True):
            groups.setdefault(key, []).append(item)
        return [g[i : i + self.largest] for g in groups.values() for i in range(0, len(g), self.largest)]

    def _models(self, downloads: Downloads) -> list[Weights]:
        """What each client is evaluated by."""
        if not self.method.predict.tuning:
            return [self.state(c).weights for c in downloads.clients]
        jobs = []
        for client in downloads.clients:
            received = with_memory(self.message(downloads, client), Bundle())
            jobs.append(Job(client, ClientState(self.start), self.data.clients[client], received))
        models: dict[int, Weights] = {}
        for group in self._stacks(jobs, _stackable(jobs)):
            for job, done in zip(group, train_stack(self.tuning, self.skeleton, group, 0), strict=True):
                # tuning that went to NaN: what was sent is the best there is
                sent = {**self.start, **job.received.weights}
                models[job.client] = sent if done.trained is None else done.trained.weights
        return [models[c] for c in downloads.clients]


@dataclass
class VisitedStack:
    """Clients' models side by side, over sets of samples that are run together when the first client asks."""

    skeleton: Skeleton
    weights: Weights
    data: FederatedData
    clients: Sequence[int]
    known: dict[str, Output] = field(default_factory=dict)

    def outputs(self, which: SampleSet) -> Output:
        if which not in self.known:
            samples = [samples_of(self.data, c, which) for c in self.clients]
            index, _ = padded([s.index for s in samples])
            self.known[which] = stacked_outputs(self.skeleton, self.weights, samples[0].x, index)
        return self.known[which]

    @cached_property
    def banks(self) -> PrototypeBank:
        own = [self.data.clients[c] for c in self.clients]
        return StackedOutputs(self.skeleton, self.weights, own, self.data.num_classes).banks


@dataclass
class StackedVisit:
    """One client of a stack."""

    client: int
    received: Bundle
    stack: VisitedStack
    k: int
    bank: PrototypeBank | None

    def outputs(self, samples: SampleSet) -> Output:
        n = len(samples_of(self.stack.data, self.client, samples))
        return Output(*(t[self.k, :n] for t in self.stack.outputs(samples)))

    def own_bank(self) -> PrototypeBank:
        return self.stack.banks[self.k] if self.bank is None else self.bank


def _stackable(jobs: Sequence[Job]) -> list[Hashable]:
    """Which clients can be stacked: rows of the same tensors, messages of one structure, all with a pool or none."""
    structures: dict[int, Hashable] = {}  # most often all have received the same
    keys: list[Hashable] = []
    for job in jobs:
        if id(job.received) not in structures:
            structures[id(job.received)] = _structure(job.received)
        pool = job.data.unlabelled
        x = id(job.data.labelled.x), id(pool.x) if pool is not None and len(pool) else 0
        keys.append((*x, structures[id(job.received)]))
    return keys


def _structure(received: Received) -> Hashable:
    """Only messages of one structure can be stacked: a client in its first round remembers nothing yet."""
    leaves, spec = pytree.tree_flatten(received)
    return repr(spec), tuple(tuple(v.shape) if isinstance(v, Tensor) else () for v in leaves)
