"""The weights of several messages that were read together, as one matrix: a row for each message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor


class StackedWeights:
    """The weights of n models of one form.

    Attributes:
        values: by name, each `[n, ...]`.
        flat: `[n, P]`, all weights of a model one after another in the order of `values`; views of the same memory.
    """

    def __init__(self, values: Mapping[str, Tensor], flat: Tensor) -> None:
        self.values, self.flat = values, flat
        self.form = tuple((name, tuple(value.shape[1:])) for name, value in values.items())

    @cached_property
    def norms(self) -> list[float]:
        """The norm of each model's weights, all together."""
        norms = torch.linalg.vector_norm(self.flat, dim=1)
        if bool(norms.isinf().any()):  # in float32 the squares of large numbers overflow
            norms = torch.linalg.vector_norm(self.flat, dim=1, dtype=torch.float64)
        values: list[float] = norms.tolist()
        return values


class WeightsRow(Mapping[str, Tensor]):
    """The weights of one of several stacked models, by name."""

    def __init__(self, stack: StackedWeights, row: int) -> None:
        self.stack, self.row = stack, row

    def __getitem__(self, name: str) -> Tensor:
        return self.stack.values[name][self.row]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stack.values)

    def __len__(self) -> int:
        return len(self.stack.values)

    @property
    def flat(self) -> Tensor:
        """All weights one after another."""
        return self.stack.flat[self.row]

    @property
    def norm(self) -> float:
        """The norm of all weights together."""
        return self.stack.norms[self.row]


def stacked_weights(values: Mapping[str, Tensor]) -> StackedWeights | None:
    """The weights of several messages as one matrix, where they lie in memory as one.

    Args:
        values: by name, each `[n, ...]`, views of a matrix with a row for each message.

    Returns:
        the stack; None where the weights have several types or do not lie one after another.
    """
    ordered = sorted(values.items(), key=lambda entry: entry[1].storage_offset())
    if not ordered or len({value.dtype for value in values.values()}) > 1 or not ordered[0][1].is_floating_point():
        return None
    first = ordered[0][1]
    n, start, stride = len(first), first.storage_offset(), first.stride(0)
    memory, place = first.untyped_storage().data_ptr(), start
    for _, value in ordered:
        if (value.storage_offset(), value.stride(0), value.untyped_storage().data_ptr()) != (place, stride, memory):
            return None
        place += value[0].numel()
    return StackedWeights(dict(ordered), first.as_strided((n, place - start), (stride, 1), start))
