"""The keys of settings, flat or nested, in full or short, and the choice that each one belongs to.

A key may be written in full (`partition.way=3`) or short (`way=3`) where only one of the four choices has it. A method
may also be named (`fedsap.scale=16`); in a comparison the key then applies to that method alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import methods, models
from ..data import Dataset, as_dataset, partitions, sources
from ..data.sources import IN_MEMORY, in_memory
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
    """Write nested tables as keys with dots.

    Args:
        given: Keys and values, flat or nested.
        prefix: What every key begins with.

    Returns:
        Values by their whole keys.

    >>> flatten({"partition": {"way": 3}})
    {'partition.way': 3}
    """
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


def with_dataset(given: Mapping[str, Any]) -> dict[str, Any]:
    """Turn data in memory, with the settings that say what it is, into a `Dataset`.

    Args:
        given: Keys and values as a person gave them in Python.

    Returns:
        The same keys where `data` is a name, a path or a `Dataset`. Otherwise a `Dataset` is in its place, and keys such
        as `label` and `standardise`, which it was made with, are gone.

    >>> with_dataset({"data": ([[0.0], [1.0]], ["a", "b"]), "rounds": 2})["data"].class_names
    ('a', 'b')
    """
    if not in_memory(given.get("data")):
        return dict(given)
    own = {key: key.removeprefix("data.") for key in given if key not in (*GENERAL, "data")}
    own = {key: name for key, name in own.items() if name in sources.options(IN_MEMORY)}
    options = {name: given[key] for key, name in own.items()}
    rest = {key: value for key, value in given.items() if key not in own}
    return {**rest, "data": as_dataset(given["data"], **options)}


def combine(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Combine two sets of keys.

    Args:
        base: Keys and values, flat or nested.
        over: Keys and values that override those of `base`. Where it chooses another method, data set, partition or
            model, the settings of the earlier choice are dropped.

    Returns:
        Flat keys and their values.

    >>> combine({"lr": 0.1, "data": "digits"}, {"lr": 0.05})
    {'lr': 0.05, 'data': 'digits'}
    """
    low, high = flatten(base), flatten(over)
    for kind in REGISTRIES:
        name = high.get(kind, high.get(f"{kind}.name"))
        if name is not None:
            old = low.pop(kind, low.pop(f"{kind}.name", None))
            if not (isinstance(old, str | Path) and isinstance(name, str | Path) and old == name):
                low = {k: v for k, v in low.items() if not k.startswith(f"{kind}.")}
    return {**low, **high}


def plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten keys, and write `partition.name` as `partition`.

    >>> plain({"partition": {"name": "iid"}})
    {'partition': 'iid'}
    """
    return {
        key.removesuffix(".name") if key.removesuffix(".name") in REGISTRIES else key: value
        for key, value in flatten(given).items()
    }


# --- the owner of a key -----------------------------------------------------------------------------------------------
def owner(key: str) -> tuple[str, str]:
    """The choice or the method that a key names, or an empty text, and the rest of the key.

    >>> owner("fedsap.scale"), owner("method.scale"), owner("scale")
    (('fedsap', 'scale'), ('method', 'scale'), ('', 'scale'))
    """
    head, _, rest = key.partition(".")
    if rest and head in REGISTRIES:
        return head, rest
    if rest and head in methods.registry:
        return methods.registry[head].name, rest
    return "", key


def same_setting(one: str, other: str) -> bool:
    """Whether two keys, in full or short, may be the same setting.

    >>> same_setting("way", "partition.way"), same_setting("fedsap.scale", "fedproto.scale")
    (True, False)
    """
    (first, a), (second, b) = owner(one), owner(other)
    of_methods = "method" in (first, second) and all(o == "method" or o in methods.registry for o in (first, second))
    return a == b and (first == second or not first or not second or of_methods)


def is_key(key: str) -> bool:
    """Whether there is a setting of this name, general or of a method, data set, partition or model."""
    head, _, rest = key.partition(".")
    known = {*GENERAL, *REGISTRIES, *(option for registry in REGISTRIES.values() for option in _all_options(registry))}
    return head in known or (rest != "" and head in methods.registry)


def _all_options(registry: Registry[Any]) -> set[str]:
    return {option for name in registry for option in registry.options(name)}


def find_group(
    key: str, known: Mapping[str, set[str]], chosen: Mapping[str, Any], others: Mapping[str, set[str]]
) -> tuple[str, str]:
    """Find the group a key belongs to.

    Args:
        key: The key as a person wrote it.
        known: The settings of each of the four choices.
        chosen: The names of the four choices.
        others: The settings of further methods of a comparison.

    Returns:
        The group and the key's name in it; the group is empty where the key belongs to another method of a comparison.
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


