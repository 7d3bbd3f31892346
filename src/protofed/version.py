"""The version of protofed: the one place where it stands."""

__version__ = "0.1.0"
