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
from ..local import ClientState, Outcome, outcome_of, with_memory
from ..rule import largest_group
from .batches import padded
from .outputs import StackedOutputs, stacked_outputs
from .training import Job, Stack, train_stack

T = TypeVar("T")


class StackEngine(PlainEngine):
    """Trains the clients of a round in stacks, one for each group."""

    unfold = False

    def use_unfold(self, on: bool) -> StackEngine:
        """Replace grouped convolutions by unfold and matrix product, and return the engine."""
        if on and not self.unfold:
            self.unfold = on
            self.skeleton = Skeleton(with_convolutions(self.skeleton.module, UnfoldConv2d))
        return self

    def groups(self, clients: Sequence[int]) -> list[list[int]]:
        """The groups of clients that are stacked.

        A client's last bits depend on the other clients of its stack, so the groups follow from the clients alone:
        clients are ordered by size and cut into groups of nearly equal length. The clients of a group, given alone, are
        one group.
        """
        ordered = sorted(clients, key=lambda c: -client_size(self.method.feed, self.data.clients[c]))
        number = -(-len(ordered) // largest_group(self.parameters[0], self.device.type != "cpu"))
        return [ordered[len(ordered) * k // number : len(ordered) * (k + 1) // number] for k in range(number)]

    def train(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        """Train the clients, one stack after another, and keep their states."""
        return in_order(downloads.clients, self._trained(downloads))

    def _trained(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        for group in self.groups(downloads.clients):
            for jobs in _stackable_groups(self.jobs(downloads.only(group))):
                for job, training in zip(
                    jobs, train_stack(self.task, self.skeleton, jobs, downloads.round), strict=True
                ):
                    destination = job.client, downloads.round, self.states.__setitem__
                    yield job.client, outcome_of(self.task, training, job.data, job.received, *destination)

    def rehearse(self, downloads: Downloads) -> None:
        """Take one step without keeping anything. It raises an error where model or method cannot be stacked."""
        with torch.random.fork_rng(devices=[]):
            for jobs in _stackable_groups(self.jobs(downloads)):
                Stack(self.task, self.skeleton, jobs, downloads.round).take_step(0)

    def jobs(self, downloads: Downloads) -> list[Job]:
        """The job of each client. Clients of one audience without a memory share one `Received`."""
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

    def visits(self, downloads: Downloads, options: Evaluation) -> Iterator[Visit]:
        """Every client with its model in a stack."""
        if not self.model_for_each:
            yield from super().visits(downloads, options)  # with one model for all there is nothing to stack
            return
        for group in self.groups(downloads.clients):
            yield from self._visited(downloads.only(group), options)

    def _visited(self, downloads: Downloads, options: Evaluation) -> Iterator[Visit]:
        """The clients of one group. Those whose samples are rows of one tensor are evaluated in one stack."""
        for clients in split(downloads.clients, lambda c: id(samples_of(self.data, c, options.part).x)):
            models = self._models(downloads.only(clients))
            weights = {name: torch.stack([model[name] for model in models]) for name in self.skeleton.slots}
            group = VisitedStack(self.skeleton, weights, self.data, clients)
            for k, client in enumerate(clients):
                bank = None if self.method.predict.tuning or client not in self.states else self.states[client].bank
                yield StackedVisit(client, self.message(downloads, client), group, k, bank)

    def _models(self, downloads: Downloads) -> list[Weights]:
        """The model by which each client is evaluated."""
        if not self.method.predict.tuning:
            return [self.state(c).weights for c in downloads.clients]
        jobs = []
        for client in downloads.clients:
            received = with_memory(self.message(downloads, client), Bundle())
            jobs.append(Job(client, ClientState(self.start), self.data.clients[client], received))
        models: dict[int, Weights] = {}
        for group in _stackable_groups(jobs):
            for job, training in zip(group, train_stack(self.tuning, self.skeleton, group, 0), strict=True):
                # where tuning became NaN, the model that was sent is evaluated
                sent_model = {**self.start, **job.received.weights}
                models[job.client] = sent_model if training.trained is None else training.trained.weights
        return [models[c] for c in downloads.clients]


@dataclass
class VisitedStack:
    """The models of several clients in a stack. Outputs are computed when the first client needs them."""

    skeleton: Skeleton
    weights: Weights
    data: FederatedData
    clients: Sequence[int]
    results: dict[str, Output] = field(default_factory=dict)

    def outputs(self, name: SampleSet) -> Output:
        """Embeddings and logits of one of the clients' sets of samples, `[K, n, ·]`."""
        if name not in self.results:
            samples = [samples_of(self.data, c, name) for c in self.clients]
            index, _ = padded([s.index for s in samples])
            self.results[name] = stacked_outputs(self.skeleton, self.weights, samples[0].x, index)
        return self.results[name]

    @cached_property
    def banks(self) -> PrototypeBank:
        """The prototypes of all clients of the stack."""
        clients_data = [self.data.clients[c] for c in self.clients]
        return StackedOutputs(self.skeleton, self.weights, clients_data, self.data.num_classes).banks


@dataclass
class StackedVisit:
    """One client of a stack."""

    client: int
    received: Bundle
    stack: VisitedStack
    k: int
    bank: PrototypeBank | None

    def outputs(self, samples: SampleSet) -> Output:
        """Embeddings and logits of one of the client's sets of samples."""
        n = len(samples_of(self.stack.data, self.client, samples))
        return Output(*(t[self.k, :n] for t in self.stack.outputs(samples)))

    def own_bank(self) -> PrototypeBank:
        """The prototypes of the client's labelled samples."""
        return self.stack.banks[self.k] if self.bank is None else self.bank


def _stackable_groups(jobs: Sequence[Job]) -> list[list[Job]]:
    """Groups of jobs that can be stacked: rows of the same tensors, messages of one structure, all with a pool or none."""
    structures: dict[int, Hashable] = {}  # most often all jobs share one message

    def key(job: Job) -> Hashable:
        if id(job.received) not in structures:
            structures[id(job.received)] = _structure(job.received)
        pool = job.data.unlabelled
        x = id(job.data.labelled.x), id(pool.x) if pool is not None and len(pool) else 0
        return *x, structures[id(job.received)]

    return split(jobs, key)


def split(items: Sequence[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Groups of the items that have the same key, in the order of the items."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _structure(received: Received) -> Hashable:
    """The structure of a message. Messages can be stacked only where it is the same; in its first round a client has no
    memory yet."""
    leaves, spec = pytree.tree_flatten(received)
    return repr(spec), tuple(tuple(v.shape) if isinstance(v, Tensor) else () for v in leaves)
