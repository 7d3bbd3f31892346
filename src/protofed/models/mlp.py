"""A multilayer perceptron for samples of any shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import nn

from .base import Classifier, Staged, at_least, register


@register("mlp")
@dataclass(frozen=True)
class MLP:
    """Flatten, then linear layers with a ReLU after each; the last one computes the embedding."""

    name: ClassVar[str]
    embedding: int = 64
    hidden: tuple[int, ...] = (128,)

    def __post_init__(self) -> None:
        at_least("mlp", 1, embedding=self.embedding, hidden=min(self.hidden, default=1))

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Build the network, with random initial weights, for samples of one shape."""
        widths = [math.prod(sample_shape), *self.hidden, self.embedding]
        layers: list[nn.Module] = [nn.Flatten()]
        for in_features, out_features in pairwise(widths):
            layers += [nn.Linear(in_features, out_features), nn.ReLU()]
        return Classifier(Staged(*layers, cut=3), self.embedding, num_classes)
