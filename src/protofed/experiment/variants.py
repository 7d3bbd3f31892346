"""From what a person writes to the grid of a comparison: variants × seeds, every cell's settings resolved.

A variant is a method and the settings in which it differs from the others, written `[LABEL=]METHOD[?key=value&…]`. A
comparison has those that are listed; a sweep has their product with axes, an axis being a key with the values it takes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import methods
from ..data import Dataset
from ..errors import ProtofedError, unknown
from ..federation import scale
from ..grammar import Entry, parse_entry, parse_pairs
from ..results.comparison import ComparisonRecord, Variant
from ..results.tables import parse_column, setting_text
from .keys import GENERAL, REGISTRIES, combine, is_key, owner, plain, same, unknown_setting
from .settings import AutoModel, Settings, read_toml, resolve

LONGEST = 100  # characters of a variant's folder name: paths have limits

Files = str | Path | Sequence[str | Path] | None


@dataclass(frozen=True)
class Grid:
    """Variants × seeds, every cell's settings resolved: what is wrong with the last cell is said before the first runs."""

    variants: list[Variant]
    seeds: list[int]
    cells: dict[str, Settings]
    columns: list[str] | None = None

    def record(self) -> ComparisonRecord:
        """What the folder of the comparison keeps of it."""
        settings = {cell: own.to_dict() for cell, own in self.cells.items()}
        return ComparisonRecord(self.variants, self.seeds, settings, self.columns)


@dataclass(frozen=True)
class Layer:
    """What one file, or the command line, says. Later layers go over earlier ones."""

    where: str
    settings: dict[str, Any]
    axes: dict[str, list[Any]]
    names: list[str]


def make_grid(
    names: Sequence[str] = (),
    *,
    over: Mapping[str, Sequence[Any]] | None = None,
    local: bool = False,
    seeds: Sequence[int] | int = 3,
    config: Files = None,
    columns: Sequence[str] | None = None,
    given: Mapping[str, Any] | None = None,
) -> Grid:
    """Make the grid of a comparison or of a sweep.

    Args:
        names: methods, each with a label and settings of its own where it has some.
        over: the axes of a sweep; none where it is a comparison, whose files may have no axes either.
        local: whether Local is run beside them.
        seeds: how many from `seed` on, or which.
        config: files of settings; later ones go over earlier ones.
        columns: the columns of the tables; none: those that the runs have.
        given: settings on top of the files'.

    Returns:
        The grid. What is wrong with its last cell is said before the first one runs.
    """
    names = [names] if isinstance(names, str) else names
    files = [config] if isinstance(config, str | Path) else config or ()
    layers = [_read_layer(Path(file), axes=over is not None) for file in files]
    layers.append(_layer("this call", given or {}, over or {}, names))
    return _grid(layers, seeds, columns, local)


def _read_layer(file: Path, *, axes: bool) -> Layer:
    given = read_toml(file)
    over, names = given.pop("sweep", {}) if axes else {}, given.pop("methods", [])
    if not isinstance(over, dict):
        raise ProtofedError(f"{file}: sweep={over!r}: expected a table of axes, [sweep]")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ProtofedError(f"{file}: methods={names!r}: expected a list of names")
    return _layer(str(file), given, over, names)


def _layer(where: str, given: Mapping[str, Any], over: Mapping[str, Any], names: Sequence[str]) -> Layer:
    """Check what one place says by itself. The methods may stand as words, as an axis, or as the setting `method`."""
    settings = plain(given)
    axes = {key: _axis(where, key, values) for key, values in plain(over).items()}
    _refuse_same(where, settings, axes)
    if not isinstance(settings.get("method", ""), str):
        raise ProtofedError(f"{where}: method={settings['method']!r}: expected a name")
    by_axis = [setting_text(name) for name in axes.pop("method", [])]
    if names and (by_axis or "method" in settings):
        raise ProtofedError(f"{where}: methods are given by name and as 'method'; leave one of them out")
    return Layer(where, settings, axes, by_axis or list(names))


