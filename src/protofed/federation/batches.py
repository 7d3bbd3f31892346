"""A client's training steps as batches: rows, views and random draws, all from streams of the run's seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import seeds
from ..data.augment import Augmentation
from ..data.draws import draw
from ..data.types import ClientData, FederatedData, Samples, name_of
from ..data.types import Unlabelled as Pool
from ..methods.client import Loss, Network, Terms, Trained, Weights
from ..models.skeleton import Skeleton
from ..parts import Batch, Each, Feed, Reduce, Step, View
from ..parts.filters import Filter
from ..wire import Bundle
from .optimiser import LocalSettings
from .secure import SecureSums

GATHER = 32  # the number of steps whose samples are fetched together
STATISTICS_BATCH = 250  # the most samples in a batch when statistics of static batch norm are collected


class Learner(Protocol):
    """What learns by training: a method at its clients, or a teacher at the server."""

    @property
    def feed(self) -> Feed:
        """Which samples, and which views of them, a training step sees."""

    @property
    def terms(self) -> Any:
        """A function of `(net, batch, received, round)` that returns the terms of the loss."""

    def begin(self, weights: Weights, received: Any) -> Weights:
        """The weights that training starts from."""

    def returned(self, trained: Trained, received: Any, round: int) -> Any:
        """What is sent (or, by a teacher, the server's new state) after training."""

    def remember(self, trained: Trained, received: Any, round: int) -> Bundle:
        """What a client remembers for its next round."""


@dataclass(frozen=True)
class Task:
    """What the clients of one federation have in common.

    `held_back` has the labels of the unlabelled samples. Only the record of how good pseudo-labels were reads them.
    """

    learner: Learner
    name: str
    local: LocalSettings
    seed: int
    num_classes: int
    augmentation: Augmentation | None = None
    held_back: Sequence[Tensor | None] = ()
    filters: tuple[Filter, ...] = ()
    rule: Reduce = Each()  # by which the server reduces what leaves the filters
    keeps_model: bool = True
    secret: bool = False  # whether a client's noise comes from the operating system and not from the seed
    secure: SecureSums | None = None  # how a client's upload becomes its part of a sum, where only sums leave it
    client_names: tuple[str, ...] = ()

    def name_of(self, client: int) -> str:
        """The name of a client, or its number where clients have no names."""
        return name_of(client, self.client_names)

    def normals(self, client: int, round: int) -> seeds.Normals:
        """A client's noise for what it sends in a round."""
        return seeds.SystemNormals() if self.secret else seeds.SeededNormals(self.seed, "noise", client, round)

    def loss(self, net: Network, batch: Batch, received: Any, round: int) -> Loss:
        """The learner's loss terms, with pseudo-labels where it gives any."""
        result: Terms | Loss = self.learner.terms(net, batch, received, round)
        return result if isinstance(result, Loss) else Loss(result)


def client_size(feed: Feed, data: ClientData) -> int:
    """The number of samples a client trains on, for servers that weigh clients by size."""
    return len(data.labelled) + (len(data.unlabelled or ()) if feed.reads_unlabelled else 0)


@dataclass(frozen=True)
class ClientSizes:
    """How many samples every client has, counted once for all rounds."""

    feed: Feed
    data: FederatedData
    counted: dict[str, list[int]] = field(default_factory=dict)

    def training(self) -> list[int]:
        """The number of samples that each client trains on."""
        if "training" not in self.counted:
            self.counted["training"] = [client_size(self.feed, client) for client in self.data.clients]
        return self.counted["training"]

    def of(self, name: str) -> list[int]:
        """The size of one of each client's sets of samples (`"test"`); 0 where a client does not have it."""
        if name not in self.counted:
            self.counted[name] = [len(getattr(client, name) or ()) for client in self.data.clients]
        return self.counted[name]


def planned_steps(task: Task, data: ClientData, client: int, round: int) -> Iterable[Step]:
    """The rows of a client's samples for each of its steps in a round."""
    order = seeds.torch_stream(task.seed, "batches", client, round)
    unlabelled, local = len(data.unlabelled or ()), task.local
    return task.learner.feed.steps(data.labelled.labels, unlabelled, local.epochs, local.batch, round, order)


def view_of(augmentation: Augmentation | None, name: View, x: Tensor, u: Tensor | None) -> Tensor:
    """A view of samples, made with uniform random draws `u`."""
    if name == "none" or augmentation is None or u is None:
        return x
    return getattr(augmentation, name)(x, u)


def draws(task: Task, step: Step, stream: torch.Generator) -> dict[str, Tensor]:
    """The random draws of a step, always in this order: for labelled samples, for each view, for the method's own use."""
    draws_by_name: dict[str, Tensor] = {}
    augmentation, feed = task.augmentation, task.learner.feed
    if augmentation is not None and feed.labelled_view != "none":
        draws_by_name["labelled"] = draw(getattr(augmentation, feed.labelled_view), len(step.labelled), stream)
    if step.unlabelled is not None:
        for name in feed.views if augmentation is not None else ():
            draws_by_name[name] = draw(getattr(augmentation, name), len(step.unlabelled), stream)
        if feed.draws:
            draws_by_name["draws"] = torch.rand(len(step.unlabelled), feed.draws, generator=stream)
    return draws_by_name


def prepared_of(
    task: Task, skeleton: Skeleton, data: ClientData, received: Any, client: int, round: int
) -> Mapping[str, Tensor]:
    """What the feed prepares of a client's unlabelled samples once a round, by the received model; empty where nothing."""
    feed = task.learner.feed
    if feed.prepare is None or feed.prepared_for != "round" or not len(data.unlabelled or ()):
        return {}
    logits = skeleton.outputs(viewed_pool(task, data, feed.prepared_view, client, round), received.weights).logits
    return feed.prepare(logits.softmax(-1))


def viewed_pool(task: Task, data: ClientData, view: View, client: int, round: int) -> Tensor:
    """A view of all of a client's unlabelled samples."""
    assert data.unlabelled is not None
    return viewed(task, data.unlabelled.take(), view, f"{view} pool", client, round)


def viewed(task: Task, x: Tensor, view: View, purpose: str, client: int, round: int) -> Tensor:
    """A view of many samples of a client, with random draws of their own stream."""
    if view == "none" or task.augmentation is None:
        return x
    stream = seeds.torch_stream(task.seed, purpose, client, round)
    return view_of(task.augmentation, view, x, draw(getattr(task.augmentation, view), len(x), stream).to(x.device))


def all_samples(data: ClientData) -> Iterator[Tensor]:
    """All samples that a client may train on, in pieces."""
    for part in (data.labelled, data.unlabelled):
        if part is None or len(part) < 2:  # the variance of one sample is undefined
            continue
        for rows in torch.arange(len(part)).tensor_split(-(-len(part) // STATISTICS_BATCH)):
            yield part.take(rows)[0] if isinstance(part, Samples) else part.take(rows)


def every_sample(data: FederatedData) -> Iterator[Tensor]:
    """All samples of the server and of all clients, in pieces of about the same size, for static batch norm's statistics."""
    parts = [part for client in data.clients for part in (client.labelled, client.unlabelled)]
    rows: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by tensor
    for part in (data.server, *parts):
        if part is not None and len(part):
            rows.setdefault(id(part.x), (part.x, []))[1].append(part.index)
    for x, indices in rows.values():
        index = torch.cat(indices)
        if len(index) > 1:
            for piece in index.tensor_split(-(-len(index) // STATISTICS_BATCH)):
                yield x[piece]


def batches(
    task: Task,
    skeleton: Skeleton,
    data: ClientData,
    received: Any,
    client: int,
    round: int,
) -> Iterator[tuple[Step, Batch]]:
    """Each step with its batch. Samples are fetched and augmented for many steps at once."""
    prepared = prepared_of(task, skeleton, data, received, client, round)
    skeleton.module.train()
    steps = iter(planned_steps(task, data, client, round))
    stream = seeds.torch_stream(task.seed, "views", client, round)
    device = data.labelled.x.device
    while group := list(islice(steps, GATHER)):
        step_draws = [draws(task, step, stream) for step in group]
        sizes = [len(step.labelled) for step in group]
        x, y = data.labelled.take(torch.cat([step.labelled for step in group]))
        x = view_of(
            task.augmentation, task.learner.feed.labelled_view, x, _concatenated(step_draws, "labelled", device)
        )
        columns = zip(skeleton.arranged(x).split(sizes), y.split(sizes), strict=True)
        pools: list[dict[str, Any]] = _pool_batches(task, skeleton, data.unlabelled, received, group, step_draws)
        weights = torch.ones(len(y), device=device).split(sizes)
        for step, (samples, labels), weight, pool in zip(group, columns, weights, pools, strict=True):
            support = None if step.support is None else step.support.to(device, torch.float32)
            batch = Batch(samples, labels, weight, support, **pool)
            if prepared and step.unlabelled is not None:
                rows = step.unlabelled.to(device)
                batch = batch._replace(prepared={name: value[rows] for name, value in prepared.items()})
            yield step, batch


def _pool_batches(
    task: Task,
    skeleton: Skeleton,
    pool: Pool | None,
    received: Any,
    group: Sequence[Step],
    step_draws: Sequence[Mapping[str, Tensor]],
) -> list[dict[str, Any]]:
    """The unlabelled part of each batch in a group of steps."""
    rows = [step.unlabelled for step in group if step.unlabelled is not None]
    if pool is None or not rows:
        return [{} for _ in group]
    u = pool.take(torch.cat(rows))
    parts = {"unlabelled": u}
    for name in task.learner.feed.views:
        parts[name] = view_of(task.augmentation, name, u, _concatenated(step_draws, name, u.device))
    method_draws = _concatenated(step_draws, "draws", u.device)
    if method_draws is not None:
        parts["draws"] = method_draws
    lengths = [len(r) for r in rows]
    split = {n: iter((t if n == "draws" else skeleton.arranged(t)).split(lengths)) for n, t in parts.items()}
    prepared = {n: iter(t.split(lengths)) for n, t in _prepared_for_steps(task, skeleton, parts, received).items()}
    all_parts: list[dict[str, Any]] = []
    for step in group:
        batch_parts: dict[str, Any] = {}
        if step.unlabelled is not None:
            batch_parts = {name: next(pieces) for name, pieces in split.items()}
            batch_parts["unlabelled_weight"] = torch.ones(len(batch_parts["unlabelled"]), device=u.device)
            if prepared:
                batch_parts["prepared"] = {name: next(pieces) for name, pieces in prepared.items()}
        all_parts.append(batch_parts)
    return all_parts


def _prepared_for_steps(
    task: Task, skeleton: Skeleton, parts: Mapping[str, Tensor], received: Any
) -> Mapping[str, Tensor]:
    """What the feed prepares of the views of a group of steps, by the received model; empty where nothing."""
    feed = task.learner.feed
    if feed.prepare is None or feed.prepared_for != "steps":
        return {}
    view = parts["unlabelled" if feed.prepared_view == "none" else feed.prepared_view]
    logits = skeleton.outputs(view, received.weights).logits
    skeleton.module.train()
    return feed.prepare(logits.softmax(-1))


def _concatenated(step_draws: Sequence[Mapping[str, Tensor]], name: str, device: torch.device) -> Tensor | None:
    values = [draws_by_name[name] for draws_by_name in step_draws if name in draws_by_name]
    return torch.cat(values).to(device) if values else None
