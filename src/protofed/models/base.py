"""What every model is: an encoder and a linear head, giving `(embedding, logits)`.

A model's settings are a frozen dataclass with a `build`; a network that already gives the pair needs one line,
`register_module`. Every model must run under `torch.func.vmap`, one set of parameters and buffers per client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import ProtofedError
from ..registry import Registry

Shape = tuple[int, ...]


class Output(NamedTuple):
    embedding: Tensor
    logits: Tensor


class Classifier(nn.Module):
    """`encoder` gives a flat embedding of `dim` numbers, `head` the class logits.

    `dropout` stands between the two, so the embedding that prototypes are made of is never dropped.
    """

    def __init__(self, encoder: nn.Module, dim: int, num_classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = encoder
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head = nn.Linear(dim, num_classes)
        self.dim = dim

    def forward(self, x: Tensor) -> Output:
        z = self.encoder(x)
        return Output(z, self.head(self.drop(z)))


class ModelSpec(Protocol):
    """A model's settings (a frozen dataclass); `build` makes the network for an input shape and a number of classes."""

    name: ClassVar[str]

    def build(self, sample_shape: Shape, num_classes: int) -> nn.Module: ...


registry: Registry[ModelSpec] = Registry("model")
register = registry.register

Factory = Callable[[Shape, int], nn.Module]


def register_module(name: str, factory: Factory) -> None:
    """Make a network of your own available by name: `factory(sample_shape, num_classes)` gives the module.

    Calling the module on `[n, *sample_shape]` must give the pair `embedding [n, d]`, `logits [n, num_classes]`.
    """

    @dataclass(frozen=True)
    class OwnModel:
        name: ClassVar[str]

        def build(self, sample_shape: Shape, num_classes: int) -> nn.Module:
            return adapt(factory(sample_shape, num_classes), sample_shape, num_classes, f"model {name!r}")

    registry.register(name)(OwnModel)


def adapt(module: nn.Module, sample_shape: Shape, num_classes: int, owner: str = "model") -> nn.Module:
    """Turn a module that gives `(embedding, logits)` into a model: checked once, `Output` returned, `dim` set.

    The module keeps its parameter names (it is not wrapped), so its own checkpoints still fit.
    """
    if not isinstance(module, nn.Module):
        raise ProtofedError(f"{owner}: expected a torch.nn.Module, got {type(module).__name__}")
    width = _probe(module, sample_shape, num_classes, owner)
    if getattr(module, "dim", width) != width:
        raise ProtofedError(
            f"{owner}: its attribute 'dim' is {module.dim!r}, but the embedding has {width} numbers and 'dim' is where "
            "protofed keeps that; rename the attribute"
        )
    module.dim = width  # type: ignore[assignment]
    for layer in module.modules():
        # Only momentum=None reads the count of batches, and counting in place is an error under vmap and grad.
        if isinstance(layer, _BatchNorm) and layer.momentum is not None:
            layer.num_batches_tracked = None
    module.register_forward_hook(_as_output)
    return module


def _as_output(module: nn.Module, args: Any, pair: tuple[Tensor, Tensor]) -> Output:
    return Output(*pair)


def _probe(module: nn.Module, sample_shape: Shape, num_classes: int, owner: str) -> int:
    """The embedding's width, found by running two blank samples; raises where the output is not what is needed."""
    training = module.training
    first = next(module.parameters(), None)
    blank = torch.zeros(2, *sample_shape, device=None if first is None else first.device)
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
    wanted = f"{owner}: expected a pair embedding [2, d], logits [2, {num_classes}] for a batch of 2; got "
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ProtofedError(wanted + _describe(result))
    z, logits = result
    flat = all(isinstance(t, Tensor) and t.is_floating_point() and t.ndim == 2 and len(t) == 2 for t in result)
    if not flat or logits.shape[1] != num_classes:
        raise ProtofedError(f"{wanted}{_describe(z)} and {_describe(logits)}")
    return int(z.shape[1])


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)}" if value.is_floating_point() else f"{list(value.shape)} of {value.dtype}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def at_least(owner: str, minimum: float, **settings: float) -> None:
    """One clear line where a setting is below its minimum."""
    for key, value in settings.items():
        if value < minimum:
            raise ProtofedError(f"model {owner!r}: {key}={value}; expected at least {minimum}")


def image_shape(owner: str, sample_shape: Shape, smallest: int = 1) -> tuple[int, int, int]:
    """`(channels, height, width)`, or an error that says which model would take such samples."""
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
