"""Run a plan: each column is a comparison in a folder of its own, and the table is written again after each."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...data import Dataset
from ...disk import write_atomically
from ...errors import ProtofedError
from ...models.published import PACKAGE
from ...results.archive import is_archive, read_summaries, unpack
from ...results.columns import Row
from ...results.folder import COMPARISON, make_folder
from ...results.lock import FolderLock
from ...results.read import read_rows
from ...results.rows import SUMMARY
from ...results.tables import setting_text
from ...version import __version__
from ..compare import (
    Comparison,
    ComparisonFolder,
    Grid,
    Part,
    Progress,
    Watch,
    gathered,
    is_comparison,
    read_comparison,
    resume_comparison,
    run_grid,
)
from ..settings import Settings
from .changes import changed_settings
from .planning import Plan, column_grid, plan
from .preset import load_preset, measure_column, slug
from .table import Reproduction, differences, markdown_table

log = logging.getLogger("protofed")
PATIENCE = 60.0  # seconds to wait for another part that is writing the table
RECORD = "reproduction.json"
TABLE = "reproduction.md"


def run_plan(
    plan: Plan,
    *,
    out: str | Path | None = None,
    jobs: int | None = None,
    watch: Watch | None = None,
    part: Part | None = None,
) -> Reproduction:
    """Run what is left of a plan or of a part of it, column by column, and write `reproduction.md` after each.

    What can be checked is checked before anything is written: whether the folder belongs to another plan, whether cells
    were begun with other settings, and whether data is missing.

    Args:
        plan: The plan, from `plan` or `resumed_plan`.
        out: The folder to write, new or begun before; None writes nothing.
        jobs: The number of runs at a time; None takes as many as there are cores.
        watch: A function that is called with the progress of a cell after each of its rounds.
        part: The part of the cells to run, beside processes that run the others in the same folder; None runs all.

    Returns:
        Our numbers beside the paper's, as far as the folder has them.

    Example: `run_plan(plan("fedsap/table2")).markdown()`
    """
    folder = None if out is None else Path(out)
    if plan.preset.file.counted:
        return _write_table(_counted(plan), "", folder)
    begin_plan(plan, folder)
    settings = "" if folder is None else _settings_section(plan)
    if part is not None:
        return _run_part(plan, folder, jobs, watch, part, settings)
    if folder is not None:
        for column, grid in plan.grids.items():
            take_finished(plan.preset.name, grid, folder / slug(column))
    reproduction = Reproduction.empty(plan.preset)
    for column, column_folder in _column_folders(plan, folder).items():
        if column_folder is None or (column in plan.grids and not is_archive(column_folder)):
            rows = _run_column(plan, column, column_folder, jobs, _watch_of_column(watch, slug(column))).rows()
        else:
            rows = _stored_rows(column_folder)
        heading = plan.preset.heading(column, plan.size, plan.given)
        reproduction = reproduction.with_column(column, heading, rows)
        _write_table(reproduction, settings, folder)
    return reproduction


def begin_plan(plan: Plan, folder: Path | None) -> None:
    """Check what can be checked of a plan, and make its folder where it is to have one and has none yet."""
    folders = _column_folders(plan, folder)
    if folder is not None and folder.exists():
        _check_record(plan, folder)
    for column in plan.grids:
        column_folder = folders[column]
        if column_folder is not None and is_comparison(column_folder):
            _check_cells(column_folder, _whole_grid(plan, column, column_folder))
        if column_folder is None or not _has_all(column_folder, plan.grids[column]):
            _check_data(plan, column, column_folder)
    if folder is not None:
        _write_record(plan, folder)
        _unpack_columns(plan, folder)


def _unpack_columns(plan: Plan, folder: Path) -> None:
    """Unpack the archives of columns that lack a run of the plan, so that it can be run beside theirs."""

    def lacking() -> list[Path]:
        folders = {folder / slug(column): grid for column, grid in plan.grids.items()}
        return [path for path, grid in folders.items() if is_archive(path) and not _has_all(path, grid)]

    if lacking():
        with FolderLock(folder).acquire(PATIENCE):  # another part may be unpacking them
            for path in lacking():
                unpack(path)
                log.info("%s: unpacked, because it lacks runs; `protofed pack` makes it an archive again", path)


def _column_folders(plan: Plan, folder: Path | None) -> dict[str, Path | None]:
    """The folder of each column: of those that are run, and of those that the folder has from before."""
    if folder is None:
        return dict.fromkeys(plan.columns)
    folders = {column: folder / slug(column) for column in plan.preset.file.columns}
    return {c: path for c, path in folders.items() if c in plan.columns or is_comparison(path)}


def stored_reproduction(folder: Path, measures: Sequence[str] | None = None) -> Reproduction:
    """Read what a folder of `protofed reproduce` has by now.

    Args:
        folder: The folder.
        measures: The names of the measures; None takes those of the preset.

    Returns:
        The numbers of all columns that the folder has.

    Example: `stored_reproduction(Path("runs/fedsap-table1-laptop"), ["accuracy_head"]).overview()`
    """
    for measure in measures or ():
        if measure_column(measure).over:
            raise ProtofedError(f"{measure}: a gain is in the table of one column; name its folder in {folder}")
    record = read_record(folder)
    preset = load_preset(record["preset"])
    reproduction = Reproduction.empty(preset, measures)
    for column in preset.file.columns:
        if is_comparison(path := folder / slug(column)):
            heading = preset.heading(column, record["size"], record["given"])
            reproduction = reproduction.with_column(column, heading, _stored_rows(path))
    return reproduction


def _stored_rows(folder: Path) -> list[Row]:
    """The rows that the folder of a column has, of runs that have finished by now; it may be an archive."""
    if is_archive(folder):
        return read_rows(folder)[0]
    return gathered(read_comparison(folder), ComparisonFolder(folder)).rows()


def parts_of_columns(plan: Plan, part: Part) -> dict[str, Part]:
    """The part of each column that a part of a plan has. A column begins with the part with which the last one ended."""
    parts, before = {}, 0
    for column in plan.columns:
        parts[column] = part.turned(-before)
        before += len(plan.grids[column].cells)
    return parts


def _run_part(
    plan: Plan, folder: Path | None, jobs: int | None, watch: Watch | None, part: Part, settings: str
) -> Reproduction:
    """Run a part of the cells of every column. The table then has what all parts have finished by now."""
    if folder is None:
        raise ProtofedError(f"part {part}: the parts of a reproduction meet in one folder; name it with --out")
    folders, parts = _column_folders(plan, folder), parts_of_columns(plan, part)
    for column, grid in plan.grids.items():
        watch_cell = _watch_of_column(watch, slug(column))
        run_grid(grid, out=folders[column], jobs=jobs, watch=watch_cell, part=parts[column])
    with FolderLock(folder).acquire(PATIENCE):
        reproduction = Reproduction.empty(plan.preset)
        for column, path in folders.items():
            assert path is not None
            rows = _stored_rows(path)
            heading = plan.preset.heading(column, plan.size, plan.given)
            reproduction = reproduction.with_column(column, heading, rows)
        return _write_table(reproduction, settings, folder)


def _counted(plan: Plan) -> Reproduction:
    counts = plan.preset.count()
    values = {measure: {row: [[v] for v in line] for row, line in rows.items()} for measure, rows in counts.items()}
    return Reproduction(plan.preset, plan.columns, plan.columns, values)


def _run_column(plan: Plan, column: str, folder: Path | None, jobs: int | None, watch: Watch | None) -> Comparison:
    grid = plan.grids[column]
    if folder is None or not is_comparison(folder):
        return run_grid(grid, out=folder, jobs=jobs, watch=watch)
    ComparisonFolder(folder).write(_whole_grid(plan, column, folder).record())  # may have other seeds, and more rows
    return resume_comparison(folder, jobs=jobs, watch=watch, only=grid.cells)


def _whole_grid(plan: Plan, column: str, folder: Path) -> Grid:
    """The grid of a column with the rows that are run, and those that its folder has from before."""
    labels = {variant.label for variant in (*plan.grids[column].variants, *ComparisonFolder(folder).read().variants)}
    return column_grid(plan.preset, column, plan.size, plan.seeds, plan.given, list(labels))


def take_finished(preset: str, grid: Grid, folder: Path) -> int:
    """Copy the runs of a column that another table's folder has already.

    Tables of one paper have runs in common, such as a figure of curves and the table of their final values. A finished run
    with the same settings, of the same version of protofed, is looked for in the folders beside the reproduction's.

    Args:
        preset: The name of the preset, whose own runs in other folders are not taken: whoever runs it again wants to see.
        grid: The variants, seeds and settings of the column.
        folder: The folder of the column, which is made where there is something to copy.

    Returns:
        The number of runs that were copied.
    """
    if is_archive(folder):
        return 0
    missing = {c: s for c, s in json.loads(grid.record().to_json())["settings"].items() if not (folder / c).exists()}
    found: dict[str, Path] = {}
    for comparison, stored in _other_columns(preset, folder.parent.parent) if missing else ():
        for cell, settings in stored.items():
            wanted = [name for name, own in missing.items() if own == settings and name not in found]
            if wanted and _is_finished(comparison / cell):
                found |= dict.fromkeys(wanted, comparison / cell)
    if not found:
        return 0
    if not is_comparison(folder):
        ComparisonFolder.create(folder, grid.record()).close()
    for cell, run in found.items():
        copy = folder / f".{cell}.copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy)
        copy.rename(folder / cell)
    sources = ", ".join(sorted({str(run.parent) for run in found.values()}))
    log.info("%s: %d runs taken from %s", folder, len(found), sources)
    return len(found)


def _other_columns(preset: str, runs: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The comparisons of other presets in a folder of runs and their cells' settings; unreadable ones are passed over."""
    for record in sorted(runs.glob(f"*/{RECORD}")):
        for file in sorted(record.parent.glob(f"*/{COMPARISON}")):
            try:
                if read_record(record.parent)["preset"] != preset:
                    yield file.parent, ComparisonFolder(file.parent).read().settings
            except ProtofedError:
                continue