def _axis(where: str, key: str, values: Any) -> list[Any]:
    if key == "seed":
        raise ProtofedError(f"{where}: the axis 'seed' has its own option, seeds (--seeds)")
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ProtofedError(f"{where}: axis {key!r}: expected a list of values, got {values!r}")
    values = [_value(value) for value in values]
    if not values:
        raise ProtofedError(f"{where}: axis {key!r} has no values")
    twice = [text for text, count in Counter(_text(value) for value in values).items() if count > 1]
    if twice:
        raise ProtofedError(f"{where}: axis {key!r}: {twice[0]} stands there twice")
    return values


def _value(value: Any) -> Any:
    """What JSON can hold, where it can: arrays' numbers and settings given as objects are common in Python."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Dataset):
        return dataclasses.asdict(value)
    return value


def _text(value: Any) -> str:
    return value.name if isinstance(value, Dataset) else setting_text(value)


def parse_words(words: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
    """Methods and settings of a command line. `x=fedavg` is a method with a label where no setting is called `x`."""
    entries: list[str] = []
    pairs: list[str] = []
    for word in words:
        (entries if _is_entry(word) else pairs).append(word)
    return entries, parse_pairs(pairs)


def _is_entry(word: str) -> bool:
    before, asks, _ = word.partition("?")
    key, equals, _ = before.partition("=")
    name = before.rpartition("=")[2].strip()
    if not equals or key.strip() in ("methods", "sweep") or is_key(key.strip()):
        return not equals
    if name not in methods.registry and (asks or " " in key.strip()):  # more than a misspelt key
        raise ProtofedError(f"{word!r}: no setting is called {key!r}, and {unknown('method', name, methods.registry)}")
    return name in methods.registry


def parse_entries(texts: Iterable[str], *, local: bool) -> list[Variant]:
    """`[LABEL=]METHOD[?key=value&key=value…]` each. What stands there twice counts once; Local comes before all.

    Without a label it is the method's name, or all that was written where two would have the same.
    """
    entries = [_entry(text) for text in texts]
    if local and not any(entry.label and entry.name == "local" and not entry.query for entry in entries):
        entries.insert(0, Entry("", "local", ""))
    entries = list(dict.fromkeys(entries))
    often = Counter(entry.label or entry.name for entry in entries)
    variants = []
    for entry in entries:
        called = entry.label or (entry.name if often[entry.name] == 1 else entry.text)
        folder = _safe(entry.name) if called == entry.name else _safer(called)
        variants.append(Variant(called, entry.name, _own_settings(entry), folder))
    return variants


def _entry(text: str) -> Entry:
    entry = parse_entry(text)
    if entry.name not in methods.registry and (entry.label or entry.query):
        raise ProtofedError(f"{text!r}: {unknown('method', entry.name, methods.registry)}")
    return entry._replace(name=methods.registry[entry.name].name)


def _own_settings(entry: Entry) -> dict[str, Any]:
    settings = entry.settings
    for key in plain(settings):
        if key in ("method", "seed"):
            what = "the method stands before '?'" if key == "method" else "seeds have their own option, seeds (--seeds)"
            raise ProtofedError(f"{entry.label or entry.text!r}: {key!r} cannot be given here: {what}")
    return settings


def _keys(key: str, values: Iterable[Any]) -> set[str]:
    """The keys an axis sets; a value that is a table sets several."""
    return {k for value in values for k in plain({key: value})}


def _refuse_same(where: str, settings: Iterable[str], axes: Mapping[str, Sequence[Any]]) -> None:
    """A setting beside an axis of the same key, or after it, is a mistake; so are two axes of one key."""
    by_axis = {axis: _keys(axis, values) for axis, values in axes.items()}
    for axis, keys in by_axis.items():
        for key in settings:
            if any(same(key, k) for k in keys):
                raise ProtofedError(
                    f"{where}: {key!r} is given as a setting, and {axis!r} as an axis; leave one of them out"
                )
    for (one, first), (other, second) in itertools.combinations(by_axis.items(), 2):
        if any(same(a, b) for a in first for b in second):
            raise ProtofedError(f"{where}: the axes {one!r} and {other!r} set the same; leave one of them out")


def _grid(layers: Sequence[Layer], seeds: Sequence[int] | int, columns: Sequence[str] | None, local: bool) -> Grid:
    if scale.asked_for():
        raise ProtofedError("a comparison spreads its runs over this host itself; start single runs with torchrun")
    for name in columns or ():
        parse_column(name)
    layers = _settled(layers)
    entries = parse_entries(_methods_of(layers), local=local)
    names = list(dict.fromkeys(entry.method for entry in entries))
    choices = _choices(layers, entries, names)
    given = [_given(layers, entry, chosen) for entry, chosen in choices]
    first = _resolve(choices[0][0], given[0], names).general.seed
    numbers = list(range(first, first + seeds)) if isinstance(seeds, int) else list(seeds)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ProtofedError(f"a comparison needs at least one seed, each once; got {numbers}")
    variants = _variants(choices)
    cells = {
        variant.cell(seed): _resolve(entry, {**keys, "seed": seed}, names)
        for variant, (entry, _), keys in zip(variants, choices, given, strict=True)
        for seed in numbers
    }
    for entry in entries:
        of_entry = [variant for variant, (origin, _) in zip(variants, choices, strict=True) if origin is entry]
        _refuse_equal(of_entry, [cells[variant.cell(numbers[0])] for variant in of_entry])
    return Grid(variants, numbers, cells, None if columns is None else list(columns))


def _methods_of(layers: Sequence[Layer]) -> list[str]:
    """The methods of the last layer that lists any, or else the last one that is given as a setting."""
    listed = next((layer.names for layer in reversed(layers) if layer.names), [])
    listed = listed or [layer.settings["method"] for layer in layers if "method" in layer.settings][-1:]
    if not listed:
        raise ProtofedError("no method given; `protofed methods` lists them")
    return listed


def _choices(
    layers: Sequence[Layer], entries: Sequence[Variant], names: Sequence[str]
) -> list[tuple[Variant, dict[str, Any]]]:
    """Each entry with each combination of the values of those axes that speak to its method."""
    axes = {key: values for layer in layers for key, values in layer.axes.items()}
    for key in axes:
        if not any(_speaks_to(key, name, names) for name in names):
            raise ProtofedError(f"axis {key!r} speaks to none of the methods: {', '.join(names)}")
    choices = []
    for entry in entries:
        spoken = {key: values for key, values in axes.items() if _speaks_to(key, entry.method, names)}
        _refuse_same(repr(entry.label), plain(entry.settings), spoken)
        choices += [(entry, dict(zip(spoken, values, strict=True))) for values in itertools.product(*spoken.values())]
    return choices


def _settled(layers: Sequence[Layer]) -> list[Layer]:
    """Axes that a later layer gives anew are forgotten; a setting after an axis of the same key is refused."""
    settled: list[Layer] = []
    for layer in layers:
        anew = {k for axis, values in layer.axes.items() for k in _keys(axis, values)}
        settled = [
            replace(old, axes={a: v for a, v in old.axes.items() if not any(same(a, k) for k in anew)})
            for old in settled
        ]
        _refuse_same(layer.where, layer.settings, {a: v for old in settled for a, v in old.axes.items()})
        settled.append(layer)
    _refuse_same("together", (), {a: v for layer in settled for a, v in layer.axes.items()})
    return settled


def _speaks_to(key: str, name: str, names: Sequence[str]) -> bool:
    """Whether an axis says anything to a method: not where it is named for another one, or only others have it."""
    named, rest = owner(key)
    if named and named not in REGISTRIES:
        return named == name
    head = rest.partition(".")[0]
    if named or head in REGISTRIES or head in GENERAL or head in methods.registry.options(name):
        return True
    return not any(head in methods.registry.options(other) for other in names)


def _given(layers: Sequence[Layer], entry: Variant, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """One variant's keys: layer over layer, an axis's value standing where its axis stands, the entry's own on top."""
    given: dict[str, Any] = {}
    for layer in layers:
        axes = plain(combine({key: value for key, value in chosen.items() if key in layer.axes}, {}))
        given = _last(plain(combine(given, {**layer.settings, **axes})), axes)
        if "method" in given and methods.registry[given["method"]].name != entry.method:
            given = combine(given, {"method": entry.method})  # the settings of a file's method are not this one's
    own = plain(entry.settings)
    return _last(plain(combine(given, own)), own)


