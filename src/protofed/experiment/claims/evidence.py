"""The rows that tests compare, read from a folder of results, and their differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from ...results.columns import Column, Row
from ...results.comparison import ComparisonFolder
from ...results.gains import Gain, gain_over
from ...results.read import read_folder, read_rows
from ...results.rows import FIGURE
from ...results.tables import setting_text
from ..compare import is_comparison
from ..general import EngineSettings, RecordSettings
from ..reproduce.changes import changed_settings
from ..reproduce.ledger import folder_name, matching_row, measured_in, row_entries
from ..reproduce.planning import column_grid
from ..reproduce.preset import SERVER, SIZES, Preset, Size, load_preset, measure_column
from .claim import Claim, Comparison
from .verdict import Finding

UNJUDGED = {field.name for kind in (EngineSettings, RecordSettings) for field in fields(kind)} - {"candidates"}
COMPARED = "compared"  # the name of the number of two rows that are compared by different measures


class Evidence:
    """A folder of results as tests of claims read it.

    Example: `Evidence(Path("docs/results")).findings(load_claims("fedsap")[0])`
    """

    def __init__(self, results: Path) -> None:
        self.results = results
        self._rows = cache(self._read)
        self._preset = cache(load_preset)
        self._entries = cache(lambda name: row_entries(self._preset(name)))
        self._measured = cache(lambda name, column: measured_in(self._preset(name), column, results)[1])
        self._made = cache(self._made_by)
        self._counts = cache(lambda name: self._preset(name).count())

    def findings(self, claim: Claim) -> list[Finding]:
        """The differences of all comparisons of a claim, in the order in which its file has them."""
        return [finding for test in claim.tests for finding in self._compared(test)]

    def folders(self, claim: Claim) -> dict[Path, str]:
        """The folders that the comparisons of a claim are read from, and how each was made, where a preset's command did."""
        found: dict[Path, str] = {}
        for test in claim.tests:
            for column in (*self._columns(test), *([test.less_in] if test.less_in else [])):
                for folder in self._folders(test, column):
                    found[folder] = found.get(folder) or self._made(test.preset, column, folder)
        return found

    def _made_by(self, name: str, column: str, folder: Path) -> str:
        """The command that made a folder, and the settings that its preset has otherwise today."""
        size = next((size for size in SIZES if name and folder.parent.name == folder_name(name, size)), None)
        if size is None:
            return ""
        preset = self._preset(name)
        changed = changed_column(preset, column, size, folder)
        since = f", which has since changed {', '.join(changed)}" if changed else ""
        return f"`{_command(preset, column, size)}`{since}"

    # --- a test's comparisons -----------------------------------------------------------------------------------------
    def _compared(self, test: Comparison) -> Iterator[Finding]:
        if test.preset and (preset := self._preset(test.preset)).file.counted:
            yield from _counted(test, preset, self._counts(test.preset)[test.measure])
            return
        columns = self._columns(test)
        for column in columns:
            for worse in (*test.worse, *test.stronger):
                gain = self._gain(test, column, worse)
                if test.less_in and gain is not None:
                    gain = _difference(gain, self._gain(test, test.less_in, worse))
                yield Finding(
                    test.better,
                    worse,
                    worse in test.stronger,
                    gain,
                    test.least,
                    test.within,
                    source=", ".join(f.relative_to(self.results).as_posix() for f in self._folders(test, column)),
                    heading=_heading(test, column if len(columns) > 1 or test.less_in else ""),
                    command=_command(self._preset(test.preset), column, "laptop") if test.preset else "",
                )

    def _gain(self, test: Comparison, column: str, worse: str) -> Gain | None:
        measure, theirs = measure_column(test.measure), measure_column(test.worse_measure or test.measure)
        better, other = self._row(test, column, test.better), self._row(test, column, worse)
        if better is None or other is None:
            return None
        if theirs != measure:
            better, other = (_named(better, measure), _named(other, theirs))
            measure = replace(measure, key=COMPARED)
        return gain_over(better, other, measure)

    def _columns(self, test: Comparison) -> list[str]:
        """The columns of a test; those of a preset that were measured, where it names none."""
        if not test.preset:
            return [""]
        every = self._preset(test.preset).file.columns
        if test.columns:
            return list(test.columns)
        return [column for column in every if self._folders(test, column)] or list(every)[:1]

    def _folders(self, test: Comparison, column: str) -> list[Path]:
        if test.preset:
            return [] if self._preset(test.preset).file.counted else self._measured(test.preset, column)
        folders = [self.results / name for name in test.folders]
        return [folder for folder in folders if is_comparison(folder)]

    def _row(self, test: Comparison, column: str, name: str) -> Row | None:
        """A row by its label; None where it was not run."""
        label, _, other = name.partition(" @ ")
        folders = self._folders(test, other or column)
        rows = [row for folder in folders for row in self._rows(folder, test.round)]
        if not rows:
            return None
        entries = self._entries(test.preset)[label] if test.preset else ()
        row = matching_row(label, entries, rows)
        return None if row is None else replace(row, label=name, runs=[_with_measures(run) for run in row.runs])

    def _read(self, folder: Path, round: int | None) -> Sequence[Row]:
        return read_rows(folder)[0] if round is None else list(_rows_at(folder, round))

    # --- where it was measured ----------------------------------------------------------------------------------------
    def setting(self, folder: Path) -> str:
        """In which setting a folder's runs were made: data, clients, network, rounds and seeds, and means of what."""
        first: Mapping[str, Any] = next(iter(ComparisonFolder(folder).read().settings.values()))
        runs = [run for row in self._rows(folder, None) for run in row.usable]
        data, model = first["data"], first.get("model") or {}
        size = f" at {data['resize']} × {data['resize']}" if data.get("resize") else ""
        network = ", ".join(map(str, first.get("models") or ())) or setting_text(
            {key: value for key, value in model.items() if key in ("name", "width", "depth", "hidden")}
        )
        clients, rounds = ("/".join(map(str, sorted({run[key] for run in runs}))) for key in ("clients", "rounds"))
        seeds = ", ".join(map(str, sorted({run["seed"] for run in runs})))
        early = "" if all(run.get("format", 1) >= 2 for run in runs) else "; means of the last five evaluations"
        return (
            f"`{folder.relative_to(self.results).as_posix()}`: {data.get('path') or data['name']}{size}, {clients} clients, "
            f"{network}, {rounds} rounds, seeds {seeds}{early}"
        )


