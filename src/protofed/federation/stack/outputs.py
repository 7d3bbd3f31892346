"""Stacks of clients' models without training: their outputs and prototypes over sets of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from ...bank import PrototypeBank
from ...data.types import ClientData, Samples
from ...models.base import Levels, Output
from ...models.skeleton import Skeleton
from .batches import padded

EVAL_SAMPLES = 4096  # the most samples, of all clients together, in one call of an evaluation


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
