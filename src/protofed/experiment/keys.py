"""Keys as people write them: flat or nested, in full or short, and whom each one belongs to.

A key may be written in full (`partition.way=3`) or short (`way=3`) where only one of the four choices has it. A method
may also be named (`fedsap.scale=16`), which in a comparison speaks to that method alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import methods, models
from ..data import Dataset, partitions, sources
from ..errors import ProtofedError, nearest, unknown
from ..parts import Reduce
from ..registry import Registry, as_text
from .general import General

REGISTRIES: dict[str, Registry[Any]] = {
    "method": methods.registry,
    "data": sources,
    "partition": partitions,
    "model": models.registry,
}

PARTS = ("exchange", "feed", "reduce", "predict", "teacher")  # of a method; some are settings of some methods
GENERAL = tuple(field.name for field in dataclasses.fields(General))
MOST = 5  # names that a hint lists


# --- flat and nested --------------------------------------------------------------------------------------------------
def flatten(given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as keys with dots: `{"partition": {"way": 3}}` is `{"partition.way": 3}`."""
    flat: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, Reduce):
            flat[f"{prefix}{key}"] = as_text(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type | Dataset):
            flat |= flatten(dataclasses.asdict(value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def combine(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `over` on top of those of `base`. Another choice by name leaves the old choice's settings behind."""
    low, high = flatten(base), flatten(over)
    for kind in REGISTRIES:
        name = high.get(kind, high.get(f"{kind}.name"))
        if name is not None:
            old = low.pop(kind, low.pop(f"{kind}.name", None))
            if not (isinstance(old, str | Path) and isinstance(name, str | Path) and old == name):
                low = {k: v for k, v in low.items() if not k.startswith(f"{kind}.")}
    return {**low, **high}


def plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Flat keys, with `partition.name` written as `partition`."""
    return {
        key.removesuffix(".name") if key.removesuffix(".name") in REGISTRIES else key: value
        for key, value in flatten(given).items()
    }


# --- whom a key belongs to --------------------------------------------------------------------------------------------
def owner(key: str) -> tuple[str, str]:
    """Whom a key names, if anybody, and the rest: `fedsap.scale`, `method.scale`, `scale`."""
    head, _, rest = key.partition(".")
    if rest and head in REGISTRIES:
        return head, rest
    if rest and head in methods.registry:
        return methods.registry[head].name, rest
    return "", key


def same(one: str, other: str) -> bool:
    """Whether two keys may set the same thing, however they are written."""
    (first, a), (second, b) = owner(one), owner(other)
    of_methods = "method" in (first, second) and all(o == "method" or o in methods.registry for o in (first, second))
    return a == b and (first == second or not first or not second or of_methods)


def is_key(key: str) -> bool:
    """Whether anything has a setting of this name."""
    head, _, rest = key.partition(".")
    known = {*GENERAL, *REGISTRIES, *(option for registry in REGISTRIES.values() for option in _all_options(registry))}
    return head in known or (rest != "" and head in methods.registry)


def _all_options(registry: Registry[Any]) -> set[str]:
    return {option for name in registry for option in registry.options(name)}


def place(
    key: str, known: Mapping[str, set[str]], chosen: Mapping[str, Any], others: Mapping[str, set[str]]
) -> tuple[str, str]:
    """Find the group a key belongs to.

    Args:
        key: as a person wrote it.
        known: the settings of each of the four choices.
        chosen: the names of the four choices.
        others: the settings of further methods of a comparison.

    Returns:
        The group and the key's name in it; an empty group where the key speaks to another method of a comparison.
    """
    head, _, rest = key.partition(".")
    if rest and head in REGISTRIES:
        return head, rest
    if rest and head in methods.registry:
        if methods.registry[head] is methods.registry[chosen["method"]]:
            return "method", rest
        options = methods.registry.options(head)
        if rest.split(".")[0] not in options:
            raise unknown(f"setting of method {head!r}:", rest, options)
        return "", ""
    if key in GENERAL:
        return "general", key
    owners = [kind for kind, names in known.items() if head in names]
    if len(owners) == 1:
        return owners[0], key
    if len(owners) > 1:
        raise ProtofedError(f"{head!r} is a setting of {' and '.join(owners)}: write {owners[0]}.{key} for one of them")
    if any(head in names for names in others.values()):
        return "", ""
    raise unknown_setting(key, chosen, {n for names in (*known.values(), *others.values()) for n in names})


# --- what to say of a key that is not there ---------------------------------------------------------------------------
def unknown_setting(key: str, chosen: Mapping[str, Any], options: Iterable[str]) -> ProtofedError:
    """The error of a key that nothing here has: whose it is, or what was perhaps meant.

    Args:
        key: as a person wrote it.
        chosen: the names of the four choices; a choice that is not made by name is left out.
        options: the settings that would have been understood, beside the general ones.
    """
    head = owner(key)[1].partition(".")[0]
    if head in PARTS and key == head:
        return _fixed_part(head, chosen["method"])
    places = [text for kind in REGISTRIES if (text := _whose(head, kind, chosen.get(kind)))]
    if places:
        return ProtofedError(f"unknown setting {key!r} here: {'; or '.join(places)}")
    near = nearest(key, {*GENERAL, *REGISTRIES, *options}, 3)
    meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return ProtofedError(f"unknown setting {key!r}; {meant}`protofed settings` lists the general ones")


def _whose(head: str, kind: str, chosen: Any) -> str:
    """Which entries of a registry have a setting, in a few words; nothing where none has it."""
    registry = REGISTRIES[kind]
    having = [name for name in registry if head in registry.options(name)]
    if not having:
        return ""
    more = f" and {len(having) - MOST} more" if len(having) > MOST else ""
    if kind == "method":
        return f"it is a setting of {_listed(having[:MOST], 'and')}{more}, not of {chosen}"
    if kind == "model" and chosen is None:
        return f"each of several models has its own: models={having[0]}?{head}=…"
    needed = _listed([f"{kind}={name}" for name in having[:MOST]], "or")
    return f"it needs {needed}{more}, and {kind} is {chosen if isinstance(chosen, str) else 'given in memory'}"


def _listed(names: Sequence[str], last: str) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"


def _fixed_part(part: str, method: str) -> ProtofedError:
    having = [name for name in methods.available() if part in methods.registry.options(name)]
    why = ""
    if part == "reduce":
        made = methods.registry.make(method)
        if not made.exchange.up:
            why = " (its clients send nothing)"
        elif not made.reduce.additive:
            why = " (it needs each upload by itself)"
    return ProtofedError(
        f"{part}: the {part} of {method} is fixed by the method{why}; it is a setting of {', '.join(having) or 'none'}"
    )


def hint_for_option(text: str) -> str | None:
    """What to say of an option that the command line does not have but that is a setting.

    Args:
        text: as it was written: `--rounds`, `--lr=0.1` or `--lr-schedule`.

    Returns:
        One sentence, such as "settings have no dashes: write rounds=VALUE"; none where no setting has that name.
    """
    name, equals, value = text.lstrip("-").partition("=")
    for key in (name, name.replace("-", "_")):
        if key and is_key(key):
            return f"settings have no dashes: write {key}={value if equals else 'VALUE'}"
    return None
