"""The grid of a comparison, made from what a person writes: variants and seeds, with the settings of every cell.

A variant is a method and the settings in which it differs from the others, written `[LABEL=]METHOD[?key=value&…]`. A
comparison has the variants that are listed; a sweep has their product with axes, each of which is a key with its values.
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
from ..data import Dataset, as_dataset
from ..data.sources import in_memory
from ..errors import ProtofedError, unknown
from ..federation import scale
from ..grammar import Entry, parse_entry, parse_pairs
from ..methods.control import has_control
from ..results.columns import parse_column
from ..results.comparison import ComparisonRecord, Variant
from ..results.tables import setting_text
from .keys import GENERAL, REGISTRIES, combine, is_key, owner, plain, same_setting, unknown_setting, with_dataset
from .settings import AutoModel, Settings, read_toml, resolve

LONGEST = 100  # characters of a variant's folder name: paths have limits

Files = str | Path | Sequence[str | Path] | None


@dataclass(frozen=True)
class Grid:
    """The variants and seeds of a comparison, and the settings of every cell by its name.

    All settings are resolved in advance, so that an error in the last cell is known before the first one runs.
    """

    variants: list[Variant]
    seeds: list[int]
    cells: dict[str, Settings]
    columns: list[str] | None = None

    def record(self) -> ComparisonRecord:
        """The record of this grid, which `comparison.json` holds."""
        settings = {name: cell.to_dict() for name, cell in self.cells.items()}
        return ComparisonRecord(self.variants, self.seeds, settings, self.columns)


@dataclass(frozen=True)
class Layer:
    """The settings, axes and methods of one file or of the command line. Later layers override earlier ones."""

    where: str
    settings: dict[str, Any]
    axes: dict[str, list[Any]]
    names: list[str]


def make_grid(
    names: Sequence[str] = (),
    *,
    over: Mapping[str, Sequence[Any]] | None = None,
    local: bool = False,
    controls: bool = False,
    seeds: Sequence[int] | int = 3,
    config: Files = None,
    columns: Sequence[str] | None = None,
    given: Mapping[str, Any] | None = None,
) -> Grid:
    """Make the grid of a comparison or of a sweep.

    Args:
        names: The methods, each with a label and settings of its own where it has some.
        over: The axes of a sweep; None for a comparison, whose files may have no axes either.
        local: Whether Local is run beside them; with `labels=server`, where no client can learn alone, `server-only` is.
        controls: Whether the control of each method that exchanges prototypes is run after it.
        seeds: The number of seeds, counted from the setting `seed`, or a list of seeds.
        config: Files of settings; later ones override earlier ones.
        columns: The columns of the tables; None takes the default ones.
        given: Settings that override those of the files.

    Returns:
        The grid. An error in its last cell is raised before the first one runs.

    Example: `make_grid(["fedavg", "fedsap"], seeds=2, given={"rounds": 20}).cells.keys()`
    """
    names = [names] if isinstance(names, str) else names
    files = [config] if isinstance(config, str | Path) else config or ()
    layers = [_read_layer(Path(file), axes=over is not None) for file in files]
    layers.append(_layer("this call", with_dataset(given or {}), over or {}, names))
    return _grid(layers, seeds, columns, local, controls)


def _read_layer(file: Path, *, axes: bool) -> Layer:
    given = read_toml(file)
    over, names = given.pop("sweep", {}) if axes else {}, given.pop("methods", [])
    if not isinstance(over, dict):
        raise ProtofedError(f"{file}: sweep={over!r}: expected a table of axes, [sweep]")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ProtofedError(f"{file}: methods={names!r}: expected a list of names")
    return _layer(str(file), given, over, names)


def _layer(where: str, given: Mapping[str, Any], over: Mapping[str, Any], names: Sequence[str]) -> Layer:
    """Check one layer by itself. The methods may be given by name, as an axis, or as the setting `method`."""
    settings = plain(given)
    axes = {key: _axis(where, key, values) for key, values in plain(over).items()}
    _check_no_conflict(where, settings, axes)
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
    values = [_value(as_dataset(value) if key == "data" and in_memory(value) else value) for value in values]
    if not values:
        raise ProtofedError(f"{where}: axis {key!r} has no values")
    duplicates = [text for text, count in Counter(_text(value) for value in values).items() if count > 1]
    if duplicates:
        raise ProtofedError(f"{where}: axis {key!r}: {duplicates[0]} stands there twice")
    return values


def _value(value: Any) -> Any:
    """The value as JSON can hold it, where that is possible: numpy's numbers, tuples and dataclasses are converted."""
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
    """Divide the words of a command line into methods and settings.

    Args:
        words: Words such as `fedavg`, `upper bound=fedavg?labels=all` and `rounds=20`. A word `x=fedavg` is a method
            with a label where no setting is called `x`.

    Returns:
        The methods, and the settings by key.

    >>> parse_words(["fedavg", "rounds=20"])
    (['fedavg'], {'rounds': 20})
    """
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
    if name not in methods.registry and (asks or " " in key.strip()):  # this is more than a misspelt key
        raise ProtofedError(f"{word!r}: no setting is called {key!r}, and {unknown('method', name, methods.registry)}")
    return name in methods.registry