def _is_finished(run: Path) -> bool:
    """Whether a run folder holds a finished run of this version of protofed."""
    try:
        summary = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
        return bool(summary["versions"]["protofed"] == __version__)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _watch_of_column(watch: Watch | None, column: str) -> Callable[[Progress], None] | None:
    """The same watch, which gets the names of cells as `COLUMN/CELL`."""
    if watch is None:
        return None

    def watch_cell(progress: Progress) -> None:
        watch(replace(progress, cell=f"{column}/{progress.cell}"))

    return watch_cell


# --- checks before anything is written --------------------------------------------------------------------------------
def _check_cells(folder: Path, grid: Grid) -> None:
    """Raise an error where cells were begun with other settings. There may be more seeds than before, or fewer."""
    stored = ComparisonFolder(folder).read().settings
    for cell, settings in grid.cells.items():
        for key, (then, now) in changed_settings(settings, stored.get(cell) or settings.to_dict()).items():
            raise ProtofedError(f"{folder / cell}: begun with {key}={then}, now it is {now}; choose another --out")


def _has_all(folder: Path, grid: Grid) -> bool:
    """Whether a folder is an archive of all runs of a grid."""
    return is_archive(folder) and set(grid.cells) <= set(read_summaries(folder))


def _check_data(plan: Plan, column: str, folder: Path | None) -> None:
    """Raise an error that names missing data and where it comes from. Finished cells need no data."""
    checked = set()
    for cell, settings in plan.grids[column].cells.items():
        source = json.dumps([settings.to_dict()["data"], getattr(settings.model, "pretrained", None)])
        if source in checked or (folder is not None and (folder / cell / "summary.json").is_file()):
            continue
        checked.add(source)
        try:
            _check_files(settings)
        except ProtofedError as error:
            needs = "".join(f"; needs {need}" for need in plan.preset.needs(column, plan.size))
            hint = "" if len(plan.columns) == 1 else "; --only runs other columns"
            raise ProtofedError(f"{plan.preset.name}, column {column!r}: {error}{needs}{hint}") from None


