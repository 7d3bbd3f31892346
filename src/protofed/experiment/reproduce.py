"""The papers' tables and figures as presets: one command runs one, and sets ours beside the paper's.

A preset is `presets/PAPER/TABLE.toml`: rows (entries as `compare` takes them), columns (groups of settings), the paper's
numbers, and what differs between its two sizes, `laptop` and `paper`. What the tables of a paper share is in its
`common.toml`: settings, and groups of them that columns `use`. Each column is run as a comparison in a folder of its own.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch

from .. import methods, models, wire
from ..bank import PrototypeBank
from ..data import Dataset
from ..errors import ProtofedError, unknown
from ..evaluate import cost
from ..federation.checkpoint import write_atomically
from ..models.base import LOW
from ..registry import first_problem
from ..report import Row, parse_column, written
from ..report.tables import MISSING, Column, mean_and_deviation
from .compare import (
    ComparisonFolder,
    Grid,
    Progress,
    Variant,
    Watch,
    is_comparison,
    make_grid,
    parse_entries,
    read_rows,
    resume_comparison,
    run_grid,
)
from .folder import make_folder
from .settings import Settings, combine, read_toml

PRESETS = Path(__file__).parent / "presets"
COMMON = "common"
RECORD = "reproduction.json"
TABLE = "reproduction.md"
SERVER = "measures."  # before the name of a number the server keeps: `measures.threshold`

Size = Literal["laptop", "paper"]
SIZES: tuple[Size, Size] = ("laptop", "paper")
Values = dict[str, dict[str, list[list[float]]]]  # by measure and row: for each column what the seeds gave


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Group(_Strict):
    """Settings of both sizes, and of each."""

    settings: dict[str, Any] = {}
    laptop: dict[str, Any] = {}
    paper: dict[str, Any] = {}

    def of(self, size: Size) -> list[dict[str, Any]]:
        return [self.settings, self.laptop if size == "laptop" else self.paper]


class DataGroup(Group):
    """A group that columns `use`; `needs` says for each size which data it takes and where that comes from."""

    needs: dict[Size, str] = {}
    instead: str = ""
    """The data that stands in for the paper's at laptop size, where it is another."""


class TableColumn(Group):
    use: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    """Folders of `docs/results` in which this column was measured before there was a preset."""


class Common(Group):
    groups: dict[str, DataGroup] = {}


class TableFile(Group):
    """A preset as its file says it."""

    title: str
    notes: tuple[str, ...] = ()
    counted: str | None = None
    """Which of `COUNTED` gives the table: nothing is trained."""
    measures: tuple[str, ...]
    rows: tuple[str, ...]
    laptop_rows: tuple[str, ...] = ()
    """In place of `rows` at that size, under the same labels."""
    laptop_columns: tuple[str, ...] = ()
    """Which columns that size has, where all would take too long or their data is rare; `--only` takes any."""
    seeds: dict[Size, int] = {"laptop": 1, "paper": 3}
    columns: dict[str, TableColumn]
    numbers: dict[str, dict[str, tuple[int | float | str, ...]]]
    """The paper's, by measure and row, one for each column: `92.1`, `"92.1 ± 0.3"`, or `"–"` where it gives none."""


@dataclass(frozen=True)
class Preset:
    name: str
    file: TableFile
    common: Common

    @property
    def labels(self) -> list[str]:
        return [_label(row) for row in self.file.rows]

    def rows(self, size: Size) -> tuple[str, ...]:
        return self.file.laptop_rows if size == "laptop" and self.file.laptop_rows else self.file.rows

    def columns(self, size: Size) -> list[str]:
        """Those that run unless others are asked for."""
        return [c for c in self.file.columns if size == "paper" or c in (self.file.laptop_columns or self.file.columns)]

    def settings(self, column: str, size: Size) -> dict[str, Any]:
        """Of one column: the paper's common ones, then its groups', then the table's, then its own."""
        own = self.file.columns[column]
        layers = [self.common, *(self.common.groups[name] for name in own.use), self.file, own]
        return reduce(combine, [part for layer in layers for part in layer.of(size)], {})

    def needs(self, column: str, size: Size) -> list[str]:
        groups = [self.common.groups[name] for name in self.file.columns[column].use]
        return [group.needs[size] for group in groups if size in group.needs]

    def heading(self, column: str, size: Size, given: Mapping[str, Any] | None = None) -> str:
        """The column's name, and on which data ours is where that is not the paper's."""
        groups = [self.common.groups[name] for name in self.file.columns[column].use]
        others = [group.instead for group in groups if group.instead and size == "laptop"]
        others = [written(given["data"])] if given and "data" in given else others
        return f"{column} (ours: {', '.join(others)})" if others else column

    def all_needs(self, size: Size) -> list[str]:
        return list(dict.fromkeys(need for column in self.file.columns for need in self.needs(column, size)))

    def paper(self, measure: str, row: str, column: str) -> str:
        numbers = self.file.numbers.get(measure, {}).get(row)
        return MISSING if numbers is None else str(numbers[list(self.file.columns).index(column)])


