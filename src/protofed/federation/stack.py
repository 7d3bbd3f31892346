"""Stacked clients: one call trains all clients of one architecture.

Parameters, buffers and optimiser state get a leading client axis, and `torch.func.vmap` gives every client its own loss. The
gradient of their sum is every client's own, as no parameter belongs to two. Clients with more steps come first, so those
still training at a step are a slice, and nothing is computed for the others. A short last batch is padded with samples of
weight 0, except under batch norm, whose statistics padding would change: there, clients whose batches differ in size are
run apart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from .. import seeds
from ..bank import PrototypeBank
from ..data.types import ClientData, FederatedData, Samples
from ..data.types import Unlabelled as Pool
from ..methods.client import Pseudo, Weights
from ..models import norm
from ..models.base import Levels, Output
from ..models.convolution import UnfoldConv2d, with_convolutions
from ..models.skeleton import Skeleton, frozen
from ..parts import Batch, Received, Step, View
from ..wire import Bundle
from .batches import Task, all_samples, draws, planned_steps, view_of, viewed_pool
from .engine import Downloads, PlainEngine
from .judge import Evaluation, SampleSet, Visit, samples_of
from .local import (
    ClientState,
    Outcome,
    PseudoLabels,
    Training,
    check_trainable,
    finished,
    one_sample_is_too_few,
    step_size,
    what_is_not_finite,
    with_memory,
)
from .optimiser import Optimiser

Tensors = dict[str, Tensor]
T = TypeVar("T")
EVAL_SAMPLES = 4096  # samples of all clients together in one evaluation call


@dataclass(frozen=True)
class Job:
    """One client's part in a stack."""

    client: int
    state: ClientState
    data: ClientData
    received: Received


