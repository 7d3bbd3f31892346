"""Names a person can choose: methods, models, data sets and partitions are all registered the same way.

What is registered is a frozen dataclass whose fields are its settings; choosing one by name and giving options makes an
instance. Options are checked and converted by their annotations, so `"3"` from a command line becomes 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import pydantic

from .errors import ProtofedError, unknown

T = TypeVar("T")
C = TypeVar("C", bound=type)


class Registry(Generic[T]):
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, type[T]] = {}

    def register(self, name: str, *aliases: str) -> Callable[[C], C]:
        """Class decorator: `@register("fedproto")` above a frozen dataclass."""

        def add(entry: C) -> C:
            if not dataclasses.is_dataclass(entry):
                raise TypeError(f"{self.kind} {name!r} must be a dataclass; its fields are its settings")
            entry.name = name  # type: ignore[attr-defined]
            for key in (name, *aliases):
                self._entries[key] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> type[T]:
        key = name.lower().replace("_", "-")
        if key not in self._entries:
            raise unknown(self.kind, name, self.names())
        return self._entries[key]

    def __contains__(self, name: str) -> bool:
        return name.lower().replace("_", "-") in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        return sorted({entry.name for entry in self._entries.values()})  # type: ignore[attr-defined]

    def options(self, name: str) -> dict[str, dataclasses.Field[Any]]:
        """The settings of one entry, by name."""
        return {f.name: f for f in dataclasses.fields(self[name]) if f.init}  # type: ignore[arg-type]

    def make(self, name: str, options: Mapping[str, Any] | None = None) -> T:
        entry, known = self[name], self.options(name)
        for key in options or {}:
            if key not in known:
                raise unknown(f"setting of {self.kind} {entry.name!r}:", key, known)  # type: ignore[attr-defined]
        return coerce(entry, dict(options or {}), f"{self.kind} {entry.name!r}")  # type: ignore[attr-defined]


def coerce(entry: type[T], options: Mapping[str, Any], owner: str) -> T:
    """Make a dataclass from loosely typed options, or say in one line which one is wrong."""
    try:
        return pydantic.TypeAdapter(entry).validate_python(dict(options))
    except pydantic.ValidationError as error:
        raise ProtofedError(f"{owner}: {first_problem(error)}") from None


def first_problem(error: pydantic.ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(map(str, problem["loc"])) or "value"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{where}={problem['input']!r}: {message}" if problem["type"] != "missing" else f"{where} is missing"