def _label(row: str) -> str:
    before = row.partition("?")[0]
    return " ".join(before.rpartition("=")[0].split()) or before.strip()


def available() -> list[str]:
    """Every preset's name, `PAPER/TABLE`."""
    files = (file.relative_to(PRESETS).with_suffix("") for file in PRESETS.glob("*/*.toml"))
    return sorted((str(file.as_posix()) for file in files if file.name != COMMON), key=_natural)


def _natural(name: str) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def load_preset(name: str) -> Preset:
    known = available()
    if name not in known:
        raise unknown("preset", name, known)
    return read_preset(PRESETS / f"{name}.toml", name)


def read_preset(file: Path, name: str) -> Preset:
    """A preset's file and its paper's `common.toml`, checked against each other."""
    shared = file.with_name(f"{COMMON}.toml")
    common = _parsed(Common, shared) if shared.is_file() else Common()
    preset = Preset(name, _parsed(TableFile, file), common)
    problem = next(_problems(preset), None)
    if problem is not None:
        raise ProtofedError(f"{file}: {problem}")
    return preset


def _parsed(kind: type[Any], file: Path) -> Any:
    try:
        return kind(**read_toml(file))
    except pydantic.ValidationError as error:
        raise ProtofedError(f"{file}: {first_problem(error)}") from None


def _problems(preset: Preset) -> Iterator[str]:
    file = preset.file
    if len(set(preset.labels)) < len(file.rows) or not file.rows:
        yield f"rows={list(file.rows)}: expected one or more, each with a label of its own"
    if file.laptop_rows and [_label(row) for row in file.laptop_rows] != preset.labels:
        yield f"laptop_rows={list(file.laptop_rows)}: expected the labels of rows, {preset.labels}"
    for name in file.laptop_columns:
        if name not in file.columns:
            yield f"laptop_columns: {unknown('column', name, file.columns)}"
    slugs = [_slug(column) for column in file.columns]
    if len(set(slugs)) < len(slugs) or not slugs:
        yield f"columns={list(file.columns)}: expected one or more, whose folders differ"
    for name in (name for column in file.columns.values() for name in column.use):
        if name not in preset.common.groups:
            yield str(unknown("group", name, preset.common.groups))
    if file.counted is not None and file.counted not in COUNTED:
        yield str(unknown("count", file.counted, COUNTED))
    for measure in file.measures if file.counted is None else ():
        try:
            _column(measure)
        except ProtofedError as error:
            yield str(error)
    for measure, numbers in file.numbers.items():
        if measure not in file.measures:
            yield f"numbers.{measure}: expected one of the measures, {list(file.measures)}"
        for row, values in numbers.items():
            if row not in preset.labels:
                yield f"numbers.{measure}: {unknown('row', row, preset.labels)}"
            if len(values) != len(slugs):
                yield f"numbers.{measure}.{row}: {len(values)} numbers for {len(slugs)} columns"
            for value in values:
                try:
                    _number(str(value))
                except ValueError:
                    yield f"numbers.{measure}.{row}: {value!r}; expected a number, 'mean ± deviation' or '–'"


