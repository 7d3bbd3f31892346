"""The one exception a person may see: a message that names the file, key or client, what was expected, and what came."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pydantic


class ProtofedError(Exception):
    """An error that a person can cause and mend. The command line prints it as one line and exits with 2."""


class Stopped(KeyboardInterrupt):
    """A run was asked to end, by Ctrl-C or by SIGTERM, and has ended; the message says how to go on.

    `code` is the exit code of the process: 130 after Ctrl-C, 143 after SIGTERM.
    """

    def __init__(self, message: str, code: int = 130) -> None:
        super().__init__(message)
        self.code = code


def nearest(name: str, choices: Iterable[str], most: int = 1) -> list[str]:
    """The at most `most` choices that are spelt most like a name, the nearest first.

    >>> nearest("fedpro", ["fedproto", "fedavg"])
    ['fedproto']
    """
    return difflib.get_close_matches(name.lower(), sorted(choices), n=most, cutoff=0.5)


def unknown(kind: str, name: str, choices: Iterable[str]) -> ProtofedError:
    """The error for an unknown name. It suggests the nearest choice and lists them all.

    Args:
        kind: What the name should be: `method`, `column`.
        name: The unknown name.
        choices: All names that there are.

    Returns:
        The error, for the caller to raise.
    """
    known = sorted(choices)
    near = nearest(name, known)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return ProtofedError(f"unknown {kind} {name!r}{hint} Known: {', '.join(known)}")


def first_problem(error: pydantic.ValidationError) -> str:
    """One of the problems that pydantic found, in one line: the deepest, which comes from the best fit of a union."""
    problem = max(error.errors(), key=lambda p: (len(p["loc"]), p["type"] == "value_error"))
    where = ".".join(str(part) for part in problem["loc"] if part not in ("float", "int", "Ramp")) or "value"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    value = repr(problem["input"])
    value = value if len(value) <= 80 else f"{value[:77]}..."
    if problem["type"] == "missing":
        return f"{where} is missing"
    return f"{where}={value}: {message}" if problem["loc"] else message  # a dataclass's own check names the setting
