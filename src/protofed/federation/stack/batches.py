"""The steps of many clients as stacked batches: rows of the shared tensors, padding, views and random draws."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...data.types import ClientData, Samples
from ...data.types import Unlabelled as Pool
from ...parts import Step, View
from ...parts.feed import EpochSteps
from ..batches import Task, view_of

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class RowPlan:
    """The rows of every client's steps: `rows[k, s, b]` index the shared tensor, and `weight` is 0 for padding."""

    rows: Tensor
    weight: Tensor
    sizes: list[list[int]]  # batch sizes, of each client at each of its steps
    extra: Tensor | None = None  # a further value for each row

    @classmethod
    def make(
        cls,
        orders: Sequence[Tensor],
        sizes: list[list[int]],
        data: Sequence[Samples | Pool],
        extra: Sequence[Tensor] = (),
    ) -> RowPlan:
        """A plan from the row numbers of each client's steps.

        Args:
            orders: For each client, rows of its samples, step after step.
            sizes: For each client, how many of them each step has.
            data: The clients' samples, which are rows of one shared tensor.
            extra: For each client, a further value for each row.
        """
        longest, widest = max(map(len, sizes)), max(max(s, default=0) for s in sizes)
        indices = [d.index.cpu() for d in data]
        padding_rows = torch.stack([i[0] if len(i) else torch.zeros((), dtype=torch.int64) for i in indices])
        rows = padding_rows[:, None, None].repeat(1, longest, widest)
        weight = torch.zeros(len(orders), longest, widest)
        flat = torch.cat([i[order] for i, order in zip(indices, orders, strict=True)])
        # a sample's position is that of its step, plus its offset in the batch
        lengths = torch.tensor([n for sizes_k in sizes for n in sizes_k])
        step_position = torch.tensor(
            [(k * longest + s) * widest for k, sizes_k in enumerate(sizes) for s in range(len(sizes_k))]
        )
        offset = torch.arange(len(flat)) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        position = step_position.repeat_interleave(lengths) + offset
        rows.view(-1)[position] = flat
        weight.view(-1)[position] = 1.0
        extra_values: Tensor | None = None
        if extra:
            extra_values = torch.zeros_like(weight)
            extra_values.view(-1)[position] = torch.cat([v.float() for v in extra])
        device = data[0].x.device
        return cls(rows.to(device), weight.to(device), sizes, None if extra_values is None else extra_values.to(device))

    @classmethod
    def of_steps(cls, step_rows: Sequence[Sequence[Tensor]], data: Sequence[Samples | Pool], *extra: Any) -> RowPlan:
        """The same from the rows, and further values, of each client and step."""
        sizes = [[rows.shape[0] for rows in rows_k] for rows_k in step_rows]
        joined = [torch.cat(list(rows_k)) for rows_k in step_rows]
        return cls.make(joined, sizes, data, [torch.cat(list(v)) for values in extra for v in values])


@dataclass(frozen=True)
class StepPlan:
    """The steps of every client. Clients with more steps come first."""

    counts: list[int]
    labelled: RowPlan
    unlabelled: RowPlan | None = None

    @classmethod
    def make(cls, steps: Sequence[Sequence[Step]], data: Sequence[ClientData]) -> StepPlan:
        """A plan from each client's steps."""
        samples = [d.labelled for d in data]
        whole = [k for k in steps if isinstance(k, EpochSteps)]
        if len(whole) == len(steps):  # labelled samples alone, whose rows are there as they are needed
            return cls(
                [len(k) for k in whole], RowPlan.make([k.order for k in whole], [k.sizes for k in whole], samples)
            )
        episodes = any(step.support is not None for steps_k in steps for step in steps_k)
        support = [[_none_is_empty(step.support) for step in steps_k] for steps_k in steps] if episodes else []
        labelled = RowPlan.of_steps([[s.labelled for s in steps_k] for steps_k in steps], samples, support)
        pools = [d.unlabelled for d in data if d.unlabelled is not None]
        unlabelled: RowPlan | None = None
        if len(pools) == len(data) and any(step.unlabelled is not None for steps_k in steps for step in steps_k):
            unlabelled = RowPlan.of_steps([[_none_is_empty(s.unlabelled) for s in steps_k] for steps_k in steps], pools)
        return cls([len(steps_k) for steps_k in steps], labelled, unlabelled)

    @property
    def weights(self) -> list[list[int]]:
        """The weight of each client's steps in its mean loss: their labelled samples, or else their unlabelled ones."""
        if self.unlabelled is None:
            return self.labelled.sizes
        pairs = zip(self.labelled.sizes, self.unlabelled.sizes, strict=True)
        return [[n or m for n, m in zip(*pair, strict=True)] for pair in pairs]

    def sizes(self, step: int, active: int) -> list[tuple[int, int]]:
        """The numbers of labelled and unlabelled samples in a step of each client that is still training."""
        pool = self.unlabelled
        return [(self.labelled.sizes[k][step], 0 if pool is None else pool.sizes[k][step]) for k in range(active)]


def as_sequence(steps: Iterable[Step]) -> Sequence[Step]:
    """Steps that can be counted and looked up."""
    return steps if isinstance(steps, EpochSteps) else list(steps)


