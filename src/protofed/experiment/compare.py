"""A comparison: variants × seeds, each cell a run of its own with its own folder, as many at a time as there are cores.

A variant is a method and the settings in which it differs from the others, written `[LABEL=]METHOD[?key=value&…]`.
`compare` has those that are listed; `sweep` has their product with axes, an axis being a key with the values it takes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .. import methods
from ..data import Dataset
from ..disk import write_atomically
from ..errors import ProtofedError, unknown
from ..federation import Record, scale
from ..federation.choose import cores
from ..results.folder import make_folder
from ..results.read import read_finished
from ..results.tables import Row, comparison_latex, comparison_markdown, parse_column, results_csv, written
from .run import Result, load_result, resume, run
from .settings import REGISTRIES, AutoModel, General, Settings, combine, parse_pairs, read_toml, resolve

FILE = "comparison.json"
LONGEST = 100  # characters of a variant's folder name: paths have limits
PATIENCE = 0.5  # seconds between two looks at whether the parent is still there


@dataclass(frozen=True)
class Progress:
    """How far one cell is: sent to whoever watches after every round."""

    cell: str
    round: int
    rounds: int
    loss: float | None
    accuracy: float | None
    by: Literal["head", "accuracy"] = "head"
    """What the accuracy is: by the head, or in the method's own way where it trains none."""


Watch = Callable[[Progress], None]
Files = str | Path | Sequence[str | Path] | None


@dataclass(frozen=True)
class Variant:
    """A method and the settings that make this variant differ; its runs are in `FOLDER-seed…`."""

    label: str
    method: str
    settings: dict[str, Any]
    folder: str

    def cell(self, seed: int) -> str:
        return f"{self.folder}-seed{seed}"


@dataclass(frozen=True)
class Grid:
    """Variants × seeds, every cell's settings resolved: what is wrong with the last cell is said before the first runs."""

    variants: list[Variant]
    seeds: list[int]
    cells: dict[str, Settings]
    columns: list[str] | None = None

    def record(self) -> dict[str, Any]:
        """As `comparison.json` holds it."""
        chosen = {} if self.columns is None else {"columns": self.columns}
        return {
            "variants": [dataclasses.asdict(variant) for variant in self.variants],
            "seeds": self.seeds,
            **chosen,
            "settings": {cell: settings.to_dict() for cell, settings in self.cells.items()},
        }


@dataclass(frozen=True)
class Comparison:
    """Results by label of the variant, one per seed."""

    results: dict[str, list[Result]]
    folder: Path | None = None
    variants: list[Variant] = field(default_factory=list)
    columns: list[str] | None = None

    def summaries(self) -> dict[str, list[dict[str, Any]]]:
        return {label: [r.summary for r in runs] for label, runs in self.results.items()}

    def rows(self) -> list[Row]:
        """As tables want it."""
        summaries = self.summaries()
        return [Row(v.label, v.method, v.settings, summaries[v.label]) for v in self.variants]


def compare(
    names: Sequence[str] = (),
    *,
    local: bool = True,
    seeds: Sequence[int] | int = 3,
    out: str | Path | None = None,
    jobs: int | None = None,
    watch: Watch | None = None,
    config: Files = None,
    columns: Sequence[str] | None = None,
    **given: Any,
) -> Comparison:
    """Run every method with every seed under the same settings. `seeds=3` means three from `seed` on.

    A method may have a label and settings of its own: `compare(["fedavg", "upper bound=fedavg?labels=all"])`. Local is
    run beside them unless `local=False`.
    """
    grid = compare_grid(names, local=local, seeds=seeds, config=config, columns=columns, given=given)
    return run_grid(grid, out=out, jobs=jobs, watch=watch)


