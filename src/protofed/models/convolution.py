"""Other algorithms for the convolutions of a network, with the same results up to rounding, faster for some shapes.

`federation.rule` decides which one is used. Parameters keep their names, so weights fit all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# where the weights' gradient is faster as a matrix product: few output positions, or few in the whole batch with many
# channels that are contiguous in memory
FEW, FEW_IN_BATCH, CHANNELS = 4, 128, 32


class UnfoldConv2d(nn.Conv2d):
    """Convolution as unfold and one matrix product per client: under `vmap` a batched product, no grouped convolution."""

    def forward(self, x: Tensor) -> Tensor:
        """The convolution of a batch."""
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

    Taps of the kernel that see nothing but padding are left out, which are eight of a 3 × 3 kernel on 1 × 1 pixels. And
    with few output positions the gradient of the weights is one matrix product of the output's gradient with the
    unfolded input, which is several times as fast as torch's own convolution.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The convolution of a batch."""
        transformed = torch._C._are_functorch_transforms_active()  # which know torch's own functions alone
        lean = None
        if torch.is_grad_enabled() and not transformed:
            lean = lean_form(self, x.shape, self.weight.stride(1) == 1)
        if lean is None:
            return F.conv2d(x, self.weight, self.bias, self.stride, _pair(self.padding), self.dilation)
        geometry = lean.window, self.stride, lean.padding, self.dilation
        if not torch.is_autocast_enabled(x.device.type):
            return _WithProduct.apply(x, self.weight, self.bias, *geometry)
        reduced = torch.get_autocast_dtype(x.device.type)  # a function of our own gets one type for all, by itself
        values = [None if value is None else value.to(reduced) for value in (x, self.weight, self.bias)]
        with torch.autocast(x.device.type, enabled=False):
            return _WithProduct.apply(*values, *geometry)


class LeanForm(NamedTuple):
    """The taps of a kernel that are used, and the padding that remains."""

    window: tuple[slice, ...]
    padding: tuple[int, int]


def lean_form(layer: nn.Conv2d, shape: Sequence[int], channels_last: bool) -> LeanForm | None:
    """How `LeanConv2d` convolves a batch of one shape; None where it does as torch does.

    Args:
        layer: The convolution, or one with the same sizes.
        shape: The shape of the batch.
        channels_last: Whether the weights have their channels last in memory.
    """
    axes = zip(shape[2:], layer.kernel_size, _pair(layer.padding), layer.stride, layer.dilation, strict=True)
    (top, bottom, pad_top, out_height), (left, right, pad_left, out_width) = (_taps(*axis) for axis in axes)
    window = (slice(None), slice(None), slice(top, bottom), slice(left, right))
    all_taps = (bottom - top, right - left) == layer.kernel_size
    contiguous = channels_last and layer.in_channels >= CHANNELS
    few_outputs = out_height * out_width <= FEW or (contiguous and shape[0] * out_height * out_width <= FEW_IN_BATCH)
    return LeanForm(window, (pad_top, pad_left)) if few_outputs or not all_taps else None


def has_few_outputs(module: nn.Module, sample_shape: Sequence[int], batch: int) -> bool:
    """Whether any plain convolution of a network has another form than torch's own as a `LeanConv2d`.

    Args:
        module: The network.
        sample_shape: The shape of one sample.
        batch: The samples in a step.
    """
    found: list[bool] = []

    def look(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Conv2d)
        found.append(lean_form(layer, (batch, *inputs[0].shape[1:]), channels_last=True) is not None)

    hooks = [layer.register_forward_pre_hook(look) for layer in module.modules() if _is_plain(layer)]
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            module(torch.zeros(1, *sample_shape, device=next(module.parameters()).device))
    finally:
        module.train(training)
        for hook in hooks:
            hook.remove()
    return any(found)


def _is_plain(layer: nn.Module) -> bool:
    plain = type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros"
    return plain and not isinstance(layer.padding, str)


