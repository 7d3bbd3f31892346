"""Random streams, one per purpose, all derived from the run's seed.

A stream is named by what it is for (`"batches", client, round`), not by how often something was drawn before. So adding
a client or an evaluation changes no other stream, and resuming needs no generator state: the stream of round 57 is the
same whether or not rounds 1 to 56 ran in this process.
"""

from __future__ import annotations

import hashlib
import json
from operator import index

import numpy as np
import torch


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
