"""Wide residual networks for small images, WRN-28-2 by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ProtofedError
from .base import Classifier, at_least, image_shape, register
from .norm import Norm, check_norm, norm_layer
from .resnet import conv3x3

FIRST, WIDTHS = 16, (16, 32, 64)


class PreActivationBlock(nn.Module):
    """Two 3×3 convolutions, each after normalisation and ReLU. A shortcut with a convolution begins after the first ReLU."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.bn1, self.conv1 = norm_layer(norm, in_channels), conv3x3(in_channels, out_channels, stride)
        self.bn2, self.conv2 = norm_layer(norm, out_channels), conv3x3(out_channels, out_channels)
        self.shortcut = (
            None if in_channels == out_channels else nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        inner = F.relu(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(inner)
        return shortcut + self.conv2(F.relu(self.bn2(self.conv1(inner))))


class WideResNetEncoder(nn.Module):
    """Three groups of blocks; the second and third halve the size. The early stage is the first group."""

    def __init__(self, channels: int, blocks: int, widen: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = conv3x3(channels, FIRST)
        in_channels, groups = FIRST, []
        for width, stride in zip(WIDTHS, (1, 2, 2), strict=True):
            out_channels = width * widen
            # only a group's first block changes the shape; with widen=1 the first group keeps it
            first_block = PreActivationBlock(in_channels, out_channels, stride, norm)
            other_blocks = [PreActivationBlock(out_channels, out_channels, 1, norm) for _ in range(blocks - 1)]
            groups.append(nn.Sequential(first_block, *other_blocks))
            in_channels = out_channels
        self.group1, self.group2, self.group3 = groups
        self.bn = norm_layer(norm, in_channels)
        self.dim = in_channels

    def early(self, x: Tensor) -> Tensor:
        """The feature maps of the early stage."""
        return self.group1(self.conv1(x))

    def late(self, h: Tensor) -> Tensor:
        """The embedding of the early stage's feature maps."""
        return F.relu(self.bn(self.group3(self.group2(h)))).mean((-2, -1))

    def forward(self, x: Tensor) -> Tensor:
        """The embedding `[n, dim]` of a batch."""
        return self.late(self.early(x))


@register("wideresnet")
@dataclass(frozen=True)
class WideResNet:
    """A wide residual network (Zagoruyko and Komodakis, 2016), WRN-`depth`-`widen`, without dropout.

    `depth` is 6n + 4: three groups of n blocks of two convolutions. The embedding is the mean over pixels, of 64 times
    `widen` numbers. The activation is ReLU, as in the paper, not the leaky one that some semi-supervised work has.
    """

    name: ClassVar[str]
    depth: int = 28
    widen: int = 2
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        at_least("wideresnet", 1, widen=self.widen)
        if self.depth < 10 or self.depth % 6 != 4:
            raise ProtofedError(f"model 'wideresnet': depth={self.depth}; expected 10, 16, 22, 28 and so on")
        check_norm("wideresnet", self.norm)

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Build the network, with random initial weights, for samples of one shape."""
        channels, _, _ = image_shape("wideresnet", sample_shape)
        encoder = WideResNetEncoder(channels, (self.depth - 4) // 6, self.widen, self.norm)
        return Classifier(encoder, encoder.dim, num_classes)