class StackedNetwork:
    """One client's slice of the stack, inside `vmap`."""

    def __init__(self, module: nn.Module, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        self.module, self.params, self.buffers = module, params, buffers

    def __call__(self, x: Tensor, params: Mapping[str, Tensor] | None = None) -> Output:
        return functional_call(self.module, {**self.buffers, **(self.params if params is None else params)}, (x,))

    def levels(self, x: Tensor) -> Levels:
        return functional_call(self.module, {**self.buffers, **self.params}, (x,), {"levels": True})

    def frozen(self, x: Tensor, weights: Mapping[str, Tensor]) -> Output:
        return frozen(self.module, x, weights)


@dataclass(frozen=True)
class RowPlan:
    """Rows of every client's steps, side by side: `rows[k, s, b]` into the shared tensor, `weight` 0 where there is none."""

    rows: Tensor
    weight: Tensor
    sizes: list[list[int]]  # of each client at each of its steps
    extra: Tensor | None = None  # a number beside each row

    @classmethod
    def make(
        cls,
        chosen: Sequence[Sequence[Tensor]],
        data: Sequence[Samples | Pool],
        extra: Sequence[Sequence[Tensor]] = (),
    ) -> RowPlan:
        sizes = [[rows.shape[0] for rows in own] for own in chosen]
        longest, widest = max(map(len, sizes)), max(max(s, default=0) for s in sizes)
        indices = [d.index.cpu() for d in data]
        first = torch.stack([i[0] if len(i) else torch.zeros((), dtype=torch.int64) for i in indices])
        rows = first[:, None, None].repeat(1, longest, widest)
        weight = torch.zeros(len(chosen), longest, widest)
        flat = torch.cat([i[torch.cat(list(own))] for i, own in zip(indices, chosen, strict=True)])
        # where each sample goes: its step's first place, and how far into the batch it is
        lengths = torch.tensor([n for own in sizes for n in own])
        begin = torch.tensor([(k * longest + s) * widest for k, own in enumerate(sizes) for s in range(len(own))])
        into = torch.arange(len(flat)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        place = begin.repeat_interleave(lengths) + into
        rows.view(-1)[place] = flat
        weight.view(-1)[place] = 1.0
        beside: Tensor | None = None
        if extra:
            beside = torch.zeros_like(weight)
            beside.view(-1)[place] = torch.cat([v.float() for own in extra for v in own])
        device = data[0].x.device
        return cls(rows.to(device), weight.to(device), sizes, None if beside is None else beside.to(device))


@dataclass(frozen=True)
class StepPlan:
    """Every client's steps. Clients with more come first."""

    counts: list[int]
    labelled: RowPlan
    unlabelled: RowPlan | None

    @classmethod
    def make(cls, steps: Sequence[Sequence[Step]], data: Sequence[ClientData]) -> StepPlan:
        episodes = any(step.support is not None for own in steps for step in own)
        support = [[_none_is_empty(step.support) for step in own] for own in steps] if episodes else []
        labelled = RowPlan.make([[s.labelled for s in own] for own in steps], [d.labelled for d in data], support)
        pools = [d.unlabelled for d in data if d.unlabelled is not None]
        unlabelled: RowPlan | None = None
        if len(pools) == len(data) and any(step.unlabelled is not None for own in steps for step in own):
            unlabelled = RowPlan.make([[_none_is_empty(s.unlabelled) for s in own] for own in steps], pools)
        return cls([len(own) for own in steps], labelled, unlabelled)

    def sizes(self, step: int, active: int) -> list[tuple[int, int]]:
        """How many labelled and unlabelled samples each client still training has at a step."""
        pool = self.unlabelled
        return [(self.labelled.sizes[k][step], 0 if pool is None else pool.sizes[k][step]) for k in range(active)]


def _none_is_empty(rows: Tensor | None) -> Tensor:
    return torch.zeros(0, dtype=torch.int64) if rows is None else rows


def _common(values: Sequence[Any]) -> tuple[Any, Any]:
    """A value for all clients: shared as it is where it is the same object, stacked where it is not."""
    first = values[0]
    if all(v is first for v in values):
        return first, None
    leaves, spec = pytree.tree_flatten(first)
    columns = zip(*(pytree.tree_flatten(v)[0] for v in values), strict=True)
    stacked = [torch.stack([torch.as_tensor(v) for v in column]) for column in columns]
    return pytree.tree_unflatten(stacked, spec), (pytree.tree_unflatten([0] * len(leaves), spec) if leaves else None)


def train_stack(task: Task, skeleton: Skeleton, jobs: Sequence[Job], round: int) -> list[Training]:
    """The steps of many clients' training at once; results in the order of `jobs`."""
    stack = Stack(task, skeleton, jobs, round)
    with torch.random.fork_rng(devices=[]):
        seeds.start_default_stream(stack.device, task.seed, "dropout", stack.jobs[0].client, round)
        for step in range(stack.plan.counts[0]):
            stack.take_step(step)
    return stack.results()


class Stack:
    """Clients in training together, those with more steps first."""

    def __init__(self, task: Task, skeleton: Skeleton, jobs: Sequence[Job], round: int) -> None:
        for job in jobs:
            check_trainable(task, job.data, job.client)
        planned = [list(planned_steps(task, job.data, job.client, round)) for job in jobs]
        self.order = sorted(range(len(jobs)), key=lambda k: -len(planned[k]))
        self.task, self.skeleton, self.round = task, skeleton, round
        self.jobs, self.steps = [jobs[k] for k in self.order], [planned[k] for k in self.order]
        self.plan = StepPlan.make(self.steps, [j.data for j in self.jobs])
        self.device = jobs[0].data.labelled.x.device
        self.streams: list[torch.Generator] = []
        if task.augmentation is not None or task.learner.feed.draws:
            self.streams = [seeds.torch_stream(task.seed, "views", j.client, round) for j in self.jobs]
        self.alone = any(isinstance(m, _BatchNorm) for m in skeleton.module.modules())
        self.totals: dict[str, Tensor] = {}
        self.pseudo = [PseudoLabels() for _ in jobs]
        self._load()
        self.received, self.dims = _common([j.received for j in self.jobs])
        self.shared = self.dims is None  # what was received is the same for all: it need not go through vmap

    def _load(self) -> None:
        """Parameters, buffers and optimiser states of all clients side by side."""
        skeleton, local = self.skeleton, self.task.local
        starts = [self.task.learner.begin(j.state.weights, j.received) for j in self.jobs]
        weights = {name: torch.stack([s[name] for s in starts]) for name in skeleton.slots}
        self.buffers = {name: weights.pop(name) for name in skeleton.slots if name not in skeleton.params}
        # gradients of a linear layer's matrices come transposed; the fused optimiser wants both to lie alike
        layers = skeleton.module.named_modules()
        matrices = {f"{name}.weight" for name, layer in layers if type(layer) is nn.Linear}
        self.params = {n: w.mT.contiguous().mT if n in matrices else w for n, w in weights.items()}
        kept = [j.state.optimiser if local.keep_optimiser else {} for j in self.jobs]
        self.optimiser = Optimiser(local, self.params, kept, self.round)
        skeleton.module.train()

    def _loss(
        self, params: Tensors, buffers: Tensors, batch: Tensors, received: Received
    ) -> tuple[Tensors, Tensors, tuple[Tensor, ...]]:
        own = {name: value.clone() for name, value in buffers.items()}  # batch norm writes into them
        net = StackedNetwork(self.skeleton.module, params, own)
        terms, pseudo = self.task.loss(net, Batch(**batch), received, self.round)
        return terms, own, () if pseudo is None else tuple(t.detach() for t in pseudo)

    def _loss_of_all(
        self, params: Tensors, buffers: Tensors, batch: Tensors
    ) -> tuple[Tensors, Tensors, tuple[Tensor, ...]]:
        return self._loss(params, buffers, batch, self.received)

    def take_step(self, s: int) -> None:
        """One step of all clients that still have one; under batch norm, those with batches of one size at a time."""
        active = sum(count > s for count in self.plan.counts)
        loss, dims = (self._loss_of_all, 0) if self.shared else (self._loss, (0, 0, 0, self.dims))
        losses = vmap(loss, in_dims=dims, randomness="different")
        for rows, widths in _groups(self.plan.sizes(s, active), self.alone):
            members = range(active)[rows] if isinstance(rows, slice) else rows.tolist()
            drawn = [draws(self.task, self.steps[k][s], self.streams[k]) if self.streams else {} for k in members]
            batch, counted = _batch(self.task, self.plan, self.jobs, rows, s, widths, drawn)
            received = () if self.shared else (pytree.tree_map(lambda t, r=rows: t[r], self.received),)
            params = {n: p[rows].detach().requires_grad_() for n, p in self.params.items()}
            with one_sample_is_too_few(self.jobs[0].client):
                buffers = {n: b[rows] for n, b in self.buffers.items()}
                terms, moved, pseudo = losses(params, buffers, batch, *received)
            total = torch.stack(list(terms.values())).sum()
            gradient = torch.autograd.grad(total, list(params.values()), allow_unused=True, materialize_grads=True)
            self.optimiser.step(gradient, rows)
            for name, value in moved.items():
                self.buffers[name][rows] = value.detach()
            for name, value in terms.items():
                if name not in self.totals:
                    self.totals[name] = torch.zeros(len(self.jobs), device=self.device)
                self.totals[name][rows] += value.detach() * counted
            for place, k in enumerate(members if pseudo else ()):
                step = self.steps[k][s]
                labelled = 0 if step.unlabelled is None else len(step.unlabelled)
                self.pseudo[k].add(step, Pseudo(*(t[place, :labelled] for t in pseudo)))

    def results(self) -> list[Training]:
        """Every client after training, in the order of the jobs."""
        task, local = self.task, self.task.local
        seen = torch.tensor([sum(map(step_size, own)) for own in self.steps], dtype=torch.float32, device=self.device)
        means = {name: (value / seen).tolist() for name, value in self.totals.items()}
        whole = {**{name: p.contiguous() for name, p in self.params.items()}, **self.buffers}
        if norm.collects(self.skeleton.module):
            _collect(self.skeleton, whole, self.buffers, self.jobs)
        whole = {name: whole[name] for name in self.skeleton.slots}
        outputs = StackedOutputs(self.skeleton, whole, [j.data for j in self.jobs], task.num_classes)
        finite = _finite_rows(whole, len(self.jobs))
        results: dict[int, Training] = {}
        for k, job in enumerate(self.jobs):
            terms = {name: values[k] for name, values in means.items()}
            own = {name: value[k] for name, value in whole.items()}
            failure = what_is_not_finite(terms, {} if finite[k] else own)
            trained = None if failure else StackedClient(outputs, k, own, task, job, self.round)
            kept = self.optimiser.export(k) if local.keep_optimiser else {}
            counts = self.pseudo[k].counts(task, job.data, job.client)
            results[self.order[k]] = Training(trained, kept, terms, failure, counts)
        return [results[k] for k in range(len(self.jobs))]


def _batch(
    task: Task,
    plan: StepPlan,
    jobs: Sequence[Job],
    rows: slice | Tensor,
    s: int,
    widths: tuple[int, int],
    drawn: Sequence[Mapping[str, Tensor]],
) -> tuple[Tensors, Tensor]:
    """The batch of some clients at a step, and how many samples each client's loss counts for."""
    own, pool = plan.labelled, plan.unlabelled
    x, y = jobs[0].data.labelled.x, jobs[0].data.labelled.y
    wide, wide_pool = widths
    index, weight = own.rows[rows, s, :wide], own.weight[rows, s, :wide]
    samples = _viewed(task, task.learner.feed.labelled_view, x[index], [d.get("labelled") for d in drawn])
    batch = {"x": samples, "y": y[index], "weight": weight}
    counted = weight.sum(1)
    if own.extra is not None:
        batch["support"] = own.extra[rows, s, :wide]
    if pool is None or not wide_pool:
        return batch, counted
    chosen, mask = pool.rows[rows, s, :wide_pool], pool.weight[rows, s, :wide_pool]
    unlabelled = jobs[0].data.unlabelled
    assert unlabelled is not None
    u = unlabelled.x[chosen]
    batch |= {"unlabelled": u, "unlabelled_weight": mask}
    for name in task.learner.feed.views:
        batch[name] = _viewed(task, name, u, [d.get(name) for d in drawn])
    if task.learner.feed.draws:
        batch["draws"] = _filled([d.get("draws") for d in drawn], wide_pool, u.device)
    return batch, torch.where(counted > 0, counted, mask.sum(1))


def _viewed(task: Task, view: View, x: Tensor, drawn: Sequence[Tensor | None]) -> Tensor:
    """A view of every client's samples `[K, n, ...]`, made in one call."""
    if view == "none" or task.augmentation is None:
        return x
    numbers = _filled(drawn, x.shape[1], x.device)
    return view_of(task.augmentation, view, x.flatten(0, 1), numbers.flatten(0, 1)).unflatten(0, x.shape[:2])


def _filled(drawn: Sequence[Tensor | None], n: int, device: torch.device) -> Tensor:
    """Clients' random numbers side by side, zeros behind those of clients with fewer samples."""
    there = [d for d in drawn if d is not None]
    result = torch.zeros(len(drawn), n, there[0].shape[1])
    for k, numbers in enumerate(drawn):
        if numbers is not None:
            result[k, : len(numbers)] = numbers
    return result.to(device)


def _collect(skeleton: Skeleton, weights: Mapping[str, Tensor], buffers: Tensors, jobs: Sequence[Job]) -> None:
    """Static batch norm's statistics, client by client: padding must not enter them."""
    for k, job in enumerate(jobs):
        skeleton.load({name: value[k] for name, value in weights.items()})
        skeleton.collect(all_samples(job.data))
        for name in buffers:
            buffers[name][k] = skeleton.slots[name]


def _groups(sizes: Sequence[tuple[int, int]], alone: bool) -> list[tuple[slice | Tensor, tuple[int, int]]]:
    """Which clients take a step together, and how many labelled and unlabelled samples wide their batch is."""
    distinct = sorted(set(sizes))
    if not alone or len(distinct) == 1:
        return [(slice(0, len(sizes)), (max(n for n, _ in distinct), max(n for _, n in distinct)))]
    return [(torch.tensor([k for k, n in enumerate(sizes) if n == size]), size) for size in distinct]


def _finite_rows(weights: Mapping[str, Tensor], clients: int) -> list[bool]:
    good = torch.ones(clients, dtype=torch.bool)
    for value in weights.values():
        good &= torch.isfinite(value.reshape(clients, -1).sum(1)).cpu()
    return good.tolist()


@dataclass(frozen=True)
class StackedOutputs:
    """Embeddings and logits of every client's labelled set, computed together when the first client asks."""

    skeleton: Skeleton
    weights: Mapping[str, Tensor]
    clients: list[ClientData]
    num_classes: int

    @property
    def data(self) -> list[Samples]:
        return [c.labelled for c in self.clients]

    @cached_property
    def outputs(self) -> tuple[Output, Tensor, Tensor]:
        """Outputs `[K, n, ·]`, labels `[K, n]` and weights `[K, n]`, padded to the largest client."""
        index, weight = padded([d.index for d in self.data])
        return stacked_outputs(self.skeleton, self.weights, self.data[0].x, index), self.data[0].y[index], weight

    @cached_property
    def banks(self) -> PrototypeBank:
        output, y, weight = self.outputs
        return self._means(output.embedding, y, weight)

    @cached_property
    def low_banks(self) -> PrototypeBank:
        index, weight = padded([d.index for d in self.data])
        low = stacked_levels(self.skeleton, self.weights, self.data[0].x, index).low
        return self._means(low, self.data[0].y[index], weight)

    def _means(self, z: Tensor, y: Tensor, weight: Tensor) -> PrototypeBank:
        return vmap(lambda z, y, w: PrototypeBank.from_embeddings(z, y, self.num_classes, w))(z, y, weight)


def padded(indices: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Index lists side by side, filled up with their first entry (0 where there is none); weight 0 where filled."""
    widest = max(len(i) for i in indices)
    if all(len(i) == widest for i in indices):
        rows = torch.stack(list(indices))
        return rows, torch.ones(rows.shape, device=rows.device)
    fill = [i[:1] if len(i) else i.new_zeros(1) for i in indices]
    rows = torch.stack([torch.cat([i, f.expand(widest - len(i))]) for i, f in zip(indices, fill, strict=True)])
    weight = torch.stack([(torch.arange(widest, device=i.device) < len(i)).float() for i in indices])
    return rows, weight


def stacked_outputs(skeleton: Skeleton, weights: Mapping[str, Tensor], x: Tensor, index: Tensor) -> Output:
    """Eval mode, no gradient, in pieces: client k's model on rows `index[k]`."""
    return Output(*_run_stacked(skeleton, weights, x, index, {}))


def stacked_levels(skeleton: Skeleton, weights: Mapping[str, Tensor], x: Tensor, index: Tensor) -> Levels:
    """The same with low-level features."""
    return Levels(*_run_stacked(skeleton, weights, x, index, {"levels": True}))


def _run_stacked(
    skeleton: Skeleton, weights: Mapping[str, Tensor], x: Tensor, index: Tensor, options: Mapping[str, Any]
) -> list[Tensor]:
    skeleton.module.eval()
    run: Callable[[Mapping[str, Tensor], Tensor], tuple[Tensor, ...]] = vmap(
        lambda w, b: functional_call(skeleton.module, dict(w), (b,), dict(options))
    )
    piece = max(1, EVAL_SAMPLES // len(index))
    with torch.no_grad():
        parts = [run(weights, x[rows]) for rows in index.split(piece, dim=1)]
    return [torch.cat(column, 1) for column in zip(*parts, strict=True)]


@dataclass(frozen=True)
class StackedClient:
    """One trained client of a stack."""

    stack: StackedOutputs
    k: int
    weights: Mapping[str, Tensor]
    task: Task
    job: Job
    round: int

    @property
    def num_unlabelled(self) -> int:
        return len(self.job.data.unlabelled or ())

    @property
    def generator(self) -> torch.Generator:
        return seeds.torch_stream(self.task.seed, "return", self.job.client, self.round)

    def unlabelled(self, view: View = "none", weights: Mapping[str, Tensor] | None = None) -> Output:
        x = viewed_pool(self.task, self.job.data, view, self.job.client, self.round)
        return self.run(x) if weights is None else self.stack.skeleton.outputs(x, weights)

    def run(self, x: Tensor) -> Output:
        own = {name: value[self.k : self.k + 1] for name, value in self.stack.weights.items()}
        output = stacked_outputs(self.stack.skeleton, own, x, torch.arange(len(x), device=x.device)[None])
        return Output(*(t[0] for t in output))

    def outputs(self) -> tuple[Output, Batch]:
        output, y, weight = self.stack.outputs
        samples = self.stack.data[self.k]
        n = len(samples)
        own = Output(output.embedding[self.k, :n], output.logits[self.k, :n])
        return own, Batch(samples.take()[0], y[self.k, :n], weight[self.k, :n])

    @cached_property
    def _bank(self) -> PrototypeBank:
        return self.stack.banks[self.k]

    def bank(self) -> PrototypeBank:
        return self._bank

    @property
    def own_bank(self) -> PrototypeBank | None:
        return self.__dict__.get("_bank")

    def low_bank(self) -> PrototypeBank:
        return self.stack.low_banks[self.k]


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
