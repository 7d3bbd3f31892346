"""A fixed space of samples that all clients have in common, and what a model that is guided by prototypes in it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from .bank import PrototypeBank

SEED = 20240229  # of the random filters, which are the same at all clients and in all runs
KERNEL, POOLS = 5, 2
NETWORK = "network."  # what the names of a guided model's own weights begin with


class CommonSpace(nn.Module):
    """Fixed features of samples, the same at all clients and for all architectures; nothing of them is trained or sent.

    Images are filtered by random kernels of mean 0 and length 1, rectified, and averaged over the four quarters of the
    image. Other samples, and the embeddings of a pretrained encoder where one is given, are projected on random orthogonal
    directions, or are taken as they are where the space is wide enough for them.

    >>> CommonSpace((1, 8, 8), 16)(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 16])
    """

    def __init__(self, sample_shape: Sequence[int], width: int, encoder: nn.Module | None = None) -> None:
        """
        Args:
            sample_shape: the shape of one sample.
            width: the number of features.
            encoder: a pretrained encoder that all clients have; it is frozen.
        """
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        self.encoder = None if encoder is None else encoder.requires_grad_(False)
        self.eval()
        self.width, self.images = width, encoder is None and len(sample_shape) == 3
        if self.images:
            shape = math.ceil(width / POOLS**2), sample_shape[0], KERNEL, KERNEL
            kernels = torch.randn(shape, generator=generator)
            kernels = kernels - kernels.mean((1, 2, 3), keepdim=True)
            self.fixed = kernels / kernels.flatten(1).norm(dim=1)[:, None, None, None]
            return
        with torch.no_grad():
            size = math.prod(sample_shape) if encoder is None else encoder(torch.zeros(1, *sample_shape)).shape[1]
        directions = torch.randn(size, min(size, width), generator=generator)
        self.fixed = torch.eye(size, width) if size <= width else torch.linalg.qr(directions).Q

    def train(self, mode: bool = True) -> CommonSpace:
        """The space stays as it is, whatever else is trained."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        """The features `[n, width]` of samples `[n, …]`."""
        fixed = self.fixed.to(x)
        if not self.images:
            if self.encoder is not None:
                with torch.no_grad():
                    x = self.encoder(x)
            return x.flatten(1) @ fixed
        maps = functional.conv2d(x, fixed, padding=KERNEL // 2).relu()
        return functional.adaptive_avg_pool2d(maps, POOLS).flatten(1)[:, : self.width]


def guide(bank: PrototypeBank, map: Tensor, share: Tensor) -> dict[str, Tensor]:
    """The buffers of a guided model that show it the prototypes."""
    return {"map": map, "prototypes": bank.means, "known": bank.known.to(bank.means.dtype), "share": share}


def guiding_bank(weights: Mapping[str, Tensor]) -> PrototypeBank:
    """The prototypes that a guided model holds."""
    return PrototypeBank(weights["prototypes"], weights["known"])
