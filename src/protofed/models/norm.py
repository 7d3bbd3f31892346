"""Normalisation layers that run as a stack of clients, and the choice between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeGuard, get_args

from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ProtofedError

Norm = Literal["none", "batch", "group", "static"]
GROUPS = 32


class BatchNorm2d(nn.BatchNorm2d):
    """PyTorch's batch norm without a count of batches.

    With a fixed momentum nothing reads the count, and counting in place is an error under `vmap` and `grad` where the
    count is not among the stacked buffers. Its key remains, as published files have it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The normalised batch."""
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum or 0.0,
            self.eps,
        )


class StaticBatchNorm2d(nn.BatchNorm2d):
    """Static batch norm (sBN; Diao et al., HeteroFL, 2021): training keeps no running statistics.

    A training batch is normalised by its own statistics. Those that evaluation uses come from passes over data within
    `collecting`. They are buffers with batch norm's names, so they travel with the weights, and a server that averages
    weights makes the clients' mean of them.
    """

    share: float | None = None  # the weight of the batch in the statistics, while they are collected

    def forward(self, x: Tensor) -> Tensor:
        """The normalised batch."""
        if self.share is None and self.training:
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        collects = self.share is not None
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, collects, self.share or 0.0, self.eps
        )


def norm_layer(kind: Norm, channels: int, eps: float = 1e-5) -> nn.Module:
    """The normalisation after a convolution.

    Group norm has as many groups as divide the channels, at most 32: with 32 channels or fewer, each is its own group.

    Args:
        kind: `none`, `batch`, `group` or `static`.
        channels: the channels of the convolution.
        eps: a number that is added to variances.

    Returns:
        the layer.

    >>> norm_layer("group", 48).num_groups
    24
    """
    if kind == "batch":
        return BatchNorm2d(channels, eps)
    if kind == "static":
        return StaticBatchNorm2d(channels, eps)
    if kind == "group":
        groups = next(n for n in range(min(GROUPS, channels), 0, -1) if channels % n == 0)
        return nn.GroupNorm(groups, channels, eps)
    return nn.Identity()


def check_norm(owner: str, norm: str) -> None:
    """Raise a `ProtofedError` for an unknown normalisation."""
    if norm not in get_args(Norm):
        expected = ", ".join(map(repr, get_args(Norm)))
        raise ProtofedError(f"model {owner!r}: norm={norm!r}; expected one of {expected}")


def is_static(layer: nn.Module) -> TypeGuard[StaticBatchNorm2d]:
    """Whether a layer is static batch norm."""
    return isinstance(layer, StaticBatchNorm2d)


def collects(module: nn.Module) -> bool:
    """Whether a module's statistics are to be collected after training, with `collecting`."""
    return any(map(is_static, module.modules()))


@contextmanager
def collecting(module: nn.Module, k: int) -> Iterator[None]:
    """A context for the k-th forward pass, counted from 1, that collects the statistics of static batch norm.

    Each such layer normalises by the batch's own statistics, whether the module trains or not, and moves its buffers by
    1/k of the way to them: the buffers become the mean over the passes, which all have the same weight, and the first
    pass replaces the old values. The variance is the mean of the batches' unbiased variances, as PyTorch collects it
    for `momentum=None`. Use `module.eval()`, for dropout, and no gradient.
    """
    if k < 1:
        raise ValueError(f"passes are counted from 1, not {k}")
    layers = [layer for layer in module.modules() if is_static(layer)]
    try:
        for layer in layers:
            layer.share = 1 / k
        yield
    finally:
        for layer in layers:
            layer.share = None
