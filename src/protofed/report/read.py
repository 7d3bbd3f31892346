"""What a report is made of: the files of a run, a comparison or a sweep, as far as they can be read.

A person who opens a report wants to see what there is. So a file that is missing, cut off or foreign gives a note and not
an end; only a folder that holds no run at all is an error.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ProtofedError
from .confusion import COMPARISON, FILE, By, Confusions, read_confusions
from .tables import DIRECTIONS, FIGURE, Row

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SEED = re.compile(r"(.+)-seed(\d+)")
WAYS = ("accuracy_head", "accuracy_prototype")  # of clients.jsonl, one at least
JsonRow = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run folder. `summary` is None while it has not finished; `notes` say what could not be read."""

    path: Path
    label: str
    seed: int
    settings: Mapping[str, Any]
    rounds: Sequence[JsonRow]
    metrics: Sequence[JsonRow]
    clients: Sequence[JsonRow]
    summary: JsonRow | None
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def method(self) -> str:
        method = self.settings.get("method")
        return str(method.get("name", self.label)) if isinstance(method, Mapping) else self.label

    @property
    def planned(self) -> int | None:
        """How many rounds the settings ask for."""
        rounds = self.settings.get("rounds")
        return rounds if isinstance(rounds, int) else None

    @property
    def last(self) -> int:
        """The last round that was written."""
        return max((row["round"] for row in (*self.rounds, *self.metrics)), default=0)

    def confusions(self, by: By | None = None) -> Confusions | None:
        """None where there is no such file yet, or (with a note) where it is not readable."""
        if not (self.path / FILE).is_file():
            return None
        try:
            return read_confusions(self.path, by)
        except ProtofedError as error:
            note = str(error)
            if note not in self.notes:
                self.notes.append(note)
            return None


@dataclass(frozen=True)
class Variant:
    """A line of the comparison: a label and its runs, one for each seed that has begun."""

    label: str
    method: str
    settings: Mapping[str, Any]
    runs: Sequence[Run]

    @property
    def finished(self) -> list[JsonRow]:
        return [run.summary for run in self.runs if run.summary is not None]

    def row(self) -> Row:
        return Row(self.label, self.method, self.settings, self.finished)


@dataclass(frozen=True)
class Folder:
    """A run (one variant, one seed), or the variants × seeds of a comparison."""

    path: Path
    comparison: bool
    variants: Sequence[Variant]
    columns: Sequence[str] | None = None
    begins: int = 1  # how many runs there will be
    own_notes: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        return [run for variant in self.variants for run in variant.runs]

    def notes(self) -> list[str]:
        return [*self.own_notes, *(note for run in self.runs for note in run.notes)]


def number(row: Mapping[str, Any], key: str) -> float | None:
    """A finite number, or None: null, text and what is missing are all the same to a curve."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def is_run(folder: Path) -> bool:
    return (folder / "settings.toml").is_file()


def read_folder(folder: str | Path) -> Folder:
    """A run folder, a comparison's, or any folder with run folders in it."""
    path = Path(folder)
    if not path.is_dir():
        raise ProtofedError(f"{path}: no such run folder")
    if is_run(path):
        run = read_run(path)
        return Folder(path, False, [Variant(run.label, run.method, {}, [run])])
    if (path / COMPARISON).is_file():
        return _read_comparison(path)
    found = _read_loose(path, [])
    if not found.runs:
        raise ProtofedError(
            f"{path}: neither a run folder (settings.toml) nor a comparison ({COMPARISON}), nor runs in it"
        )
    return found


def read_run(path: Path, label: str | None = None, seed: int | None = None) -> Run:
    notes: list[str] = []
    settings = _settings(path / "settings.toml", notes)
    rounds = _rows(path / "rounds.jsonl", notes)
    metrics = _rows(path / "metrics.jsonl", notes)
    clients = _rows(path / "clients.jsonl", notes, _is_client_row)
    summary = _summary(path / "summary.json", notes)
    if summary is not None:
        missing = [n for n in ("rounds.jsonl", "metrics.jsonl", "clients.jsonl") if not (path / n).is_file()]
        notes += [f"{path / name}: missing, although the run has finished" for name in missing]
    method = settings.get("method")
    known = method.get("name") if isinstance(method, Mapping) else None
    own = settings.get("seed")
    seed = own if isinstance(own, int) else seed or 0
    return Run(path, label or str(known or path.name), seed, settings, rounds, metrics, clients, summary, notes)


