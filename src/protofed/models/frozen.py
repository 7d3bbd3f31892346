"""Networks of which only the head trains: the body stays as it was built, published or random, for all clients.

The body is no part of the model's parameters, so a client's weights, its messages and its checkpoints hold only what it
trains. As it never changes, its features of a sample can be computed once; then the model is what comes after it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..errors import ProtofedError
from .base import Classifier, ModelSpec, Output, Shape
from .efficientnet import EfficientNetEncoder
from .googlenet import GoogLeNetEncoder
from .mobilenet import MobileNetV2Encoder
from .projection import Projection
from .published import ScaledEncoder
from .resnet import ResNetEncoder
from .text import TextEncoder

PROJECTING = (ResNetEncoder, GoogLeNetEncoder, MobileNetV2Encoder, EfficientNetEncoder, TextEncoder)


class FrozenEncoder(nn.Module):
    """An encoder whose body does not train; a layer that brings its features to another width does.

    Without a body it takes features in place of samples.
    """

    def __init__(self, body: nn.Module | None, project: nn.Module) -> None:
        super().__init__()
        self.body = () if body is None else (body,)  # in a tuple, so that it is no part and always in eval mode
        self.project = project

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenEncoder:
        """Move the model with its body, of which a copy is moved, because the original is shared."""
        self.body = tuple(copy.deepcopy(body)._apply(fn) for body in self.body)
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        """The embedding `[n, dim]` of a batch."""
        for body in self.body:
            x = body(x)
        return self.project(x)


def values_of(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters of a network and its floating buffers, by name."""
    yield from network.named_parameters()
    yield from ((name, value) for name, value in network.named_buffers() if value.is_floating_point())


class EmbeddingOf(nn.Module):
    """The embedding of a network that returns logits too."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """The embedding of a batch."""
        output = self.network(x)
        return output.embedding if isinstance(output, Output) else output


def divided(network: nn.Module, owner: str) -> tuple[nn.Module, nn.Module, str]:
    """Divide a network into a body and what trains.

    Args:
        network: The network, which is changed: its body loses the layer that brings features to another width.
        owner: The model's name, for errors.

    Returns:
        The body, that layer (the identity where there is none), and the attribute of the network that held them.
    """
    slot = "encoder" if isinstance(network, Classifier) else "backbone"
    if not isinstance(network, Classifier | Projection):
        raise ProtofedError(
            f"train=head: {owner} is one piece and has no encoder apart from its head; let it return features alone, or "
            "use projection=linear"
        )
    body: nn.Module = getattr(network, slot)
    inner = body.inner if isinstance(body, ScaledEncoder) else body
    project: nn.Module = nn.Identity()
    if isinstance(inner, PROJECTING):
        project, inner.project = inner.project, nn.Identity()
    return (body if isinstance(body, nn.Module) and slot == "encoder" else EmbeddingOf(body)), project, slot


@dataclass(frozen=True)
class Frozen:
    """A model's settings, of whose network the body is frozen. They have the model's name and can be used like any settings.

    `body` is built once and shared by all clients. With `cached`, the network takes the body's features in place of
    samples, whatever shape it is built for.
    """

    model: ModelSpec
    shape: Shape
    body: nn.Module = field(repr=False, compare=False)
    cached: bool = True

    @property
    def name(self) -> str:
        """The model's registered name."""
        return self.model.name

    @classmethod
    def of(cls, model: ModelSpec, shape: Shape, num_classes: int, cached: bool) -> Frozen:
        """Build the body, with random initial weights of torch's global generator where it has no published ones.

        Args:
            model: The model's settings.
            shape: The shape of one sample.
            num_classes: The number of classes.
            cached: Whether the network takes features in place of samples.
        """
        owner = f"model {model.name!r}"
        network = model.build(shape, num_classes)
        body, _, slot = divided(network, owner)
        setattr(network, slot, nn.Identity())
        if not any(p.requires_grad for p in network.parameters()):
            raise ProtofedError(f"train=head: {owner} has no head that could train")
        return cls(model, tuple(shape), body.requires_grad_(False).eval(), cached)

    def joined(self, num_classes: int) -> tuple[dict[str, str], dict[str, Tensor]]:
        """The parts of the whole network, by the names that they have in it.

        Args:
            num_classes: The number of classes.

        Returns:
            The name there of each weight that trains, by its name here; and the body's weights by their names there.
        """
        network = self.model.build(self.shape, num_classes)
        names = {id(value): name for name, value in values_of(network)}
        body, project, slot = divided(network, f"model {self.name!r}")
        setattr(network, slot, FrozenEncoder(None, project))
        trained = {name: names[id(value)] for name, value in values_of(network)}
        own = dict(values_of(self.body))
        return trained, {names[id(value)]: own[name].detach() for name, value in values_of(body)}

    def build(self, sample_shape: Shape, num_classes: int) -> nn.Module:
        """Build the network; the part that trains has random initial weights."""
        network = self.model.build(self.shape, num_classes)
        _, project, slot = divided(network, f"model {self.name!r}")
        setattr(network, slot, FrozenEncoder(None if self.cached else self.body, project))
        return network
