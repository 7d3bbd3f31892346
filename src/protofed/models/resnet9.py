"""ResNet8 and ResNet9 of ProtoFSSL (Table 6), which come from FedMatch."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from .base import Classifier, Staged, check_width, image_shape, register, scaled
from .norm import Norm, check_norm, norm_layer


class Unit(nn.Sequential):
    """A 3×3 convolution, normalisation, ReLU.

    The initial weights have a variance of 1 over the number of inputs, as in the paper's code. PyTorch's default is a
    third of that, which without normalisation makes embeddings a tenth as large.
    """

    def __init__(self, in_channels: int, out_channels: int, norm: Norm) -> None:
        conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="linear")
        super().__init__(conv, norm_layer(norm, out_channels), nn.ReLU())


class Skip(nn.Sequential):
    """Layers with a shortcut; nothing follows the sum."""

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the input and the layers' output."""
        return x + super().forward(x)


class ZeroHead(nn.Module):
    """A head whose logits are zeros, for a model that predicts by prototypes alone.

    They are an empty sum over the embedding, so that a loss of logits alone has a gradient, which is zero.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes

    def forward(self, z: Tensor) -> Tensor:
        """Zeros `[…, num_classes]`."""
        if torch.compiler.is_exporting():  # ONNX has no empty sums
            return torch.zeros_like(z[..., :1]).expand(*z.shape[:-1], self.num_classes)
        return z[..., :0].sum(-1, keepdim=True).expand(*z.shape[:-1], self.num_classes)


@register("resnet9")
@dataclass(frozen=True)
class ResNet9:
    """ResNet9 of ProtoFSSL's baselines: eight convolutions and a linear head, all without bias.

    The last max pool is over the whole image. `width` multiplies every number of channels, the embedding's 512 too.
    `pools` are the sides of the three poolings before it. By default they are 2, 2, 2, as in the paper's table, and for
    images of 96 pixels 3, 2, 4, as in its code for STL-10, so that a map of 4 × 4 is left in both.
    """

    name: ClassVar[str]
    width: float = 1.0
    norm: Norm = "none"
    pools: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_width(self.name, self.width)
        if self.pools and (len(self.pools) != 3 or min(self.pools) < 1):
            raise ValueError(f"pools must be three numbers from 1 on, or none, got {list(self.pools)}")
        check_norm(self.name, self.norm)

    def head(self, dim: int, num_classes: int) -> nn.Module:
        """The linear head without bias."""
        return nn.Linear(dim, num_classes, bias=False)

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Build the network, with random initial weights, for samples of one shape."""
        channels, *sides = image_shape(self.name, sample_shape, smallest=max(16, math.prod(self.pools)))
        first, second, third = self.pools or ((3, 2, 4) if sides == [96, 96] else (2, 2, 2))
        a, b, c, d = (scaled(n, self.width) for n in (64, 128, 256, 512))
        height, width = (side // first // second // third for side in sides)  # 4 pixels of 32
        layers: list[tuple[str, nn.Module]] = [
            ("conv1", Unit(channels, a, self.norm)),
            ("conv2", Unit(a, b, self.norm)),
            ("pool1", nn.MaxPool2d(first)),
            ("skip1", Skip(Unit(b, b, self.norm), Unit(b, b, self.norm))),
            ("conv5", Unit(b, c, self.norm)),
            ("pool2", nn.MaxPool2d(second)),
            ("conv6", Unit(c, d, self.norm)),
            ("pool3", nn.MaxPool2d(third)),
            ("skip2", Skip(Unit(d, d, self.norm), Unit(d, d, self.norm))),
            ("pool4", nn.MaxPool2d((height, width))),
            ("flat", nn.Flatten()),
        ]
        return Classifier(Staged(OrderedDict(layers), cut=3), d, num_classes, head=self.head(d, num_classes))


@register("resnet8")
@dataclass(frozen=True)
class ResNet8(ResNet9):
    """ResNet8 of ProtoFSSL: ResNet9 without its head.

    Its logits are zeros, so it is for methods that learn and predict by prototypes; a projection gives it a head.
    """

    def head(self, dim: int, num_classes: int) -> nn.Module:
        """A head whose logits are zeros."""
        return ZeroHead(num_classes)
