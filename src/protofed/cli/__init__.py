"""The command line: parse, call, print. Its modules load nothing heavy; a command loads what it needs when it runs."""

from .main import app, main

__all__ = ["app", "main"]
