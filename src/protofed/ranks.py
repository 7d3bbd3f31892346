"""The rank of this process among those that torchrun (or SLURM through it) started, without loading torch."""

from __future__ import annotations

import os


def asked_for() -> bool:
    """Whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    """The number of this process among those started together; the first, or the only one, is 0."""
    return int(os.environ.get("RANK", "0"))
