"""A network beside a classifier in a fixed space that all clients have in common, whose scores it corrects."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ProtofedError
from .base import ModelSpec, Output, Shape

SEED = 20240229  # of the random filters, which are the same at all clients and in all runs
KERNEL, POOLS = 5, 2


class CommonSpace:
    """Fixed features of samples, the same at all clients and for all architectures; nothing of them is trained or sent.

    Images are filtered by random kernels of mean 0 and length 1, rectified, and averaged over the four quarters of the
    image. Other samples are projected on random orthogonal directions, or are taken as they are where the space is wide
    enough for them.

    >>> CommonSpace((1, 8, 8), 16)(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 16])
    """

    def __init__(self, sample_shape: Shape, width: int) -> None:
        """
        Args:
            sample_shape: the shape of one sample.
            width: the number of features.
        """
        generator = torch.Generator().manual_seed(SEED)
        self.width, self.images = width, len(sample_shape) == 3
        if self.images:
            shape = math.ceil(width / POOLS**2), sample_shape[0], KERNEL, KERNEL
            kernels = torch.randn(shape, generator=generator)
            kernels = kernels - kernels.mean((1, 2, 3), keepdim=True)
            self.fixed = kernels / kernels.flatten(1).norm(dim=1)[:, None, None, None]
            return
        size = math.prod(sample_shape)
        directions = torch.randn(size, min(size, width), generator=generator)
        self.fixed = torch.eye(size, width) if size <= width else torch.linalg.qr(directions).Q

    def __call__(self, x: Tensor) -> Tensor:
        """The features `[n, width]` of samples `[n, …]`."""
        fixed = self.fixed.to(x)
        if not self.images:
            return x.flatten(1) @ fixed
        maps = functional.conv2d(x, fixed, padding=KERNEL // 2).relu()
        return functional.adaptive_avg_pool2d(maps, POOLS).flatten(1)[:, : self.width]


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
