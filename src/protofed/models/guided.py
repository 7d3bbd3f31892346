"""A model beside a classifier in a fixed space that all clients have in common, whose scores it corrects."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ProtofedError
from .base import ModelSpec, Output, Shape

SEED = 20240229  # of the random filters, which are the same at all clients
KERNEL, POOLS = 5, 2


class CommonSpace:
    """Fixed features of samples, the same at all clients and for all architectures: nothing of them is trained or sent.

    Images are filtered by random kernels of mean 0, rectified, and averaged over the four quarters of the image. Other samples are
    projected at random, or taken as they are where they have no more numbers than the space.

    >>> CommonSpace((1, 8, 8), 16)(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 16])
    """

    def __init__(self, sample_shape: Shape, width: int) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.width, self.images = width, len(sample_shape) == 3
        if self.images:
            kernels = torch.randn(math.ceil(width / POOLS**2), sample_shape[0], KERNEL, KERNEL, generator=generator)
            kernels = kernels - kernels.mean((1, 2, 3), keepdim=True)
            self.fixed = kernels / kernels.flatten(1).norm(dim=1)[:, None, None, None]
            return
        size = math.prod(sample_shape)
        random = torch.randn(size, width, generator=generator)
        self.fixed = torch.eye(size, width) if size <= width else torch.linalg.qr(random).Q

    def __call__(self, x: Tensor) -> Tensor:
        """The features `[n, width]` of samples."""
        fixed = self.fixed.to(x)
        if not self.images:
            return x.flatten(1) @ fixed
        maps = F.conv2d(x, fixed, padding=KERNEL // 2).relu()
        return F.adaptive_avg_pool2d(maps, POOLS).flatten(1)[:, : self.width]


class Guided(nn.Module):
    """A network whose logits are added to the scores of the nearest prototype in the common space.

    The embedding is what the map makes of the common features: one number for each class. Map and prototypes are buffers, which a
    method sets; a class without a prototype has the network's logit alone.
    """

    def __init__(self, network: nn.Module, sample_shape: Shape, num_classes: int, width: int, trust: float) -> None:
        super().__init__()
        self.network, self.dim, self.trust = network, num_classes, trust
        self.space = CommonSpace(sample_shape, width)
        self.register_buffer("map", torch.eye(num_classes, width))
        self.register_buffer("prototypes", torch.zeros(num_classes, num_classes))
        self.register_buffer("known", torch.zeros(num_classes))
        self.map: Tensor
        self.prototypes: Tensor
        self.known: Tensor

    def forward(self, x: Tensor) -> Output:
        """The embedding in the common space, and the logits of both together."""
        with torch.no_grad():
            z = self.space(x) @ self.map.transpose(-1, -2)
            scores = z @ self.prototypes.transpose(-1, -2) - 0.5 * (self.prototypes * self.prototypes).sum(-1)
            scores = self.known * scores
            scores = scores - scores.mean(-1, keepdim=True)
        return Output(z, self.network(x).logits + self.trust * scores)


@dataclass(frozen=True)
class GuidedSpec:
    """A model's settings, from which `Guided` is built."""

    model: ModelSpec
    width: int
    trust: float

    @property
    def name(self) -> str:
        """The model's registered name."""
        return self.model.name

    def build(self, sample_shape: Shape, num_classes: int) -> Guided:
        """Build the network, with random initial weights, for samples of one shape."""
        if self.name == "bert":
            raise ProtofedError("constellation needs samples that are numbers; texts: train=head gives it an encoder's features")
        return Guided(self.model.build(sample_shape, num_classes), sample_shape, num_classes, self.width, self.trust)
