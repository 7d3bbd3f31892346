"""The structure of every model: an encoder and a linear head, which return `(embedding, logits)`.

A model's settings are a frozen dataclass with a `build`. A network that already returns the pair, or flat features
alone, needs one line, `register_module`. Every model must run under `torch.func.vmap`, one set of parameters and
buffers per client.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import ProtofedError
from ..registry import Registry
from .norm import check_norm

Shape = tuple[int, ...]
PSI = "psi."  # the prefix of ψ's names in a model that is a sum σ + ψ (`decomposed.py`); σ has the model's own names
LOW = 64  # the size of a low-level feature, the same for all models, so that architectures can compare theirs


class Output(NamedTuple):
    """A model's output for a batch: the embedding `[n, d]`, and the head's logits `[n, C]`."""

    embedding: Tensor
    logits: Tensor


class Levels(NamedTuple):
    """A model's output together with the low-level feature `low [n, LOW]`."""

    low: Tensor
    embedding: Tensor
    logits: Tensor


@runtime_checkable
class Stages(Protocol):
    """An encoder in two stages: `early` computes the low-level feature, and `late` the embedding from it."""

    def early(self, x: Tensor) -> Tensor:
        """The feature maps of the early stage."""

    def late(self, h: Tensor) -> Tensor:
        """The embedding of the early stage's feature maps."""


class Staged(nn.Sequential):
    """A sequence of layers of which the first `cut` are the early stage."""

    def __init__(self, *layers: Any, cut: int) -> None:
        super().__init__(*layers)
        self.cut = cut

    def early(self, x: Tensor) -> Tensor:
        """The output of the first `cut` layers."""
        for layer in islice(self, self.cut):
            x = layer(x)
        return x

    def late(self, h: Tensor) -> Tensor:
        """The output of the other layers."""
        for layer in islice(self, self.cut, None):
            h = layer(h)
        return h


def by_stages(encoder: nn.Module, x: Tensor, owner: str) -> tuple[Tensor, Tensor]:
    """Run an encoder stage by stage.

    Args:
        encoder: an encoder in two stages.
        x: a batch.
        owner: the model's name in the error message, where it has no stages.

    Returns:
        the low-level feature, pooled to `LOW` numbers without parameters, and the embedding.
    """
    if not isinstance(encoder, Stages):
        raise no_levels(owner)
    h = encoder.early(x)
    return F.adaptive_avg_pool1d(h.flatten(1), LOW), encoder.late(h)


def no_levels(owner: str) -> ProtofedError:
    """The error of a model that has no low-level features."""
    return ProtofedError(
        f"{owner} gives no low-level features; fedmps needs a built-in image model or mlp, or a Classifier whose encoder "
        "has the methods 'early' and 'late'"
    )


