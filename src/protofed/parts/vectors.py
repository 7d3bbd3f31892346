"""All weights of a model as one vector: what it means that a model moved, and how far."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def change_of(weights: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> Tensor:
    """How weights have changed, as one vector.

    Args:
        weights: by name, at least one.
        before: what they were; a weight that is not among them was 0.

    Returns:
        the changes one after another, in the order of the weights.

    >>> change_of({"a": torch.ones(2), "b": torch.zeros(1)}, {"a": torch.ones(2), "b": torch.ones(1)})
    tensor([ 0.,  0., -1.])
    """
    return torch.cat([(value - before[n] if n in before else value).reshape(-1) for n, value in weights.items()])


def changed(weights: Mapping[str, Tensor], before: Mapping[str, Tensor], change: Tensor) -> dict[str, Tensor]:
    """The weights that a change leads to.

    Args:
        weights: whose names, shapes and dtypes the result has.
        before: the weights that are changed; a weight that is not among them was 0.
        change: as `change_of` gives it.

    Returns:
        the weights by name.

    >>> changed({"a": torch.zeros(2)}, {"a": torch.ones(2)}, torch.tensor([0.0, 1.0]))["a"]
    tensor([1., 2.])
    """
    pieces = change.split([value.numel() for value in weights.values()])
    result = {}
    for (name, value), piece in zip(weights.items(), pieces, strict=True):
        moved = piece.reshape(value.shape)
        result[name] = (before[name] + moved if name in before else moved).to(value.dtype)
    return result
