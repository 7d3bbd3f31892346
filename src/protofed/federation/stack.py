"""Stacked clients: one call trains all clients of one architecture.

Parameters, buffers and optimiser state get a leading client axis; `torch.func.vmap` over `grad` gives every client its own
gradient. Clients with more steps come first, so those still training at a step are a slice, and nothing is computed for
the others. A short last batch is padded with samples of weight 0, except under batch norm, whose statistics padding would
change: there, clients whose batches differ in size are run apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from .. import seeds, wire
from ..bank import PrototypeBank
from ..data.types import ClientData, Samples
from ..evaluate import Scores
from ..methods.base import Batch, Received, Step
from ..models.base import Levels, Output
from ..wire import Bundle
from .engine import Judging, PlainEngine, samples_of
from .local import (
    ClientState,
    Outcome,
    Skeleton,
    Task,
    check_trainable,
    holds,
    one_sample_is_too_few,
    what_is_not_finite,
)
from .optimiser import Optimiser

Tensors = dict[str, Tensor]
T = TypeVar("T")
EVAL_SAMPLES = 4096  # samples of all clients together in one evaluation call


class UnfoldConv2d(nn.Conv2d):
    """Convolution as unfold and one matrix product per client: under `vmap` a batched product, not a grouped convolution."""

    def forward(self, x: Tensor) -> Tensor:
        n, _, height, width = x.shape
        padding, stride, size, dilation = (
            pair if isinstance(pair, tuple) else (0, 0)
            for pair in (self.padding, self.stride, self.kernel_size, self.dilation)
        )
        out = [
            (extent + 2 * padding[i] - dilation[i] * (size[i] - 1) - 1) // stride[i] + 1
            for i, extent in enumerate((height, width))
        ]
        columns = nn.functional.unfold(x, size, dilation, padding, stride)
        columns = columns.permute(1, 0, 2).reshape(columns.shape[1], -1)
        product = self.weight.reshape(self.out_channels, -1) @ columns
        if self.bias is not None:
            product = product + self.bias[:, None]
        return product.reshape(self.out_channels, n, *out).transpose(0, 1)


def with_unfolded_convolutions(module: nn.Module) -> nn.Module:
    """A copy whose plain convolutions are `UnfoldConv2d`; parameter names stay."""
    twin = copy.deepcopy(module)
    for layer in twin.modules():
        if type(layer) is nn.Conv2d and layer.groups == 1 and not isinstance(layer.padding, str):
            layer.__class__ = UnfoldConv2d
    return twin


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


@dataclass(frozen=True)
class StepPlan:
    """Every client's steps, side by side: `rows[k, s, b]` into the shared tensors, `weight` 0 where there is none."""

    rows: Tensor
    weight: Tensor
    counts: list[int]  # steps of each client, falling
    sizes: list[list[int]]  # batch size of each client at each of its steps

    @classmethod
    def make(cls, steps: Sequence[Sequence[Step]], data: Sequence[Samples]) -> StepPlan:
        counts = [len(s) for s in steps]
        sizes = [[len(step.labelled) for step in client] for client in steps]
        longest, widest = max(counts), max(max(s) for s in sizes)
        indices = [d.index.cpu() for d in data]
        rows = torch.stack([i[0] for i in indices])[:, None, None].repeat(1, longest, widest)
        weight = torch.zeros(len(steps), longest, widest)
        chosen = torch.cat([i[torch.cat([s.labelled for s in own])] for i, own in zip(indices, steps, strict=True)])
        # where each sample goes: its step's first place, and how far into the batch it is
        lengths = torch.tensor([n for own in sizes for n in own])
        begin = torch.tensor([(k * longest + s) * widest for k, own in enumerate(sizes) for s in range(len(own))])
        into = torch.arange(len(chosen)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        place = begin.repeat_interleave(lengths) + into
        rows.view(-1)[place] = chosen
        weight.view(-1)[place] = 1.0
        device = data[0].x.device
        return cls(rows.to(device), weight.to(device), counts, sizes)


def _common(values: Sequence[Any]) -> tuple[Any, Any]:
    """A value for all clients: shared as it is where it is the same object, stacked where it is not."""
    first = values[0]
    if all(v is first for v in values):
        return first, None
    leaves, spec = pytree.tree_flatten(first)
    columns = zip(*(pytree.tree_flatten(v)[0] for v in values), strict=True)
    stacked = [torch.stack([torch.as_tensor(v) for v in column]) for column in columns]
    return pytree.tree_unflatten(stacked, spec), (pytree.tree_unflatten([0] * len(leaves), spec) if leaves else None)


def train_stack(
    task: Task, skeleton: Skeleton, jobs: Sequence[Job], round: int
) -> list[tuple[ClientState, Bundle | None, dict[str, float], str]]:
    """`train_client` for many clients at once; results in the order of `jobs`."""
    method, local, module = task.method, task.local, skeleton.module
    for job in jobs:
        check_trainable(job.data, job.client)
    planned = [_steps(task, job, round) for job in jobs]
    order = sorted(range(len(jobs)), key=lambda k: -len(planned[k]))
    jobs_sorted, steps = [jobs[k] for k in order], [planned[k] for k in order]
    plan = StepPlan.make(steps, [j.data.labelled for j in jobs_sorted])
    views = [seeds.torch_stream(task.seed, "views", j.client, round) for j in jobs_sorted]
    x, y = jobs[0].data.labelled.x, jobs[0].data.labelled.y

    starts = [method.client_start(j.state.weights, j.received) for j in jobs_sorted]
    weights = {name: torch.stack([s[name] for s in starts]) for name in skeleton.slots}
    params = {name: weights.pop(name) for name in skeleton.params}
    buffers = weights
    kept = [j.state.optimiser if local.keep_optimiser else {} for j in jobs_sorted]
    optimiser = Optimiser(local, params, kept)
    received, received_dims = _common([j.received for j in jobs_sorted])

    def loss(p: Tensors, b: Tensors, batch: Tensors, has: Received) -> tuple[Tensor, tuple[Tensors, Tensors]]:
        own = {name: value.clone() for name, value in b.items()}  # batch norm writes into them
        terms = method.client_loss(StackedNetwork(module, p, own), Batch(**batch), has, round)
        return torch.stack(list(terms.values())).sum(), (terms, own)

    gradient = vmap(grad(loss, has_aux=True), in_dims=(0, 0, 0, received_dims), randomness="different")
    alone = any(isinstance(m, _BatchNorm) for m in module.modules())
    totals: dict[str, Tensor] = {}
    module.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.derive(task.seed, "dropout", jobs_sorted[0].client, round))
        for s in range(plan.counts[0]):
            active = sum(count > s for count in plan.counts)
            for rows, width in _groups([size[s] for size in plan.sizes[:active]], alone):
                index, weight = plan.rows[rows, s, :width], plan.weight[rows, s, :width]
                batch = {"x": x[index], "y": y[index], "weight": weight}
                batch |= _unlabelled(
                    task,
                    jobs_sorted,
                    steps,
                    views,
                    range(active)[rows] if isinstance(rows, slice) else rows.tolist(),
                    s,
                )
                has = received if received_dims is None else pytree.tree_map(lambda t, r=rows: t[r], received)
                with one_sample_is_too_few(jobs_sorted[0].client):
                    grads, (terms, moved) = gradient(
                        {n: p[rows] for n, p in params.items()}, {n: b[rows] for n, b in buffers.items()}, batch, has
                    )
                optimiser.step([grads[name] for name in params], rows)
                for name, value in moved.items():
                    buffers[name][rows] = value
                for name, value in terms.items():
                    if name not in totals:
                        totals[name] = torch.zeros(len(jobs), device=x.device)
                    totals[name][rows] += value.detach() * weight.sum(1)

    seen = torch.tensor([sum(s) for s in plan.sizes], dtype=torch.float32, device=x.device)
    means = {name: (value / seen).tolist() for name, value in totals.items()}
    whole = {name: {**params, **buffers}[name] for name in skeleton.slots}
    stacked = StackedOutputs(skeleton, whole, [j.data.labelled for j in jobs_sorted], task.num_classes)
    finite = _finite_rows(whole, len(jobs))
    results: list[tuple[ClientState, Bundle | None, dict[str, float], str]] = [(j.state, None, {}, "") for j in jobs]
    for k, job in enumerate(jobs_sorted):
        losses = {name: values[k] for name, values in means.items()}
        own = {name: value[k] for name, value in whole.items()}
        problem = what_is_not_finite(losses, {} if finite[k] else own)
        if problem:
            results[order[k]] = (job.state, None, losses, problem)
            continue
        trained = StackedClient(stacked, k, own)
        upload = method.client_return(trained, job.received, round)
        after = ClientState(
            {name: value.clone() for name, value in own.items()} if method.private_model else own,
            optimiser.export(k) if local.keep_optimiser else {},
            method.client_remember(trained, job.received, round),
        )
        results[order[k]] = (after, upload, losses, "")
    return results