class Classifier(nn.Module):
    """An encoder that computes a flat embedding of `dim` numbers, and a head (by default linear) that computes logits.

    `dropout` is applied between the two, so it never changes the embedding that prototypes are made of. `levels=True`
    needs an encoder in `Stages`; `owner` is the model's name in the error message where it has none.
    """

    def __init__(
        self,
        encoder: nn.Module,
        dim: int,
        num_classes: int,
        dropout: float = 0.0,
        owner: str = "this model",
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(dim, num_classes) if head is None else head
        self.dim = dim
        self.owner = owner

    def forward(self, x: Tensor, levels: bool = False) -> Output | Levels:
        """The embedding and logits of a batch, with `levels` the low-level feature too."""
        if levels:
            low, z = by_stages(self.encoder, x, self.owner)
            return Levels(low, z, self.head(self.drop(z)))
        z = self.encoder(x)
        return Output(z, self.head(self.drop(z)))


class ModelSpec(Protocol):
    """A model's settings (a frozen dataclass); `build` makes the network for an input shape and a number of classes."""

    @property
    def name(self) -> str:
        """The registered name of the model."""

    def build(self, sample_shape: Shape, num_classes: int) -> nn.Module:
        """Build the network, with random initial weights of torch's global generator.

        Args:
            sample_shape: The shape of one sample.
            num_classes: The number of classes.

        Returns:
            The network, which has an attribute `dim`, the width of its embedding.
        """


registry: Registry[ModelSpec] = Registry("model")
register = registry.register

Factory = Callable[[Shape, int], nn.Module]


def register_module(name: str, factory: Factory) -> None:
    """Make a network of your own available by name.

    Args:
        name: the name for the setting `model`.
        factory: a function of the sample shape and the number of classes that returns the module. The module must map
            `[n, *sample_shape]` to the pair `embedding [n, d]`, `logits [n, num_classes]`, or flat features `[n, d]`
            alone, which get a linear head.

    Example: `register_module("mine", lambda shape, classes: MyNetwork(classes))`
    """

    @dataclass(frozen=True)
    class OwnModel:
        name: ClassVar[str]

        def build(self, sample_shape: Shape, num_classes: int) -> nn.Module:
            return adapt(factory(sample_shape, num_classes), sample_shape, num_classes, f"model {name!r}")

    registry.register(name)(OwnModel)


def adapt(module: nn.Module, sample_shape: Shape, num_classes: int, owner: str = "model") -> nn.Module:
    """Turn a module that returns `(embedding, logits)` into a model: it is checked, returns `Output`, and has `dim`.

    The module keeps its parameter names, as it is not wrapped, so its own checkpoints still fit. A module that returns
    flat features alone becomes the `encoder` of a `Classifier`.

    Args:
        module: the network.
        sample_shape: the shape of one sample.
        num_classes: the number of classes.
        owner: the model's name in error messages.

    Returns:
        the model.

    >>> adapt(nn.Flatten(), (1, 2, 3), num_classes=10).dim
    6
    """
    if not isinstance(module, nn.Module):
        raise ProtofedError(f"{owner}: expected a torch.nn.Module, got {type(module).__name__}")
    width, has_logits = _probe(module, sample_shape, num_classes, owner)
    for layer in module.modules():
        # Only momentum=None reads the count of batches, and counting in place is an error under vmap and grad.
        if isinstance(layer, _BatchNorm) and layer.momentum is not None:
            layer.num_batches_tracked = None
    if not has_logits:
        return Classifier(module, width, num_classes, owner=owner)
    if getattr(module, "dim", width) != width:
        raise ProtofedError(
            f"{owner}: its attribute 'dim' is {module.dim!r}, but the embedding has {width} numbers and 'dim' is where "
            "protofed keeps that; rename the attribute"
        )
    module.dim = width  # type: ignore[assignment]
    if not isinstance(module, Classifier) and _as_output not in module._forward_hooks.values():
        module.register_forward_pre_hook(partial(_without_levels, owner), with_kwargs=True)
        module.register_forward_hook(_as_output)
    return module


def _without_levels(owner: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if kwargs.get("levels"):
        raise no_levels(owner)
    return args, {key: value for key, value in kwargs.items() if key != "levels"}


def _as_output(module: nn.Module, args: Any, pair: tuple[Tensor, Tensor]) -> Output:
    return Output(*pair)


def _probe(module: nn.Module, sample_shape: Shape, num_classes: int, owner: str) -> tuple[int, bool]:
    """The embedding's width and whether the module returns logits too, from a run with two blank samples.

    It raises an error where the output has another form.
    """
    training = module.training
    parameter = next(module.parameters(), None)
    blank = torch.zeros(2, *sample_shape, device=None if parameter is None else parameter.device)
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            result = module(blank)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ProtofedError(
            f"{owner}: failed on a batch of shape {tuple(blank.shape)} ({type(error).__name__}: {reason})"
        ) from error
    finally:
        module.train(training)
    expectation = (
        f"{owner}: expected a pair embedding [2, d], logits [2, {num_classes}] or features [2, d] alone for a batch of 2; "
        "got "
    )
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    if not is_pair and not isinstance(result, Tensor):
        raise ProtofedError(expectation + _describe(result))
    parts = tuple(result) if is_pair else (result,)
    if not all(_is_flat(part) for part in parts) or (is_pair and parts[1].shape[1] != num_classes):
        unpooled = isinstance(parts[0], Tensor) and parts[0].ndim > 2
        hint = "; end it with a global pooling or flatten" if unpooled else ""
        raise ProtofedError(expectation + " and ".join(map(_describe, parts)) + hint)
    return int(parts[0].shape[1]), is_pair


def _is_flat(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 2 and len(value) == 2


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)}" if value.is_floating_point() else f"{list(value.shape)} of {value.dtype}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__


def parameter_count(model: nn.Module) -> int:
    """The number of a model's parameters.

    Args:
        model: the network; a sum σ + ψ counts as the one model that it represents.

    Returns:
        the number.

    >>> parameter_count(nn.Linear(3, 2))
    8
    """
    return sum(p.numel() for p in getattr(model, "undivided", model).parameters())


def at_least(owner: str, minimum: float, **settings: float) -> None:
    """Raise a `ProtofedError` for a setting that is below its minimum.

    Args:
        owner: The model's name.
        minimum: The smallest value.
        **settings: Values by name.
    """
    for key, value in settings.items():
        if value < minimum:
            raise ProtofedError(f"model {owner!r}: {key}={value}; expected at least {minimum}")


def check_width(owner: str, width: float) -> None:
    """Raise a `ProtofedError` for a width by which channels cannot be multiplied."""
    if not 0 < width < math.inf:
        raise ProtofedError(f"model {owner!r}: width={width}; expected a number above 0")


def check_network(owner: str, stem: str, width: float, embedding: int | None, norm: str) -> None:
    """Raise a `ProtofedError` for a wrong value of a setting that the larger image networks share."""
    if stem not in ("cifar", "imagenet"):
        raise ProtofedError(f"model {owner!r}: stem={stem!r}; expected 'cifar' or 'imagenet'")
    check_width(owner, width)
    check_norm(owner, norm)
    if embedding is not None:
        at_least(owner, 1, embedding=embedding)


def scaled(channels: int, width: float) -> int:
    """A number of channels times a width multiplier, at least 1.

    >>> scaled(64, 0.5), scaled(1, 0.1)
    (32, 1)
    """
    return max(1, round(channels * width))


def projection(native: int, embedding: int) -> nn.Module:
    """A linear layer where the embedding has another width than the network's own, otherwise the identity."""
    return nn.Linear(native, embedding) if embedding != native else nn.Identity()


def image_shape(owner: str, sample_shape: Shape, smallest: int = 1) -> tuple[int, int, int]:
    """The channels, height and width of images.

    Args:
        owner: the model's name.
        sample_shape: the shape of one sample.
        smallest: the smallest side that the model accepts.

    Returns:
        `(channels, height, width)`. The error names a model that accepts such samples.

    >>> image_shape("cnn", (3, 32, 32))
    (3, 32, 32)
    """
    if len(sample_shape) != 3:
        raise ProtofedError(
            f"model {owner!r} needs images [channels, height, width]; a sample has shape {list(sample_shape)}. "
            "Try model=mlp"
        )
    channels, height, width = sample_shape
    if min(height, width) < smallest:
        raise ProtofedError(
            f"model {owner!r} needs images of at least {smallest}x{smallest}; a sample has shape {list(sample_shape)}. "
            "Try model=mlp"
        )
    return channels, height, width
