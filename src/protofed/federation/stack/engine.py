"""The engine that stacks clients: who is trained with whom, and how a stack is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
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
from ..batches import client_size
from ..engine import Downloads, PlainEngine, in_order
from ..judge import Evaluation, SampleSet, Visit, samples_of
from ..local import ClientState, Outcome, finished, with_memory
from ..rule import largest_group
from .batches import padded
from .outputs import StackedOutputs, stacked_outputs
from .training import Job, Stack, train_stack

T = TypeVar("T")


class StackEngine(PlainEngine):
    """Trains the chosen clients as stacks, one for each group."""

    unfold = False

    def use_unfold(self, on: bool) -> StackEngine:
        """Convolutions as unfold and matrix product in place of grouped convolution."""
        if on and not self.unfold:
            self.unfold = on
            self.skeleton = Skeleton(with_convolutions(self.skeleton.module, UnfoldConv2d))
        return self

    def groups(self, clients: Sequence[int]) -> list[list[int]]:
        """Who is stacked with whom.

        A client's last bits depend on who is beside it in the stack, so the groups follow from the clients alone: those of
        like size together, in groups of like number. A group is itself one group.
        """
        ordered = sorted(clients, key=lambda c: -client_size(self.method.feed, self.data.clients[c]))
        number = -(-len(ordered) // largest_group(self.parameters[0], self.device.type != "cpu"))
        return [ordered[len(ordered) * k // number : len(ordered) * (k + 1) // number] for k in range(number)]

    def train(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        return in_order(downloads.clients, self._trained(downloads))

    def _trained(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        for group in self.groups(downloads.clients):
            for jobs in _alike(self.jobs(downloads.only(group))):
                for job, done in zip(jobs, train_stack(self.task, self.skeleton, jobs, downloads.round), strict=True):
                    where = job.client, downloads.round, self.states.__setitem__
                    yield job.client, finished(self.task, done, job.data, job.received, *where)

    def rehearse(self, downloads: Downloads) -> None:
        """One step of the clients, of which nothing is kept: it raises where model or method cannot be stacked."""
        with torch.random.fork_rng(devices=[]):
            for jobs in _alike(self.jobs(downloads)):
                Stack(self.task, self.skeleton, jobs, downloads.round).take_step(0)

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
        for group in self.groups(downloads.clients):
            yield from self._visited(downloads.only(group), how)

    def _visited(self, downloads: Downloads, how: Evaluation) -> Iterator[Visit]:
        """The clients of one group; those whose samples are rows of one tensor side by side."""
        for clients in split(downloads.clients, lambda c: id(samples_of(self.data, c, how.part).x)):
            models = self._models(downloads.only(clients))
            weights = {name: torch.stack([own[name] for own in models]) for name in self.skeleton.slots}
            group = VisitedStack(self.skeleton, weights, self.data, clients)
            for k, client in enumerate(clients):
                bank = None if self.method.predict.tuning or client not in self.states else self.states[client].bank
                yield StackedVisit(client, self.message(downloads, client), group, k, bank)

    def _models(self, downloads: Downloads) -> list[Weights]:
        """What each client is evaluated by."""
        if not self.method.predict.tuning:
            return [self.state(c).weights for c in downloads.clients]
        jobs = []
        for client in downloads.clients:
            received = with_memory(self.message(downloads, client), Bundle())
            jobs.append(Job(client, ClientState(self.start), self.data.clients[client], received))
        models: dict[int, Weights] = {}
        for group in _alike(jobs):
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


def _alike(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that can be stacked: rows of the same tensors, messages of one structure, all with a pool or none."""
    structures: dict[int, Hashable] = {}  # most often all have received the same

    def key(job: Job) -> Hashable:
        if id(job.received) not in structures:
            structures[id(job.received)] = _structure(job.received)
        pool = job.data.unlabelled
        x = id(job.data.labelled.x), id(pool.x) if pool is not None and len(pool) else 0
        return *x, structures[id(job.received)]

    return split(jobs, key)


def split(items: Sequence[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Items with one key together, in their order."""
    found: dict[Hashable, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def _structure(received: Received) -> Hashable:
    """Only messages of one structure can be stacked: a client in its first round remembers nothing yet."""
    leaves, spec = pytree.tree_flatten(received)
    return repr(spec), tuple(tuple(v.shape) if isinstance(v, Tensor) else () for v in leaves)
