"""A network beside a classifier in a fixed space that all clients have in common, whose scores it corrects."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..common import CommonSpace
from ..errors import ProtofedError
from .base import Classifier, ModelSpec, Output, Shape


class Guided(nn.Module):
    """A network whose logits are added to the scores of the prototypes in the common space.

    The embedding is what the map makes of the common features, one number for each class. Map and prototypes are buffers,
    which a method sets. A class without a prototype has the network's logit alone. `share` is that of the network in a
    mixed prediction.
    """

    map: Tensor
    prototypes: Tensor
    known: Tensor
    share: Tensor

    def __init__(
        self, network: nn.Module, sample_shape: Shape, num_classes: int, width: int, pretrained: bool = False
    ) -> None:
        super().__init__()
        self.network, self.dim = network, num_classes
        encoder = copy.deepcopy(network.encoder) if pretrained and isinstance(network, Classifier) else None
        self.space = CommonSpace(sample_shape, width, encoder)
        self.register_buffer("map", torch.eye(num_classes, width))
        self.register_buffer("prototypes", torch.zeros(num_classes, num_classes))
        self.register_buffer("known", torch.zeros(num_classes))
        self.register_buffer("share", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Output:
        """The embedding in the common space, and the logits of both together."""
        z = self.space(x) @ self.map.transpose(-1, -2)
        scores = z @ self.prototypes.transpose(-1, -2) - 0.5 * (self.prototypes * self.prototypes).sum(-1)
        scores = self.known * scores  # they differ from −½·distance² by what is the same for all classes
        return Output(z, self.network(x).logits + scores - scores.mean(-1, keepdim=True))


@dataclass(frozen=True)
class GuidedModel:
    """A model's settings, from which `Guided` is built.

    With `pretrained` the common space is that of the encoder as it starts, of which the model then has a frozen copy.
    """

    model: ModelSpec
    width: int
    pretrained: bool = False

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
        network = self.model.build(sample_shape, num_classes)
        return Guided(network, sample_shape, num_classes, self.width, self.pretrained)
