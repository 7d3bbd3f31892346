"""Names a person can choose: methods, models, data sets and partitions are all registered the same way.

What is registered is a frozen dataclass whose fields are its settings; choosing one by name and giving options makes an
instance. Options are checked and converted by their annotations, so `"3"` from a command line becomes 3.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar

import pydantic

from .errors import ProtofedError, first_problem, unknown
from .grammar import parse_choice, parse_list, write_choice

T = TypeVar("T")
C = TypeVar("C", bound=type)


def _key(name: str) -> str:
    """The name as it is looked up: case does not count, and `_` is the same as `-`."""
    return name.lower().replace("_", "-")


class Registry(Generic[T]):
    """The entries of one kind by name; `kind` says in errors what they are.

    Attributes:
        kind: What the entries are: `method`, `model`.
        papers: By name, the paper that an entry comes from, or an empty text.

    Example: `Registry("model").names()` is an empty list until something is registered.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, type[T]] = {}
        self.papers: dict[str, str] = {}

    def register(self, name: str, *aliases: str, paper: str = "") -> Callable[[C], C]:
        """Register the dataclass below: `@register("fedproto", paper="Tan et al., AAAI 2022")`.

        Args:
            name: The name by which a person chooses the entry.
            *aliases: Further names of the same entry.
            paper: The paper that the entry comes from.

        Returns:
            A decorator of a dataclass, whose fields are the settings of the entry.
        """

        def add(entry: C) -> C:
            if not dataclasses.is_dataclass(entry):
                raise TypeError(f"{self.kind} {name!r} must be a dataclass; its fields are its settings")
            entry.name = name  # type: ignore[attr-defined]
            self.papers[name] = paper
            for key in (name, *aliases):
                self._entries[_key(key)] = entry  # type: ignore[assignment]
            return entry

        return add

    def __getitem__(self, name: str) -> type[T]:
        if name not in self:
            raise unknown(self.kind, name, self.names())
        return self._entries[_key(name)]

    def __contains__(self, name: str) -> bool:
        return _key(name) in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        """The names of all entries in alphabetical order, without aliases."""
        return sorted({entry.name for entry in self._entries.values()})  # type: ignore[attr-defined]

    def options(self, name: str) -> dict[str, dataclasses.Field[Any]]:
        """The dataclass fields of one entry, which are its settings, by name."""
        return {f.name: f for f in dataclasses.fields(self[name]) if f.init}  # type: ignore[arg-type]

    def make(self, name: str, options: Mapping[str, Any] | None = None) -> T:
        """Make an entry with settings.

        Args:
            name: The name of the entry, or an alias.
            options: Settings by name, converted by their annotations; the others have their defaults.

        Returns:
            An instance of the registered dataclass. An unknown name or option is an error of one line.

        Example: `methods.registry.make("fedprox", {"mu": "0.01"}).mu` is 0.01.
        """
        entry = self[name]
        return coerce(entry, self._completed(name, options or {}), f"{self.kind} {entry.name!r}")  # type: ignore[attr-defined]

    def _completed(self, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with what their defaults add: a group given in part (`alignment.shape`) keeps the rest of its default.

        A number that becomes a schedule starts at 0 and grows to its default. Where a list is expected, one number becomes a
        list of one.
        """
        completed, fields = dict(options), self.options(name)
        for key, value in options.items():
            default = fields[key].default if key in fields else None
            if isinstance(value, Mapping) and dataclasses.is_dataclass(default) and not isinstance(default, type):
                completed[key] = {**dataclasses.asdict(default), **value}
            elif isinstance(value, Mapping) and isinstance(default, int | float):
                completed[key] = {"start": 0, **({"maximum": default} if default else {}), **value}
            elif isinstance(value, int | float) and isinstance(default, tuple):
                completed[key] = [value]
        return completed

    @contextlib.contextmanager
    def temporarily(self) -> Iterator[Registry[T]]:
        """Undo on leaving what was registered, replaced or removed inside: `with methods.registry.temporarily(): ...`."""
        before = {name: copy.copy(value) for name, value in vars(self).items()}
        try:
            yield self
        finally:
            vars(self).update(before)


def parse_part(registry: Registry[T], text: str) -> T:
    """Make an entry from the text of a setting.

    Args:
        registry: The registry of the entry.
        text: A name, with settings of its own if any: `trimmed?share=0.2`.

    Returns:
        The entry.
    """
    return registry.make(*parse_choice(text, registry.kind))


def as_text(part: Any) -> str:
    """The text that `parse_part` reads back: the name of a part and all its settings."""
    return write_choice(part.name, as_options(part))


def as_options(entry: Any) -> dict[str, Any]:
    """The settings of an entry as plain values: a part as text, parts as a list of texts, a schedule as a mapping."""
    return {f.name: _plain(getattr(entry, f.name)) for f in dataclasses.fields(entry)}


def is_part(value: Any) -> bool:
    """Whether a value is a registered part, which a text can stand for."""
    return isinstance(getattr(type(value), "registry", None), Registry)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and any(map(is_part, value)):
        return [as_text(part) for part in value]
    if is_part(value):
        return as_text(value)
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


@lru_cache(maxsize=512)
def _adapter(entry: type) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(entry)


@lru_cache(maxsize=512)
def _hints(entry: type) -> dict[str, Any]:
    """The types of a dataclass's settings, by name."""
    hints = typing.get_type_hints(entry)
    return {f.name: hints[f.name] for f in dataclasses.fields(entry) if f.init}


def coerce(entry: type[T], options: Mapping[str, Any], owner: str) -> T:
    """Make a dataclass from loosely typed options.

    Args:
        entry: The dataclass.
        options: Values by the name of the field; texts of a command line are converted by the annotations.
        owner: What the options belong to, with which an error begins: `method 'fedprox'`.

    Returns:
        The dataclass. An unknown key or a value that does not fit is an error of one line.
    """
    try:
        return _adapter(entry).validate_python(_prepare(entry, dict(options), owner))  # type: ignore[arg-type]
    except pydantic.ValidationError as error:
        raise ProtofedError(f"{owner}: {first_problem(error)}") from None


def _prepare(hint: Any, value: Any, owner: str) -> Any:
    """The value as pydantic can validate it.

    Unknown keys are refused at every depth, which pydantic does not do. Texts of a command line are read: `none`, and
    `64,32` or `64` for a tuple.
    """
    parts = getattr(hint, "registry", None)
    if isinstance(parts, Registry) and isinstance(value, str):
        return parse_part(parts, value)
    choices = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    classes = [t for t in choices if isinstance(t, type) and dataclasses.is_dataclass(t)]
    if classes and isinstance(value, Mapping):
        known = {name: field_hint for t in classes for name, field_hint in _hints(t).items()}
        for key in value:
            if key not in known:
                raise unknown(f"setting of {owner}:", str(key), known or ["(none)"])
        return {key: _prepare(known[key], v, f"{owner} {key}") for key, v in value.items()}
    sequence = next((t for t in choices if typing.get_origin(t) in (tuple, list)), None)
    if isinstance(value, str) and type(None) in choices and value.lower() == "none":
        return None
    if sequence is not None and isinstance(value, list | tuple):
        return [_prepare(typing.get_args(sequence)[0], v, owner) for v in value]
    is_text = str in choices or any(value in typing.get_args(t) for t in choices if typing.get_origin(t) is Literal)
    if sequence is not None and isinstance(value, str) and not is_text:
        return [_prepare(typing.get_args(sequence)[0], v, owner) for v in parse_list(value)]
    if sequence is not None and isinstance(value, int | float) and not {int, float} & set(choices):
        return [value]
    return value