def _steps(task: Task, job: Job, round: int) -> list[Step]:
    stream = seeds.torch_stream(task.seed, "batches", job.client, round)
    pool, local = job.data.unlabelled, task.local
    return list(task.method.steps(job.data.labelled.labels, len(pool or ()), local.epochs, local.batch, stream))


def _unlabelled(
    task: Task,
    jobs: Sequence[Job],
    steps: Sequence[Sequence[Step]],
    views: Sequence[torch.Generator],
    clients: Sequence[int],
    s: int,
) -> Tensors:
    """Weak and strong views of this step's unlabelled samples, side by side; nothing where no client has any."""
    pairs = []
    for k in clients:
        pool, chosen = jobs[k].data.unlabelled, steps[k][s].unlabelled
        if pool is None or chosen is None:
            return {}
        pairs.append(task.method.views(pool.take(chosen), views[k]))
    widest = max(len(weak) for weak, _ in pairs)
    return {
        "weak": torch.stack([_filled(weak, widest) for weak, _ in pairs]),
        "strong": torch.stack([_filled(strong, widest) for _, strong in pairs]),
        "unlabelled_weight": torch.stack(
            [(torch.arange(widest, device=weak.device) < len(weak)).float() for weak, _ in pairs]
        ),
    }


def _filled(x: Tensor, n: int) -> Tensor:
    return torch.cat([x, x[:1].expand(n - len(x), *x.shape[1:])])


