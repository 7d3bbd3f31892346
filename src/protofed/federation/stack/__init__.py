"""Stacked clients: one call trains all clients of a group, which have one architecture."""

from .engine import StackEngine

__all__ = ["StackEngine"]