def parse_entries(texts: Iterable[str], *, local: bool, baseline: str = "local") -> list[Variant]:
    """Read the methods of a comparison.

    Args:
        texts: Entries `[LABEL=]METHOD[?key=value&key=value…]`. An entry that stands there twice counts once. The label
            of an entry without one is its method's name, or the whole entry where two would have the same.
        local: Whether the baseline is put before them.
        baseline: The method that learns without a federation: Local, or `server-only` where clients have no labels.

    Returns:
        A variant for each entry, before any axis.
    """
    entries = [_entry(text) for text in texts]
    if local and not any(entry.label and entry.name == baseline and not entry.query for entry in entries):
        entries.insert(0, Entry("", baseline, ""))
    entries = list(dict.fromkeys(entries))
    counts = Counter(entry.label or entry.name for entry in entries)
    variants = []
    for entry in entries:
        label = entry.label or (entry.name if counts[entry.name] == 1 else entry.text)
        folder = _safe_value(entry.name) if label == entry.name else _safe_label(label)
        variants.append(Variant(label, entry.name, _own_settings(entry), folder))
    return variants


def with_controls(entries: Iterable[Variant]) -> list[Variant]:
    """The entries of a comparison, and after each method that exchanges prototypes its control, `METHOD control`.

    Args:
        entries: Those that `parse_entries` gives. One that has the setting `control` stays alone.

    Returns:
        The entries. A control has all settings of its method, and `control=own`.
    """
    result = []
    for entry in entries:
        result.append(entry)
        if "control" not in plain(entry.settings) and has_control(methods.get(entry.method)):
            settings = {**entry.settings, "control": "own"}
            result.append(Variant(f"{entry.label} control", entry.method, settings, f"{entry.folder}-control"))
    return result


def _entry(text: str) -> Entry:
    entry = parse_entry(text)
    if entry.name not in methods.registry and (entry.label or entry.query):
        raise ProtofedError(f"{text!r}: {unknown('method', entry.name, methods.registry)}")
    return entry._replace(name=methods.registry[entry.name].name)


def _own_settings(entry: Entry) -> dict[str, Any]:
    settings = entry.settings
    for key in plain(settings):
        if key in ("method", "seed"):
            reason = (
                "the method stands before '?'" if key == "method" else "seeds have their own option, seeds (--seeds)"
            )
            raise ProtofedError(f"{entry.label or entry.text!r}: {key!r} cannot be given here: {reason}")
    return settings


def _keys(key: str, values: Iterable[Any]) -> set[str]:
    """The keys that an axis sets; a value that is a table sets several."""
    return {k for value in values for k in plain({key: value})}


def _check_no_conflict(where: str, settings: Iterable[str], axes: Mapping[str, Sequence[Any]]) -> None:
    """Raise an error where a key is both a setting and an axis, or where two axes have one key."""
    by_axis = {axis: _keys(axis, values) for axis, values in axes.items()}
    for axis, keys in by_axis.items():
        for key in settings:
            if any(same_setting(key, k) for k in keys):
                raise ProtofedError(
                    f"{where}: {key!r} is given as a setting, and {axis!r} as an axis; leave one of them out"
                )
    for (one, first), (other, second) in itertools.combinations(by_axis.items(), 2):
        if any(same_setting(a, b) for a in first for b in second):
            raise ProtofedError(f"{where}: the axes {one!r} and {other!r} set the same; leave one of them out")


