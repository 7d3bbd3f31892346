"""The room that runs the rounds: the round itself, the engines that train the clients, checkpoint and resume."""

from . import checkpoint, scale
from .optimiser import LocalSettings
from .records import Record
from .rounds import Federation

__all__ = ["Federation", "LocalSettings", "Record", "checkpoint", "scale"]
