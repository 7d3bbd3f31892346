"""Stacked clients: one call trains all clients of a group, which have one architecture."""

from .engine import StackEngine
from .training import Job, train_stack

__all__ = ["Job", "StackEngine", "train_stack"]
