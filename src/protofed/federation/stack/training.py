"""The training of many clients in one call.

Parameters, buffers and optimiser state get a leading client axis, and `torch.func.vmap` gives every client its own
loss. The gradient of their sum holds the gradient of each client, as no parameter belongs to two clients. Clients with
more steps come first, so those still training at a step are a slice, and nothing is computed for the others. A short
last batch is padded with samples of weight 0, except under batch norm, whose statistics padding would change: there,
clients whose batches differ in size are run apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from ... import seeds
from ...bank import PrototypeBank
from ...data.types import ClientData
from ...methods.client import Pseudo
from ...models import norm
from ...models.base import Levels, Output
from ...models.skeleton import Skeleton, frozen
from ...parts import Batch, Received, View
from ..batches import Task, all_samples, draws, planned_steps, prepared_of, viewed, viewed_pool
from ..gradients import GradientNorms
from ..local import (
    ClientState,
    PseudoLabels,
    Training,
    check_trainable,
    one_sample_is_too_few,
    what_is_not_finite,
)
from ..optimiser import Optimiser
from .batches import StepPlan, Tensors, as_sequence, batch_of, padded_rows, together
from .outputs import StackedOutputs, stacked_outputs

SHARED = 2**18  # numbers of a tensor that is not copied for each client of a stack


@dataclass(frozen=True)
class Job:
    """One client of a stack: its state, its data and the message it was sent."""

    client: int
    state: ClientState
    data: ClientData
    received: Received


class StackedNetwork:
    """One client's slice of the stack, inside `vmap`."""

    def __init__(self, skeleton: Skeleton, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        self.module, self.params, self.buffers, self.tied = skeleton.module, params, buffers, skeleton.tied

    def __call__(self, x: Tensor, params: Mapping[str, Tensor] | None = None) -> Output:
        weights = {**self.buffers, **(self.params if params is None else params)}
        return functional_call(self.module, weights, (x,), tie_weights=self.tied)

    def levels(self, x: Tensor) -> Levels:
        """Embedding, logits and a low-level feature of samples."""
        return functional_call(self.module, {**self.buffers, **self.params}, (x,), {"levels": True})

    def frozen(self, x: Tensor, weights: Mapping[str, Tensor]) -> Output:
        """Outputs of another model of this architecture in eval mode, without gradient."""
        return frozen(self.module, x, weights)


class ReceivedByAll:
    """What the clients of a stack were sent: one message for all, or a stack of their messages.

    Of different messages, tensors of at least `SHARED` numbers that are the very same for all clients stay one tensor.
    """

    def __init__(self, messages: Sequence[Received]) -> None:
        self.reference = messages[0]
        same = all(message is self.reference for message in messages)
        leaves, self.spec = pytree.tree_flatten(self.reference)
        columns = list(zip(*(pytree.tree_flatten(m)[0] for m in messages[: 1 if same else None]), strict=True))
        common = [same or _is_one_large_tensor(column) for column in columns]
        self.shared = {k: leaves[k] for k in range(len(leaves)) if common[k]}
        self.stacked = [
            torch.stack([torch.as_tensor(v) for v in column]) for k, column in enumerate(columns) if not common[k]
        ]

    def of_one(self, stacked: Sequence[Tensor]) -> Received:
        """One client's message, from its slices of what is stacked."""
        if not stacked:
            return self.reference
        rest = iter(stacked)
        leaves = [self.shared[k] if k in self.shared else next(rest) for k in range(self.spec.num_leaves)]
        received: Received = pytree.tree_unflatten(leaves, self.spec)
        return received


def _is_one_large_tensor(column: Sequence[Any]) -> bool:
    value = column[0]
    return isinstance(value, Tensor) and value.numel() >= SHARED and all(v is value for v in column)


def train_stack(task: Task, skeleton: Skeleton, jobs: Sequence[Job], round: int) -> list[Training]:
    """Take the steps of many clients' training at once.

    Args:
        task: What the clients have in common.
        skeleton: The architecture.
        jobs: The clients of the stack.
        round: The round.

    Returns:
        The result of each client's training, in the order of `jobs`.
    """
    stack = Stack(task, skeleton, jobs, round)
    with torch.random.fork_rng(devices=[]):
        seeds.start_default_stream(stack.device, task.seed, "dropout", stack.jobs[0].client, round)
        for step in range(stack.plan.counts[0]):
            stack.take_step(step)
    return stack.results()


class Stack:
    """Clients that are trained together. Those with more steps come first."""

    def __init__(self, task: Task, skeleton: Skeleton, jobs: Sequence[Job], round: int) -> None:
        for job in jobs:
            check_trainable(task, job.data, job.client)
        planned = [as_sequence(planned_steps(task, job.data, job.client, round)) for job in jobs]
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
        self.prepared = [prepared_of(task, skeleton, j.data, j.received, j.client, round) for j in self.jobs]
        self._load()
        self.received = ReceivedByAll([j.received for j in self.jobs])

    def _load(self) -> None:
        """Stack the parameters, buffers and optimiser states of all clients."""
        skeleton, local = self.skeleton, self.task.local
        starts = [self.task.learner.begin(j.state.weights, j.received) for j in self.jobs]
        weights = {name: torch.stack([s[name] for s in starts]) for name in skeleton.slots}
        self.buffers = {name: weights.pop(name) for name in skeleton.slots if name not in skeleton.params}
        # gradients of a linear layer's weight are transposed, and the fused optimiser needs the same memory order for both
        layers = skeleton.module.named_modules()
        matrices = {f"{name}.weight" for name, layer in layers if type(layer) is nn.Linear}
        self.params = {n: w.mT.contiguous().mT if n in matrices else w for n, w in weights.items()}
        optimiser_states = [j.state.optimiser if local.exports_optimiser else {} for j in self.jobs]
        self.optimiser = Optimiser(local, self.params, optimiser_states, self.round)
        self.norms = GradientNorms(next(iter(self.params.values())), stacked=True)
        skeleton.module.train()

    def _loss(
        self, params: Tensors, buffers: Tensors, batch: dict[str, Any], received: Sequence[Tensor]
    ) -> tuple[Tensors, Tensors, tuple[Tensor, ...]]:
        new_buffers = {name: value.clone() for name, value in buffers.items()}  # batch norm writes into them
        net = StackedNetwork(self.skeleton, params, new_buffers)
        terms, pseudo = self.task.loss(net, Batch(**batch), self.received.of_one(received), self.round)
        return terms, new_buffers, () if pseudo is None else tuple(t.detach() for t in pseudo)

    def take_step(self, s: int) -> None:
        """Take one step of all clients that still have one. Under batch norm, clients whose batches differ in size are
        run apart."""
        active = sum(count > s for count in self.plan.counts)
        losses = vmap(self._loss, randomness="different")
        for rows, widths in together(self.plan.sizes(s, active), self.alone):
            members = range(active)[rows] if isinstance(rows, slice) else rows.tolist()
            client_draws = [
                draws(self.task, self.steps[k][s], self.streams[k]) if self.streams else {} for k in members
            ]
            batch: dict[str, Any]
            batch, sample_counts = batch_of(self.task, self.plan, self.jobs[0].data, rows, s, widths, client_draws)
            if any(self.prepared) and widths[1]:
                rows_of = [(self.prepared[k], self.steps[k][s].unlabelled) for k in members]
                batch["prepared"] = padded_rows(rows_of, widths[1])
            received = [tensor[rows] for tensor in self.received.stacked]
            params = {n: p[rows].detach().requires_grad_() for n, p in self.params.items()}
            with one_sample_is_too_few(self.task.name_of(self.jobs[0].client)):
                buffers = {n: b[rows] for n, b in self.buffers.items()}
                terms, new_buffers, pseudo = losses(params, buffers, batch, received)
            if self.task.local.gradients:
                self.norms.add(terms, list(params.values()), rows)
            total = torch.stack(list(terms.values())).sum()
            gradient = torch.autograd.grad(total, list(params.values()), allow_unused=True, materialize_grads=True)
            self.optimiser.step(gradient, rows)
            for name, value in new_buffers.items():
                self.buffers[name][rows] = value.detach()
            for name, value in terms.items():
                if name not in self.totals:
                    self.totals[name] = torch.zeros(len(self.jobs), device=self.device)
                self.totals[name][rows] += value.detach() * sample_counts
            for position, k in enumerate(members if pseudo else ()):
                step = self.steps[k][s]
                pseudo_count = 0 if step.unlabelled is None else len(step.unlabelled)
                self.pseudo[k].add(step, Pseudo(*(t[position, :pseudo_count] for t in pseudo)))

    def results(self) -> list[Training]:
        """The result of each client's training, in the order of the jobs."""
        task, local = self.task, self.task.local
        sample_counts = torch.tensor(
            [sum(sizes) for sizes in self.plan.weights], dtype=torch.float32, device=self.device
        )
        means = {name: (value / sample_counts).tolist() for name, value in self.totals.items()}
        stacked = {**{name: p.contiguous() for name, p in self.params.items()}, **self.buffers}
        if norm.collects(self.skeleton.module):
            _collect(self.skeleton, stacked, self.buffers, self.jobs)
        stacked = {name: stacked[name] for name in self.skeleton.slots}
        outputs = StackedOutputs(self.skeleton, stacked, [j.data for j in self.jobs], task.num_classes)
        finite = _finite_rows(stacked, len(self.jobs))
        columns = [value.unbind() for value in stacked.values()]
        models = [dict(zip(stacked, values, strict=True)) for values in zip(*columns, strict=True)]
        results: dict[int, Training] = {}
        for k, job in enumerate(self.jobs):
            terms = {name: values[k] for name, values in means.items()}
            weights = models[k]
            failure = what_is_not_finite(terms, {} if finite[k] else weights)
            trained = None if failure else StackedClient(outputs, k, weights, task, job, self.round)
            optimiser_state = self.optimiser.export(k) if local.exports_optimiser else {}
            counts = self.pseudo[k].counts(task, job.data, job.client)
            measures = self.norms.measures(k)
            results[self.order[k]] = Training(trained, optimiser_state, terms, failure, counts, measures)
        return [results[k] for k in range(len(self.jobs))]


def _collect(skeleton: Skeleton, weights: Mapping[str, Tensor], buffers: Tensors, jobs: Sequence[Job]) -> None:
    """Collect the statistics of static batch norm client by client, because padding must not enter them."""
    for k, job in enumerate(jobs):
        skeleton.load({name: value[k] for name, value in weights.items()})
        skeleton.collect(all_samples(job.data))
        for name in buffers:
            buffers[name][k] = skeleton.slots[name]


def _finite_rows(weights: Mapping[str, Tensor], clients: int) -> list[bool]:
    good = torch.ones(clients, dtype=torch.bool)
    for value in weights.values():
        good &= torch.isfinite(value.reshape(clients, -1).sum(1)).cpu()
    return good.tolist()


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
        """The number of the client's unlabelled samples."""
        return len(self.job.data.unlabelled or ())

    @property
    def generator(self) -> torch.Generator:
        """The client's random stream for what it returns."""
        return seeds.torch_stream(self.task.seed, "return", self.job.client, self.round)

    def unlabelled(self, view: View = "none", weights: Mapping[str, Tensor] | None = None) -> Output:
        """Embeddings and logits of a view of the unlabelled samples, by the client's model or by other weights."""
        x = viewed_pool(self.task, self.job.data, view, self.job.client, self.round)
        return self.run(x) if weights is None else self.stack.skeleton.outputs(x, weights)

    def labelled(self, view: View) -> Output:
        """Embeddings and logits of a view of the labelled samples."""
        x = self.job.data.labelled.take()[0]
        return self.run(viewed(self.task, x, view, f"{view} labelled", self.job.client, self.round))

    def run(self, x: Tensor) -> Output:
        """Embeddings and logits of any samples."""
        weights = {name: value[self.k : self.k + 1] for name, value in self.stack.weights.items()}
        output = stacked_outputs(self.stack.skeleton, weights, x, torch.arange(len(x), device=x.device)[None])
        return Output(*(t[0] for t in output))

    def outputs(self) -> tuple[Output, Batch]:
        """Embeddings and logits of the labelled samples, and these as one batch."""
        output, y, weight = self.stack.outputs
        samples = self.stack.data[self.k]
        n = len(samples)
        client_output = Output(output.embedding[self.k, :n], output.logits[self.k, :n])
        return client_output, Batch(samples.take()[0], y[self.k, :n], weight[self.k, :n])

    @cached_property
    def _bank(self) -> PrototypeBank:
        return self.stack.banks[self.k]

    def bank(self) -> PrototypeBank:
        """The class means of the embeddings of the labelled samples."""
        return self._bank

    @property
    def own_bank(self) -> PrototypeBank | None:
        """The client's prototypes, where the method has computed them."""
        return self.__dict__.get("_bank")

    def low_bank(self) -> PrototypeBank:
        """The class means of the low-level features of the labelled samples."""
        return self.stack.low_banks[self.k]

    def common(self, x: Tensor) -> Tensor:
        """The features of samples in the space that all clients have in common."""
        return self.stack.skeleton.common(x)
