"""A preset: the file of one table or figure of a paper, read and checked.

A preset is `presets/PAPER/TABLE.toml`: rows (entries as `compare` takes them), columns (groups of settings), the paper's
numbers, and what differs between its two sizes, `laptop` and `paper`. What the tables of a paper share is in its
`common.toml`: settings, groups of them that columns `use`, and rows that stand `beside` those of every table. A table that
is counted and not trained has `counted = true`, and its arithmetic stands in a module of the same name beside it,
`presets/PAPER/TABLE.py`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic

from ...errors import ProtofedError, first_problem, unknown
from ...evaluate.confusion import SINGLE
from ...results.columns import BEST_ROUND, COSTS, GAIN, LAST_ROUND, LOCAL, OWN, Column, parse_column
from ...results.tables import MISSING, setting_text
from .. import presets
from ..settings import combine, read_toml

PRESETS = Path(__file__).parent.parent / "presets"
COMMON = "common"
SERVER = "measures."  # prefix of the name of a number that the server keeps: `measures.threshold`

Size = Literal["laptop", "paper"]
SIZES: tuple[Size, Size] = ("laptop", "paper")
Numbers = dict[str, tuple[int | float | str, ...]]
FileModel = TypeVar("FileModel", bound=pydantic.BaseModel)


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Group(_Strict):
    """Settings that both sizes share, and those of each size."""

    settings: dict[str, Any] = {}
    laptop: dict[str, Any] = {}
    paper: dict[str, Any] = {}

    def layers(self, size: Size) -> list[dict[str, Any]]:
        """The settings of one size; later layers override earlier ones."""
        return [self.settings, self.laptop if size == "laptop" else self.paper]


class DataGroup(Group):
    """A group that columns `use`; `needs` says for each size which data it takes and where that comes from."""

    needs: dict[Size, str] = {}
    instead: str = ""
    """The data that replaces the paper's at laptop size, where it does."""


class TableColumn(Group):
    """One column of the table, which is run as a comparison of all rows."""

    use: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    """Folders of `docs/results` in which this column was measured before there was a preset."""


class Common(Group):
    """What the tables of one paper share."""

    groups: dict[str, DataGroup] = {}
    notes: tuple[str, ...] = ()
    """What is said under every table that is not counted."""
    beside: tuple[str, ...] = ()
    """Rows that stand in every table that is not counted, after its own: what a method is compared with, whatever its paper
    has. A table that has a row of that label keeps its own."""
    laptop_beside: tuple[str, ...] = ()
    """The rows that replace `beside` at laptop size, under the same labels."""