def sweep(
    names: Sequence[str] = (),
    *,
    over: Mapping[str, Sequence[Any]] | None = None,
    seeds: Sequence[int] | int = 3,
    out: str | Path | None = None,
    jobs: int | None = None,
    watch: Watch | None = None,
    config: Files = None,
    columns: Sequence[str] | None = None,
    **given: Any,
) -> Comparison:
    """Run every method with every combination of the axes' values and every seed.

    `over={"lr": [0.01, 0.1], "partition": ["iid", "dirichlet"]}`: any key can be an axis. A method that an axis does
    not speak to (`fedsap.scale`) is run once for all its values.
    """
    grid = sweep_grid(names, over=over or {}, seeds=seeds, config=config, columns=columns, given=given)
    return run_grid(grid, out=out, jobs=jobs, watch=watch)


# --- from what a person writes to the grid ----------------------------------------------------------------------------
@dataclass(frozen=True)
class Layer:
    """What one file, or the command line, says. Later layers go over earlier ones."""

    where: str
    settings: dict[str, Any]
    axes: dict[str, list[Any]]
    names: list[str]


def compare_grid(
    names: Sequence[str],
    *,
    local: bool = True,
    seeds: Sequence[int] | int,
    given: Mapping[str, Any],
    config: Files = None,
    columns: Sequence[str] | None = None,
) -> Grid:
    names = [names] if isinstance(names, str) else names
    files = [_read_layer(file, axes=False) for file in _files(config)]
    return _grid([*files, _layer("this call", given, {}, names)], seeds, columns, local)


def sweep_grid(
    names: Sequence[str],
    *,
    over: Mapping[str, Sequence[Any]],
    seeds: Sequence[int] | int,
    given: Mapping[str, Any],
    config: Files = None,
    columns: Sequence[str] | None = None,
) -> Grid:
    names = [names] if isinstance(names, str) else names
    files = [_read_layer(file, axes=True) for file in _files(config)]
    return _grid([*files, _layer("this call", given, over, names)], seeds, columns, local=False)


def _files(config: Files) -> list[Path]:
    if config is None:
        return []
    return [Path(config)] if isinstance(config, str | Path) else [Path(file) for file in config]


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
    settings = _plain(combine(given, {}))
    axes = {key: _axis(where, key, values) for key, values in _plain(combine(over, {})).items()}
    _refuse_same(where, settings, axes)
    if not isinstance(settings.get("method", ""), str):
        raise ProtofedError(f"{where}: method={settings['method']!r}: expected a name")
    by_axis = [written(name) for name in axes.pop("method", [])]
    if names and (by_axis or "method" in settings):
        raise ProtofedError(f"{where}: methods are given by name and as 'method'; leave one of them out")
    return Layer(where, settings, axes, by_axis or list(names))


def _plain(flat: dict[str, Any]) -> dict[str, Any]:
    """`partition.name` is `partition`."""
    return {key.removesuffix(".name") if key.removesuffix(".name") in REGISTRIES else key: v for key, v in flat.items()}


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
    return value.name if isinstance(value, Dataset) else written(value)


def parse_axes(words: Iterable[str]) -> dict[str, list[Any]]:
    """`key=v1,v2` of a command line. A value that has commas of its own is in brackets: `hidden=[64],[128,64]`."""
    axes: dict[str, list[Any]] = {}
    for word in words:
        key, equals, text = (part.strip() for part in word.partition("="))
        if not equals or not key:
            raise ProtofedError(f"--over {word!r}: expected key=value,value,…")
        if key in axes:
            raise ProtofedError(f"--over {key!r} is given twice; write all its values in one")
        axes[key] = [_parse(key, part) for part in _split(f"--over {word!r}", text)] if text else []
    return axes


def _parse(key: str, text: str) -> Any:
    if text.startswith("[") and text.endswith("]"):
        return [_parse(key, part) for part in _split(f"--over {text!r}", text[1:-1])] if text[1:-1].strip() else []
    return parse_pairs([f"{key}={text}"])[key]


