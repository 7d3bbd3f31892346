"""The small convolutional network of FedProto, which FedSAP uses too."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..errors import ProtofedError
from .base import Classifier, Staged, at_least, image_shape, register
from .norm import Norm, check_norm, norm_layer


@register("cnn")
@dataclass(frozen=True)
class CNN:
    """FedProto's network for MNIST and FEMNIST (Tan et al., 2022): two convolutions, each max-pooled by 2, then the
    embedding; a ReLU after each.

    `dropout` is applied where the published network applies it, with 0.5: to whole channels after the second
    convolution, and to single values between embedding and head. With 0 there are no dropout layers. `norm` adds a
    layer after each convolution, which the published network does not have.
    """

    name: ClassVar[str]
    embedding: int = 50
    channels: tuple[int, int] = (10, 20)
    kernel: int = 5
    dropout: float = 0.0
    norm: Norm = "none"

    def __post_init__(self) -> None:
        at_least("cnn", 1, embedding=self.embedding, channels=min(self.channels), kernel=self.kernel)
        if not 0 <= self.dropout < 1:
            raise ProtofedError(f"model 'cnn': dropout={self.dropout}; expected at least 0 and below 1")
        check_norm("cnn", self.norm)

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Build the network, with random initial weights, for samples of one shape."""
        # (side − k + 1) / 2 must leave k + 1 pixels for the second convolution and pooling
        channels, *sides = image_shape("cnn", sample_shape, smallest=3 * self.kernel + 1)
        channels1, channels2 = self.channels
        height, width = (((side - self.kernel + 1) // 2 - self.kernel + 1) // 2 for side in sides)
        layers: list[tuple[str, nn.Module]] = [
            ("conv1", nn.Conv2d(channels, channels1, self.kernel)),
            ("norm1", norm_layer(self.norm, channels1)),
            ("pool1", nn.MaxPool2d(2)),
            ("relu1", nn.ReLU()),
            ("conv2", nn.Conv2d(channels1, channels2, self.kernel)),
            ("norm2", norm_layer(self.norm, channels2)),
            *([("drop2", nn.Dropout2d(self.dropout))] if self.dropout else []),
            ("pool2", nn.MaxPool2d(2)),
            ("relu2", nn.ReLU()),
            ("flat", nn.Flatten()),
            ("fc1", nn.Linear(channels2 * height * width, self.embedding)),
            ("relu3", nn.ReLU()),
        ]
        return Classifier(Staged(OrderedDict(layers), cut=4), self.embedding, num_classes, self.dropout)