def _read_comparison(path: Path) -> Folder:
    file = path / COMPARISON
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        named = record.get("variants") or [
            {"label": name, "method": name, "settings": {}, "folder": name} for name in record["methods"]
        ]
        seeds = [int(seed) for seed in record["seeds"]]
        variants = []
        for entry in named:
            places = [(path / f"{entry['folder']}-seed{seed}", seed) for seed in seeds]
            if any(place.parent != path for place, _ in places):
                raise ValueError(f"folder {entry['folder']!r} is not in this folder")
            runs = [read_run(place, entry["label"], seed) for place, seed in places if is_run(place)]
            variants.append(Variant(str(entry["label"]), str(entry["method"]), dict(entry["settings"]), runs))
        return Folder(path, True, variants, record.get("columns"), len(variants) * len(seeds))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        note = f"{file}: not readable ({type(error).__name__}: {error}); the runs are grouped by their folders' names"
        return _read_loose(path, [note])


def _read_loose(path: Path, notes: list[str]) -> Folder:
    """Runs grouped by their folders' names: `fedsap-seed1234` and `fedsap-seed1235` are seeds of one variant."""
    places = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".") and is_run(p))
    groups: dict[str, list[Run]] = {}
    for place in places:
        found = SEED.fullmatch(place.name)
        label = found[1] if found else place.name
        groups.setdefault(label, []).append(read_run(place, label, int(found[2]) if found else None))
    variants = [Variant(label, runs[0].method, {}, runs) for label, runs in groups.items()]
    return Folder(path, True, variants, None, len(places), notes)


def _settings(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"{file}: not readable ({error})")
        return {}


def _rows(file: Path, notes: list[str], fits: Callable[[JsonRow], bool] | None = None) -> list[JsonRow]:
    """The rows of a .jsonl file by round. A last line that is being written, or was cut off, is passed over silently."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        notes.append(f"{file}: not readable ({error})")
        return []
    rows, bad = {}, []
    for place, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            if place < len(lines) or line.endswith("\n"):
                bad.append(place)
            continue
        if not isinstance(row, dict) or type(row.get("round")) is not int or not (fits is None or fits(row)):
            bad.append(place)
            continue
        rows[row["round"]] = row
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        notes.append(f"{file}: line {bad[0]}{more} left out: expected an object with a round, as this file holds")
    return [rows[round] for round in sorted(rows)]


def _is_client_row(row: JsonRow) -> bool:
    ways = [key for key in WAYS if key in row]
    lists = [row.get(key) for key in (*ways, "samples")]
    if not ways or not all(isinstance(values, list) and values for values in lists):
        return False
    return len({len(values) for values in lists if values}) == 1


def _summary(file: Path, notes: list[str]) -> JsonRow | None:
    """None, with a note, where tables could not use it."""
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        for key in ("method", "seed", "rounds", "seconds", FIGURE, "last_round", *DIRECTIONS):
            if key not in summary:
                raise ValueError(f"{key} is missing")
        for key in (FIGURE, "last_round", *DIRECTIONS):
            values = summary[key]
            null = key not in DIRECTIONS  # a figure that does not exist is null
            if not isinstance(values, dict) or any(
                number(values, k) is None and not (v is None and null) for k, v in values.items()
            ):
                raise ValueError(f"{key}: expected an object of numbers")
        if number(summary, "seconds") is None or not (number(summary, "rounds") or 0) >= 1:
            raise ValueError("rounds or seconds is not a number")
        return summary
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        notes.append(f"{file}: not readable ({error}); the run is shown as one that has not finished")
        return None
