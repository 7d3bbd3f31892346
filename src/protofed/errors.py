"""The one exception a person may see: a message that names the file, key or client, what was expected, and what came."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ProtofedError(Exception):
    """Bad input. The command line prints it as one line and exits with 2; anything else is a bug of ours."""


class Stopped(KeyboardInterrupt):
    """A run was asked to end, by Ctrl-C or by SIGTERM, and has ended; the message says how to go on.

    `code` is the exit code of the process: 130 after Ctrl-C, 143 after SIGTERM.
    """

    def __init__(self, message: str, code: int = 130) -> None:
        super().__init__(message)
        self.code = code


def nearest(name: str, choices: Iterable[str], most: int = 1) -> list[str]:
    """The names that are spelt most like this one, the nearest first."""
    return difflib.get_close_matches(name.lower(), sorted(choices), n=most, cutoff=0.5)


def unknown(kind: str, name: str, choices: Iterable[str]) -> ProtofedError:
    """An unknown name, with the nearest right spelling first."""
    known = sorted(choices)
    near = nearest(name, known)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ProtofedError(f"unknown {kind} {name!r}{hint} Known: {', '.join(known)}")