# --- errors for unknown keys ------------------------------------------------------------------------------------------
def unknown_setting(key: str, chosen: Mapping[str, Any], options: Iterable[str]) -> ProtofedError:
    """The error for a key that none of the choices has. It names the owners of such a key, or similar keys.

    Args:
        key: The key as a person wrote it.
        chosen: The names of the four choices; a choice that is not made by name is left out.
        options: The settings that are known, beside the general ones.

    Returns:
        The error, for the caller to raise.
    """
    head = owner(key)[1].partition(".")[0]
    if head in PARTS and key == head:
        return _fixed_part(head, chosen["method"])
    owners = [text for kind in REGISTRIES if (text := _owners_text(head, kind, chosen.get(kind)))]
    if owners:
        return ProtofedError(f"unknown setting {key!r} here: {'; or '.join(owners)}")
    near = nearest(key, {*GENERAL, *REGISTRIES, *options}, 3)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return ProtofedError(f"unknown setting {key!r}; {hint}`protofed settings` lists the general ones")


def _owners_text(head: str, kind: str, chosen: Any) -> str:
    """The entries of a registry that have a setting, as part of a sentence; an empty text where none has it."""
    registry = REGISTRIES[kind]
    owners = [name for name in registry if head in registry.options(name)]
    if not owners:
        return ""
    more = f" and {len(owners) - MOST} more" if len(owners) > MOST else ""
    if kind == "method":
        return f"it is a setting of {_listed(owners[:MOST], 'and')}{more}, not of {chosen}"
    if kind == "model" and chosen is None:
        return f"each of several models has its own: models={owners[0]}?{head}=…"
    needed = _listed([f"{kind}={name}" for name in owners[:MOST]], "or")
    return f"it needs {needed}{more}, and {kind} is {chosen if isinstance(chosen, str) else 'given in memory'}"


def _listed(names: Sequence[str], last: str) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"


def _fixed_part(part: str, method: str) -> ProtofedError:
    """The error for a part that is not a setting of this method."""
    owners = [name for name in methods.available() if part in methods.registry.options(name)]
    reason = ""
    if part == "reduce":
        instance = methods.registry.make(method)
        if not instance.exchange.up:
            reason = " (its clients send nothing)"
        elif not instance.reduce.additive:
            reason = " (it needs each upload by itself)"
    return ProtofedError(
        f"{part}: the {part} of {method} is fixed by the method{reason}; it is a setting of {', '.join(owners) or 'none'}"
    )


def hint_for_option(text: str) -> str | None:
    """The hint for an option that the command line does not have but that is the name of a setting.

    Args:
        text: The option as it was written: `--rounds`, `--lr=0.1` or `--lr-schedule`.

    Returns:
        One sentence; None where no setting has that name.

    >>> hint_for_option("--rounds")
    'settings have no dashes: write rounds=VALUE'
    """
    name, equals, value = text.lstrip("-").partition("=")
    for key in (name, name.replace("-", "_")):
        if key and is_key(key):
            return f"settings have no dashes: write {key}={value if equals else 'VALUE'}"
    return None
