"""The one reader of run folders, comparisons and archives of them.

A person who opens a report wants to see what there is, so reading is tolerant: a file that is missing, cut off or foreign
gives a note, and only a folder that holds no run at all is an error. A program that goes on from a result reads strictly:
the same problem is then an error of one line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import disk
from ..errors import ProtofedError
from .archive import ArchivedRun, is_archive, read_archive, read_summaries
from .columns import Row
from .comparison import ComparisonFolder, ComparisonRecord, failures_of
from .folder import COMPARISON, SETTINGS, check_is_run, parse_settings, read_settings
from .protocol import with_protocol
from .rows import (
    CLIENTS,
    EVALUATIONS,
    FORMAT,
    ROUNDS,
    ROW_FILES,
    SUMMARY,
    JsonRow,
    problem_of,
    rough_problem_of,
)
from .stored import Run, StoredResults, VariantRuns

__all__ = [
    "Reader",
    "Run",
    "StoredResults",
    "VariantRuns",
    "is_run",
    "read_finished",
    "read_folder",
    "read_rows",
    "read_run",
]

SEED = re.compile(r"(.+)-seed(\d+)")


@dataclass
class Reader:
    """Reads the files of runs. Problems are notes, or errors where it is strict."""

    strict: bool = False
    notes: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        """Take note of a problem, or raise it as an error where the reader is strict."""
        if self.strict:
            raise ProtofedError(text)
        self.notes.append(text)

    def settings(self, path: Path, text: str | None = None) -> dict[str, Any]:
        """Read a run's settings, from its folder or from the text that an archive holds."""
        try:
            return read_settings(path) if text is None else parse_settings(path / SETTINGS, text)
        except ProtofedError as error:
            self.problem(str(error))
            return {}

    def rows(self, file: Path) -> list[JsonRow]:
        """Read the rows of a .jsonl file by round. A last line that is being written, or was cut off, is skipped."""
        try:
            lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            self.problem(f"{file}: not readable ({error})")
            return []
        return self.parsed(file, lines)

    def parsed(self, file: Path, lines: Sequence[str]) -> list[JsonRow]:
        """Read the lines of a .jsonl file: the rows that pass the check for this file's name, sorted by round."""
        rows: dict[int, JsonRow] = {}
        bad: list[tuple[int, str]] = []
        for position, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError:
                if position < len(lines) or line.endswith("\n"):
                    bad.append((position, "not JSON"))
                continue
            problem = (problem_of if self.strict else rough_problem_of)(file.name, row)
            if problem is None:
                rows[row["round"]] = row
            else:
                bad.append((position, problem))
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            self.problem(f"{file}: line {bad[0][0]}{more} left out ({bad[0][1]})")
        return [rows[round] for round in sorted(rows)]

    def summary(self, file: Path) -> JsonRow | None:
        """Read the summary. It is None where the run has not finished, or (with a note) where the file is unusable."""
        try:
            return self.checked_summary(file, json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.problem(f"{file}: not readable ({error}); the run is shown as one that has not finished")
            return None

    def checked_summary(self, file: Path, content: Any) -> JsonRow | None:
        """Check a summary that was read from `file`. It is None (with a note) where tables could not use it."""
        problem = problem_of(SUMMARY, content)
        if problem is None and content.get("format", 1) > FORMAT:
            problem = f"format {content['format']}; this version reads up to {FORMAT}"
        if problem is None and ("format" in content or disk.DIGEST in content):
            try:
                content = disk.opened(json.dumps(content).encode(), file)
            except ProtofedError:
                problem = "damaged: its content does not match the digest in it"
        if problem is None:
            return dict(content)
        self.problem(f"{file}: not readable ({problem}); the run is shown as one that has not finished")
        return None


def is_run(folder: Path) -> bool:
    """Whether a folder is a run folder."""
    return (folder / SETTINGS).is_file()


def read_folder(folder: str | Path) -> StoredResults:
    """Read a run folder, a comparison's folder, or any folder with run folders in it, as far as that can be done.

    Args:
        folder: The folder.

    Returns:
        The runs by variant, with notes of what could not be read. A folder without any run is an error.

    Example: `read_folder("runs/digits").runs[0].metrics`
    """
    path = Path(folder)
    if not path.is_dir():
        raise ProtofedError(f"{path}: no such run folder")
    if is_run(path):
        run = read_run(path)
        return StoredResults(path, False, [VariantRuns(run.label, run.method, {}, [run])])
    if (path / COMPARISON).is_file():
        return _read_comparison(path)
    results = _read_loose(path, [])
    if not results.runs:
        raise ProtofedError(
            f"{path}: neither a run folder ({SETTINGS}) nor a comparison ({COMPARISON}), nor runs in it"
        )
    return results


def read_run(path: Path, label: str | None = None, seed: int | None = None) -> Run:
    """Read one run folder as far as that can be done.

    Args:
        path: The run folder.
        label: The label of its variant; None takes the method's name.
        seed: The seed, where the settings do not say it.

    Returns:
        The run, with notes of what could not be read.
    """
    reader = Reader()
    settings = reader.settings(path)
    rows = {name: reader.rows(path / name) for name in ROW_FILES}
    summary = reader.summary(path / SUMMARY)
    if summary is not None:
        missing = [name for name in ROW_FILES if not (path / name).is_file()]
        reader.notes += [f"{path / name}: missing, although the run has finished" for name in missing]
    return _run(path, label, seed, settings, rows, summary, reader.notes)


def _run(
    path: Path,
    label: str | None,
    seed: int | None,
    settings: Mapping[str, Any],
    rows: Mapping[str, list[JsonRow]],
    summary: JsonRow | None,
    notes: list[str],
) -> Run:
    method = settings.get("method")
    name = method.get("name") if isinstance(method, Mapping) else None
    own_seed = settings.get("seed")
    seed = own_seed if isinstance(own_seed, int) else seed or 0
    label = label or str(name or path.name)
    return Run(path, label, seed, settings, rows[ROUNDS], rows[EVALUATIONS], rows[CLIENTS], summary, notes)


def read_finished(path: Path) -> tuple[dict[str, Any], list[JsonRow], JsonRow]:
    """Read a finished run strictly: its settings, its evaluations and its summary.

    A run that has not finished is an error, and so are files that are damaged or do not belong together.
    """
    check_is_run(path)
    reader = Reader(strict=True)
    settings = reader.settings(path)
    summary = reader.summary(path / SUMMARY)
    if summary is None:
        raise ProtofedError(f"{path}: the run has not finished; `protofed resume {path}`")
    for name, digest in summary.get("rows", {}).items():
        if (path / name).is_file() and disk.digest_of(path / name) == digest:
            continue
        raise ProtofedError(f"{path / name}: not the rows that {SUMMARY} was made of (missing, damaged or foreign)")
    return settings, reader.rows(path / EVALUATIONS), summary


def _read_comparison(path: Path) -> StoredResults:
    folder = ComparisonFolder(path)
    notes: list[str] = []
    try:
        record = folder.read()
    except ProtofedError as error:
        return _read_loose(path, [f"{error}; the runs are grouped by their folders' names"])
    try:
        failures = folder.failures()
    except ProtofedError as error:
        failures, notes = {}, [str(error)]
    archive = read_archive(path) if is_archive(path) else None
    variants = [
        VariantRuns(
            variant.label,
            variant.method,
            variant.settings,
            list(_runs_of(path, record, k, archive)),
            failures_of(variant, record.seeds, failures),
        )
        for k, variant in enumerate(record.variants)
    ]
    return StoredResults(path, True, variants, record.columns, len(record.cells), notes)


def _runs_of(
    path: Path, record: ComparisonRecord, which: int, archive: Mapping[str, ArchivedRun] | None
) -> Iterable[Run]:
    variant = record.variants[which]
    for seed in record.seeds:
        run = path / variant.cell(seed)
        if archive is not None and run.name in archive:
            yield _archived_run(run, archive[run.name], variant.label, seed)
        elif is_run(run):
            yield read_run(run, variant.label, seed)


def _archived_run(path: Path, run: ArchivedRun, label: str, seed: int) -> Run:
    reader = Reader()
    settings = reader.settings(path, run.settings)
    rows = {name: reader.parsed(path / name, run.lines[name]) for name in ROW_FILES}
    summary = None if run.summary is None else reader.checked_summary(path / SUMMARY, run.summary)
    return replace(_run(path, label, seed, settings, rows, summary, reader.notes), archived_confusions=run.confusions)


def read_rows(path: Path) -> tuple[list[Row], list[str] | None]:
    """Read strictly what the table of a comparison needs.

    Args:
        path: The comparison's folder, or an archive of it.

    Returns:
        A row for each variant with the summaries of its finished runs, and the columns that were chosen, or None. A
        damaged summary is an error, and so is a comparison of which no run has finished.

    Example: `rows, columns = read_rows(Path("runs/digits"))`
    """
    folder = ComparisonFolder(path)
    record, failures = folder.read(), folder.failures()
    reader = Reader(strict=True)
    stored = read_summaries(path) if is_archive(path) else None
    rows = []
    for variant in record.variants:
        summaries = []
        for seed in record.seeds:
            file = path / variant.cell(seed) / SUMMARY
            summary = None
            if stored is not None and variant.cell(seed) in stored:
                summary = reader.checked_summary(file, stored[variant.cell(seed)])
            elif file.is_file():
                summary = reader.summary(file)
            if summary is not None:
                summaries.append(with_protocol(summary, record.settings.get(variant.cell(seed), {})))
        failed = failures_of(variant, record.seeds, failures)
        rows.append(Row(variant.label, variant.method, variant.settings, summaries, failed))
    if not any(row.runs for row in rows):
        raise ProtofedError(f"{path}: no run of this comparison has finished; `protofed resume {path}`")
    return rows, record.columns


def _read_loose(path: Path, notes: list[str]) -> StoredResults:
    """Runs grouped by their folders' names: `fedsap-seed1234` and `fedsap-seed1235` are seeds of one variant."""
    folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".") and is_run(p))
    groups: dict[str, list[Run]] = {}
    for folder in folders:
        match = SEED.fullmatch(folder.name)
        label = match[1] if match else folder.name
        groups.setdefault(label, []).append(read_run(folder, label, int(match[2]) if match else None))
    variants = [VariantRuns(label, runs[0].method, {}, runs) for label, runs in groups.items()]
    return StoredResults(path, True, variants, None, len(folders), notes)