def changed_column(preset: Preset, column: str, size: Size, folder: Path) -> list[str]:
    """The settings in which a preset's column differs today from the runs in a folder, but for those of speed and record.

    Args:
        preset: The preset.
        column: Its column.
        size: Its size.
        folder: A comparison's folder that the column was measured in.

    Returns:
        The whole keys of what both have and differs, and of what was not there then and is not at its default now.
    """
    stored = ComparisonFolder(folder).read().settings
    seed = min(settings["seed"] for settings in stored.values())
    changed: dict[str, None] = {}
    for cell, settings in column_grid(preset, column, size, [seed], {}).cells.items():
        if cell not in stored:
            continue
        keys = changed_settings(settings, stored[cell])
        changed |= dict.fromkeys(key for key in keys if key.partition(".")[0] not in UNJUDGED)
    return [key.replace("method.", "") for key in changed]


def _command(preset: Preset, column: str, size: Size) -> str:
    """What measures a column of a preset; one that is not run unless it is asked for is named."""
    named = "" if column in preset.columns(size) else f' --only "{column}"'
    return f"protofed reproduce {preset.name}{' --size paper' if size == 'paper' else ''}{named}"


def _heading(test: Comparison, column: str) -> str:
    """What is compared: the measure and its round, and the column where there are several."""
    titles = [measure_column(name).title for name in (test.measure, test.worse_measure) if name]
    title = " against ".join(titles) + (f", round {test.round}" if test.round else "")
    return f"{column}{f' more than {test.less_in}' if test.less_in else ''}, {title}" if column else title


def _difference(one: Gain, other: Gain | None) -> Gain | None:
    """What one gain is above another, seed by seed."""
    if other is None:
        return None
    by_seed = {seed: value - other.by_seed[seed] for seed, value in one.by_seed.items() if seed in other.by_seed}
    return replace(one, by_seed=by_seed, by_site={}) if by_seed else None


def _counted(test: Comparison, preset: Preset, counts: Mapping[str, Sequence[float]]) -> Iterator[Finding]:
    """The differences of counted numbers, of which less is better, in per cent of the larger one."""
    every = list(preset.file.columns)
    for column in test.columns or every:
        k = every.index(column)
        for worse in (*test.worse, *test.stronger):
            ours, theirs = counts[test.better][k], counts[worse][k]
            percent = Column(test.measure, f"{test.measure}, in %", digits=2, better="lower")
            gain = Gain(test.better, worse, percent, {0: 100 * (theirs - ours) / max(theirs, ours)}, {})
            heading = f"{column}, less, in %" if len(every) > 1 else "less, in %"
            strong = worse in test.stronger
            bounds = (test.least, test.within)
            yield Finding(test.better, worse, strong, gain, *bounds, True, preset.name, heading)


def _named(row: Row, measure: Column) -> Row:
    """A row whose number of one measure stands under the name that both rows of a comparison have."""
    runs = []
    for run in row.runs:
        value = measure.value(run)
        figures = {} if value is None else {COMPARED: value / measure.scale}
        runs.append({**run, FIGURE: figures})
    return replace(row, runs=runs)


def _with_measures(run: Mapping[str, Any]) -> dict[str, Any]:
    """A summary whose figures have the numbers that the server keeps too, under the names that presets give them."""
    kept = {f"{SERVER}{name}": value for name, value in run.get("measures", {}).items()}
    return {**run, FIGURE: {**kept, **run[FIGURE]}}


def _rows_at(folder: Path, round: int) -> Iterator[Row]:
    """The rows of a comparison with the figures of one round in place of the last five's."""
    for variant in read_folder(folder).variants:
        runs = []
        for run in variant.runs:
            figures = next((row for row in run.metrics if row["round"] == round), {})
            kept: Mapping[str, Any] = next((r.get("measures", {}) for r in run.rounds if r["round"] == round), {})
            if run.summary is not None:
                runs.append({**run.summary, FIGURE: figures, "measures": kept})
        yield Row(variant.label, variant.method, variant.settings, runs)