def _last(given: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, Any]:
    """Of two spellings of a key the last one counts."""
    return {**{k: v for k, v in given.items() if k not in last}, **last}


def _resolve(entry: Variant, given: Mapping[str, Any], names: Sequence[str]) -> Settings:
    """An entry's settings. What is its own must speak to it: here no other method's key is passed over."""
    if not entry.settings:
        return resolve(entry.method, given, also=names)
    try:
        settings = resolve(entry.method, given, also=names)
        for key in plain(entry.settings):
            _check_heard(key, settings)
    except ProtofedError as error:
        raise ProtofedError(f"{entry.label!r}: {error}") from None
    return settings


def _check_heard(key: str, settings: Settings) -> None:
    named, rest = owner(key)
    known = {*GENERAL, *REGISTRIES}
    for choice in (getattr(settings, kind) for kind in REGISTRIES):
        if isinstance(choice, AutoModel):
            known |= set(choice.options)
        elif not isinstance(choice, Dataset):
            known |= {f.name for f in dataclasses.fields(choice)}
    to_another = named not in ("", settings.method.name, *REGISTRIES)
    if to_another or (not named and rest.partition(".")[0] not in known):
        chosen = {kind: getattr(getattr(settings, kind), "name", None) for kind in REGISTRIES}
        raise unknown_setting(key, chosen, known)


