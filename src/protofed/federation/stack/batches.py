"""The steps of many clients as batches side by side: rows into the shared tensors, padding, views and random draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.types import ClientData, Samples
from ...data.types import Unlabelled as Pool
from ...parts import Step, View
from ..batches import Task, view_of

Tensors = dict[str, Tensor]


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


def batch_of(
    task: Task,
    plan: StepPlan,
    shared: ClientData,
    rows: slice | Tensor,
    s: int,
    widths: tuple[int, int],
    drawn: Sequence[Mapping[str, Tensor]],
) -> tuple[Tensors, Tensor]:
    """The batch of some clients at a step, and how many samples each client's loss counts for. `shared` is any of the
    clients: all are rows of the same tensors."""
    own, pool = plan.labelled, plan.unlabelled
    x, y = shared.labelled.x, shared.labelled.y
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
    assert shared.unlabelled is not None
    u = shared.unlabelled.x[chosen]
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


def together(sizes: Sequence[tuple[int, int]], alone: bool) -> list[tuple[slice | Tensor, tuple[int, int]]]:
    """Which clients take a step together, and how many labelled and unlabelled samples wide their batch is."""
    distinct = sorted(set(sizes))
    if not alone or len(distinct) == 1:
        return [(slice(0, len(sizes)), (max(n for n, _ in distinct), max(n for _, n in distinct)))]
    return [(torch.tensor([k for k, n in enumerate(sizes) if n == size]), size) for size in distinct]


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
