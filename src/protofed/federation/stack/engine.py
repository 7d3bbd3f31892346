"""The engine that stacks clients: who is trained with whom, and how a stack is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...bank import PrototypeBank
from ...data.types import FederatedData
from ...evaluate import Board, Confusions
from ...methods.client import Weights
from ...models.base import Output
from ...models.convolution import UnfoldConv2d, with_convolutions
from ...models.skeleton import Skeleton
from ...parts import Predict, Received
from ...wire import Bundle
from ..engine import Downloads, PlainEngine, SharedStore, in_order
from ..judge import Candidates, Evaluation, SampleSet, Visit, samples_of, score, shape
from ..local import ClientState, Outcome, outcome_of, with_memory
from ..rule import largest_group
from .batches import padded
from .outputs import StackedOutputs, predicted_classes, stacked_outputs
from .training import Job, Stack, train_stack

T = TypeVar("T")
ALONE = 256  # a client with at least so many samples is evaluated by itself: its own calls are long enough


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
        sizes = self.sizes.training()
        ordered = sorted(clients, key=lambda c: -sizes[c])
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
        states = self.trained_from(downloads.clients)
        for (client, audience), state in zip(downloads.audience.items(), states, strict=True):
            received = shared.get(audience) if state.memory.empty else None
            if received is None:
                received = with_memory(self.message(downloads, client), state.memory)
                if state.memory.empty:
                    shared[audience] = received
            jobs.append(Job(client, state, self.data.clients[client], received))
        return jobs

    def evaluate(self, downloads: Downloads, options: Evaluation) -> Board:
        """Score the clients, one stack after another."""
        stacked, alone = self._divided(downloads.clients, options)
        if not stacked:
            return super().evaluate(downloads, options)
        candidates = Candidates(self.method.predict, options)
        boards = [self._judged(visits, candidates) for visits in self._stacks(downloads.only(stacked), options)]
        if alone:
            boards.append(super().evaluate(downloads.only(alone), options))
        return Board.joined(boards, downloads.clients)

    def _divided(self, clients: Sequence[int], options: Evaluation) -> tuple[list[int], list[int]]:
        """The clients that are evaluated in stacks, and the others. There is nothing to stack where clients share a model,
        and nothing is saved where each has many samples."""
        own, tuning = self.own_models(clients), self.method.predict.tuning > 0
        sizes = self.sizes.of(options.part)
        stacked = [client for client in clients if client in own and (tuning or sizes[client] < ALONE)] if own else []
        if not stacked:
            return [], list(clients)
        together = set(stacked)
        return stacked, [client for client in clients if client not in together]

    def shares(self, downloads: Downloads, options: Evaluation) -> tuple[list[int], list[list[int]]]:
        """How an evaluation can be shared out; clients that are stacked together are one group."""
        stacked, alone = self._divided(downloads.clients, options)
        alike, groups = super().shares(downloads.only(alone), options)
        return alike, [*(self.groups(stacked) if stacked else ()), *groups]

    def visits(self, downloads: Downloads, options: Evaluation) -> Iterator[Visit]:
        """Every client with its model in a stack."""
        if not self.model_for_each:
            yield from super().visits(downloads, options)
            return
        for visits in self._stacks(downloads, options):
            yield from visits

    def _stacks(self, downloads: Downloads, options: Evaluation) -> Iterator[list[StackedVisit]]:
        """The clients of each group. Those whose samples are rows of one tensor are evaluated in one stack."""
        for group in self.groups(downloads.clients) if downloads.clients else ():
            for clients in split(group, lambda c: id(samples_of(self.data, c, options.part).x)):
                messages = [self.message(downloads, client) for client in clients]
                if self.method.predict.common:
                    begun = [self.begun(message, client) for message, client in zip(messages, clients, strict=True)]
                    messages, models = [message for message, _ in begun], self._stacked([model for _, model in begun])
                else:
                    models = self._stacked_models(downloads.only(clients))
                stack = VisitedStack(self.skeleton, models, self.data, clients)
                yield [StackedVisit(client, messages[k], stack, k, self.kept_bank) for k, client in enumerate(clients)]

    def _judged(self, visits: list[StackedVisit], candidates: Candidates) -> Board:
        """The scores of the clients of one stack. Those of which no more is measured are scored together."""
        options, stack = candidates.options, visits[0].stack
        banks: list[PrototypeBank] = []
        if options.prototypes:
            banks = [candidates.of(v.received, v.own_bank, self.data.clients[v.client])[0] for v in visits]
        alike = len({bank.means.shape for bank in banks}) < 2  # a method of several helpers has none in the beginning
        predict, data = self.method.predict, self.data
        if not alike or options.one_by_one(predict):
            return Board.of({v.client: score(v, predict, data, options) for v in visits})
        shaped = [v for v in visits if v.client < options.shaped]
        columns = stack.confusions(options.part, banks, [v.k for v in shaped], predict)
        return Board(stack.clients, *columns, {v.client: shape(v, predict, data, options, {}) for v in shaped})

    def _stacked_models(self, downloads: Downloads) -> Weights:
        """The models by which clients are evaluated, with a leading client axis."""
        if isinstance(self.states, SharedStore) and not (self.method.predict.tuning or self.inputs.own_start):
            return self.states.stacked(downloads.clients, self.start)
        return self._stacked(self._models(downloads))

    def _stacked(self, models: Sequence[Weights]) -> Weights:
        return {name: torch.stack([model[name] for model in models]) for name in self.skeleton.slots}

    def _models(self, downloads: Downloads) -> list[Weights]:
        """The model by which each client is evaluated."""
        if not self.method.predict.tuning:
            return [state.weights for state in self.trained_from(downloads.clients)]
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
    kept: dict[tuple[str, int], Output] = field(default_factory=dict)

    def outputs(self, name: SampleSet, k: int) -> Output:
        """Embeddings and logits of one of the sets of samples of the stack's client k."""
        if (name, k) in self.kept:
            return self.kept[name, k]
        if name not in self.results:
            samples = [samples_of(self.data, c, name) for c in self.clients]
            index, _ = padded([s.index for s in samples])
            self.results[name] = stacked_outputs(self.skeleton, self.weights, samples[0].x, index)
        n = len(samples_of(self.data, self.clients[k], name))
        return Output(*(t[k, :n] for t in self.results[name]))

    def confusions(
        self, name: SampleSet, banks: Sequence[PrototypeBank], kept: Sequence[int], predict: Predict
    ) -> tuple[Confusions, Confusions]:
        """The confusions of all clients by head and by prototype.

        Args:
            name: The set of samples.
            banks: The prototypes that each client chooses among; without them there are no confusions by prototype.
            kept: The clients of the stack whose outputs are kept.
            predict: The method's rule of prediction.
        """
        samples = [samples_of(self.data, c, name) for c in self.clients]
        lengths = np.array([s.index.shape[0] for s in samples])
        same = all(s.index is samples[0].index for s in samples)
        index = samples[0].index[None] if same else padded([s.index for s in samples])[0]
        classes, outputs = predicted_classes(
            self.skeleton, self.weights, samples[0].x, index, banks, predict.scores, kept
        )
        for place, k in enumerate(kept):
            self.kept[name, k] = Output(*(t[place, : lengths[k]] for t in outputs))
        labels = [samples[0].labels] * len(samples) if same else [s.labels for s in samples]
        y = torch.cat(labels).cpu().numpy()
        owner = np.repeat(np.arange(len(samples)), lengths)
        mask = np.arange(index.shape[1]) < lengths[:, None]
        by_head, *others = [Confusions.of(owner, y, p[mask], len(samples)) for p in classes]
        if not others:
            return by_head, Confusions.listed([None] * len(samples))
        distinct = {id(bank): bank for bank in banks}
        known = {key: bool(bank.known.any()) for key, bank in distinct.items()}
        return by_head, others[0].where(np.array([known[id(bank)] for bank in banks]))

    @cached_property
    def banks(self) -> PrototypeBank:
        """The prototypes of all clients of the stack."""
        clients_data = [self.data.clients[c] for c in self.clients]
        return StackedOutputs(self.skeleton, self.weights, clients_data, self.data.num_classes).banks


@dataclass
class StackedVisit:
    """One client of a stack. `kept_bank` gives its prototypes where training has computed them under this model."""

    client: int
    received: Bundle
    stack: VisitedStack
    k: int
    kept_bank: Callable[[int], PrototypeBank | None]

    def outputs(self, samples: SampleSet) -> Output:
        """Embeddings and logits of one of the client's sets of samples."""
        return self.stack.outputs(samples, self.k)

    def own_bank(self) -> PrototypeBank:
        """The prototypes of the client's labelled samples."""
        bank = self.kept_bank(self.client)
        return self.stack.banks[self.k] if bank is None else bank


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
