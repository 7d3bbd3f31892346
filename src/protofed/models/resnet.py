"""ResNet-18 with torchvision's parameter names, so that its published weights load."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ProtofedError
from .base import Classifier, check_network, image_shape, projection, register, scaled
from .norm import Norm, norm_layer

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
    `width` multiplies every number of channels, the embedding's 512 too; another `embedding` adds a linear layer.
    """

    name: ClassVar[str]
    stem: Literal["cifar", "imagenet"] = "cifar"
    pretrained: str | None = None
    embedding: int | None = None
    width: float = 1.0
    norm: Norm = "batch"

    def __post_init__(self) -> None:
        check_network("resnet18", self.stem, self.width, self.embedding, self.norm)
        if self.pretrained is not None and self.width != 1:
            raise ProtofedError(f"model 'resnet18': width={self.width}; expected 1.0 with pretrained={self.pretrained}")
        if self.pretrained is not None and self.norm not in ("batch", "static"):
            raise ProtofedError(
                f"model 'resnet18': norm={self.norm!r}; expected 'batch' or 'static' with pretrained={self.pretrained}"
            )

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Build the network, with random initial weights, for samples of one shape."""
        channels, _, _ = image_shape("resnet18", sample_shape)
        encoder = ResNetEncoder(channels, self.stem, self.width, self.embedding, self.norm)
        model = Classifier(encoder, encoder.dim, num_classes)
        if self.pretrained is not None:
            load_torchvision(model, Path(self.pretrained).expanduser())
        return model


def load_torchvision(model: Classifier, file: Path) -> None:
    """Load torchvision's ResNet-18 weights into the encoder and, where its shape is the same, into the head."""
    weights = read_state_dict(file)
    expected = {k: v for k, v in model.encoder.state_dict().items() if not k.startswith("project.")}
    # files from before PyTorch 0.4.1, torchvision's own among them, have no counts of batches
    required = {k for k in expected if not k.endswith("num_batches_tracked")}
    missing_keys, unknown_keys = (
        sorted(required - weights.keys()),
        sorted(weights.keys() - expected.keys() - {"fc.weight", "fc.bias"}),
    )
    if missing_keys or unknown_keys:
        differences = [f"without {_some(missing_keys)}"] * bool(missing_keys) + [f"with {_some(unknown_keys)}"] * bool(
            unknown_keys
        )
        raise ProtofedError(
            f"{file}: expected the keys of torchvision's ResNet-18; found a file {' and '.join(differences)}"
        )
    for key, value in expected.items():
        if key in weights and weights[key].shape != value.shape:
            raise ProtofedError(
                f"{file}: {key} has shape {list(weights[key].shape)}; expected {list(value.shape)}"
                + (_stem_hint(weights[key], value) if key == "conv1.weight" else "")
            )
    model.encoder.load_state_dict({k: v for k, v in weights.items() if k in expected}, strict=False)
    head = {k.removeprefix("fc."): v for k, v in weights.items() if k.startswith("fc.")}
    if {k: v.shape for k, v in head.items()} == {k: v.shape for k, v in model.head.state_dict().items()}:
        model.head.load_state_dict(head)


def read_state_dict(file: Path) -> Mapping[str, Tensor]:
    """Tensors by name from a `.safetensors`, `.pt` or `.pth` file. Pickled code in a file is refused, never run."""
    if not file.is_file():
        raise ProtofedError(f"{file}: no such file; expected pretrained weights (.safetensors, .pt or .pth)")
    suffix = file.suffix.lower()
    if suffix not in (".safetensors", ".pt", ".pth"):
        raise ProtofedError(f"{file}: expected pretrained weights in .safetensors, .pt or .pth, not {suffix!r}")
    try:
        state = load_file(file) if suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ProtofedError(
            f"{file}: expected a plain state dict of tensors; found something else pickled, which is never run"
        ) from None
    except Exception as error:  # a damaged file may raise nearly anything
        reason = " ".join(str(error).split())[:120]
        raise ProtofedError(f"{file}: cannot be read as weights ({type(error).__name__}: {reason})") from None
    if not isinstance(state, Mapping) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()
    ):
        content = (
            f"a mapping with {_some([str(k) for k in state])}" if isinstance(state, Mapping) else type(state).__name__
        )
        raise ProtofedError(f"{file}: expected a state dict, tensors by name; found {content}")
    return state


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more keys" if len(names) > 2 else "")


def _stem_hint(kernel: Tensor, expected: Tensor) -> str:
    if kernel.ndim == 4 and kernel.shape[-1] == 7 and expected.shape[-1] == 3:
        return "; use stem=imagenet with this file"
    if kernel.ndim == 4 and kernel.shape[-1] == 3 and expected.shape[-1] == 7:
        return "; use stem=cifar with this file"
    return f"; the images have {expected.shape[1]} channels"
