"""GoogLeNet, the first Inception network, with batch norm by default and torchvision's parameter names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Classifier, check_network, image_shape, projection, register, scaled
from .norm import Norm, norm_layer
from .published import Published, Scaling, check_pretrained

# channels of 1×1; of 1×1 then 3×3, twice; and of 1×1 after the pool
INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


class ConvNorm(nn.Module):
    """Convolution, normalisation, ReLU."""

    def __init__(self, in_channels: int, out_channels: int, norm: Norm, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)
        self.bn = norm_layer(norm, out_channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """The output of the three layers."""
        return F.relu(self.bn(self.conv(x)))


class Inception(nn.Module):
    """Four parallel branches whose channels are concatenated. The third has 3×3, not the paper's 5×5, as in torchvision."""

    def __init__(
        self, in_channels: int, norm: Norm, out1: int, in3: int, out3: int, in5: int, out5: int, pooled: int
    ) -> None:
        super().__init__()
        self.branch1 = ConvNorm(in_channels, out1, norm, 1)
        self.branch2 = nn.Sequential(ConvNorm(in_channels, in3, norm, 1), ConvNorm(in3, out3, norm, 3))
        self.branch3 = nn.Sequential(ConvNorm(in_channels, in5, norm, 1), ConvNorm(in5, out5, norm, 3))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), ConvNorm(in_channels, pooled, norm, 1))
        self.channels = out1 + out3 + out5 + pooled

    def forward(self, x: Tensor) -> Tensor:
        """The concatenated output of the four branches."""
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], -3)


def halving(kernel: int) -> nn.MaxPool2d:
    """A max pool of stride 2."""
    return nn.MaxPool2d(kernel, 2, ceil_mode=True)


class GoogLeNetEncoder(nn.Module):
    """Everything before torchvision's `fc`, without auxiliary heads; the stem is the early stage."""

    def __init__(self, channels: int, stem: str, width: float, embedding: int | None, norm: Norm) -> None:
        super().__init__()
        stem_channels, last_channels = scaled(64, width), scaled(192, width)
        if stem == "imagenet":
            self.conv1, self.maxpool1 = ConvNorm(channels, stem_channels, norm, 7, 2), halving(3)
            self.conv2, self.conv3 = (
                ConvNorm(stem_channels, stem_channels, norm, 1),
                ConvNorm(stem_channels, last_channels, norm, 3),
            )
            self.maxpool2 = halving(3)
            self.stem: tuple[str, ...] = ("conv1", "maxpool1", "conv2", "conv3", "maxpool2")
        else:
            self.conv1 = ConvNorm(channels, last_channels, norm, 3)
            self.stem = ("conv1",)
        self.maxpool3, self.maxpool4 = halving(3), halving(2)
        for name, widths in INCEPTIONS.items():
            block = Inception(last_channels, norm, *(scaled(n, width) for n in widths))
            self.add_module(f"inception{name}", block)
            last_channels = block.channels
        self.dim = last_channels if embedding is None else embedding
        self.project = projection(last_channels, self.dim)

    def early(self, x: Tensor) -> Tensor:
        """The feature maps of the early stage."""
        for name in self.stem:
            x = self.get_submodule(name)(x)
        return x

    def late(self, h: Tensor) -> Tensor:
        """The embedding of the early stage's feature maps."""
        for name in INCEPTIONS:
            if name == "4a":
                h = self.maxpool3(h)
            elif name == "5a":
                h = self.maxpool4(h)
            h = self.get_submodule(f"inception{name}")(h)
        return self.project(h.mean((-2, -1)))

    def forward(self, x: Tensor) -> Tensor:
        """The embedding `[n, dim]` of a batch."""
        return self.late(self.early(x))


@register("googlenet")
@dataclass(frozen=True)
class GoogLeNet:
    """GoogLeNet (Szegedy et al., 2015), without auxiliary heads and dropout.

    `stem="cifar"` begins with one 3×3 convolution of stride 1 to 192 channels, `"imagenet"` with the published one,
    which makes images eight times smaller. `width` multiplies every number of channels, the embedding's 1024 too;
    another `embedding` adds a linear layer. `pretrained` is a file of torchvision's GoogLeNet weights, which needs
    `stem="imagenet"`; `scaling="published"` gives these weights the inputs they were trained with, from −1 to 1.
    """

    name: ClassVar[str]
    published: ClassVar[Published] = Published(
        "torchvision's GoogLeNet", "fc.", mean=(0.5,) * 3, std=(0.5,) * 3, ignored=("aux1.", "aux2.")
    )

    stem: Literal["cifar", "imagenet"] = "cifar"
    pretrained: str | None = None
    scaling: Scaling = "published"
    width: float = 1.0
    embedding: int | None = None
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        check_network("googlenet", self.stem, self.width, self.embedding, self.norm)
        check_pretrained("googlenet", self.pretrained, self.width, self.norm)

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Build the network, with random initial weights, for samples of one shape."""
        # each pool of 3 needs two pixels; with the imagenet stem, the third pool has an eighth of the side
        channels, _, _ = image_shape("googlenet", sample_shape, smallest=15 if self.stem == "imagenet" else 2)
        encoder = GoogLeNetEncoder(channels, self.stem, self.width, self.embedding, self.norm)
        model = Classifier(encoder, encoder.dim, num_classes)
        if self.pretrained is not None:
            self.published.load(model, self.pretrained, self.name)
        return model
