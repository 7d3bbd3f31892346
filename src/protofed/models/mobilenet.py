"""MobileNetV2 with torchvision's parameter names."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Literal

from torch import Tensor, nn

from .base import Classifier, check_network, image_shape, projection, register
from .norm import Norm, norm_layer

FIRST, LAST = 32, 1280
# expansion, channels, blocks, stride of the first of them (Table 2)
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def divisible(channels: int, width: float) -> int:
    """`channels` times `width` to the nearest multiple of 8, or the next where that would take more than a tenth away."""
    wanted = channels * width
    nearest = max(8, int(wanted + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * wanted else nearest + 8


def conv_norm(before: int, after: int, norm: Norm, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        norm_layer(norm, after),
        nn.ReLU6(),
    )


class InvertedResidual(nn.Module):
    """Widen, convolve each channel on its own, narrow without activation; a shortcut where the shape stays."""

    def __init__(self, before: int, after: int, stride: int, expansion: int, norm: Norm) -> None:
        super().__init__()
        inner = before * expansion
        self.shortcut = stride == 1 and before == after
        self.conv = nn.Sequential(
            *([conv_norm(before, inner, norm, 1)] if expansion != 1 else []),
            conv_norm(inner, inner, norm, 3, stride, groups=inner),
            nn.Conv2d(inner, after, 1, bias=False),
            norm_layer(norm, after),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.shortcut else self.conv(x)


class MobileNetV2Encoder(nn.Module):
    """torchvision's `features` and the mean over pixels; the early stage ends after the first block."""

    def __init__(self, channels: int, stem: str, width: float, embedding: int | None, norm: Norm) -> None:
        super().__init__()
        small = stem == "cifar"
        before = divisible(FIRST, width)
        layers: list[nn.Module] = [conv_norm(channels, before, norm, 3, 1 if small else 2)]
        for stage, (expansion, channels_out, blocks, first) in enumerate(STAGES):
            after = divisible(channels_out, width)
            for block in range(blocks):
                stride = first if block == 0 and not (small and stage == 1) else 1
                layers.append(InvertedResidual(before, after, stride, expansion, norm))
                before = after
        native = divisible(LAST, width)
        self.features = nn.Sequential(*layers, conv_norm(before, native, norm, 1))
        self.dim = native if embedding is None else embedding
        self.project = projection(native, self.dim)

    def early(self, x: Tensor) -> Tensor:
        for layer in islice(self.features, 2):
            x = layer(x)
        return x

    def late(self, h: Tensor) -> Tensor:
        for layer in islice(self.features, 2, None):
            h = layer(h)
        return self.project(h.mean((-2, -1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.late(self.early(x))


@register("mobilenetv2")
@dataclass(frozen=True)
class MobileNetV2:
    """MobileNetV2 (Sandler et al., 2018), without dropout.

    `stem="cifar"` has stride 1 where `"imagenet"` has its first two strides of 2. `width` multiplies every number of
    channels, to multiples of 8, and the embedding's 1280 too (the paper leaves that where `width` is below 1); another
    `embedding` adds a linear layer.
    """

    name: ClassVar[str]
    stem: Literal["cifar", "imagenet"] = "cifar"
    width: float = 1.0
    embedding: int | None = None
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        check_network("mobilenetv2", self.stem, self.width, self.embedding, self.norm)

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        channels, _, _ = image_shape("mobilenetv2", sample_shape)
        encoder = MobileNetV2Encoder(channels, self.stem, self.width, self.embedding, self.norm)
        return Classifier(encoder, encoder.dim, num_classes)
