"""The tables of a reproduction, with our numbers beside the paper's, and what differs between a preset's two sizes."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...results.columns import Row
from ...results.notes import incomplete_of, losses_of
from ...results.protocol import protocol_notes
from ...results.tables import MISSING, mean_and_deviation, setting_text
from ..settings import Settings, combine
from .planning import column_grid
from .preset import SERVER, SIZES, Preset, measure_column, paper_number, slug

Values = dict[str, dict[str, list[list[float]]]]  # by measure and row, for each column the numbers of all seeds


@dataclass(frozen=True)
class Reproduction:
    """Our numbers of a preset, which its tables set beside the paper's."""

    preset: Preset
    columns: list[str]
    headings: list[str]
    values: Values
    notes: tuple[str, ...] = ()
    """The runs that failed, and the clients that were dropped."""
    failed: tuple[str, ...] = ()
    """The runs that failed, as `COLUMN/CELL`."""
    protocols: tuple[tuple[str, str], ...] = ()
    """The heading of each column, and how its clients were scored."""

    @classmethod
    def empty(cls, preset: Preset, measures: Sequence[str] | None = None) -> Reproduction:
        """A reproduction of which no column has been measured yet, of the preset's measures or of others."""
        chosen = preset.file.measures if measures is None else measures
        return cls(preset, [], [], {measure: {row: [] for row in preset.labels} for measure in chosen})

    def with_column(self, column: str, heading: str, lines: Sequence[Row]) -> Reproduction:
        """This reproduction with one more column.

        Args:
            column: The name of the column.
            heading: What the tables call it.
            lines: The rows of its comparison.

        Returns:
            A new reproduction.
        """
        runs = {line.label: line.usable for line in lines}
        values = {
            measure: {row: [*columns, _measured_values(runs.get(row, ()), measure)] for row, columns in rows.items()}
            for measure, rows in self.values.items()
        }
        few = incomplete_of([line for line in lines if line.usable], lines)
        fewer = [f"fewer seeds than the others: {', '.join(few)}"] if few else []
        notes = tuple(f"{heading}: {note}" for note in (*fewer, *losses_of(lines)))
        failed = tuple(f"{slug(column)}, {line.label}, seed {seed}" for line in lines for seed in line.reasons())
        return Reproduction(
            self.preset,
            [*self.columns, column],
            [*self.headings, heading],
            values,
            (*self.notes, *notes),
            (*self.failed, *failed),
            (*self.protocols, *((heading, note) for note in protocol_notes(lines))),
        )

    def below(self) -> list[str]:
        """The lines under the tables: how clients were scored, in which columns where these differ, and what was lost."""
        said: dict[str, list[str]] = {}
        for heading, note in self.protocols:
            said.setdefault(note, []).append(heading)
        one = len(said) == 1
        return [*(note if one else f"{', '.join(headings)}: {note}" for note, headings in said.items()), *self.notes]

    def tables(self) -> list[tuple[str, list[list[str]]]]:
        """The tables: for each measure its title and its lines, the first of which is the header."""
        return [(_title(self.preset, measure), self._lines(measure)) for measure in self.preset.file.measures]

    def _lines(self, measure: str) -> list[list[str]]:
        digits = 2 if self.preset.file.counted else measure_column(measure).digits
        lines = [["", *self.headings]]
        for row in self.preset.labels:
            ours = self.values.get(measure, {}).get(row, [[] for _ in self.columns])
            papers = [self.preset.paper(measure, row, column) for column in self.columns]
            lines.append([row, *(_cell(v, p, digits) for v, p in zip(ours, papers, strict=True))])
        return lines

    def overview(self) -> tuple[list[str], list[list[str]]]:
        """One table of our numbers alone, with all columns side by side.

        Where there is one measure, a cell has its mean and deviation over seeds; where there are several, it has their means
        in turn, with a digit less. Rows that were not measured are left out.

        Returns:
            The header, and the lines.
        """
        columns = {measure: measure_column(measure) for measure in self.values}
        header = [f"{' / '.join(column.title for column in columns.values())}", *self.headings]
        lines = []
        for row in self.preset.labels:
            cells = []
            for index in range(len(self.columns)):
                seeds = {measure: rows[row][index] for measure, rows in self.values.items()}
                texts = [_ours(values, columns[m].digits, alone=len(seeds) == 1) for m, values in seeds.items()]
                cells.append(" / ".join(texts) if any(seeds.values()) else MISSING)
            if set(cells) != {MISSING}:
                lines.append([row, *cells])
        return header, lines

    def markdown(self, level: int = 2) -> str:
        """Write the tables in Markdown, with headings of a level. A cell has our number, the paper's and the difference."""
        parts = []
        for title, (header, *lines) in self.tables():
            table = markdown_table(header, lines, align="---:")
            parts.append(f"{'#' * level} {title}\n\n{table}\n")
        parts += [f"{note[:1].upper()}{note[1:]}.\n" for note in self.below()]
        return "\n".join(parts)


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]], align: str = "---") -> str:
    """Write a table in Markdown.

    Args:
        header: The headings.
        lines: The texts of the cells.
        align: The alignment under every heading but the first.

    Returns:
        The table.
    """
    alignments = ["---", *(align for _ in header[1:])]
    rows = [header, alignments, *([cell.replace("|", "\\|") for cell in line] for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _title(preset: Preset, measure: str) -> str:
    if preset.file.counted:
        return f"{measure}: ours / paper / difference"
    column = measure_column(measure)
    return f"{column.title}{', in %' if column.scale == 100 else ''}: ours / paper / difference"


def _ours(values: Sequence[float], digits: int, *, alone: bool) -> str:
    if not values:
        return MISSING
    return mean_and_deviation(values, digits) if alone else f"{statistics.fmean(values):,.{max(digits - 1, 0)}f}"


def _cell(values: Sequence[float], paper: str, digits: int) -> str:
    ours = mean_and_deviation(values, digits) if values else MISSING
    number = paper_number(paper)
    if number is None:
        return ours
    if not values:
        return f"{ours} / {paper}"
    difference = round(statistics.fmean(values) - number, digits) + 0.0  # adding nought turns −0.0 into 0.0
    difference_text = f"{difference:+,.{digits}f}".replace("-", "−")
    return f"{ours} / {paper} / {difference_text}"


def _measured_values(runs: Sequence[Mapping[str, Any]], measure: str) -> list[float]:
    """The numbers of the runs, in the unit of the table."""
    if measure.startswith(SERVER):
        values = [run.get("measures", {}).get(measure.removeprefix(SERVER)) for run in runs]
    else:
        values = [measure_column(measure).value(run) for run in runs]
    return [value for value in values if value is not None]


def differences(preset: Preset) -> list[tuple[str, str, str, str]]:
    """The settings that differ between the two sizes of a preset, whatever the command line overrides.

    Returns:
        Lines of: the setting, its value at laptop size, its value at the paper's, and in which columns.
    """
    all_columns = list(preset.file.columns)
    columns_of: dict[tuple[str, str, str], list[str]] = {}
    laptop_seeds, paper_seeds = (str(preset.file.seeds[size]) for size in SIZES)
    if laptop_seeds != paper_seeds:
        columns_of["seeds", laptop_seeds, paper_seeds] = all_columns
    for column in all_columns:
        grids = [column_grid(preset, column, size, 1, {}) for size in SIZES]
        for laptop, paper in zip(*(grid.cells.values() for grid in grids), strict=True):
            for difference in _cell_differences(_flat(laptop), _flat(paper)):
                columns = columns_of.setdefault(difference, [])
                columns += [column] if column not in columns else []
    return [(*key, "all" if columns == all_columns else ", ".join(columns)) for key, columns in columns_of.items()]


def _cell_differences(laptop: Mapping[str, Any], paper: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    for key in [*laptop, *(key for key in paper if key not in laptop)]:
        if laptop.get(key) != paper.get(key):
            left, right = (setting_text(settings[key]) if key in settings else MISSING for settings in (laptop, paper))
            yield key, left, right


def _flat(settings: Settings) -> dict[str, Any]:
    flat = combine(settings.to_dict(), {})
    return {re.sub(r"^method\.", f"{settings.method.name}.", key): value for key, value in flat.items()}
