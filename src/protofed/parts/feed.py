"""Feeds: which samples, and which views of them, a training step sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

View = Literal["none", "weak", "strong"]
Prepare = Callable[[Tensor], Mapping[str, Tensor]]
"""A function of the probabilities `[n, C]` that the received model gives a client's unlabelled samples to tensors with a
row for each sample."""


class Batch(NamedTuple):
    """One step's samples. `weight` is 1 for a sample and 0 for padding; every loss takes it.

    `x` is the feed's view of the labelled samples. `unlabelled` are unlabelled samples as they are, `weak` and `strong`
    the views of them that the feed asks for, `unlabelled_weight` their padding mask, `draws` uniform random numbers
    beside each, and `prepared` their rows of what was prepared at the start of the round; they are None where a step has
    no unlabelled samples. `support` is 1 for the samples of an episode's support set.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    support: Tensor | None = None
    unlabelled: Tensor | None = None
    weak: Tensor | None = None
    strong: Tensor | None = None
    unlabelled_weight: Tensor | None = None
    draws: Tensor | None = None
    prepared: Mapping[str, Tensor] | None = None


class Step(NamedTuple):
    """Row numbers of one training step, into a client's labelled and unlabelled sets.

    `support` says which of the labelled rows are the support set, where the step is an episode.
    """

    labelled: Tensor
    unlabelled: Tensor | None = None
    support: Tensor | None = None


class EpochSteps(Sequence[Step]):
    """The steps of whole epochs: all rows in their order, and how many of them each step has."""

    def __init__(self, order: Tensor, sizes: list[int]) -> None:
        self.order, self.sizes = order, sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, step: Any) -> Any:
        if isinstance(step, slice):
            return list(self)[step]
        return self._steps[step]

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    @cached_property
    def _steps(self) -> list[Step]:
        return [Step(rows) for rows in self.order.split(self.sizes)]


@dataclass(frozen=True)
class Feed:
    """Which samples a step sees. What a method needs of its clients' data follows from it."""

    needs_labels: ClassVar[bool] = True
    """Whether a client without a labelled sample cannot train."""
    reads_unlabelled: ClassVar[bool] = False
    """Whether clients train on unlabelled samples too; these then count in a client's size."""

    labelled_view: View = "none"  # of labelled samples
    views: tuple[View, ...] = ()  # of unlabelled samples
    draws: int = 0  # uniform random numbers beside each unlabelled sample
    prepare: Prepare | None = None
    """What is computed once a round, before the first step, from the received model's probabilities for all unlabelled
    samples; a step's batch has its rows of it as `prepared`."""
    prepared_view: View = "none"  # the view of the samples that these probabilities are of
    prepared_for: Literal["round", "steps"] = "round"
    """Of which draw of that view: one of all samples for the whole round, or each step's own, which a loop then computes
    for many steps in one call. In a stack, whose calls are large already, a step has nothing prepared of its own view."""

    @property
    def augments(self) -> bool:
        """Whether any view is asked for."""
        prepared = self.prepare is not None and self.prepared_view != "none"
        return bool(self.views) or self.labelled_view != "none" or prepared

    def steps(
        self, labels: Tensor, unlabelled: int, epochs: int, batch: int, round: int, generator: torch.Generator
    ) -> Iterable[Step]:
        """The rows of each training step of a client.

        Args:
            labels: the labels of the client's labelled samples.
            unlabelled: how many unlabelled samples it has.
            epochs: how many local epochs it trains.
            batch: the batch size.
            round: the round, counted from 1.
            generator: the stream to draw from.

        Returns:
            the steps, one after another.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Epochs(Feed):
    """Whole epochs over the labelled set, shuffled anew each time."""

    def steps(
        self, labels: Tensor, unlabelled: int, epochs: int, batch: int, round: int, generator: torch.Generator
    ) -> EpochSteps:
        orders = [torch.randperm(len(labels), generator=generator) for _ in range(epochs)]
        return EpochSteps(torch.cat(orders), epoch_sizes(len(labels), batch) * epochs)


@dataclass(frozen=True)
class Paired(Feed):
    """Whole epochs over both sets: as many steps as the labelled set gives, the unlabelled set dealt evenly to them.

    A set with fewer samples than there are steps is gone through several times; an empty one takes no part. Up to round
    `after` there are labelled samples alone.
    """

    reads_unlabelled: ClassVar[bool] = True

    after: int = 0

    def steps(
        self, labels: Tensor, unlabelled: int, epochs: int, batch: int, round: int, generator: torch.Generator
    ) -> Iterator[Step]:
        for _ in range(epochs):
            labelled = list(epoch_rows(len(labels), 1, batch, generator))
            if not unlabelled or round <= self.after:
                yield from map(Step, labelled)
                continue
            pool = torch.randperm(unlabelled, generator=generator)
            pool = pool.repeat(-(-len(labelled) // unlabelled))
            yield from map(Step, labelled, pool.tensor_split(len(labelled)))


@dataclass(frozen=True)
class Unlabelled(Feed):
    """Whole epochs over the unlabelled set alone, where the labels are at the server."""

    needs_labels: ClassVar[bool] = False
    reads_unlabelled: ClassVar[bool] = True

    def steps(
        self, labels: Tensor, unlabelled: int, epochs: int, batch: int, round: int, generator: torch.Generator
    ) -> Iterator[Step]:
        none = torch.zeros(0, dtype=torch.int64)
        return (Step(none, rows) for rows in epoch_rows(unlabelled, epochs, batch, generator))


@dataclass(frozen=True)
class Episodes(Feed):
    """Each local epoch is one episode: of each class `shots` support and `queries` query samples, and some unlabelled ones.

    A class with too few samples gives those it has, support first.
    """

    reads_unlabelled: ClassVar[bool] = True

    shots: int = 1
    queries: int = 2
    unlabelled_queries: int = 100

    def steps(
        self, labels: Tensor, unlabelled: int, epochs: int, batch: int, round: int, generator: torch.Generator
    ) -> Iterator[Step]:
        classes = [torch.nonzero(labels == k).squeeze(1).cpu() for k in labels.unique().tolist()]
        wanted = self.shots + self.queries
        for _ in range(epochs):
            drawn = [rows[torch.randperm(len(rows), generator=generator)] for rows in classes]
            chosen = torch.cat([rows[:wanted] for rows in drawn])
            support = torch.cat([torch.arange(min(len(rows), wanted)) < self.shots for rows in drawn])
            pool: Tensor | None = None
            if unlabelled:
                pool = torch.randperm(unlabelled, generator=generator)[: self.unlabelled_queries]
            yield Step(chosen, pool if pool is not None and len(pool) else None, support)


def epoch_rows(n: int, epochs: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Shuffled batches of whole epochs.

    A last batch of one sample joins the one before it, because batch norm cannot train on one sample.

    Args:
        n: the number of samples.
        epochs: how many epochs.
        batch: the batch size.
        generator: the stream to draw from.

    Returns:
        the row numbers of each batch.

    >>> [len(rows) for rows in epoch_rows(9, epochs=1, batch=4, generator=torch.Generator())]
    [4, 5]
    """
    sizes = epoch_sizes(n, batch)
    for _ in range(epochs):
        yield from torch.randperm(n, generator=generator).split(sizes)


def epoch_sizes(n: int, batch: int) -> list[int]:
    """The batch sizes of an epoch over `n` samples, where a last batch of one sample joins the one before it."""
    sizes = [batch] * (n // batch) + ([n % batch] if n % batch or not n else [])
    if batch > 1 and len(sizes) > 1 and sizes[-1] == 1:
        sizes[-2:] = [batch + 1]
    return sizes
