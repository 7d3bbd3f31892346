"""Other ways to compute the convolutions of a network: the same numbers up to rounding, sooner for some shapes.

`federation.rule` says which is used. Parameters keep their names, so weights fit either way.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# where the gradient of the weights is sooner a matrix product: few output positions, or few in the whole batch, of many
# channels that lie together
FEW, FEW_IN_ALL, CHANNELS = 4, 128, 32


class UnfoldConv2d(nn.Conv2d):
    """Convolution as unfold and one matrix product per client: under `vmap` a batched product, not a grouped convolution."""

    def forward(self, x: Tensor) -> Tensor:
        n, _, height, width = x.shape
        padding, stride, size, dilation = (
            pair if isinstance(pair, tuple) else (0, 0)
            for pair in (self.padding, self.stride, self.kernel_size, self.dilation)
        )
        out = [
            (extent + 2 * padding[i] - dilation[i] * (size[i] - 1) - 1) // stride[i] + 1
            for i, extent in enumerate((height, width))
        ]
        columns = F.unfold(x, size, dilation, padding, stride)
        columns = columns.permute(1, 0, 2).reshape(columns.shape[1], -1)
        product = self.weight.reshape(self.out_channels, -1) @ columns
        if self.bias is not None:
            product = product + self.bias[:, None]
        return product.reshape(self.out_channels, n, *out).transpose(0, 1)


class LeanConv2d(nn.Conv2d):
    """Convolution of one client's small batches, with two savings.

    Taps of the kernel that meet nothing but padding are left out: of a 3 × 3 kernel on 1 × 1 pixels, eight. And with few
    output positions the gradient of the weights is one matrix product of the output's gradient with the unfolded input,
    for which torch's own convolution takes several times as long.
    """

    def forward(self, x: Tensor) -> Tensor:
        padding = _pair(self.padding)
        if not torch.is_grad_enabled():
            return F.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation)
        how = zip(x.shape[2:], self.kernel_size, padding, self.stride, self.dilation, strict=True)
        (top, bottom, above, high), (left, right, before, wide) = (_taps(*each) for each in how)
        cut = (slice(None), slice(None), slice(top, bottom), slice(left, right))
        whole = (bottom - top, right - left) == self.kernel_size
        together = self.weight.stride(1) == 1 and self.in_channels >= CHANNELS
        few = high * wide <= FEW or (together and len(x) * high * wide <= FEW_IN_ALL)
        if whole and not few:
            return F.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation)
        return _WithProduct.apply(x, self.weight, self.bias, cut, self.stride, (above, before), self.dilation)


def _pair(value: Any) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def _outputs(extent: int, size: int, padding: int, stride: int, dilation: int) -> int:
    return (extent + 2 * padding - dilation * (size - 1) - 1) // stride + 1


def _taps(extent: int, size: int, padding: int, stride: int, dilation: int) -> tuple[int, int, int, int]:
    """Which taps of one dimension may meet a pixel.

    Returns:
        the first of them, the end of them, the padding that is left for them, and how many outputs there are. All taps where
        leaving some out would not give the same outputs.
    """
    out = _outputs(extent, size, padding, stride, dilation)
    used = [i for i in range(size) if i * dilation - padding < extent and (out - 1) * stride + i * dilation >= padding]
    begin, end = (used[0], used[-1] + 1) if used else (0, size)
    left = padding - begin * dilation
    if left < 0 or _outputs(extent, end - begin, left, stride, dilation) != out:
        return 0, size, padding, out
    return begin, end, left, out


class _WithProduct(torch.autograd.Function):
    """torch's convolution with a part of the kernel; the gradient of the weights is one matrix product."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cut: Any, stride: Any, padding: Any, dilation: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = cut, stride, padding, dilation
        ctx.biased = bias is not None
        part = weight[cut]
        if _is_a_point(x, part, padding):
            return F.linear(x.flatten(1), part[:, :, 0, 0], bias)[:, :, None, None]
        return F.conv2d(x, part, bias, stride, padding, dilation)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (g,), (x, weight) = gradients, ctx.saved_tensors
        cut, stride, padding, dilation = ctx.how
        part = weight[cut]
        point = _is_a_point(x, part, padding)
        dx = dw = db = None
        if ctx.needs_input_grad[0] and point:
            dx = (g.flatten(1) @ part[:, :, 0, 0])[:, :, None, None]
        elif ctx.needs_input_grad[0]:
            where = (g, x, part, None, stride, padding, dilation, False, (0, 0), 1, (True, False, False))
            dx = torch.ops.aten.convolution_backward(*where)[0]
        if ctx.needs_input_grad[1]:
            dw = _weights_gradient(x, part, g, stride, padding, dilation)
            if dw.shape != weight.shape:
                whole = torch.zeros_like(weight)
                whole[cut] = dw
                dw = whole
            elif dw.stride() != weight.stride():  # the fused optimiser wants both to lie alike
                dw = torch.empty_like(weight).copy_(dw)
        if ctx.biased and ctx.needs_input_grad[2]:
            db = g.sum((0, 2, 3))
        return dx, dw, db, None, None, None, None


def _is_a_point(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> bool:
    return weight.shape[2:] == x.shape[2:] == (1, 1) and not any(padding)


def _weights_gradient(x: Tensor, weight: Tensor, g: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
    o, c, kh, kw = weight.shape
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    if weight.stride(1) == 1:  # channels last: the numbers of a window lie together
        windows = _windows(
            padded.contiguous(memory_format=torch.channels_last), (kh, kw), stride, dilation, g.shape[2:]
        )
        rows = windows.permute(2, 4, 5, 0, 1, 3).reshape(-1, kh * kw * c)
        return (g.permute(0, 2, 3, 1).reshape(-1, o).t() @ rows).view(o, kh, kw, c).permute(0, 3, 1, 2)
    columns = (
        _windows(padded, (kh, kw), stride, dilation, g.shape[2:]).permute(3, 0, 1, 2, 4, 5).reshape(c * kh * kw, -1)
    )
    if g.stride(1) == 1:  # channels last
        return (columns @ g.permute(0, 2, 3, 1).reshape(-1, o)).t().reshape(o, c, kh, kw)
    return (g.transpose(0, 1).reshape(o, -1) @ columns.t()).view(o, c, kh, kw)


def _windows(x: Tensor, size: tuple[int, int], stride: Any, dilation: Any, out: Any) -> Tensor:
    """`[kh, kw, n, c, oh, ow]`, a view: the pixels that each tap of the kernel meets."""
    n, c = x.shape[:2]
    at, channel, down, along = x.stride()
    shape = (*size, n, c, *out)
    strides = (down * dilation[0], along * dilation[1], at, channel, down * stride[0], along * stride[1])
    return x.as_strided(shape, strides, x.storage_offset())


def with_convolutions(module: nn.Module, kind: type[nn.Conv2d]) -> nn.Module:
    """A copy of a network whose plain convolutions are computed in another way; parameter names stay.

    Args:
        module: the network.
        kind: `UnfoldConv2d` or `LeanConv2d`.
    """
    twin = copy.deepcopy(module)
    for layer in twin.modules():
        plain = type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros"
        if plain and not isinstance(layer.padding, str):
            layer.__class__ = kind
    return twin
