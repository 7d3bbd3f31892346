"""Stacked clients: one call trains all clients of one architecture.

Parameters, buffers and optimiser state get a leading client axis, and `torch.func.vmap` gives every client its own loss. The
gradient of their sum is every client's own, as no parameter belongs to two. Clients with more steps come first, so those
still training at a step are a slice, and nothing is computed for the others. A short last batch is padded with samples of
weight 0, except under batch norm, whose statistics padding would change: there, clients whose batches differ in size are
run apart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from .. import seeds, wire
from ..bank import PrototypeBank
from ..data.types import ClientData, Samples, Unlabelled
from ..evaluate import Scores
from ..methods.base import Batch, Pseudo, Received, Step, View
from ..models import norm
from ..models.base import Levels, Output
from ..wire import Bundle, Message
from .convolution import UnfoldConv2d, with_convolutions
from .engine import Judging, PlainEngine, samples_of
from .local import (
    ClientState,
    Outcome,
    Skeleton,
    Task,
    Training,
    all_samples,
    as_loss,
    check_trainable,
    client_size,
    draws,
    frozen,
    holds,
    one_sample_is_too_few,
    planned_steps,
    pseudo_counts,
    step_size,
    view_of,
    viewed_pool,
    what_is_not_finite,
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
        data: Sequence[Samples | Unlabelled],
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
    """`train_client` for many clients at once; results in the order of `jobs`."""
    method, local, module = task.method, task.local, skeleton.module
    for job in jobs:
        check_trainable(method, job.data, job.client)
    planned = [list(planned_steps(task, job.data, job.client, round)) for job in jobs]
    order = sorted(range(len(jobs)), key=lambda k: -len(planned[k]))
    jobs_sorted, steps = [jobs[k] for k in order], [planned[k] for k in order]
    plan = StepPlan.make(steps, [j.data for j in jobs_sorted])
    random = task.augmentation is not None or method.random_numbers > 0
    streams = [seeds.torch_stream(task.seed, "views", j.client, round) for j in jobs_sorted] if random else []
    device = jobs[0].data.labelled.x.device

    starts = [method.client_start(j.state.weights, j.received) for j in jobs_sorted]
    names = [*skeleton.slots, *(name for name in starts[0] if name not in skeleton.slots)]
    weights = {name: torch.stack([s[name] for s in starts]) for name in names}
    buffers = {name: weights.pop(name) for name in skeleton.slots if name not in skeleton.params}
    # gradients of a linear layer's matrices come transposed; the fused optimiser wants both to lie alike
    matrices = {f"{name}.weight" for name, layer in module.named_modules() if type(layer) is nn.Linear}
    params = {n: w.mT.contiguous().mT if n in matrices else w for n, w in weights.items()}
    kept = [j.state.optimiser if local.keep_optimiser else {} for j in jobs_sorted]
    optimiser = Optimiser(local, params, kept, round)
    received, received_dims = _common([j.received for j in jobs_sorted])

    def loss(p: Tensors, b: Tensors, batch: Tensors, has: Received) -> tuple[Tensors, Tensors, tuple[Tensor, ...]]:
        own = {name: value.clone() for name, value in b.items()}  # batch norm writes into them
        terms, pseudo = as_loss(method.client_loss(StackedNetwork(module, p, own), Batch(**batch), has, round))
        return terms, own, () if pseudo is None else tuple(t.detach() for t in pseudo)

    def loss_of_all(p: Tensors, b: Tensors, batch: Tensors) -> tuple[Tensors, Tensors, tuple[Tensor, ...]]:
        return loss(p, b, batch, received)  # the same for all: it need not go through vmap

    same = received_dims is None
    losses_of = vmap(
        loss_of_all if same else loss,
        in_dims=0 if same else (0, 0, 0, received_dims),
        randomness="different",
    )
    alone = any(isinstance(m, _BatchNorm) for m in module.modules())
    totals: dict[str, Tensor] = {}
    guesses: list[list[Pseudo]] = [[] for _ in jobs]
    guessed: list[list[Tensor]] = [[] for _ in jobs]
    module.train()
    with torch.random.fork_rng(devices=[]):
        seeds.start_default_stream(device, task.seed, "dropout", jobs_sorted[0].client, round)
        for s in range(plan.counts[0]):
            active = sum(count > s for count in plan.counts)
            for rows, widths in _groups(plan.sizes(s, active), alone):
                members = range(active)[rows] if isinstance(rows, slice) else rows.tolist()
                drawn = [draws(task, steps[k][s], streams[k]) if random else {} for k in members]
                batch, counted = _batch(task, plan, jobs_sorted, rows, s, widths, drawn)
                has = () if same else (pytree.tree_map(lambda t, r=rows: t[r], received),)
                here = {n: p[rows].detach().requires_grad_() for n, p in params.items()}
                with one_sample_is_too_few(jobs_sorted[0].client):
                    terms, moved, guess = losses_of(here, {n: b[rows] for n, b in buffers.items()}, batch, *has)
                total = torch.stack(list(terms.values())).sum()
                gradient = torch.autograd.grad(total, list(here.values()), allow_unused=True, materialize_grads=True)
                optimiser.step(gradient, rows)
                for name, value in moved.items():
                    buffers[name][rows] = value.detach()
                for name, value in terms.items():
                    if name not in totals:
                        totals[name] = torch.zeros(len(jobs), device=device)
                    totals[name][rows] += value.detach() * counted
                for place, k in enumerate(members if guess else ()):
                    chosen = steps[k][s].unlabelled
                    if chosen is not None:
                        guesses[k].append(Pseudo(*(t[place, : len(chosen)] for t in guess)))
                        guessed[k].append(chosen)

    seen = torch.tensor([sum(map(step_size, own)) for own in steps], dtype=torch.float32, device=device)
    means = {name: (value / seen).tolist() for name, value in totals.items()}
    params = {name: p.contiguous() for name, p in params.items()}
    if norm.collects(module):
        _collect(skeleton, method.collapse({**params, **buffers}), buffers, jobs_sorted)
    whole = {name: {**params, **buffers}[name] for name in names}
    stacked = StackedOutputs(skeleton, method.collapse(whole), [j.data for j in jobs_sorted], task.num_classes)
    finite = _finite_rows(whole, len(jobs))
    results: list[Training] = [Training(j.state, None, {}) for j in jobs]
    for k, job in enumerate(jobs_sorted):
        losses = {name: values[k] for name, values in means.items()}
        own = {name: value[k] for name, value in whole.items()}
        counts = pseudo_counts(task, job.data, job.client, guesses[k], guessed[k])
        problem = what_is_not_finite(losses, {} if finite[k] else own)
        if problem:
            results[order[k]] = Training(job.state, None, losses, problem, counts)
            continue
        trained = StackedClient(stacked, k, own, task, job, round)
        upload = method.client_return(trained, job.received, round)
        after = ClientState(
            {name: value.clone() for name, value in own.items()} if method.private_model else own,
            optimiser.export(k) if local.keep_optimiser else {},
            method.client_remember(trained, job.received, round),
        )
        results[order[k]] = Training(after, upload, losses, "", counts)
    return results


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
    samples = _viewed(task, task.method.labelled_view, x[index], [d.get("labelled") for d in drawn])
    batch = {"x": samples, "y": y[index], "weight": weight}
    counted = weight.sum(1)
    if own.extra is not None:
        batch["support"] = own.extra[rows, s, :wide]
    if pool is None or not wide_pool:
        return batch, counted
    chosen, there = pool.rows[rows, s, :wide_pool], pool.weight[rows, s, :wide_pool]
    unlabelled = jobs[0].data.unlabelled
    assert unlabelled is not None
    u = unlabelled.x[chosen]
    batch |= {"unlabelled": u, "unlabelled_weight": there}
    for name in task.method.views:
        batch[name] = _viewed(task, name, u, [d.get(name) for d in drawn])
    if task.method.random_numbers:
        batch["numbers"] = _filled([d.get("numbers") for d in drawn], wide_pool, u.device)
    return batch, torch.where(counted > 0, counted, there.sum(1))


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
    def num_samples(self) -> Tensor:
        return torch.tensor(len(self.stack.data[self.k]))

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

    def bank(self) -> PrototypeBank:
        return self.stack.banks[self.k]

    def low_bank(self) -> PrototypeBank:
        return self.stack.low_banks[self.k]


class StackEngine(PlainEngine):
    """Trains the chosen clients as stacks of at most `largest`."""

    largest = 256
    unfold = False

    def use_unfold(self, on: bool) -> StackEngine:
        """Convolutions as unfold and matrix product in place of grouped convolution."""
        if on != self.unfold:
            self.unfold = on
            self.skeleton = Skeleton(with_convolutions(self.skeleton.module, UnfoldConv2d)) if on else self._build()
        return self

    def train(self, round: int, downloads: Mapping[int, Message]) -> dict[int, Outcome]:
        arrived: dict[int, Bundle] = {}
        jobs = []
        shared: dict[int, Received] = {}
        for client, message in downloads.items():
            if id(message) not in arrived:
                arrived[id(message)] = wire.decode(message, f"server's message to client {client}").to(self.device)
            state = self.state(client)
            received = shared.get(id(message)) if state.memory.empty else None
            if received is None:
                received = holds(arrived[id(message)], state)
                if state.memory.empty:
                    shared[id(message)] = received
            jobs.append(Job(client, state, self.data.clients[client], received))
        outcomes = {}
        for group in self._stacks(jobs, _alike(jobs)):
            for job, done in zip(group, train_stack(self.task, self.skeleton, group, round), strict=True):
                self.keep(job.client, done.state)
                encoded = None if done.upload is None else wire.encode(done.upload)
                size = client_size(self.method, job.data)
                outcomes[job.client] = Outcome(encoded, size, done.terms, done.failure, done.pseudo)
        return outcomes

    def evaluate(self, server: Bundle, clients: Sequence[int], how: Judging = Judging()) -> list[Scores]:  # noqa: B008
        if not self.model_for_each:
            return super().evaluate(server, clients, how)  # one model: nothing to stack
        server = server.to(self.device)
        samples = [samples_of(self.data, c, how) for c in clients]
        scores: dict[int, Scores] = {}
        for group in self._stacks(list(zip(clients, samples, strict=True)), [id(s.x) for s in samples]):
            scores |= self._evaluate_group(server, group, how)
        return [scores[c] for c in clients]

    def _stacks(self, items: Sequence[T], alike: Sequence[Hashable]) -> list[list[T]]:
        """Stacks of at most `largest`, each of clients that are alike: same tensor of samples, same kind of message."""
        groups: dict[Hashable, list[T]] = {}
        for item, key in zip(items, alike, strict=True):
            groups.setdefault(key, []).append(item)
        return [g[i : i + self.largest] for g in groups.values() for i in range(0, len(g), self.largest)]

    def _evaluate_group(self, server: Bundle, group: Sequence[tuple[int, Samples]], how: Judging) -> dict[int, Scores]:
        clients, samples = [c for c, _ in group], [t for _, t in group]
        models = [self.method.collapse(own) for own in self._models(server, clients)]
        weights = {name: torch.stack([own[name] for own in models]) for name in self.skeleton.slots}
        data = [self.data.clients[c] for c in clients]
        own = StackedOutputs(self.skeleton, weights, data, self.data.num_classes).banks
        index, _ = padded([t.index for t in samples])
        output = stacked_outputs(self.skeleton, weights, samples[0].x, index)
        central: Output | None = None
        if how.votes and self.data.central_test is not None:
            rows = self.data.central_test.index.expand(len(clients), -1)
            central = stacked_outputs(self.skeleton, weights, self.data.central_test.x, rows)
        scores = {}
        for k, (client, test) in enumerate(group):
            mine = Output(*(t[k, : len(test)] for t in output))
            voting = None if central is None else Output(*(t[k] for t in central))
            scores[client] = self._score(server, client, own[k], mine, voting, how)
        return scores

    def _models(self, server: Bundle, clients: Sequence[int]) -> list[Mapping[str, Tensor]]:
        """What each client is evaluated by."""
        if not self.method.tuning_epochs:
            return [self.state(c).weights for c in clients]
        jobs = []
        for client in clients:
            state = ClientState(self.start)
            sent = holds(self.method.send(server, client, 0), state)
            jobs.append(Job(client, state, self.data.clients[client], sent))
        models: dict[int, Mapping[str, Tensor]] = {}
        for group in self._stacks(jobs, _alike(jobs)):
            for job, done in zip(group, train_stack(self.tuning, self.skeleton, group, 0), strict=True):
                # tuning that went to NaN: what was sent is the best there is
                sent_weights = {**self.start, **job.received.weights}
                models[job.client] = sent_weights if done.failure else done.state.weights
        return [models[c] for c in clients]


def _alike(jobs: Sequence[Job]) -> list[Hashable]:
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