def _none_is_empty(rows: Tensor | None) -> Tensor:
    return torch.zeros(0, dtype=torch.int64) if rows is None else rows


def batch_of(
    task: Task,
    plan: StepPlan,
    shared: ClientData,
    rows: slice | Tensor,
    s: int,
    widths: tuple[int, int],
    client_draws: Sequence[Mapping[str, Tensor]],
) -> tuple[dict[str, Any], Tensor]:
    """The batch of some clients at one step.

    Args:
        task: What the clients have in common.
        plan: The rows of all steps.
        shared: Any of the clients, because the samples of all are rows of the same tensors.
        rows: The clients of the stack that take the step.
        s: The number of the step.
        widths: The labelled and unlabelled samples in a client's batch, padding included.
        client_draws: The random draws of each client.

    Returns:
        The parts of the batch by name, and the number of samples by which each client's loss is weighted.
    """
    labelled, pool = plan.labelled, plan.unlabelled
    x, y = shared.labelled.x, shared.labelled.y
    wide, wide_pool = widths
    index, weight = labelled.rows[rows, s, :wide], labelled.weight[rows, s, :wide]
    samples = _viewed(task, task.learner.feed.labelled_view, x[index], [d.get("labelled") for d in client_draws])
    batch: dict[str, Any] = {"x": samples, "y": y[index], "weight": weight}
    counted = weight.sum(1)
    if labelled.extra is not None:
        batch["support"] = labelled.extra[rows, s, :wide]
    if pool is None or not wide_pool:
        return batch, counted
    pool_index, mask = pool.rows[rows, s, :wide_pool], pool.weight[rows, s, :wide_pool]
    assert shared.unlabelled is not None
    u = shared.unlabelled.x[pool_index]
    batch |= {"unlabelled": u, "unlabelled_weight": mask}
    for name in task.learner.feed.views:
        batch[name] = _viewed(task, name, u, [d.get(name) for d in client_draws])
    if task.learner.feed.draws:
        batch["draws"] = _padded_draws([d.get("draws") for d in client_draws], wide_pool, u.device)
    return batch, torch.where(counted > 0, counted, mask.sum(1))


def _viewed(task: Task, view: View, x: Tensor, client_draws: Sequence[Tensor | None]) -> Tensor:
    """A view of every client's samples `[K, n, ...]`, made in one call."""
    if view == "none" or task.augmentation is None:
        return x
    draws = _padded_draws(client_draws, x.shape[1], x.device)
    return view_of(task.augmentation, view, x.flatten(0, 1), draws.flatten(0, 1)).unflatten(0, x.shape[:2])


def _padded_draws(client_draws: Sequence[Tensor | None], n: int, device: torch.device) -> Tensor:
    """The random draws of all clients in one tensor, padded with zeros."""
    present = [d for d in client_draws if d is not None]
    result = torch.zeros(len(client_draws), n, present[0].shape[1])
    for k, draws in enumerate(client_draws):
        if draws is not None:
            result[k, : len(draws)] = draws
    return result.to(device)


def padded_rows(clients: Sequence[tuple[Mapping[str, Tensor], Tensor | None]], n: int) -> Tensors:
    """Rows of tensors that each client has by name, stacked and padded with zeros to `n` rows.

    Args:
        clients: For each client the tensors, and the rows of them that its step has, if any.
        n: The number of rows, padding included.
    """
    stacked: Tensors = {}
    for name in next(tensors for tensors, _ in clients if tensors):
        values = [None if rows is None else tensors[name][rows.to(tensors[name].device)] for tensors, rows in clients]
        some = next(value for value in values if value is not None)
        stacked[name] = some.new_zeros(len(clients), n, *some.shape[1:])
        for k, value in enumerate(values):
            if value is not None:
                stacked[name][k, : len(value)] = value
    return stacked


def together(sizes: Sequence[tuple[int, int]], alone: bool) -> list[tuple[slice | Tensor, tuple[int, int]]]:
    """The groups of clients that take a step together, with the numbers of labelled and unlabelled samples in their batch.

    With `alone`, only clients whose batches have the same sizes are grouped.
    """
    distinct = sorted(set(sizes))
    if not alone or len(distinct) == 1:
        return [(slice(0, len(sizes)), (max(n for n, _ in distinct), max(n for _, n in distinct)))]
    return [(torch.tensor([k for k, n in enumerate(sizes) if n == size]), size) for size in distinct]


def padded(indices: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Index lists as one tensor, padded with their first entry (or 0), and weights that are 0 for padding."""
    widest = max(len(i) for i in indices)
    if all(len(i) == widest for i in indices):
        rows = torch.stack(list(indices))
        return rows, torch.ones(rows.shape, device=rows.device)
    fill = [i[:1] if len(i) else i.new_zeros(1) for i in indices]
    rows = torch.stack([torch.cat([i, f.expand(widest - len(i))]) for i, f in zip(indices, fill, strict=True)])
    weight = torch.stack([(torch.arange(widest, device=i.device) < len(i)).float() for i in indices])
    return rows, weight