def _grid(
    layers: Sequence[Layer], seeds: Sequence[int] | int, columns: Sequence[str] | None, local: bool, controls: bool
) -> Grid:
    if scale.asked_for():
        raise ProtofedError("a comparison spreads its runs over this host itself; start single runs with torchrun")
    for name in columns or ():
        parse_column(name)
    layers = _without_replaced_axes(layers)
    entries = parse_entries(_methods_of(layers), local=local, baseline=_baseline(layers))
    if controls:
        entries = with_controls(entries)
    names = list(dict.fromkeys(entry.method for entry in entries))
    choices = _choices(layers, entries, names)
    given = [_combined_layers(layers, entry, chosen) for entry, chosen in choices]
    first = _resolve(choices[0][0], given[0], names).general.seed
    seed_list = list(range(first, first + seeds)) if isinstance(seeds, int) else list(seeds)
    if not seed_list or len(set(seed_list)) < len(seed_list):
        raise ProtofedError(f"a comparison needs at least one seed, each once; got {seed_list}")
    variants = _variants(choices)
    cells = {
        variant.cell(seed): _resolve(entry, {**keys, "seed": seed}, names)
        for variant, (entry, _), keys in zip(variants, choices, given, strict=True)
        for seed in seed_list
    }
    for entry in entries:
        of_entry = [variant for variant, (origin, _) in zip(variants, choices, strict=True) if origin is entry]
        _check_distinct(of_entry, [cells[variant.cell(seed_list[0])] for variant in of_entry])
    return Grid(variants, seed_list, cells, None if columns is None else list(columns))


def _baseline(layers: Sequence[Layer]) -> str:
    """Local, or `server-only` where only the server has labels, so that a client cannot learn alone."""
    labels = [layer.settings["labels"] for layer in layers if "labels" in layer.settings]
    return "server-only" if labels[-1:] == ["server"] else "local"


def _methods_of(layers: Sequence[Layer]) -> list[str]:
    """The methods of the last layer that lists any, or else the last one that is given as a setting."""
    names = next((layer.names for layer in reversed(layers) if layer.names), [])
    names = names or [layer.settings["method"] for layer in layers if "method" in layer.settings][-1:]
    if not names:
        raise ProtofedError("no method given; `protofed methods` lists them")
    return names


def _choices(
    layers: Sequence[Layer], entries: Sequence[Variant], names: Sequence[str]
) -> list[tuple[Variant, dict[str, Any]]]:
    """Each entry with each combination of the values of those axes that apply to its method."""
    axes = {key: values for layer in layers for key, values in layer.axes.items()}
    for key in axes:
        if not any(_applies_to(key, name, names) for name in names):
            raise ProtofedError(f"axis {key!r} applies to none of the methods: {', '.join(names)}")
    choices = []
    for entry in entries:
        applicable = {key: values for key, values in axes.items() if _applies_to(key, entry.method, names)}
        _check_no_conflict(repr(entry.label), plain(entry.settings), applicable)
        choices += [
            (entry, dict(zip(applicable, values, strict=True))) for values in itertools.product(*applicable.values())
        ]
    return choices


def _without_replaced_axes(layers: Sequence[Layer]) -> list[Layer]:
    """The layers without the axes that a later layer replaces. A setting after an axis of the same key is an error."""
    result: list[Layer] = []
    for layer in layers:
        new_keys = {k for axis, values in layer.axes.items() for k in _keys(axis, values)}
        result = [
            replace(old, axes={a: v for a, v in old.axes.items() if not any(same_setting(a, k) for k in new_keys)})
            for old in result
        ]
        _check_no_conflict(layer.where, layer.settings, {a: v for old in result for a, v in old.axes.items()})
        result.append(layer)
    _check_no_conflict("together", (), {a: v for layer in result for a, v in layer.axes.items()})
    return result


def _applies_to(key: str, name: str, names: Sequence[str]) -> bool:
    """Whether an axis applies to a method: not where it names another one, or where only others have such a setting."""
    named, rest = owner(key)
    if named and named not in REGISTRIES:
        return named == name
    head = rest.partition(".")[0]
    if named or head in REGISTRIES or head in GENERAL or head in methods.registry.options(name):
        return True
    return not any(head in methods.registry.options(other) for other in names)


