"""ResNet-18 with torchvision's parameter names, so that its published weights load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from .base import Classifier, check_network, image_shape, projection, register, scaled
from .norm import Norm, norm_layer
from .published import Published, Scaling, check_pretrained

WIDTHS = (64, 128, 256, 512)


def conv3x3(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    """A 3×3 convolution with padding and without bias."""
    return nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut (He et al., 2016)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv3x3(in_channels, out_channels, stride), norm_layer(norm, out_channels)
        self.conv2, self.bn2 = conv3x3(out_channels, out_channels), norm_layer(norm, out_channels)
        self.downsample = nn.Sequential()
        if stride != 1 or in_channels != out_channels:
            shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, norm_layer(norm, out_channels))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(inner)) + self.downsample(x))


class ResNetEncoder(nn.Module):
    """Everything before torchvision's `fc`, and a layer `project` where the embedding has another width than the network."""

    def __init__(self, channels: int, stem: str, width: float, embedding: int | None, norm: Norm) -> None:
        super().__init__()
        a, b, c, d = (scaled(n, width) for n in WIDTHS)
        self.dim = d if embedding is None else embedding
        large = stem == "imagenet"
        self.conv1 = nn.Conv2d(channels, a, 7, 2, padding=3, bias=False) if large else conv3x3(channels, a)
        self.bn1 = norm_layer(norm, a)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if large else nn.Identity()
        self.layer1 = nn.Sequential(BasicBlock(a, a, 1, norm), BasicBlock(a, a, 1, norm))
        self.layer2 = nn.Sequential(BasicBlock(a, b, 2, norm), BasicBlock(b, b, 1, norm))
        self.layer3 = nn.Sequential(BasicBlock(b, c, 2, norm), BasicBlock(c, c, 1, norm))
        self.layer4 = nn.Sequential(BasicBlock(c, d, 2, norm), BasicBlock(d, d, 1, norm))
        self.project = projection(d, self.dim)

    def early(self, x: Tensor) -> Tensor:
        """The feature maps of the early stage."""
        return self.layer1(self.maxpool(F.relu(self.bn1(self.conv1(x)))))

    def late(self, h: Tensor) -> Tensor:
        """The embedding of the early stage's feature maps."""
        return self.project(self.layer4(self.layer3(self.layer2(h))).mean((-2, -1)))

    def forward(self, x: Tensor) -> Tensor:
        """The embedding `[n, dim]` of a batch."""
        return self.late(self.early(x))


@register("resnet18")
@dataclass(frozen=True)
class ResNet18:
    """ResNet-18 (He et al., 2016).

    `stem="cifar"` begins with a 3×3 convolution for small images, `"imagenet"` with a 7×7 one of stride 2 and a max
    pool. `pretrained` is a file of torchvision's ResNet-18 weights (`.safetensors`, `.pt` or `.pth`); its `fc` is
    used as the head where the number of classes is the same, and left out otherwise; it needs `norm` batch or static.
    `scaling="published"` gives these weights the inputs they were trained with, scaled by ImageNet's mean and deviation.
    `width` multiplies every number of channels, the embedding's 512 too; another `embedding` adds a linear layer.
    """

    name: ClassVar[str]
    published: ClassVar[Published] = Published("torchvision's ResNet-18", "fc.")

    stem: Literal["cifar", "imagenet"] = "cifar"
    pretrained: str | None = None
    scaling: Scaling = "published"
    embedding: int | None = None
    width: float = 1.0
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        check_network("resnet18", self.stem, self.width, self.embedding, self.norm)
        check_pretrained("resnet18", self.pretrained, self.width, self.norm)

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Build the network, with random initial weights, for samples of one shape."""
        channels, _, _ = image_shape("resnet18", sample_shape)
        encoder = ResNetEncoder(channels, self.stem, self.width, self.embedding, self.norm)
        model = Classifier(encoder, encoder.dim, num_classes)
        if self.pretrained is not None:
            self.published.load(model, self.pretrained, self.name)
        return model
