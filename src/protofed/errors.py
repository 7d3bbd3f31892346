"""The one exception a person may see: a message that names the file, key or client, what was expected, and what came."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pydantic


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


def first_problem(error: pydantic.ValidationError) -> str:
    """One of pydantic's complaints in one line. Of a union's it is the deepest, from the member that came nearest."""
    problem = max(error.errors(), key=lambda p: (len(p["loc"]), p["type"] == "value_error"))
    where = ".".join(str(part) for part in problem["loc"] if part not in ("float", "int", "Ramp")) or "value"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    came = repr(problem["input"])
    came = came if len(came) <= 80 else f"{came[:77]}..."
    if problem["type"] == "missing":
        return f"{where} is missing"
    return f"{where}={came}: {message}" if problem["loc"] else message  # a dataclass's own check names the setting