class TableFile(Group):
    """The content of a preset's file."""

    title: str
    notes: tuple[str, ...] = ()
    counted: bool = False
    """Whether the module beside the file counts the table; then nothing is trained."""
    measures: tuple[str, ...]
    rows: tuple[str, ...]
    laptop_rows: tuple[str, ...] = ()
    """The rows that replace `rows` at laptop size, under the same labels."""
    laptop_columns: tuple[str, ...] = ()
    """The columns at laptop size, where all would take too long or their data is rare; `--only` takes any."""
    seeds: dict[Size, int] = {"laptop": 1, "paper": 3}
    columns: dict[str, TableColumn]
    numbers: dict[str, Numbers]
    """The paper's numbers by measure and row, one for each column: `92.1`, `"92.1 ± 0.3"`, or `"–"` where it has none. Where
    two measures of ours stand for one of the paper's, the second names the first: `best_accuracy = "accuracy"`."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _named(cls, content: Any) -> Any:
        """The content with the numbers in place of the name of a measure that has them."""
        numbers = content.get("numbers")
        if not isinstance(numbers, Mapping):
            return content
        named = {key: numbers.get(value, value) if isinstance(value, str) else value for key, value in numbers.items()}
        return {**content, "numbers": named}

    def with_beside(self, common: Common) -> TableFile:
        """This table with the rows and the notes that all tables of the paper have."""
        if self.counted:
            return self
        own = {row_label(row) for row in self.rows}
        beside, laptop = (
            tuple(row for row in rows if row_label(row) not in own) for rows in (common.beside, common.laptop_beside)
        )
        rows = self.laptop_rows or self.rows
        laptop_rows = (*rows, *(laptop or beside)) if self.laptop_rows or laptop else ()
        update = {"rows": (*self.rows, *beside), "laptop_rows": laptop_rows, "notes": (*self.notes, *common.notes)}
        return self.model_copy(update=update)


@dataclass(frozen=True)
class Preset:
    """A table's file and what it shares with the paper's other tables."""

    name: str
    file: TableFile
    common: Common

    @property
    def labels(self) -> list[str]:
        """The labels of the rows."""
        return [row_label(row) for row in self.file.rows]

    def rows(self, size: Size) -> tuple[str, ...]:
        """The rows at one size, as entries of a comparison."""
        return self.file.laptop_rows if size == "laptop" and self.file.laptop_rows else self.file.rows

    def columns(self, size: Size) -> list[str]:
        """The columns that are run at one size unless `--only` names others."""
        return [c for c in self.file.columns if size == "paper" or c in (self.file.laptop_columns or self.file.columns)]

    def settings(self, column: str, size: Size) -> dict[str, Any]:
        """The settings of one column: the paper's common ones, then its groups', then the table's, then the column's."""
        groups = [self.common, *self._groups(column), self.file, self.file.columns[column]]
        return reduce(combine, [layer for group in groups for layer in group.layers(size)], {})

    def needs(self, column: str, size: Size) -> list[str]:
        """The data that a column needs, and where it comes from."""
        return [group.needs[size] for group in self._groups(column) if size in group.needs]

    def all_needs(self, size: Size) -> list[str]:
        """The data that all columns need at one size, and where it comes from."""
        return list(dict.fromkeys(need for column in self.file.columns for need in self.needs(column, size)))

    def heading(self, column: str, size: Size, overrides: Mapping[str, Any] | None = None) -> str:
        """The name of a column, and our data where it is not the paper's."""
        stand_ins = [group.instead for group in self._groups(column) if group.instead and size == "laptop"]
        if overrides and "data" in overrides:
            stand_ins = [setting_text(overrides["data"])]
        return f"{column} (ours: {', '.join(stand_ins)})" if stand_ins else column

    def table_columns(self, size: Size) -> list[str] | None:
        """The columns of the table that is written beside the runs of a column; None where the default ones have all.

        Measures that a table has not by default, such as the accuracy on the whole test set, come first.
        """
        measures = [m for m in self.file.measures if not m.startswith(SERVER) and parse_column(m).key != OWN]
        default = [f"accuracy_{kind}" for kind in SINGLE]
        if all(name in default or name.startswith((LAST_ROUND, BEST_ROUND)) for name in measures):
            return None
        local = any(row_method(row) == LOCAL for row in self.rows(size))
        gains = [f"{GAIN}{kind}" for kind in SINGLE] if local else []
        return list(dict.fromkeys([*measures, *default, *gains, *COSTS]))

    def paper(self, measure: str, row: str, column: str) -> str:
        """The paper's number as the preset's file has it."""
        numbers = self.file.numbers.get(measure, {}).get(row)
        return MISSING if numbers is None else str(numbers[list(self.file.columns).index(column)])

    def count(self) -> presets.Counts:
        """The numbers of a counted table, from the module beside its file."""
        module = importlib.import_module(f"{presets.__name__}.{self.name.replace('/', '.')}")
        counts: presets.Counts = module.counts()
        return counts

    def _groups(self, column: str) -> list[DataGroup]:
        return [self.common.groups[name] for name in self.file.columns[column].use]


def available() -> list[str]:
    """Every preset's name, `PAPER/TABLE`."""
    files = (file.relative_to(PRESETS).with_suffix("") for file in PRESETS.glob("*/*.toml"))
    return sorted((str(file.as_posix()) for file in files if file.name != COMMON), key=_natural)


