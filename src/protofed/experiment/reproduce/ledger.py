"""The ledger: every preset's numbers beside what has been measured in a folder of results, or how to measure it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ... import methods
from ...disk import write_atomically
from ...errors import ProtofedError
from ...results.archive import is_archive
from ...results.columns import Row
from ...results.comparison import ComparisonFolder
from ...results.read import read_rows
from ..compare import Variant, is_comparison, parse_entries
from .planning import plan
from .preset import Preset, Size, available, load_preset, row_label, row_method, slug
from .run import run_plan
from .table import Reproduction


def ledger_pages(results: Path) -> dict[str, str]:
    """The ledger in Markdown, one page for each paper.

    A column is read from the preset's own folder (`PAPER-TABLE-SIZE`, the default's name) where that is in the results,
    else from the folders that the column names under `measured`.
    """
    pages: dict[str, str] = {}
    for name in available():
        preset = load_preset(name)
        text = f"### {preset.file.title}\n\n{_preset_section(preset, results)}"
        paper = name.partition("/")[0]
        pages[paper] = f"{pages[paper]}\n{text}" if paper in pages else text
    return pages


def write_ledger(results: Path) -> list[Path]:
    """Write `ledger/PAPER.md` in the folder of results, one for each paper."""
    if not results.is_dir():
        raise ProtofedError(f"--ledger {results}: no such folder of results")
    files = []
    for paper, text in ledger_pages(results).items():
        files.append(results / "ledger" / f"{paper}.md")
        files[-1].parent.mkdir(exist_ok=True)
        write_atomically(files[-1], text.encode())
    return files


def _preset_section(preset: Preset, results: Path) -> str:
    command = f"`protofed reproduce {preset.name}`"
    if preset.file.counted:
        return f"Counted, not trained: {command}.\n\n" + run_plan(plan(preset.name)).markdown(4)
    reproduction, sources = Reproduction.empty(preset), []
    entries = row_entries(preset)
    for column in preset.file.columns:
        size, folders = measured_in(preset, column, results)
        if not folders:
            continue
        rows_of = {folder: read_rows(folder)[0] for folder in folders}
        rows = [row for part in rows_of.values() for row in part]
        found = {label: matching_row(label, entries[label], rows) for label in preset.labels}
        lines = [Row(label, label, {}, row.runs if row else ()) for label, row in found.items()]
        reproduction = reproduction.with_column(column, preset.heading(column, size), lines)
        sources += [f"- {column}: {_provenance(folder, part, results)}" for folder, part in rows_of.items()]
    if not reproduction.columns:
        return f"Not measured yet: {command}.\n"
    rest = [column for column in preset.file.columns if column not in reproduction.columns]
    later = (
        f"\nNot measured yet (`protofed reproduce {preset.name} --only COLUMN`): {', '.join(rest)}.\n" if rest else ""
    )
    return f"{reproduction.markdown(4)}\nOurs is read from `docs/results`:\n\n" + "\n".join(sources) + f"\n{later}"


def measured_in(preset: Preset, column: str, results: Path) -> tuple[Size, list[Path]]:
    """At which size a column was measured, and in which folders its finished runs are."""
    candidates: list[tuple[Size, list[Path]]] = [
        (size, [results / folder_name(preset.name, size) / slug(column)]) for size in ("paper", "laptop")
    ]
    candidates.append(("laptop", [results / name for name in preset.file.columns[column].measured]))
    for size, folders in candidates:
        measured = [f for f in folders if is_comparison(f) and (is_archive(f) or any(f.glob("*/summary.json")))]
        if measured:
            return size, measured
    return "laptop", []


def folder_name(name: str, size: Size) -> str:
    """The folder of a preset at one size, in `runs` and among results.

    >>> folder_name("fedsap/table1", "laptop")
    'fedsap-table1-laptop'
    """
    return f"{name.replace('/', '-')}-{size}"


def row_entries(preset: Preset) -> dict[str, list[Variant]]:
    """By label, the row as an entry of a comparison, at the paper's size and at the laptop's."""
    entries: dict[str, list[Variant]] = {label: [] for label in preset.labels}
    for row in dict.fromkeys([*preset.rows("paper"), *preset.rows("laptop")]):
        if row_method(row) in methods.registry:
            entries[row_label(row)] += parse_entries([row], local=False)
    return entries


def matching_row(label: str, entries: Sequence[Variant], rows: Sequence[Row]) -> Row | None:
    """The row with the same label, else the one of the same method with the same settings of its own.

    Args:
        label: The label of a preset's row.
        entries: The same row as an entry of a comparison, as `row_entries` gives it.
        rows: The rows that were measured.

    Returns:
        The row; None where it was not measured.
    """
    same = [row for row in rows if row.label == label]
    same += [row for e in entries for row in rows if row.method == e.method and dict(row.settings) == e.settings]
    return same[0] if same else None


def _provenance(folder: Path, rows: Sequence[Row], results: Path) -> str:
    runs = [run for row in rows for run in row.runs]
    rounds = "/".join(map(str, sorted({run["rounds"] for run in runs})))
    seeds = ", ".join(map(str, sorted({run["seed"] for run in runs})))
    data = min(str(s["data"].get("path", s["data"]["name"])) for s in ComparisonFolder(folder).read().settings.values())
    return f"`{folder.relative_to(results).as_posix()}`: {data}, {rounds} rounds, seeds {seeds}"