def _split(where: str, text: str, at: str = ",") -> list[str]:
    """At commas, or another sign, outside brackets and quotes."""
    parts, open_signs, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        else:
            open_signs += (sign in "[{") - (sign in "]}")
        if sign == at and not open_signs and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    if open_signs or quote:
        raise ProtofedError(f"{where}: a bracket or quote is not closed")
    parts = [part.strip() for part in parts]
    if not all(parts):
        raise ProtofedError(f"{where}: there is nothing between two {at!r}, or at an end")
    return parts


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
    if not equals or _is_key(key.strip()):
        return not equals
    if name not in methods.registry and (asks or " " in key.strip()):  # more than a misspelt key
        raise ProtofedError(f"{word!r}: no setting is called {key!r}, and {unknown('method', name, methods.registry)}")
    return name in methods.registry


def _is_key(key: str) -> bool:
    head, _, rest = key.partition(".")
    known = {*General.model_fields, *REGISTRIES, "methods", "sweep"}
    known |= {option for registry in REGISTRIES.values() for name in registry for option in registry.options(name)}
    return head in known or (rest != "" and head in methods.registry)


def parse_entries(texts: Iterable[str], *, local: bool) -> list[Variant]:
    """`[LABEL=]METHOD[?key=value&key=value…]` each. What stands there twice counts once; Local comes before all.

    Without a label it is the method's name, or all that was written where two would have the same.
    """
    entries = [_label_method_query(text) for text in texts]
    if local and not any(label and method == "local" and not query for label, method, query in entries):
        entries.insert(0, ("", "local", ""))
    entries = list(dict.fromkeys(entries))
    often = Counter(label or method for label, method, _ in entries)
    variants = []
    for label, method, query in entries:
        written_out = f"{method}?{query}" if query else method
        called = label or (method if often[method] == 1 else written_out)
        folder = _safe(method) if called == method else _safer(called)
        variants.append(Variant(called, method, _query(label or written_out, query), folder))
    return variants


def _label_method_query(text: str) -> tuple[str, str, str]:
    before, asks, query = text.partition("?")
    label, equals, name = before.rpartition("=")
    label, query = " ".join(label.split()), query.strip()
    if equals and not label:
        raise ProtofedError(f"{text!r}: expected a label before '='")
    if asks and not query:
        raise ProtofedError(f"{text!r}: expected key=value after '?'")
    if name.strip() not in methods.registry and (equals or asks):
        raise ProtofedError(f"{text!r}: {unknown('method', name.strip(), methods.registry)}")
    return label, methods.registry[name.strip()].name, query


