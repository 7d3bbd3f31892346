"""The convolutional network with dropout that benchmarks of federated learning use."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..errors import ProtofedError
from .base import Classifier, Staged, at_least, image_shape, register


@register("dropout-cnn")
@dataclass(frozen=True)
class DropoutCNN:
    """The network of Reddi et al. (2021) for EMNIST, which pfl-research trains on CIFAR-10: two 3×3 convolutions without
    padding, a ReLU after each, one 2×2 max-pooling, then the embedding and a ReLU.

    `dropout` has two rates: after the pooling, and between embedding and head. With 0 there is no such layer.
    """

    name: ClassVar[str]
    embedding: int = 128
    channels: tuple[int, int] = (32, 64)
    dropout: tuple[float, float] = (0.25, 0.5)

    def __post_init__(self) -> None:
        at_least("dropout-cnn", 1, embedding=self.embedding, channels=min(self.channels))
        for rate in self.dropout:
            if not 0 <= rate < 1:
                raise ProtofedError(f"model 'dropout-cnn': dropout={rate}; expected at least 0 and below 1")

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Build the network, with random initial weights, for samples of one shape."""
        channels, *sides = image_shape("dropout-cnn", sample_shape, smallest=6)
        channels1, channels2 = self.channels
        height, width = ((side - 4) // 2 for side in sides)
        layers: list[tuple[str, nn.Module]] = [
            ("conv1", nn.Conv2d(channels, channels1, 3)),
            ("relu1", nn.ReLU()),
            ("conv2", nn.Conv2d(channels1, channels2, 3)),
            ("relu2", nn.ReLU()),
            ("pool", nn.MaxPool2d(2)),
            *([("drop", nn.Dropout(self.dropout[0]))] if self.dropout[0] else []),
            ("flat", nn.Flatten()),
            ("fc1", nn.Linear(channels2 * height * width, self.embedding)),
            ("relu3", nn.ReLU()),
        ]
        return Classifier(Staged(OrderedDict(layers), cut=2), self.embedding, num_classes, self.dropout[1])