def _variants(choices: Sequence[tuple[Variant, dict[str, Any]]]) -> list[Variant]:
    labels, plain = [], []
    for entry, chosen in choices:
        name = entry.method
        keys = {key: rest if named in (name, "method") else key for key in chosen for named, rest in [owner(key)]}
        values = [f"{keys[key]}={_text(value)}" for key, value in chosen.items()]
        labels.append(" ".join([entry.label, *values]))
        plain.append("-".join([entry.folder, *map(_safe, values)]))
    twice = [label for label, count in Counter(labels).items() if count > 1]
    if twice:
        raise ProtofedError(f"two variants are called {twice[0]!r}; give each a label of its own: LABEL=METHOD")
    often = Counter(folder.lower() for folder in plain)  # some file systems do not tell A from a
    variants = []
    for (entry, chosen), label, folder in zip(choices, labels, plain, strict=True):
        if len(folder) > LONGEST or often[folder.lower()] > 1:
            folder = f"{folder[:LONGEST]}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"
        own = {key: value.name if isinstance(value, Dataset) else value for key, value in chosen.items()}
        variants.append(Variant(label, entry.method, {**entry.settings, **own}, folder))
    return variants


def _safe(label: str) -> str:
    """A name for every file system: `hidden=[64,32]` loses its brackets, other signs become `_`."""
    return re.sub(r"[^A-Za-z0-9._=,+-]", "_", re.sub(r"[\[\]]", "", label).replace(" ", "-"))


def _safer(label: str) -> str:
    """Of a label a person has chosen, or of an entry: letters, digits, `-`, `_` and `.` alone, and not hidden."""
    return re.sub(r"^[.-]|[^A-Za-z0-9._-]", "_", label.replace(" ", "-"))


def _refuse_equal(variants: Sequence[Variant], resolved: Sequence[Settings]) -> None:
    """Two variants of an entry that come to the same settings: a value is written in two ways (`1` and `1.0`).

    Entries may come to the same: an upper bound is listed as such, also where the others happen to meet it.
    """
    seen: dict[str, str] = {}
    for variant, settings in zip(variants, resolved, strict=True):
        data = id(settings.data) if isinstance(settings.data, Dataset) else 0
        what = json.dumps([settings.to_dict(), data], sort_keys=True)
        if what in seen:
            raise ProtofedError(f"{seen[what]!r} and {variant.label!r} are the same settings; leave one of them out")
        seen[what] = variant.label
