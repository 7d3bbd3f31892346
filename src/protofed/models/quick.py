"""Other forms of a network's layers for the steps of one client on a processor, whose batches are small.

They compute what torch's own layers compute, with less traffic to memory. Parameters keep their names.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LARGE = 1_000_000  # weights of a linear layer from which its gradient is kept as a product
FLATTENED = 1 << 15  # values of a batch from which one conversion of the gradient is cheaper than one in each layer
BITS = 16  # random bits that decide whether dropout keeps a value


class ChannelsLastFlatten(nn.Flatten):
    """Flatten whose gradient has its channels last again, as the layers before it have; bits are torch's own."""

    def forward(self, x: Tensor) -> Tensor:
        """The samples of a batch as vectors."""
        whole = (self.start_dim, self.end_dim) == (1, -1) and x.ndim == 4 and x.numel() >= FLATTENED
        if not whole or not torch.is_grad_enabled() or not x.is_contiguous(memory_format=torch.channels_last):
            return super().forward(x)
        return _Flattened.apply(x)


class _Flattened(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.flatten(1).clone() if x.is_contiguous() else x.flatten(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].reshape(ctx.shape).contiguous(memory_format=torch.channels_last)


class BitDropout(nn.Dropout):
    """Dropout that draws 16 random bits for a value, where torch draws 64.

    The rate is thereby a multiple of 2⁻¹⁶, and kept values are divided by exactly the share that is kept.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The batch with some values set to 0, in training."""
        dropped = round(self.p * 2**BITS)
        if not self.training or not 0 < dropped < 2**BITS or not _dense(x):
            return super().forward(x)
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64, device=x.device).random_(-(2**63), None)
        kept = words.view(torch.int16)[: x.numel()] >= dropped - 2 ** (BITS - 1)
        mask = kept.to(x.dtype).mul_(2**BITS / (2**BITS - dropped))
        return x * mask.as_strided(x.shape, x.stride())


def _dense(x: Tensor) -> bool:
    channels_last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return channels_last or x.is_contiguous()


class ProductLinear(nn.Linear):
    """A linear layer that can leave its weight's gradient as a product, for an optimiser that adds products.

    A batch of ten gives a gradient of rank ten. While `factors` is a list, the gradient `gᵀ x` of its weight is not
    computed: the two factors `(g, x)` are appended to it, and autograd has no gradient for the weight.
    """

    factors: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for a batch."""
        own = isinstance(self.weight, nn.Parameter) and x.ndim == 2 and x.dtype == self.weight.dtype
        if self.factors is None or not own or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        return _Factored.apply(x, self.weight, self.bias, self.factors)

    def taken(self) -> list[tuple[Tensor, Tensor]]:
        """The factors of one backward pass; the next one begins with none."""
        assert self.factors is not None
        factors = list(self.factors)
        self.factors.clear()
        return factors


class _Factored(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, factors: list[tuple[Tensor, Tensor]]) -> Tensor:
        return _product(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.factors = inputs
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (g,), (x, weight) = gradients, ctx.saved_tensors
        ctx.factors.append((g, x.detach()))
        dx = _product(g, weight.t(), None) if ctx.needs_input_grad[0] else None
        return dx, None, g.sum(0) if ctx.biased else None, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer's output, by oneDNN where torch has it, which is faster for few rows and many weights."""
    if x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def with_quick_layers(module: nn.Module, flatten_only: bool = False) -> nn.Module:
    """A copy of a network with the layers of this file.

    Args:
        module: The network.
        flatten_only: Whether only flattening layers are replaced. The others change dropout's masks and last bits.

    Returns:
        The copy.
    """
    copied = copy.deepcopy(module)
    for layer in copied.modules():
        if type(layer) is nn.Flatten:
            layer.__class__ = ChannelsLastFlatten
        elif flatten_only:
            continue
        elif type(layer) is nn.Dropout and not layer.inplace:
            layer.__class__ = BitDropout
        elif type(layer) is nn.Linear and layer.weight.numel() >= LARGE:
            layer.__class__ = ProductLinear
        elif isinstance(layer, nn.Sequential):
            _ease(layer)
    return copied


def _ease(sequence: nn.Sequential) -> None:
    """Pool before a ReLU, which gives the same bits of fewer values, and let a ReLU overwrite what nobody else reads."""
    names, cut = list(sequence._modules), getattr(sequence, "cut", 0)  # what is before the cut is read there
    pairs = [pair for k, pair in enumerate(pairwise(names), 1) if k != cut]
    for first, second in pairs:
        relu, pool = sequence._modules[first], sequence._modules[second]
        if type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d and not pool.return_indices:
            sequence._modules[first], sequence._modules[second] = pool, relu
    for first, second in pairs:
        if type(sequence._modules[first]) in (nn.Conv2d, nn.MaxPool2d) and type(sequence._modules[second]) is nn.ReLU:
            sequence._modules[second] = nn.ReLU(inplace=True)


def product_layers(module: nn.Module) -> Iterator[tuple[str, ProductLinear]]:
    """The layers that can leave their weight's gradient as a product, by the name of the weight."""
    for name, layer in module.named_modules():
        if isinstance(layer, ProductLinear) and layer.weight.requires_grad:
            yield f"{name}.weight".lstrip("."), layer


@contextmanager
def factors_of(layers: Mapping[str, ProductLinear]) -> Iterator[None]:
    """A context in which layers leave their weights' gradients as products."""
    for layer in layers.values():
        layer.factors = []
    try:
        yield
    finally:
        for layer in layers.values():
            layer.factors = None
