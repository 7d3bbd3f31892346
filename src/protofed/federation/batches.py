"""A client's training steps as batches: rows, views and random draws, all from streams of the run's seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import seeds
from ..data.augment import Augmentation, draw
from ..data.types import ClientData, Samples
from ..data.types import Unlabelled as Pool
from ..methods.client import Loss, Network, Terms, Trained, Weights
from ..models.skeleton import Skeleton
from ..parts import Batch, Feed, Step, View
from ..parts.filters import Filter
from ..wire import Bundle
from .optimiser import LocalSettings

GATHER = 32  # steps whose samples are fetched together
STATISTICS_BATCH = 250  # samples at most in a batch of the pass that gives static batch norm its statistics


class Learner(Protocol):
    """Who learns by training: a method at its clients, or a teacher at the server."""

    @property
    def feed(self) -> Feed: ...

    @property
    def terms(self) -> Any:
        """`(net, batch, received, round)` to the terms of the loss."""

    def begin(self, weights: Weights, received: Any) -> Weights: ...

    def returned(self, trained: Trained, received: Any, round: int) -> Any: ...

    def remember(self, trained: Trained, received: Any, round: int) -> Bundle: ...


@dataclass(frozen=True)
class Task:
    """What the clients of one federation have in common.

    `held_back` are the labels of the unlabelled samples: only the record of what pseudo-labels were worth reads them.
    """

    learner: Learner
    name: str
    local: LocalSettings
    seed: int
    num_classes: int
    augmentation: Augmentation | None = None
    held_back: Sequence[Tensor | None] = ()
    filters: tuple[Filter, ...] = ()
    keeps_model: bool = True

    def loss(self, net: Network, batch: Batch, received: Any, round: int) -> Loss:
        """The learner's loss terms, with pseudo-labels where it has any."""
        given: Terms | Loss = self.learner.terms(net, batch, received, round)
        return given if isinstance(given, Loss) else Loss(given)


def client_size(feed: Feed, data: ClientData) -> int:
    """How many samples a client trains on, for servers that weigh clients by size."""
    return len(data.labelled) + (len(data.unlabelled or ()) if feed.reads_unlabelled else 0)


def planned_steps(task: Task, data: ClientData, client: int, round: int) -> Iterator[Step]:
    """The rows of each of a client's steps in a round."""
    order = seeds.torch_stream(task.seed, "batches", client, round)
    unlabelled, local = len(data.unlabelled or ()), task.local
    return task.learner.feed.steps(data.labelled.labels, unlabelled, local.epochs, local.batch, round, order)


def view_of(augmentation: Augmentation | None, name: View, x: Tensor, u: Tensor | None) -> Tensor:
    """A view of samples, by uniform draws `u`."""
    if name == "none" or augmentation is None or u is None:
        return x
    return getattr(augmentation, name)(x, u)


def draws(task: Task, step: Step, stream: torch.Generator) -> dict[str, Tensor]:
    """A step's random draws, always in this order: for labelled samples, for each view, for the method's own use."""
    drawn: dict[str, Tensor] = {}
    augmentation, feed = task.augmentation, task.learner.feed
    if augmentation is not None and feed.labelled_view != "none":
        drawn["labelled"] = draw(getattr(augmentation, feed.labelled_view), len(step.labelled), stream)
    if step.unlabelled is not None:
        for name in feed.views if augmentation is not None else ():
            drawn[name] = draw(getattr(augmentation, name), len(step.unlabelled), stream)
        if feed.draws:
            drawn["draws"] = torch.rand(len(step.unlabelled), feed.draws, generator=stream)
    return drawn


def viewed_pool(task: Task, data: ClientData, view: View, client: int, round: int) -> Tensor:
    """All of a client's unlabelled samples, as a view of them."""
    assert data.unlabelled is not None
    x = data.unlabelled.take()
    if view == "none" or task.augmentation is None:
        return x
    stream = seeds.torch_stream(task.seed, f"{view} pool", client, round)
    return view_of(task.augmentation, view, x, draw(getattr(task.augmentation, view), len(x), stream).to(x.device))


def all_samples(data: ClientData) -> Iterator[Tensor]:
    """Everything a client may train on, in pieces."""
    for part in (data.labelled, data.unlabelled):
        if part is None or len(part) < 2:  # one sample has no deviation
            continue
        for rows in torch.arange(len(part)).tensor_split(-(-len(part) // STATISTICS_BATCH)):
            yield part.take(rows)[0] if isinstance(part, Samples) else part.take(rows)


def batches(task: Task, skeleton: Skeleton, data: ClientData, client: int, round: int) -> Iterator[tuple[Step, Batch]]:
    """Each step with its samples, which are fetched and augmented for many steps at once."""
    steps = planned_steps(task, data, client, round)
    stream = seeds.torch_stream(task.seed, "views", client, round)
    device = data.labelled.x.device
    while group := list(islice(steps, GATHER)):
        drawn = [draws(task, step, stream) for step in group]
        sizes = [len(step.labelled) for step in group]
        x, y = data.labelled.take(torch.cat([step.labelled for step in group]))
        x = view_of(task.augmentation, task.learner.feed.labelled_view, x, _concatenated(drawn, "labelled", device))
        columns = zip(skeleton.arranged(x).split(sizes), y.split(sizes), strict=True)
        pools = _pool_batches(task, skeleton, data.unlabelled, group, drawn)
        ones = torch.ones(len(y), device=device).split(sizes)
        for step, (own, labels), weight, pool in zip(group, columns, ones, pools, strict=True):
            support = None if step.support is None else step.support.to(device, torch.float32)
            yield step, Batch(own, labels, weight, support, **pool)


def _pool_batches(
    task: Task,
    skeleton: Skeleton,
    pool: Pool | None,
    group: Sequence[Step],
    drawn: Sequence[Mapping[str, Tensor]],
) -> list[dict[str, Tensor]]:
    """The unlabelled part of each batch of a group."""
    rows = [step.unlabelled for step in group if step.unlabelled is not None]
    if pool is None or not rows:
        return [{} for _ in group]
    u = pool.take(torch.cat(rows))
    parts = {"unlabelled": u}
    for name in task.learner.feed.views:
        parts[name] = view_of(task.augmentation, name, u, _concatenated(drawn, name, u.device))
    own_draws = _concatenated(drawn, "draws", u.device)
    if own_draws is not None:
        parts["draws"] = own_draws
    lengths = [len(r) for r in rows]
    split = {n: iter((t if n == "draws" else skeleton.arranged(t)).split(lengths)) for n, t in parts.items()}
    result: list[dict[str, Tensor]] = []
    for step in group:
        own = {} if step.unlabelled is None else {name: next(pieces) for name, pieces in split.items()}
        if own:
            own["unlabelled_weight"] = torch.ones(len(own["unlabelled"]), device=u.device)
        result.append(own)
    return result


def _concatenated(drawn: Sequence[Mapping[str, Tensor]], name: str, device: torch.device) -> Tensor | None:
    values = [draws[name] for draws in drawn if name in draws]
    return torch.cat(values).to(device) if values else None