def _slug(column: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", column.lower()).strip("-.")


def _number(text: str) -> float | None:
    return None if text == MISSING else float(text.partition("±")[0])


def _column(measure: str) -> Column:
    if measure.startswith(SERVER):
        return Column(measure, measure.removeprefix(SERVER), digits=3)
    return parse_column(measure)


def _measured(runs: Sequence[Mapping[str, Any]], measure: str) -> list[float]:
    """What the runs gave, in the unit of the table."""
    if measure.startswith(SERVER):
        found = [run.get("measures", {}).get(measure.removeprefix(SERVER)) for run in runs]
    else:
        found = [_column(measure).value(run) for run in runs]
    return [value for value in found if value is not None]


# --- what is to be run ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Plan:
    """A preset at one size, every cell's settings resolved."""

    preset: Preset
    size: Size
    grids: dict[str, Grid]  # by column
    given: dict[str, Any]

    @property
    def columns(self) -> list[str]:
        return list(self.grids) if self.preset.file.counted is None else list(self.preset.file.columns)

    @property
    def cells(self) -> int:
        return sum(len(grid.cells) for grid in self.grids.values())


def plan(
    name: str,
    *,
    size: Size = "laptop",
    seeds: Sequence[int] | int | None = None,
    only: Sequence[str] = (),
    given: Mapping[str, Any] | None = None,
) -> Plan:
    """What `protofed reproduce NAME` would run. `only` takes the columns whose names have one of these in them."""
    preset = load_preset(name)
    own = dict(given or {})
    if preset.file.counted is not None:
        if own or only or seeds is not None:
            raise ProtofedError(f"{name}: this table is counted, not trained; it takes no settings, columns or seeds")
        return Plan(preset, size, {}, {})
    asked = {column for part in only for column in _named(part, preset.file.columns)}
    columns = [c for c in preset.file.columns if c in asked] if only else preset.columns(size)
    if not columns:
        raise ProtofedError(
            f"{name}: --only {', '.join(only)} is in no column's name: {', '.join(preset.file.columns)}"
        )
    number = preset.file.seeds[size] if seeds is None else seeds
    return Plan(preset, size, {c: _grid(preset, c, size, number, own) for c in columns}, own)


def _named(part: str, columns: Iterable[str]) -> list[str]:
    """The columns with this text in their names, as whole words if any have it so: CIFAR-10 is not CIFAR-100."""
    inside = [c for c in columns if part.lower() in c.lower()]
    return [c for c in inside if re.search(rf"(?<!\w){re.escape(part)}(?!\w)", c, re.IGNORECASE)] or inside


def _grid(preset: Preset, column: str, size: Size, seeds: Sequence[int] | int, given: Mapping[str, Any]) -> Grid:
    rows = preset.rows(size)
    used = (row.partition("?")[0].rpartition("=")[2].strip() for row in rows)
    absent = [name for name in dict.fromkeys(used) if name not in methods.registry]
    if absent:
        raise ProtofedError(f"{preset.name} compares {', '.join(absent)}, which is not among the methods here")
    settings = combine(preset.settings(column, size), given)
    try:
        return make_grid(rows, seeds=seeds, given=settings)
    except ProtofedError as error:
        raise ProtofedError(f"{preset.name}, {column}: {error}") from None


# --- running it -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Reproduction:
    """Ours of a preset, beside the paper's."""

    preset: Preset
    columns: list[str]
    headings: list[str]
    values: Values

    def tables(self) -> list[tuple[str, list[list[str]]]]:
        """For each measure its title and its lines, the first of which is the header."""
        return [(_title(self.preset, measure), self._lines(measure)) for measure in self.preset.file.measures]

    def _lines(self, measure: str) -> list[list[str]]:
        digits = 2 if self.preset.file.counted is not None else _column(measure).digits
        lines = [["", *self.headings]]
        for row in self.preset.labels:
            ours = self.values.get(measure, {}).get(row, [[] for _ in self.columns])
            papers = [self.preset.paper(measure, row, column) for column in self.columns]
            lines.append([row, *(_cell(v, p, digits) for v, p in zip(ours, papers, strict=True))])
        return lines

    def markdown(self, level: int = 2) -> str:
        """The tables. A cell has ours, the paper's and the difference."""
        parts = []
        for title, (header, *lines) in self.tables():
            table = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
            table += ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
            parts.append(f"{'#' * level} {title}\n\n" + "\n".join(table) + "\n")
        return "\n".join(parts)


def _title(preset: Preset, measure: str) -> str:
    name = measure if preset.file.counted is not None else _column(measure).title
    percent = preset.file.counted is None and _column(measure).scale == 100
    return f"{name}{', in %' if percent else ''}: ours / paper / difference"


def _cell(values: Sequence[float], paper: str, digits: int) -> str:
    ours = mean_and_deviation(values, digits) if values else MISSING
    number = _number(paper)
    if number is None:
        return ours
    if not values:
        return f"{ours} / {paper}"
    difference = round(statistics.fmean(values) - number, digits) + 0.0  # no minus before nought
    shown = f"{difference:+,.{digits}f}".replace("-", "−")
    return f"{ours} / {paper} / {shown}"


def run_plan(
    plan: Plan, *, out: str | Path | None = None, jobs: int | None = None, watch: Watch | None = None
) -> Reproduction:
    """Run what is left of a plan in `out`, column by column, and write `reproduction.md` there after each."""
    preset = plan.preset
    folder = None if out is None else Path(out)
    if preset.file.counted is not None:
        counted = COUNTED[preset.file.counted]()
        values = {m: {row: [[v] for v in line] for row, line in rows.items()} for m, rows in counted.items()}
        return _written(Reproduction(preset, plan.columns, plan.columns, values), "", folder)
    places = {column: None if folder is None else folder / _slug(column) for column in plan.columns}
    if folder is not None:
        _open(plan, folder)
    for column, place in places.items():
        if place is not None and is_comparison(place):
            _check_same(place, plan.grids[column])
    for column, place in places.items():
        _check_data(plan, column, place)
    about = "" if folder is None else _about(plan)
    reproduction = Reproduction(preset, [], [], {m: {row: [] for row in preset.labels} for m in preset.file.measures})
    for column, place in places.items():
        result = _run_column(plan.grids[column], place, jobs, _prefixed(watch, _slug(column)))
        for measure in preset.file.measures:
            for row in preset.labels:
                runs = [run.summary for run in result.results[row]]
                reproduction.values[measure][row].append(_measured(runs, measure))
        heading = preset.heading(column, plan.size, plan.given)
        reproduction = replace(
            reproduction, columns=[*reproduction.columns, column], headings=[*reproduction.headings, heading]
        )
        _written(reproduction, about, folder)
    return reproduction


def _run_column(grid: Grid, place: Path | None, jobs: int | None, watch: Watch | None) -> Any:
    if place is None or not is_comparison(place):
        return run_grid(grid, out=place, jobs=jobs, watch=watch)
    ComparisonFolder(place).write(grid.record())  # may have other seeds than before
    return resume_comparison(place, jobs=jobs, watch=watch)


def _prefixed(watch: Watch | None, column: str) -> Watch | None:
    if watch is None:
        return None

    def named(progress: Progress) -> None:
        watch(replace(progress, cell=f"{column}/{progress.cell}"))

    return named


def _open(plan: Plan, folder: Path) -> None:
    """Make the folder, or see that it is one of the same preset, size and settings."""
    record = {"preset": plan.preset.name, "size": plan.size, "given": plan.given, "columns": plan.columns}
    first = next(iter(plan.grids.values()))
    text = json.dumps({**record, "seeds": first.seeds}, indent=1)
    if not folder.exists():
        make_folder(folder, {RECORD: text})
        return
    before = read_record(folder)
    for key in ("preset", "size", "given"):
        if before[key] != json.loads(text)[key]:
            raise ProtofedError(f"{folder}: made with {key} {before[key]!r}, not {record[key]!r}; choose another --out")
    write_atomically(folder / RECORD, text.encode())


def is_reproduction(folder: Path) -> bool:
    return (folder / RECORD).is_file()


def read_record(folder: Path) -> dict[str, Any]:
    """Preset, size, settings given, columns and seeds with which a folder was last run."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return {key: record[key] for key in ("preset", "size", "given", "columns", "seeds")}
    except FileNotFoundError:
        raise ProtofedError(
            f"{folder}: exists, and is no folder of `protofed reproduce` (it has no {RECORD})"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProtofedError(f"{folder / RECORD}: not readable ({type(error).__name__}: {error})") from None


def resumed_plan(folder: Path) -> Plan:
    """The plan that a folder was last run with."""
    record = read_record(folder)
    whole = plan(record["preset"], size=record["size"], seeds=record["seeds"], given=record["given"])
    return replace(whole, grids={column: whole.grids[column] for column in record["columns"]})


def _check_same(place: Path, grid: Grid) -> None:
    """Cells that were begun keep their settings; there may be more seeds than before, or fewer."""
    before = ComparisonFolder(place).read().settings
    now = json.loads(grid.record().to_json())["settings"]
    for cell in before.keys() & now.keys():
        for key in before[cell].keys() | now[cell].keys():
            if before[cell].get(key) != now[cell].get(key):
                raise ProtofedError(
                    f"{place / cell}: begun with {key}={before[cell].get(key)!r}, now it is {now[cell].get(key)!r}; "
                    "choose another --out"
                )


def _check_data(plan: Plan, column: str, place: Path | None) -> None:
    """What is missing is said before the first run, with where it comes from; finished columns need nothing."""
    seen = set()
    for cell, settings in plan.grids[column].cells.items():
        what = json.dumps([settings.to_dict()["data"], getattr(settings.model, "pretrained", None)])
        if what in seen or (place is not None and (place / cell / "summary.json").is_file()):
            continue
        seen.add(what)
        try:
            _look_at(settings)
        except ProtofedError as error:
            needs = "".join(f"; needs {need}" for need in plan.preset.needs(column, plan.size))
            others = "" if len(plan.columns) == 1 else "; --only runs other columns"
            raise ProtofedError(f"{plan.preset.name}, column {column!r}: {error}{needs}{others}") from None


def _look_at(settings: Settings) -> None:
    pretrained = getattr(settings.model, "pretrained", None)
    if pretrained is not None and not Path(pretrained).expanduser().is_file():
        raise ProtofedError(f"{pretrained}: no such file of pretrained weights")
    if not isinstance(settings.data, Dataset):
        settings.data.load()


def _written(reproduction: Reproduction, about: str, folder: Path | None) -> Reproduction:
    """`reproduction.md`: the tables, notes, and how the two sizes differ."""
    if folder is None:
        return reproduction
    file = reproduction.preset.file
    notes = "\n## Notes\n\n" + "\n".join(f"- {note}" for note in file.notes) + "\n" if file.notes else ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = f"# {file.title}\n\n{reproduction.markdown()}{notes}{about}"
        write_atomically(folder / TABLE, text.encode())
    except OSError as error:
        raise ProtofedError(f"{folder / TABLE}: cannot be written ({error.strerror})") from None
    return reproduction


def _about(plan: Plan) -> str:
    seeds = next(iter(plan.grids.values())).seeds
    given = "".join(f" {key}={written(value)}" for key, value in plan.given.items())
    lines = ["| setting | laptop | paper | columns |", "| --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(line) + " |" for line in differences(plan.preset)]
    return (
        f"\n## Settings\n\nSize {plan.size}, seeds {', '.join(map(str, seeds))}; given with the command:{given or ' none'}. "
        "The run folders beside this file hold every setting. What differs between the two sizes:\n\n"
        + "\n".join(lines)
        + "\n"
    )


def differences(preset: Preset) -> list[tuple[str, str, str, str]]:
    """Setting, its value at laptop size, at the paper's, and in which columns: what differs, whatever is overridden."""
    everywhere = list(preset.file.columns)
    found: dict[tuple[str, str, str], list[str]] = {}
    laptop_seeds, paper_seeds = (str(preset.file.seeds[size]) for size in SIZES)
    if laptop_seeds != paper_seeds:
        found["seeds", laptop_seeds, paper_seeds] = everywhere
    for column in everywhere:
        grids = [_grid(preset, column, size, 1, {}) for size in SIZES]
        for laptop, paper in zip(*(grid.cells.values() for grid in grids), strict=True):
            low, high = _flat(laptop), _flat(paper)
            for key in [*low, *(key for key in high if key not in low)]:
                if low.get(key) != high.get(key):
                    left, right = (written(side[key]) if key in side else MISSING for side in (low, high))
                    columns = found.setdefault((key, left, right), [])
                    columns += [column] if column not in columns else []
    return [(*what, "all" if columns == everywhere else ", ".join(columns)) for what, columns in found.items()]


def _flat(settings: Settings) -> dict[str, Any]:
    flat = combine(settings.to_dict(), {})
    return {re.sub(r"^method\.", f"{settings.method.name}.", key): value for key, value in flat.items()}


# --- the ledger -------------------------------------------------------------------------------------------------------
def ledger(results: Path) -> dict[str, str]:
    """By paper, in Markdown: each preset's numbers beside what is measured in a folder of results, or how to measure it.

    A preset's own folder (`PAPER-TABLE-SIZE`, the default's name) comes before the column's `measured`.
    """
    pages: dict[str, str] = {}
    for name in available():
        preset = load_preset(name)
        text = f"### {preset.file.title}\n\n{_measured_part(preset, results)}"
        paper = name.partition("/")[0]
        pages[paper] = f"{pages[paper]}\n{text}" if paper in pages else text
    return pages


def write_ledger(results: Path) -> list[Path]:
    """`ledger/PAPER.md` in the folder of results, one for each paper."""
    if not results.is_dir():
        raise ProtofedError(f"--ledger {results}: no such folder of results")
    files = []
    for paper, text in ledger(results).items():
        files.append(results / "ledger" / f"{paper}.md")
        files[-1].parent.mkdir(exist_ok=True)
        write_atomically(files[-1], text.encode())
    return files


def _measured_part(preset: Preset, results: Path) -> str:
    command = f"`protofed reproduce {preset.name}`"
    if preset.file.counted is not None:
        return f"Counted, not trained: {command}.\n\n" + run_plan(plan(preset.name)).markdown(4)
    columns, headings, sources = [], [], []
    values: Values = {m: {row: [] for row in preset.labels} for m in preset.file.measures}
    for column in preset.file.columns:
        size, places = measured_in(preset, column, results)
        if not places:
            continue
        found = {place: read_rows(place)[0] for place in places}
        rows = [row for part in found.values() for row in part]
        columns.append(column)
        headings.append(preset.heading(column, size))
        sources += [f"- {column}: {_provenance(place, part, results)}" for place, part in found.items()]
        for label, entries in _entries(preset).items():
            runs = _matching(label, entries, rows)
            for measure in preset.file.measures:
                values[measure][label].append(_measured(runs, measure))
    if not columns:
        return f"Not measured yet: {command}.\n"
    rest = [column for column in preset.file.columns if column not in columns]
    later = (
        f"\nNot measured yet (`protofed reproduce {preset.name} --only COLUMN`): {', '.join(rest)}.\n" if rest else ""
    )
    tables = Reproduction(preset, columns, headings, values).markdown(4)
    return f"{tables}\nOurs is read from `docs/results`:\n\n" + "\n".join(sources) + f"\n{later}"


def measured_in(preset: Preset, column: str, results: Path) -> tuple[Size, list[Path]]:
    """At which size a column was measured, and where its finished runs are."""
    before = [results / name for name in preset.file.columns[column].measured]
    own: list[tuple[Size, list[Path]]] = [
        (size, [results / folder_name(preset.name, size) / _slug(column)]) for size in ("paper", "laptop")
    ]
    for size, places in [*own, ("laptop", before)]:
        there = [p for p in places if is_comparison(p) and any(p.glob("*/summary.json"))]
        if there:
            return size, there
    return "laptop", []


def folder_name(name: str, size: Size) -> str:
    return f"{name.replace('/', '-')}-{size}"


def _entries(preset: Preset) -> dict[str, list[Variant]]:
    """By label, the row as an entry of a comparison, at the paper's size and at the laptop's."""
    found: dict[str, list[Variant]] = {label: [] for label in preset.labels}
    for row in dict.fromkeys([*preset.rows("paper"), *preset.rows("laptop")]):
        if row.partition("?")[0].rpartition("=")[2].strip() in methods.registry:
            found[_label(row)] += parse_entries([row], local=False)
    return found


def _matching(label: str, entries: Sequence[Variant], rows: Sequence[Row]) -> Sequence[Mapping[str, Any]]:
    """The runs of the row that is called the same, or is the same method with the same settings of its own."""
    same = [row for row in rows if row.label == label]
    same += [row for e in entries for row in rows if row.method == e.method and dict(row.settings) == e.settings]
    return same[0].runs if same else ()


def _provenance(place: Path, rows: Sequence[Row], results: Path) -> str:
    runs = [run for row in rows for run in row.runs]
    rounds = "/".join(map(str, sorted({run["rounds"] for run in runs})))
    seeds = ", ".join(map(str, sorted({run["seed"] for run in runs})))
    first = read_toml(min(place.glob("*/summary.json")).with_name("settings.toml"))
    data = str(first["data"].get("path", first["data"]["name"]))
    return f"`{place.relative_to(results).as_posix()}`: {data}, {rounds} rounds, seeds {seeds}"


# --- tables that need no training -------------------------------------------------------------------------------------
Counts = dict[str, dict[str, list[float]]]  # by measure and row, one for each column


def _parameters(model: str, shape: tuple[int, ...], classes: int, **options: Any) -> int:
    with torch.device("meta"):
        return models.parameter_count(models.build(model, shape, classes, **options))


def _prototype_bytes(classes: int, dim: int) -> int:
    """Of a bank that knows all its classes, as our counters see it; class numbers, counts and framing are apart."""
    bank = PrototypeBank(torch.zeros(classes, dim), torch.ones(classes))
    return wire.sizes(wire.encode(wire.Bundle(bank=bank)))["prototypes"]


def _fedsap_table2() -> Counts:
    """Thousands of numbers up in a round: N clients' prototypes of μ_n classes; of FedAvg one copy of the model."""
    networks = [
        _parameters("cnn", (1, 128, 128), 62),
        _parameters("resnet18", (3, 32, 32), 10, stem="imagenet"),
        _parameters("resnet18", (3, 32, 32), 100, stem="imagenet"),
    ]
    sizes = [(3, 50), (3, 512), (10, 512)]
    prototypes = [20 * _prototype_bytes(way, dim) / cost.BYTES / 1000 for way, dim in sizes]
    both = [20 * _prototype_bytes(way, dim + LOW) / cost.BYTES / 1000 for way, dim in sizes]
    one = [number / 1000 for number in networks]
    return {"thousands of numbers": {"FedAvg": one, "FedMPS": both, "FedProto": prototypes, "FedSAP": prototypes}}


def _fedpagr_cost() -> Counts:
    """kB of one client that holds all ten classes, d = 512."""
    kilobytes = _prototype_bytes(10, 512) / 1000
    names = ("FedProto", "FedTGP", "FedProc", "FedPAGR")
    return {"kB of a client and round": {name: [kilobytes, kilobytes] for name in names}}


def _fedapa_table5() -> Counts:
    """kB of one client and round, both directions; d = 256, 21 classes, 6 clients."""
    model = 2 * cost.BYTES * _parameters("largeconvnet4", (1, 1000, 242), 20) / 1000
    names = ("FedAvg", "CARING", "WiFederated")
    return {
        "kB of a client and round": {n: [model] for n in names} | {"FedAPA": [7 * _prototype_bytes(21, 256) / 1000]}
    }


def _fedarpl_cost() -> Counts:
    """Both directions of one client: phase 2 sends prototypes down, phase 3 also up. WRN-28-2, 100 classes."""
    model = 2 * cost.BYTES * _parameters("wideresnet", (3, 32, 32), 100, norm="static")
    bank = _prototype_bytes(100, 128)
    sums = {"phase 1": model, "phase 2": model + bank, "phase 3": model + 2 * bank}
    table = {phase: [total / 1e6, 100 * (total / model - 1)] for phase, total in sums.items()}
    return {"a client and round": table}


def _protofssl_table2() -> Counts:
    """As the paper counts: one pass over 50 labelled and 490 unlabelled pictures, two helpers, refreshed every 10."""
    network = models.build("resnet9", (3, 32, 32), 10)
    forward = cost.forward_flops(network, (3, 32, 32))
    kinds: dict[str, cost.Kind] = {
        "FixMatch-FedAvg, FedRGD": "fixmatch",
        "FedMatch": "fedmatch",
        "ProtoFSSL": "protofssl",
    }
    table = {}
    for label, kind in kinds.items():
        flops = cost.client_flops(kind, forward, 50, 490, 1, helpers=2, classes=10, dim=512)
        size = cost.client_bytes(kind, models.parameter_count(network), helpers=2, refresh=10, classes=10, dim=512)
        table[label] = [flops / 1e9, size / 1e6]
    return {"a client and round": table}


COUNTED: dict[str, Callable[[], Counts]] = {
    "fedsap-table2": _fedsap_table2,
    "fedpagr-cost": _fedpagr_cost,
    "fedapa-table5": _fedapa_table5,
    "fedarpl-cost": _fedarpl_cost,
    "protofssl-table2": _protofssl_table2,
}