def _natural(name: str) -> list[str | int]:
    """A key that sorts table10 after table9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def load_preset(name: str) -> Preset:
    """Read one of the presets that come with protofed: `load_preset("fedsap/table1").file.title`."""
    names = available()
    if name not in names:
        raise unknown("preset", name, names)
    return read_preset(PRESETS / f"{name}.toml", name)


def read_preset(file: Path, name: str) -> Preset:
    """Read a preset's file and its paper's `common.toml`, and check them.

    Args:
        file: The file of the preset.
        name: The name of the preset, `PAPER/TABLE`.

    Returns:
        The preset. A file that contradicts itself is an error.
    """
    shared = file.with_name(f"{COMMON}.toml")
    common = _parse_file(Common, shared) if shared.is_file() else Common()
    preset = Preset(name, _parse_file(TableFile, file).with_beside(common), common)
    problem = next(_problems(preset, file), None)
    if problem is not None:
        raise ProtofedError(f"{file}: {problem}")
    return preset


def _parse_file(model: type[FileModel], file: Path) -> FileModel:
    try:
        return model(**read_toml(file))
    except pydantic.ValidationError as error:
        raise ProtofedError(f"{file}: {first_problem(error)}") from None


# --- problems of a file -----------------------------------------------------------------------------------------------
def _problems(preset: Preset, file: Path) -> Iterator[str]:
    yield from _row_problems(preset)
    yield from _column_problems(preset)
    yield from _measure_problems(preset, file)
    yield from _number_problems(preset)


def _row_problems(preset: Preset) -> Iterator[str]:
    file = preset.file
    if len(set(preset.labels)) < len(file.rows) or not file.rows:
        yield f"rows={list(file.rows)}: expected one or more, each with a label of its own"
    if file.laptop_rows and [row_label(row) for row in file.laptop_rows] != preset.labels:
        yield f"laptop_rows={list(file.laptop_rows)}: expected the labels of rows, {preset.labels}"


def _column_problems(preset: Preset) -> Iterator[str]:
    file = preset.file
    for name in file.laptop_columns:
        if name not in file.columns:
            yield f"laptop_columns: {unknown('column', name, file.columns)}"
    if len({slug(column) for column in file.columns}) < len(file.columns) or not file.columns:
        yield f"columns={list(file.columns)}: expected one or more, whose folders differ"
    for name in (name for column in file.columns.values() for name in column.use):
        if name not in preset.common.groups:
            yield str(unknown("group", name, preset.common.groups))


def _measure_problems(preset: Preset, file: Path) -> Iterator[str]:
    if preset.file.counted:
        if not file.with_suffix(".py").is_file():
            yield f"counted = true: expected the arithmetic in {file.with_suffix('.py').name} beside this file"
        return
    for measure in preset.file.measures:
        try:
            measure_column(measure)
        except ProtofedError as error:
            yield str(error)


def _number_problems(preset: Preset) -> Iterator[str]:
    columns = len(preset.file.columns)
    for measure, numbers in preset.file.numbers.items():
        if measure not in preset.file.measures:
            yield f"numbers.{measure}: expected one of the measures, {list(preset.file.measures)}"
        for row, values in numbers.items():
            if row not in preset.labels:
                yield f"numbers.{measure}: {unknown('row', row, preset.labels)}"
            if len(values) != columns:
                yield f"numbers.{measure}.{row}: {len(values)} numbers for {columns} columns"
            for value in values:
                try:
                    paper_number(str(value))
                except ValueError:
                    yield f"numbers.{measure}.{row}: {value!r}; expected a number, 'mean ± deviation' or '–'"


# --- what the texts of a file mean ------------------------------------------------------------------------------------
def row_label(row: str) -> str:
    """The label of a row, or its method where it has none.

    >>> row_label("Fed-ARPL=fedarpl?client_weight=1"), row_label("fedavg")
    ('Fed-ARPL', 'fedavg')
    """
    name = row.partition("?")[0]
    return " ".join(name.rpartition("=")[0].split()) or name.strip()


def row_method(row: str) -> str:
    """The method of a row.

    >>> row_method("Fed-ARPL=fedarpl?client_weight=1")
    'fedarpl'
    """
    return row.partition("?")[0].rpartition("=")[2].strip()


def slug(column: str) -> str:
    """The name of a column's folder.

    >>> slug("CIFAR-10 250, Dir 0.5")
    'cifar-10-250-dir-0.5'
    """
    return re.sub(r"[^a-z0-9.]+", "-", column.lower()).strip("-.")


def paper_number(text: str) -> float | None:
    """The mean of a paper's number, or None where the paper has no number.

    >>> paper_number("92.1 ± 0.3"), paper_number("–")
    (92.1, None)
    """
    return None if text == MISSING else float(text.partition("±")[0])


def measure_column(measure: str) -> Column:
    """The column of a table of results that a measure is read from."""
    if measure.startswith(SERVER):
        return Column(measure, measure.removeprefix(SERVER), digits=3)
    return parse_column(measure)