def _check_files(settings: Settings) -> None:
    pretrained = getattr(settings.model, "pretrained", None)
    if pretrained not in (None, PACKAGE) and not Path(pretrained).expanduser().is_file():
        raise ProtofedError(f"{pretrained}: no such file of pretrained weights")
    if not isinstance(settings.data, Dataset):
        settings.data.load()


# --- the folder -------------------------------------------------------------------------------------------------------
def is_reproduction(folder: Path) -> bool:
    """Whether a folder was written by `protofed reproduce`."""
    return (folder / RECORD).is_file()


def _record(plan: Plan) -> dict[str, Any]:
    return {
        "preset": plan.preset.name,
        "size": plan.size,
        "given": plan.given,
        "columns": plan.columns,
        "seeds": plan.seeds,
        **({"rows": plan.rows} if plan.rows else {}),
    }


def _check_record(plan: Plan, folder: Path) -> None:
    """Raise an error where a folder was made with another preset, size or settings."""
    stored, current = read_record(folder), json.loads(json.dumps(_record(plan)))
    for key in ("preset", "size", "given"):
        if stored[key] != current[key]:
            raise ProtofedError(
                f"{folder}: made with {key} {stored[key]!r}, not {current[key]!r}; choose another --out"
            )


def _write_record(plan: Plan, folder: Path) -> None:
    text = json.dumps(_record(plan), indent=1)
    if not folder.exists():
        try:
            make_folder(folder, {RECORD: text.encode()}).release()
        except ProtofedError:
            if not is_reproduction(folder):  # otherwise another part was quicker
                raise
    elif read_record(folder) != json.loads(text):
        write_atomically(folder / RECORD, text.encode())


