"""The room that runs the rounds: the round itself, the engines that train the clients, checkpoint and resume."""

from . import checkpoint, scale
from .optimiser import LocalSettings
from .rounds import Federation, Record

__all__ = ["Federation", "LocalSettings", "Record", "checkpoint", "scale"]