def _pair(value: Any) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def _outputs(extent: int, size: int, padding: int, stride: int, dilation: int) -> int:
    return (extent + 2 * padding - dilation * (size - 1) - 1) // stride + 1


def _taps(extent: int, size: int, padding: int, stride: int, dilation: int) -> tuple[int, int, int, int]:
    """The taps of one dimension that may see a pixel.

    Returns:
        the first of them, their end, the remaining padding, and the number of outputs. All taps are returned where
        leaving some out would change the outputs.
    """
    out = _outputs(extent, size, padding, stride, dilation)
    useful = [
        i for i in range(size) if i * dilation - padding < extent and (out - 1) * stride + i * dilation >= padding
    ]
    begin, end = (useful[0], useful[-1] + 1) if useful else (0, size)
    remaining_padding = padding - begin * dilation
    if remaining_padding < 0 or _outputs(extent, end - begin, remaining_padding, stride, dilation) != out:
        return 0, size, padding, out
    return begin, end, remaining_padding, out


class _WithProduct(torch.autograd.Function):
    """torch's convolution with a part of the kernel; the gradient of the weights is one matrix product."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, window: Any, stride: Any, padding: Any, dilation: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = window, stride, padding, dilation
        ctx.biased = bias is not None
        part = weight[window]
        if _is_a_point(x, part, padding):
            return F.linear(x.flatten(1), part[:, :, 0, 0], bias)[:, :, None, None]
        return F.conv2d(x, part, bias, stride, padding, dilation)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (g,), (x, weight) = gradients, ctx.saved_tensors
        window, stride, padding, dilation = ctx.geometry
        part = weight[window]
        point = _is_a_point(x, part, padding)
        dx = dw = db = None
        if ctx.needs_input_grad[0] and point:
            dx = (g.flatten(1) @ part[:, :, 0, 0])[:, :, None, None]
        elif ctx.needs_input_grad[0]:
            arguments = (g, x, part, None, stride, padding, dilation, False, (0, 0), 1, (True, False, False))
            dx = torch.ops.aten.convolution_backward(*arguments)[0]
        if ctx.needs_input_grad[1]:
            dw = _weights_gradient(x, part, g, stride, padding, dilation)
            if dw.shape != weight.shape:
                whole = torch.zeros_like(weight)
                whole[window] = dw
                dw = whole
            elif dw.stride() != weight.stride():  # the fused optimiser needs the same memory order for both
                dw = torch.empty_like(weight).copy_(dw)
        if ctx.biased and ctx.needs_input_grad[2]:
            db = g.sum((0, 2, 3))
        return dx, dw, db, None, None, None, None


def _is_a_point(x: Tensor, weight: Tensor, padding: tuple[int, int]) -> bool:
    return weight.shape[2:] == x.shape[2:] == (1, 1) and not any(padding)


def _weights_gradient(x: Tensor, weight: Tensor, g: Tensor, stride: Any, padding: Any, dilation: Any) -> Tensor:
    o, c, kh, kw = weight.shape
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
    if weight.stride(1) == 1:  # channels last: the values of a window are contiguous
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
    """The pixels that each tap of the kernel sees, as a view `[kh, kw, n, c, oh, ow]`."""
    n, c = x.shape[:2]
    sample_stride, channel_stride, row_stride, column_stride = x.stride()
    shape = (*size, n, c, *out)
    strides = (
        row_stride * dilation[0],
        column_stride * dilation[1],
        sample_stride,
        channel_stride,
        row_stride * stride[0],
        column_stride * stride[1],
    )
    return x.as_strided(shape, strides, x.storage_offset())


def with_convolutions(module: nn.Module, kind: type[nn.Conv2d]) -> nn.Module:
    """A copy of a network whose plain convolutions use another algorithm; parameter names stay the same.

    Args:
        module: The network.
        kind: `UnfoldConv2d` or `LeanConv2d`.

    Returns:
        The copy.
    """
    copied = copy.deepcopy(module)
    for layer in copied.modules():
        if _is_plain(layer):
            layer.__class__ = kind
    return copied
