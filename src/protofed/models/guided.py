"""A network beside a classifier in a fixed space that all clients have in common, whose scores it corrects."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..common import CommonSpace
from ..errors import ProtofedError
from .base import ModelSpec, Output, Shape


class Guided(nn.Module):
    """A network whose logits are added to the scores of the prototypes in the common space.

    The embedding is what the map makes of the common features, one number for each class. Map and prototypes are buffers,
    which a method sets. A class without a prototype has the network's logit alone.
    """

    map: Tensor
    prototypes: Tensor
    known: Tensor

    def __init__(self, network: nn.Module, sample_shape: Shape, num_classes: int, width: int) -> None:
        super().__init__()
        self.network, self.dim = network, num_classes
        self.space = CommonSpace(sample_shape, width)
        self.register_buffer("map", torch.eye(num_classes, width))
        self.register_buffer("prototypes", torch.zeros(num_classes, num_classes))
        self.register_buffer("known", torch.zeros(num_classes))

    def forward(self, x: Tensor) -> Output:
        """The embedding in the common space, and the logits of both together."""
        z = self.space(x) @ self.map.transpose(-1, -2)
        scores = z @ self.prototypes.transpose(-1, -2) - 0.5 * (self.prototypes * self.prototypes).sum(-1)
        scores = self.known * scores  # they differ from −½·distance² by what is the same for all classes
        return Output(z, self.network(x).logits + scores - scores.mean(-1, keepdim=True))


@dataclass(frozen=True)
class GuidedModel:
    """A model's settings, from which `Guided` is built."""

    model: ModelSpec
    width: int

    @property
    def name(self) -> str:
        """The model's registered name."""
        return self.model.name

    def build(self, sample_shape: Shape, num_classes: int) -> Guided:
        """Build the network, with random initial weights, for samples of one shape."""
        if self.name == "bert":
            raise ProtofedError(
                "constellation compares samples as they are, and tokens are no numbers; give it an encoder's features as "
                "data"
            )
        return Guided(self.model.build(sample_shape, num_classes), sample_shape, num_classes, self.width)