def _query(entry: str, query: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for pair in _split(repr(entry), query, "&") if query else ():
        try:
            [(key, value)] = parse_pairs([pair]).items()
        except ProtofedError as error:
            raise ProtofedError(f"{entry!r}: {error}") from None
        if key in settings:
            raise ProtofedError(f"{entry!r}: {key!r} is given twice")
        settings[key] = value
    for key in _plain(combine(settings, {})):
        if key in ("method", "seed"):
            what = "the method stands before '?'" if key == "method" else "seeds have their own option, seeds (--seeds)"
            raise ProtofedError(f"{entry!r}: {key!r} cannot be given here: {what}")
    return settings


def _owner(key: str) -> tuple[str, str]:
    """Whom a key names, if anybody, and the rest: `fedsap.scale`, `method.scale`, `scale`."""
    head, _, rest = key.partition(".")
    if rest and head in REGISTRIES:
        return head, rest
    if rest and head in methods.registry:
        return methods.registry[head].name, rest
    return "", key


def _same(one: str, other: str) -> bool:
    """Whether two keys may set the same thing, however they are written."""
    (first, a), (second, b) = _owner(one), _owner(other)
    of_methods = "method" in (first, second) and all(o == "method" or o in methods.registry for o in (first, second))
    return a == b and (first == second or not first or not second or of_methods)


def _keys(key: str, values: Iterable[Any]) -> set[str]:
    """The keys an axis sets; a value that is a table sets several."""
    return {k for value in values for k in _plain(combine({key: value}, {}))}


def _refuse_same(where: str, settings: Iterable[str], axes: Mapping[str, Sequence[Any]]) -> None:
    """A setting beside an axis of the same key, or after it, is a mistake; so are two axes of one key."""
    by_axis = {axis: _keys(axis, values) for axis, values in axes.items()}
    for axis, keys in by_axis.items():
        for key in settings:
            if any(_same(key, k) for k in keys):
                raise ProtofedError(
                    f"{where}: {key!r} is given as a setting, and {axis!r} as an axis; leave one of them out"
                )
    for (one, first), (other, second) in itertools.combinations(by_axis.items(), 2):
        if any(_same(a, b) for a in first for b in second):
            raise ProtofedError(f"{where}: the axes {one!r} and {other!r} set the same; leave one of them out")


def _grid(layers: Sequence[Layer], seeds: Sequence[int] | int, columns: Sequence[str] | None, local: bool) -> Grid:
    if scale.asked_for():
        raise ProtofedError("a comparison spreads its runs over this host itself; start single runs with torchrun")
    for name in columns or ():
        parse_column(name)
    layers = _settled(layers)
    axes = {key: values for layer in layers for key, values in layer.axes.items()}
    words = next((layer.names for layer in reversed(layers) if layer.names), [])
    words = words or [layer.settings["method"] for layer in layers if "method" in layer.settings][-1:]
    if not words:
        raise ProtofedError("no method given; `protofed methods` lists them")
    entries = parse_entries(words, local=local)
    names = list(dict.fromkeys(entry.method for entry in entries))
    for key in axes:
        if not any(_speaks_to(key, name, names) for name in names):
            raise ProtofedError(f"axis {key!r} speaks to none of the methods: {', '.join(names)}")
    choices = []
    for entry in entries:
        spoken = {key: values for key, values in axes.items() if _speaks_to(key, entry.method, names)}
        _refuse_same(repr(entry.label), _plain(combine(entry.settings, {})), spoken)
        choices += [(entry, dict(zip(spoken, values, strict=True))) for values in itertools.product(*spoken.values())]
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


def _settled(layers: Sequence[Layer]) -> list[Layer]:
    """Axes that a later layer gives anew are forgotten; a setting after an axis of the same key is refused."""
    settled: list[Layer] = []
    for layer in layers:
        anew = {k for axis, values in layer.axes.items() for k in _keys(axis, values)}
        settled = [
            replace(old, axes={a: v for a, v in old.axes.items() if not any(_same(a, k) for k in anew)})
            for old in settled
        ]
        _refuse_same(layer.where, layer.settings, {a: v for old in settled for a, v in old.axes.items()})
        settled.append(layer)
    _refuse_same("together", (), {a: v for layer in settled for a, v in layer.axes.items()})
    return settled


def _speaks_to(key: str, name: str, names: Sequence[str]) -> bool:
    """Whether an axis says anything to a method: not where it is named for another one, or only others have it."""
    owner, rest = _owner(key)
    if owner and owner not in REGISTRIES:
        return owner == name
    head = rest.partition(".")[0]
    if owner or head in REGISTRIES or head in General.model_fields or head in methods.registry.options(name):
        return True
    return not any(head in methods.registry.options(other) for other in names)


def _given(layers: Sequence[Layer], entry: Variant, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """One variant's keys: layer over layer, an axis's value standing where its axis stands, the entry's own on top."""
    given: dict[str, Any] = {}
    for layer in layers:
        axes = _plain(combine({key: value for key, value in chosen.items() if key in layer.axes}, {}))
        given = _last(_plain(combine(given, {**layer.settings, **axes})), axes)
        if "method" in given and methods.registry[given["method"]].name != entry.method:
            given = combine(given, {"method": entry.method})  # the settings of a file's method are not this one's
    own = _plain(combine(entry.settings, {}))
    return _last(_plain(combine(given, own)), own)


def _last(given: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, Any]:
    """Of two spellings of a key the last one counts."""
    return {**{k: v for k, v in given.items() if k not in last}, **last}


def _resolve(entry: Variant, given: Mapping[str, Any], names: Sequence[str]) -> Settings:
    """An entry's settings. What is its own must speak to it: here no other method's key is passed over."""
    if not entry.settings:
        return resolve(entry.method, given, also=names)
    try:
        settings = resolve(entry.method, given, also=names)
        for key in _plain(combine(entry.settings, {})):
            _check_heard(key, settings)
    except ProtofedError as error:
        raise ProtofedError(f"{entry.label!r}: {error}") from None
    return settings


def _check_heard(key: str, settings: Settings) -> None:
    owner, rest = _owner(key)
    known = {*General.model_fields, *REGISTRIES}
    for choice in (getattr(settings, kind) for kind in REGISTRIES):
        if isinstance(choice, AutoModel):
            known |= set(choice.options)
        elif not isinstance(choice, Dataset):
            known |= {f.name for f in dataclasses.fields(choice)}
    to_another = owner not in ("", settings.method.name, *REGISTRIES)
    if to_another or (not owner and rest.partition(".")[0] not in known):
        raise unknown("setting", key, known)


def _variants(choices: Sequence[tuple[Variant, dict[str, Any]]]) -> list[Variant]:
    labels, plain = [], []
    for entry, chosen in choices:
        name = entry.method
        keys = {key: rest if owner in (name, "method") else key for key in chosen for owner, rest in [_owner(key)]}
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


# --- the folder -------------------------------------------------------------------------------------------------------
def is_comparison(folder: Path) -> bool:
    return (folder / FILE).is_file()


def _read_record(folder: Path) -> tuple[list[Variant], list[int], dict[str, Any], list[str] | None]:
    """Variants, seeds, each cell's settings as written, and the columns of the tables.

    Version 0.1 wrote `methods` in place of `variants`: one for each method.
    """
    try:
        record = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if "variants" in record:
            variants = [Variant(**variant) for variant in record["variants"]]
        else:
            variants = [Variant(name, name, {}, name) for name in record["methods"]]
        seeds, settings = list(record["seeds"]), dict(record["settings"])
        missing = [v.cell(seed) for v in variants for seed in seeds if v.cell(seed) not in settings]
        if missing:
            raise ProtofedError(f"{folder / FILE}: settings of the cell {missing[0]!r} are missing")
        return variants, seeds, settings, record.get("columns")
    except FileNotFoundError:
        raise ProtofedError(f"{folder}: not a comparison's folder (it has no {FILE})") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtofedError(f"{folder / FILE}: not readable ({type(error).__name__}: {error})") from None


def read_comparison(folder: Path) -> Grid:
    variants, seeds, settings, columns = _read_record(folder)
    return Grid(variants, seeds, {cell: resolve(None, given) for cell, given in settings.items()}, columns)


def read_rows(folder: Path) -> tuple[list[Row], list[str] | None]:
    """The finished cells of a comparison and the columns it was started with: what a table needs, and no more."""
    variants, seeds, _, columns = _read_record(folder)
    rows = []
    for variant in variants:
        places = [folder / variant.cell(seed) for seed in seeds]
        runs = [read_finished(place)[2] for place in places if (place / "summary.json").is_file()]
        rows.append(Row(variant.label, variant.method, variant.settings, runs))
    if not any(row.runs for row in rows):
        raise ProtofedError(f"{folder}: no run of this comparison has finished; `protofed resume {folder}`")
    return rows, columns


def resume_comparison(folder: Path, *, jobs: int | None = None, watch: Watch | None = None) -> Comparison:
    """Finish a comparison that was stopped: finished runs are kept, begun ones resumed, the rest run."""
    return _run_cells(read_comparison(folder), folder, jobs, watch)


def run_grid(grid: Grid, *, out: str | Path | None, jobs: int | None, watch: Watch | None) -> Comparison:
    folder = None if out is None else Path(out)
    if folder is not None:
        make_folder(folder, {FILE: json.dumps(grid.record(), indent=1).encode()}).release()
    return _run_cells(grid, folder, jobs, watch)


def _write_tables(result: Comparison, folder: Path) -> None:
    rows, columns = result.rows(), result.columns
    write_atomically(folder / "results.csv", results_csv(rows).encode())
    write_atomically(folder / "table.md", comparison_markdown(rows, columns).encode())
    write_atomically(folder / "table.tex", comparison_latex(rows, columns).encode())


# --- running the cells ------------------------------------------------------------------------------------------------
def _run_cells(grid: Grid, folder: Path | None, jobs: int | None, watch: Watch | None) -> Comparison:
    widest = max(max(1, s.general.threads, s.general.workers) for s in grid.cells.values())
    jobs = min(len(grid.cells), jobs or max(1, cores() // widest))
    share = max(1, cores() // jobs)  # each run gets its share of the cores, unless the settings say how many
    cells = {cell: _within(settings, share) for cell, settings in grid.cells.items()}
    places = {cell: None if folder is None else folder / cell for cell in cells}
    done: dict[str, Result] = {}
    if jobs == 1:
        for cell, settings in cells.items():
            done[cell] = _run_cell(cell, settings, places[cell], watch)
    else:
        # forked where possible: quick to start, and a person's own methods and data are there
        context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
        queue = context.Queue()
        begin = (os.getpid(), queue, cells, places)  # inherited by forking: only names and results are pickled
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin_worker, initargs=begin) as pool:
            waiting = {pool.submit(_run_cell_in_worker, cell): cell for cell in cells}
            listener = threading.Thread(target=_listen, args=(queue, watch), daemon=True)
            listener.start()
            try:
                for future in as_completed(waiting):
                    done[waiting[future]] = Result(cells[waiting[future]], *future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in multiprocessing.active_children():  # the runs under way: nobody will see their results
                    child.terminate()
                raise
        queue.put(None)
        listener.join()
    results = {v.label: [done[v.cell(seed)] for seed in grid.seeds] for v in grid.variants}
    comparison = Comparison(results, folder, grid.variants, grid.columns)
    if folder is not None:
        _write_tables(comparison, folder)
    return comparison


def _within(settings: Settings, share: int) -> Settings:
    engine = settings.engine
    return settings.with_engine(replace(engine, workers=engine.workers or share, threads=engine.threads or share))


def _run_cell(cell: str, settings: Settings, place: Path | None, watch: Watch | None) -> Result:
    last = 0

    def report(record: Record, rounds: int) -> None:
        nonlocal last
        last = record.round
        if watch is not None:
            watch(Progress(cell, record.round, rounds, record.loss, *_shown(record.metrics)))

    try:
        if place is not None and (place / "summary.json").is_file():
            result = load_result(place)
        elif place is not None and (place / "settings.toml").is_file():
            result = resume(place, watch=report)
        else:
            result = run(settings, out=place, watch=report)
    except ProtofedError as error:
        raise ProtofedError(f"{cell}: {error}") from None
    rounds = settings.general.rounds
    if watch is not None and last < rounds:  # nothing was left to run
        watch(Progress(cell, rounds, rounds, None, *_shown(result.summary["last_round"])))
    return result


def _shown(metrics: Mapping[str, Any]) -> tuple[float | None, Literal["head", "accuracy"]]:
    head = metrics.get("accuracy_head")
    return (metrics["accuracy"], "accuracy") if head is None and "accuracy" in metrics else (head, "head")


_inherited: tuple[Any, dict[str, Settings], dict[str, Path | None]]


def _begin_worker(parent: int, *given: Any) -> None:
    global _inherited
    _inherited = given
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """A run that outlives a killed comparison would write into the folder that `resume` is at work on."""
    while os.getppid() == parent:
        time.sleep(PATIENCE)
    os._exit(1)


def _run_cell_in_worker(cell: str) -> tuple[list[dict[str, Any]], dict[str, Any], Path | None]:
    """In a thread of its own: OpenMP's other threads did not survive the fork, and the main thread would wait for them
    where the parent has computed with several."""
    queue, cells, places = _inherited
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(_run_cell, cell, cells[cell], places[cell], queue.put).result()
    return result.metrics, result.summary, result.folder


def _listen(queue: Any, watch: Watch | None) -> None:
    while (progress := queue.get()) is not None:
        if watch is not None:
            watch(progress)