def _combined_layers(layers: Sequence[Layer], entry: Variant, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of one variant: each layer with the values of its axes over the layers before, and the entry's own on top."""
    given: dict[str, Any] = {}
    for layer in layers:
        axes = plain(combine({key: value for key, value in chosen.items() if key in layer.axes}, {}))
        given = _moved_last(plain(combine(given, {**layer.settings, **axes})), axes)
        if "method" in given and methods.registry[given["method"]].name != entry.method:
            given = combine(given, {"method": entry.method})  # the settings of a file's method are not this one's
    own_settings = plain(entry.settings)
    return _moved_last(plain(combine(given, own_settings)), own_settings)


def _moved_last(given: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, Any]:
    """The keys with those of `last` at the end, because the last one of two spellings of a key counts."""
    return {**{k: v for k, v in given.items() if k not in last}, **last}


def _resolve(entry: Variant, given: Mapping[str, Any], names: Sequence[str]) -> Settings:
    """Resolve the settings of an entry. Its own keys must apply to it, even where another method has such a key."""
    if not entry.settings:
        return resolve(entry.method, given, also=names)
    try:
        settings = resolve(entry.method, given, also=names)
        for key in plain(entry.settings):
            _check_applies(key, settings)
    except ProtofedError as error:
        raise ProtofedError(f"{entry.label!r}: {error}") from None
    return settings


def _check_applies(key: str, settings: Settings) -> None:
    named, rest = owner(key)
    known = {*GENERAL, *REGISTRIES}
    for choice in (getattr(settings, kind) for kind in REGISTRIES):
        if isinstance(choice, AutoModel):
            known |= set(choice.options)
        elif not isinstance(choice, Dataset):
            known |= {f.name for f in dataclasses.fields(choice)}
    names_another = named not in ("", settings.method.name, *REGISTRIES)
    if names_another or (not named and rest.partition(".")[0] not in known):
        chosen = {kind: getattr(getattr(settings, kind), "name", None) for kind in REGISTRIES}
        raise unknown_setting(key, chosen, known)


def _variants(choices: Sequence[tuple[Variant, dict[str, Any]]]) -> list[Variant]:
    labels, folders = [], []
    for entry, chosen in choices:
        name = entry.method
        keys = {key: rest if named in (name, "method") else key for key in chosen for named, rest in [owner(key)]}
        values = [f"{keys[key]}={_text(value)}" for key, value in chosen.items()]
        labels.append(" ".join([entry.label, *values]))
        folders.append("-".join([entry.folder, *map(_safe_value, values)]))
    duplicates = [label for label, count in Counter(labels).items() if count > 1]
    if duplicates:
        raise ProtofedError(f"two variants are called {duplicates[0]!r}; give each a label of its own: LABEL=METHOD")
    counts = Counter(folder.lower() for folder in folders)  # some file systems do not distinguish A from a
    variants = []
    for (entry, chosen), label, folder in zip(choices, labels, folders, strict=True):
        if len(folder) > LONGEST or counts[folder.lower()] > 1:
            folder = f"{folder[:LONGEST]}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"
        on_axes = {key: value.name if isinstance(value, Dataset) else value for key, value in chosen.items()}
        variants.append(Variant(label, entry.method, {**entry.settings, **on_axes}, folder))
    return variants


def _safe_value(label: str) -> str:
    """A name for every file system: `hidden=[64,32]` loses its brackets, and other characters become `_`."""
    return re.sub(r"[^A-Za-z0-9._=,+-]", "_", re.sub(r"[\[\]]", "", label).replace(" ", "-"))


def _safe_label(label: str) -> str:
    """The folder's name for a label that a person has chosen: letters, digits, `-`, `_` and `.`, and not hidden."""
    return re.sub(r"^[.-]|[^A-Za-z0-9._-]", "_", label.replace(" ", "-"))


def _check_distinct(variants: Sequence[Variant], resolved: Sequence[Settings]) -> None:
    """Raise an error where two variants of an entry have the same settings: a value is written twice, as `1` and `1.0`.

    Different entries may have the same settings: an upper bound is listed as such, even where another equals it.
    """
    label_of: dict[str, str] = {}
    for variant, settings in zip(variants, resolved, strict=True):
        data = id(settings.data) if isinstance(settings.data, Dataset) else 0
        content = json.dumps([settings.to_dict(), data], sort_keys=True)
        if content in label_of:
            raise ProtofedError(
                f"{label_of[content]!r} and {variant.label!r} are the same settings; leave one of them out"
            )
        label_of[content] = variant.label