def read_record(folder: Path) -> dict[str, Any]:
    """Read the preset, size, settings of the command line, columns, seeds and rows with which a folder was last run."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return {key: record[key] for key in ("preset", "size", "given", "columns", "seeds")} | {
            key: record[key] for key in ("rows",) if key in record
        }
    except FileNotFoundError:
        raise ProtofedError(
            f"{folder}: exists, and is no folder of `protofed reproduce` (it has no {RECORD})"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProtofedError(f"{folder / RECORD}: not readable ({type(error).__name__}: {error})") from None


def resumed_plan(folder: Path) -> Plan:
    """Make the plan that a folder was last run with."""
    record = read_record(folder)
    options = {key: record[key] for key in ("size", "seeds", "given", "rows") if key in record}
    whole = plan(record["preset"], only=record["columns"], **options)
    return replace(whole, grids={column: whole.grids[column] for column in record["columns"]})


def _write_table(reproduction: Reproduction, settings: str, folder: Path | None) -> Reproduction:
    """Write `reproduction.md`: the tables, the notes, and how the two sizes differ."""
    if folder is None:
        return reproduction
    file = reproduction.preset.file
    notes = "\n## Notes\n\n" + "\n".join(f"- {note}" for note in file.notes) + "\n" if file.notes else ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = f"# {file.title}\n\n{reproduction.markdown()}{notes}{settings}"
        write_atomically(folder / TABLE, text.encode())
    except OSError as error:
        raise ProtofedError(f"{folder / TABLE}: cannot be written ({error.strerror})") from None
    return reproduction


def _settings_section(plan: Plan) -> str:
    overrides = "".join(f" {key}={setting_text(value)}" for key, value in plan.given.items()) or " none"
    table = markdown_table(["setting", "laptop", "paper", "columns"], differences(plan.preset))
    return (
        f"\n## Settings\n\nSize {plan.size}, seeds {', '.join(map(str, plan.seeds))}; given with the command:{overrides}. "
        f"The run folders beside this file hold every setting. What differs between the two sizes:\n\n{table}\n"
    )
