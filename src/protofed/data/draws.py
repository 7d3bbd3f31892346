"""What a view of samples is, and the random numbers that it is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class View(Protocol):
    """A view: a pure function of samples `x [n, ...]` and random draws `u [n, num_draws]`, uniform in `[0, 1)`.

    It returns samples of the same shape, type and device.
    """

    @property
    def num_draws(self) -> int:
        """The number of random draws that one sample needs."""

    def __call__(self, x: Tensor, u: Tensor) -> Tensor: ...


def draw(view: View, n: int, generator: torch.Generator) -> Tensor:
    """The random draws of a view.

    Args:
        view: the view.
        n: the number of samples.
        generator: the stream to draw from.

    Returns:
        `[n, num_draws]`, on the CPU, so that every device sees the same views.

    >>> from protofed.data.augment import Jitter
    >>> draw(Jitter(0.1), 3, torch.Generator()).shape
    torch.Size([3, 1])
    """
    return torch.rand(n, view.num_draws, generator=generator)


def whole(u: Tensor, count: int | Tensor) -> Tensor:
    """Uniform draws as whole numbers. A float below 1 times `count` never rounds up to `count`.

    Args:
        u: Uniform draws in `[0, 1)`.
        count: The number of whole numbers to choose from.

    Returns:
        Whole numbers in `0 … count − 1`.

    >>> whole(torch.tensor([0.0, 0.5, 0.99]), 4).tolist()
    [0, 2, 3]
    """
    return (u * count).long()


def _mix(h: Tensor) -> Tensor:
    """A hash of 32 bits, in place, in 64-bit integers; the multipliers are below 2³¹, so that no product overflows."""
    for shift, multiplier in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        h.bitwise_xor_(h >> shift).mul_(multiplier).bitwise_and_(0xFFFFFFFF)
    return h.bitwise_xor_(h >> 15)


def spread(u: Tensor, shape: Sequence[int]) -> Tensor:
    """Many uniform draws from one draw for each row, by a hash of the row's draw and the position.

    Args:
        u: `[n]`, uniform in `[0, 1)`.
        shape: the shape of the draws of each row.

    Returns:
        `[n, *shape]`, inside (0, 1).

    >>> spread(torch.tensor([0.25, 0.75]), (3,)).shape
    torch.Size([2, 3])
    """
    seed = _mix((u * 2**24).long())  # as many values as a float32 draw has
    position = _mix(torch.arange(1, 1 + math.prod(shape), device=u.device))
    bits = _mix(seed[:, None] ^ position).bitwise_right_shift_(9)
    return bits.float().add_(0.5).div_(2**23).reshape(len(u), *shape)


def normal(u: Tensor, shape: Sequence[int]) -> Tensor:
    """Many normal draws from one uniform draw for each row.

    Args:
        u: `[n]`, uniform in `[0, 1)`.
        shape: the shape of the draws of each row.

    Returns:
        `[n, *shape]`.
    """
    return spread(u, shape).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2))
