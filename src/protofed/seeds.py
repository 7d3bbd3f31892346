"""Random streams, one per purpose, all derived from the run's seed.

A stream is named by what it is for (`"batches", client, round`), not by how often something was drawn before. So adding
a client or an evaluation changes no other stream, and resuming needs no generator state: the stream of round 57 is the
same whether or not rounds 1 to 56 ran in this process.
"""

from __future__ import annotations

import hashlib
import json
import os
from operator import index
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


def derive(seed: int, *purpose: str | int) -> int:
    """Derive the seed of one stream.

    Args:
        seed: The run's seed.
        *purpose: What the stream is for: texts and whole numbers, such as `"batches", client, round`.

    Returns:
        A seed of 63 bits.

    >>> derive(1, "batches", 0, 1) == derive(1, "batches", 0, 1) != derive(1, "batches", 0, 2)
    True
    """
    # JSON keeps ("a", "b") apart from ("a/b",) and 1 from "1"; index() makes numpy's integers plain and refuses floats
    text = json.dumps([index(seed), *(part if isinstance(part, str) else index(part) for part in purpose)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def torch_stream(seed: int, *purpose: str | int) -> torch.Generator:
    """The generator of torch for one purpose of a run: `torch_stream(seed, "batches", client, round)`."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


def start_default_stream(device: torch.device, seed: int, *purpose: str | int) -> None:
    """Seed torch's default generator of a device, from which dropout draws, for one purpose of a run."""
    if device.type == "cpu":  # torch.manual_seed looks after accelerators too, which takes as long as a small step
        torch.default_generator.manual_seed(derive(seed, *purpose))
    else:
        torch.manual_seed(derive(seed, *purpose))


def numpy_stream(seed: int, *purpose: str | int) -> np.random.Generator:
    """The generator of numpy for one purpose of a run: `numpy_stream(seed, "partition")`."""
    return np.random.default_rng(derive(seed, *purpose))


class Normals(Protocol):
    """A source of draws from the standard normal distribution."""

    def draw(self, *shape: int) -> Tensor:
        """Draws of a shape, in float64."""
        ...


class SeededNormals:
    """Draws that follow from a run's seed, so that a simulation can be repeated. Who knows the seed knows them.

    >>> SeededNormals(1, "noise").draw(2).equal(SeededNormals(1, "noise").draw(2))
    True
    """

    def __init__(self, seed: int, *purpose: str | int) -> None:
        self.stream = torch_stream(seed, *purpose)

    def draw(self, *shape: int) -> Tensor:
        """Draws of a shape, in float64; the next call draws anew."""
        return torch.randn(*shape, generator=self.stream, dtype=torch.float64)


class SystemNormals:
    """Draws from the operating system's random numbers, which nobody can repeat, for noise that protects somebody.

    >>> SystemNormals().draw(2, 3).shape
    torch.Size([2, 3])
    """

    def draw(self, *shape: int) -> Tensor:
        """Draws of a shape, in float64."""
        words = np.frombuffer(os.urandom(8 * int(np.prod(shape, dtype=np.int64))), dtype=np.uint64)
        uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return torch.special.ndtri(torch.from_numpy(uniform)).reshape(shape)