def _groups(sizes: Sequence[int], alone: bool) -> list[tuple[slice | Tensor, int]]:
    """Which clients take a step together, and how wide their batch is."""
    distinct = sorted(set(sizes))
    if not alone or len(distinct) == 1:
        return [(slice(0, len(sizes)), max(distinct))]
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
    weights: Tensors
    data: list[Samples]
    num_classes: int

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
    """Index lists side by side, filled up with their first entry; weight 0 where filled."""
    widest = max(len(i) for i in indices)
    rows = torch.stack([torch.cat([i, i[:1].expand(widest - len(i))]) for i in indices])
    weight = torch.stack([(torch.arange(widest, device=i.device) < len(i)).float() for i in indices])
    return rows, weight


def stacked_outputs(skeleton: Skeleton, weights: Tensors, x: Tensor, index: Tensor) -> Output:
    """Eval mode, no gradient, in pieces: client k's model on rows `index[k]`."""
    return Output(*_run_stacked(skeleton, weights, x, index, {}))


def stacked_levels(skeleton: Skeleton, weights: Tensors, x: Tensor, index: Tensor) -> Levels:
    """The same with low-level features."""
    return Levels(*_run_stacked(skeleton, weights, x, index, {"levels": True}))


def _run_stacked(
    skeleton: Skeleton, weights: Tensors, x: Tensor, index: Tensor, options: Mapping[str, Any]
) -> list[Tensor]:
    skeleton.module.eval()
    run: Callable[[Tensors, Tensor], tuple[Tensor, ...]] = vmap(
        lambda w, b: functional_call(skeleton.module, w, (b,), dict(options))
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

    @property
    def num_samples(self) -> Tensor:
        return torch.tensor(len(self.stack.data[self.k]))

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
            self.skeleton = Skeleton(with_unfolded_convolutions(self.skeleton.module)) if on else self._build()
        return self

    def train(self, round: int, downloads: Mapping[int, bytes]) -> dict[int, Outcome]:
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
        for group in self._stacks(jobs, [(id(job.data.labelled.x), _structure(job.received)) for job in jobs]):
            for job, (after, upload, terms, failure) in zip(
                group, train_stack(self.task, self.skeleton, group, round), strict=True
            ):
                self.keep(job.client, after)
                encoded = None if upload is None else wire.encode(upload)
                outcomes[job.client] = Outcome(encoded, len(job.data.labelled), terms, failure)
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
        models = self._models(server, clients)
        weights = {name: torch.stack([own[name] for own in models]) for name in self.skeleton.slots}
        data = [self.data.clients[c] for c in clients]
        own = StackedOutputs(self.skeleton, weights, [d.labelled for d in data], self.data.num_classes).banks
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
        for group in self._stacks(jobs, [(id(job.data.labelled.x), _structure(job.received)) for job in jobs]):
            for job, (after, _, _, failure) in zip(
                group, train_stack(self.tuning, self.skeleton, group, 0), strict=True
            ):
                # tuning that went to NaN: what was sent is the best there is
                models[job.client] = {**self.start, **job.received.weights} if failure else after.weights
        return [models[c] for c in clients]


def _structure(received: Received) -> Hashable:
    """Only messages of one structure can be stacked: a client in its first round remembers nothing yet."""
    leaves, spec = pytree.tree_flatten(received)
    return repr(spec), tuple(tuple(v.shape) if isinstance(v, Tensor) else () for v in leaves)
