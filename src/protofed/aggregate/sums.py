"""Sums over the clients of a stack, of which the rules are made."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bank import PrototypeBank


def known_means(banks: PrototypeBank) -> Tensor:
    """The prototypes of a stack, with zeros where a class is unknown."""
    if banks.means.ndim != 3:
        raise ValueError(f"expected a stack of banks [N, C, d], got means of shape {tuple(banks.means.shape)}")
    return torch.where(banks.known[..., None], banks.means, 0.0)


def total(banks: PrototypeBank, weight: Tensor | None = None) -> Tensor:
    """The sum over the clients that hold each class.

    Args:
        banks: a stack of the clients' banks `[N, C, d]`.
        weight: `[N, C]`, how much each client counts for each class; 1 where it is not given.

    Returns:
        `[C, d]`.

    >>> means, counts = torch.tensor([[[0.0]], [[4.0]]]), torch.tensor([[1.0], [3.0]])
    >>> banks = PrototypeBank(means, counts)  # two clients, one class
    >>> total(banks, banks.counts).item()
    12.0
    """
    means = known_means(banks)
    return (means if weight is None else means * weight[..., None]).sum(0)


def over(summed: Tensor, number: Tensor) -> Tensor:
    """Sums divided by how many stand behind each class.

    Args:
        summed: `[C, d]`.
        number: `[C]`.

    Returns:
        `[C, d]`; a class without any stays as it is.

    >>> over(torch.tensor([[6.0], [0.0]]), torch.tensor([3.0, 0.0])).flatten()
    tensor([2., 0.])
    """
    return summed / torch.where(number > 0, number, 1)[:, None]
