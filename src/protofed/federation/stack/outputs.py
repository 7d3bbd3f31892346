"""Stacks of clients' models without training: their outputs and prototypes over sets of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from ...bank import PrototypeBank
from ...data.types import ClientData, Samples
from ...evaluate import predicted
from ...models.base import Levels, Output
from ...models.skeleton import Skeleton
from .batches import padded

EVAL_SAMPLES = 8192  # the most samples, of all clients together, in one call of an evaluation


@dataclass(frozen=True)
class StackedOutputs:
    """Embeddings and logits of every client's labelled samples, computed together when the first client needs them."""

    skeleton: Skeleton
    weights: Mapping[str, Tensor]
    clients: list[ClientData]
    num_classes: int

    @property
    def data(self) -> list[Samples]:
        """The labelled samples of each client."""
        return [c.labelled for c in self.clients]

    @cached_property
    def outputs(self) -> tuple[Output, Tensor, Tensor]:
        """Outputs `[K, n, ·]`, labels `[K, n]` and weights `[K, n]`, padded to the largest client."""
        index, weight = padded([d.index for d in self.data])
        return stacked_outputs(self.skeleton, self.weights, self.data[0].x, index), self.data[0].y[index], weight

    @cached_property
    def banks(self) -> PrototypeBank:
        """The class means of each client's embeddings."""
        output, y, weight = self.outputs
        return self._means(output.embedding, y, weight)

    @cached_property
    def low_banks(self) -> PrototypeBank:
        """The class means of each client's low-level features."""
        index, weight = padded([d.index for d in self.data])
        low = stacked_levels(self.skeleton, self.weights, self.data[0].x, index).low
        return self._means(low, self.data[0].y[index], weight)

    def _means(self, z: Tensor, y: Tensor, weight: Tensor) -> PrototypeBank:
        return vmap(lambda z, y, w: PrototypeBank.from_embeddings(z, y, self.num_classes, w))(z, y, weight)


def stacked_outputs(skeleton: Skeleton, weights: Mapping[str, Tensor], x: Tensor, index: Tensor) -> Output:
    """Outputs of client k's model for rows `index[k]`, in eval mode, without gradient and in pieces."""
    return Output(*_run_stacked(skeleton, weights, x, index, {}))


def stacked_levels(skeleton: Skeleton, weights: Mapping[str, Tensor], x: Tensor, index: Tensor) -> Levels:
    """The same as `stacked_outputs`, with low-level features."""
    return Levels(*_run_stacked(skeleton, weights, x, index, {"levels": True}))


def predicted_classes(
    skeleton: Skeleton,
    weights: Mapping[str, Tensor],
    x: Tensor,
    index: Tensor,
    banks: Sequence[PrototypeBank],
    prototype_scores: Callable[[Tensor, PrototypeBank], Tensor],
    kept: Sequence[int],
) -> tuple[list[np.ndarray], Output]:
    """The classes that clients predict. Embeddings and logits are given up piece by piece, but for some clients.

    Args:
        skeleton: The clients' architecture.
        weights: The models of K clients, with a leading axis.
        x: The tensor that all samples are rows of.
        index: The rows of each client `[K, n]`, or `[1, n]` where all have the same.
        banks: The prototypes of each client, of one shape; without them nothing is predicted by prototype.
        prototype_scores: The scores of embeddings by a bank.
        kept: The clients whose outputs are kept.

    Returns:
        The classes `[K, n]` by head and, where there are banks, by prototype; and the outputs of the clients in `kept`.
    """
    same = all(bank is banks[0] for bank in banks)
    bank = banks[0] if banks and same else PrototypeBank.stack(banks) if banks else None
    stacked_scores = vmap(prototype_scores)
    classes: list[list[np.ndarray]] = [[], []]
    outputs: list[list[Tensor]] = [[], []]
    clients = list(kept)
    with torch.no_grad():
        for z, logits in _pieces(skeleton, weights, x, index, {}):
            classes[0].append(predicted(logits))
            if bank is not None and same:
                # a score is of one sample, so those of all clients are computed together
                classes[1].append(predicted(prototype_scores(z.flatten(0, 1), bank)).reshape(z.shape[:2]))
            elif bank is not None:
                classes[1].append(predicted(stacked_scores(z, bank)))
            for column, value in zip(outputs, (z, logits), strict=True):
                column.append(value[clients])
    return [np.concatenate(p, 1) for p in classes if p], Output(*(torch.cat(column, 1) for column in outputs))


def _run_stacked(
    skeleton: Skeleton, weights: Mapping[str, Tensor], x: Tensor, index: Tensor, options: Mapping[str, Any]
) -> list[Tensor]:
    parts = list(_pieces(skeleton, weights, x, index, options))
    return [torch.cat(column, 1) for column in zip(*parts, strict=True)]


def _pieces(
    skeleton: Skeleton, weights: Mapping[str, Tensor], x: Tensor, index: Tensor, options: Mapping[str, Any]
) -> Iterator[tuple[Tensor, ...]]:
    """The outputs of some samples of all clients after another."""
    clients = len(next(iter(weights.values())))
    run: Callable[[Mapping[str, Tensor], Tensor], tuple[Tensor, ...]]
    if skeleton.dense is not None and not options:
        run = skeleton.dense.outputs
    else:
        skeleton.module.eval()
        run = vmap(lambda w, b: functional_call(skeleton.module, dict(w), (b,), dict(options)))
    with torch.no_grad():
        for rows in index.split(max(1, EVAL_SAMPLES // clients), dim=1):
            samples = x[rows]
            yield run(weights, samples.expand(clients, *samples.shape[1:]))
