"""The three networks for Wi-Fi CSI of FedAPA (Table II)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import nn

from .base import Classifier, Staged, at_least, image_shape, register
from .norm import Norm, check_norm, norm_layer

NATIVE = 256


class ConvNet4:
    """Blocks of a 3×3 convolution of stride 2, normalisation and ReLU; the mean over pixels; the embedding; the head.

    The table's 1×1 convolution after the pool, which computes the embedding, is the linear layer `project`, which is
    the same operation on one pixel. `TinyConvNet4` has it only where the embedding is not the width of its one block.
    """

    name: ClassVar[str]
    widths: ClassVar[tuple[int, ...]]
    embedding: int | None
    norm: Norm

    def __post_init__(self) -> None:
        if self.embedding is not None:
            at_least(self.name, 1, embedding=self.embedding)
        check_norm(self.name, self.norm)

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Build the network, with random initial weights, for samples of one shape."""
        channels, _, _ = image_shape(self.name, sample_shape)
        dim = NATIVE if self.embedding is None else self.embedding
        layers: list[tuple[str, nn.Module]] = []
        for i, (in_channels, out_channels) in enumerate(pairwise((channels, *self.widths)), start=1):
            layers += [
                (f"conv{i}", nn.Conv2d(in_channels, out_channels, 3, 2, padding=1, bias=False)),
                (f"bn{i}", norm_layer(self.norm, out_channels)),
                (f"relu{i}", nn.ReLU()),
            ]
        layers += [("pool", nn.AdaptiveAvgPool2d(1)), ("flat", nn.Flatten())]
        if len(self.widths) > 1 or dim != NATIVE:
            layers += [("project", nn.Linear(self.widths[-1], dim))]
        return Classifier(Staged(OrderedDict(layers), cut=3), dim, num_classes)


@register("tinyconvnet4")
@dataclass(frozen=True)
class TinyConvNet4(ConvNet4):
    """FedAPA's smallest network for CSI: one block of 256 channels."""

    widths: ClassVar[tuple[int, ...]] = (256,)
    embedding: int | None = None
    norm: Norm = "batch"


@register("middleconvnet4")
@dataclass(frozen=True)
class MiddleConvNet4(ConvNet4):
    """FedAPA's middle network for CSI: two blocks, then a linear layer to the embedding."""

    widths: ClassVar[tuple[int, ...]] = (16, 32)
    embedding: int | None = None
    norm: Norm = "batch"


@register("largeconvnet4")
@dataclass(frozen=True)
class LargeConvNet4(ConvNet4):
    """FedAPA's largest network for CSI, its default: five blocks, then a linear layer to the embedding."""

    widths: ClassVar[tuple[int, ...]] = (16, 32, 64, 128, 256)
    embedding: int | None = None
    norm: Norm = "batch"
