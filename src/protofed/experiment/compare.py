"""Comparisons: every variant is run with every seed, each as a run with its own folder, several at a time.

`compare` runs the variants that are listed; `sweep` runs their product with axes.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..data.remarks import say
from ..disk import write_atomically
from ..errors import ProtofedError, Stopped
from ..grammar import parse_axes
from ..outcome import Comparison, Result
from ..results.archive import is_archive
from ..results.comparison import ComparisonFolder, ComparisonRecord, Variant
from ..results.rows import SUMMARY
from ..results.tables import comparison_latex, comparison_markdown, results_csv
from .cells import Failure, Progress, Watch, run_cells
from .run import load
from .settings import resolve
from .shares import Part
from .variants import Files, Grid, make_grid, parse_entries, parse_words

__all__ = [
    "Comparison",
    "ComparisonFolder",
    "ComparisonRecord",
    "Grid",
    "Part",
    "Progress",
    "Variant",
    "Watch",
    "compare",
    "gathered",
    "is_comparison",
    "make_grid",
    "parse_axes",
    "parse_entries",
    "parse_words",
    "read_comparison",
    "resume_comparison",
    "run_grid",
    "sweep",
]

log = logging.getLogger("protofed")


def compare(
    names: Sequence[str] = (),
    *,
    local: bool = True,
    controls: bool = False,
    seeds: Sequence[int] | int = 3,
    out: str | Path | None = None,
    jobs: int | None = None,
    part: str | None = None,
    watch: Watch | None = None,
    config: Files = None,
    columns: Sequence[str] | None = None,
    **given: Any,
) -> Comparison:
    """Run every method with every seed under the same settings.

    Args:
        names: The methods. One may have a label and settings of its own: `"upper bound=fedavg?labels=all"`.
        local: Whether Local is run beside them; with `labels=server`, where no client can learn alone, `server-only` is.
        controls: Whether the control of each method that exchanges prototypes is run after it: the same loss with the
            client's own prototypes (`control=own`).
        seeds: The number of seeds, counted from the setting `seed`, or a list of seeds.
        out: The folder to write, which must not exist yet; None writes nothing.
        jobs: The number of runs at a time; None takes as many as there are cores.
        part: A part of the runs, `"2/8"`, beside processes that run the others in the same folder; None runs all.
        watch: A function that is called with the progress of a run after each of its rounds.
        config: One file of settings or several; later ones override earlier ones, and keywords override all.
        columns: The columns of the tables that are written; None takes the default ones.
        **given: Settings, as on the command line.

    Returns:
        The results of the runs that finished, and why the others failed. An error is raised where all of them failed.

    Example: `compare(["fedavg", "fedsap"], data="digits", rounds=20).rows()`
    """
    grid = make_grid(names, local=local, controls=controls, seeds=seeds, config=config, columns=columns, given=given)
    return run_grid(grid, out=out, jobs=jobs, watch=watch, part=None if part is None else Part.parse(part))


def sweep(
    names: Sequence[str] = (),
    *,
    over: Mapping[str, Sequence[Any]] | None = None,
    seeds: Sequence[int] | int = 3,
    out: str | Path | None = None,
    jobs: int | None = None,
    part: str | None = None,
    watch: Watch | None = None,
    config: Files = None,
    columns: Sequence[str] | None = None,
    **given: Any,
) -> Comparison:
    """Run every method with every combination of values and every seed.

    Args:
        names: The methods, as for `compare`.
        over: The axes: keys with their values. A method that an axis does not apply to (`fedsap.scale` and FedAvg) is
            run once for all its values.
        seeds: As for `compare`.
        out: As for `compare`.
        jobs: As for `compare`.
        part: As for `compare`.
        watch: As for `compare`.
        config: As for `compare`; a file may hold axes in its table `[sweep]`.
        columns: As for `compare`.
        **given: As for `compare`.

    Returns:
        The results of the runs that finished, and why the others failed, as for `compare`.

    Example: `sweep(["fedsap"], over={"lr": [0.01, 0.1]}, data="digits")`
    """
    grid = make_grid(names, over=over or {}, seeds=seeds, config=config, columns=columns, given=given)
    return run_grid(grid, out=out, jobs=jobs, watch=watch, part=None if part is None else Part.parse(part))


def run_grid(
    grid: Grid, *, out: str | Path | None, jobs: int | None, watch: Watch | None, part: Part | None = None
) -> Comparison:
    """Run all cells of a grid, or a part of them.

    Args:
        grid: The variants, seeds and settings.
        out: The folder to write, which must not exist yet; None writes nothing.
        jobs: The number of runs at a time; None takes as many as there are cores.
        watch: A function that is called with the progress of a run after each of its rounds.
        part: The part to run. Its folder may exist: other processes run the other parts in it, before, after or beside.

    Returns:
        The results; of a part, those of all runs that have finished by then in the folder.
    """
    if part is not None:
        if out is None:
            raise ProtofedError(f"part {part}: the parts of a comparison meet in one folder; name it with --out")
        folder = ComparisonFolder.open_part(Path(out), grid.record(), part.number, part.of)
        return _run_in(folder, grid, jobs, watch, part)
    return _run_in(None if out is None else ComparisonFolder.create(Path(out), grid.record()), grid, jobs, watch)


def resume_comparison(
    folder: Path,
    *,
    jobs: int | None = None,
    watch: Watch | None = None,
    part: Part | None = None,
    only: Collection[str] | None = None,
) -> Comparison:
    """Finish a comparison that was stopped: finished runs are kept, begun ones resumed, and failed ones tried again.

    Args:
        folder: The comparison's folder.
        jobs: The number of runs at a time; None takes as many as there are cores.
        watch: A function that is called with the progress of a run after each of its rounds.
        part: The part to finish; None finishes all.
        only: The cells to finish; the others stay as they are. None finishes all.

    Returns:
        The results of all runs, or of those that have finished by then.

    Example: `resume_comparison(Path("runs/digits"))`
    """
    if is_archive(folder):
        raise ProtofedError(f"{folder}: an archive of a comparison; there is nothing in it to go on from")
    grid = read_comparison(folder)
    if part is not None:
        return run_grid(grid, out=folder, jobs=jobs, watch=watch, part=part)
    return _run_in(ComparisonFolder.open(folder), grid, jobs, watch, only=only)


def _run_in(
    folder: ComparisonFolder | None,
    grid: Grid,
    jobs: int | None,
    watch: Watch | None,
    part: Part | None = None,
    only: Collection[str] | None = None,
) -> Comparison:
    """Run what is left of a grid or of a part of it, and say how to go on where it is stopped."""
    try:
        if part is not None and folder is not None:
            return _run_part(grid, folder, jobs, watch, part)
        return _run(grid, folder, jobs, watch, only)
    except KeyboardInterrupt as error:
        if folder is None:
            raise
        code = error.code if isinstance(error, Stopped) else 130
        option = "" if part is None else f" --part {part}"
        raise Stopped(f"stopped; `protofed resume {shlex.quote(str(folder.path))}{option}` goes on", code) from None
    finally:
        if folder is not None:
            folder.close()


def _run(
    grid: Grid,
    folder: ComparisonFolder | None,
    jobs: int | None,
    watch: Watch | None,
    only: Collection[str] | None = None,
) -> Comparison:
    results: dict[str, Result] = {}
    failures = {} if folder is None else {k: v for k, v in folder.failures().items() if k in grid.cells}
    cells = grid.cells if only is None else {name: grid.cells[name] for name in grid.cells if name in only}
    with closing(run_cells(cells, None if folder is None else folder.path, jobs, watch)) as outcomes:  # type: ignore[type-var]
        for cell, outcome in outcomes:
            earlier_reason = failures.pop(cell, None)
            if isinstance(outcome, Failure):
                log.warning("%s failed: %s", cell, outcome.reason)
                failures[cell] = outcome.reason
            else:
                results[cell] = outcome
            if folder is not None and failures.get(cell) != earlier_reason:
                folder.write_failures(failures)
    if not results:
        raise _all_failed(failures)
    if folder is not None and len(cells) < len(grid.cells):
        comparison = gathered(grid, folder)
    else:
        comparison = _comparison(grid, folder, results, failures)
    if folder is not None:
        _write_tables(comparison, folder.path)
    say(remark for result in results.values() for remark in result.summary.get("remarks", ()))
    return comparison


def _all_failed(failures: Mapping[str, str]) -> ProtofedError:
    cell, reason = next(iter(failures.items()))
    return ProtofedError(f"{cell}: {reason}" + (f" (all {len(failures)} runs failed)" if len(failures) > 1 else ""))


def _comparison(
    grid: Grid, folder: ComparisonFolder | None, results: Mapping[str, Result], failures: Mapping[str, str]
) -> Comparison:
    """The comparison of cells that have a result or have failed; the others are left."""
    return Comparison(
        {v.label: [results[c] for seed in grid.seeds if (c := v.cell(seed)) in results] for v in grid.variants},
        None if folder is None else folder.path,
        grid.variants,
        grid.columns,
        {cell: failures[cell] for cell in grid.cells if cell in failures},
        grid.seeds,
        [cell for cell in grid.cells if cell not in results and cell not in failures],
    )


def _run_part(grid: Grid, folder: ComparisonFolder, jobs: int | None, watch: Watch | None, part: Part) -> Comparison:
    """Run the cells of a part. What belongs to all parts is written under the folder's lock; the last part's tables stay."""
    mine = {name: grid.cells[name] for name in part.of_cells(grid.cells)}
    failed: dict[str, str] = {}
    with closing(run_cells(mine, folder.path, jobs, watch)) as outcomes:  # type: ignore[type-var]
        for cell, outcome in outcomes:
            if isinstance(outcome, Failure):
                log.warning("%s failed: %s", cell, outcome.reason)
                failed[cell] = outcome.reason
    with folder.merging():
        stored = folder.failures()
        failures = {cell: reason for cell, reason in stored.items() if cell not in mine} | failed
        if failures != stored:
            folder.write_failures(failures)
        comparison = gathered(grid, folder)
        if not comparison.left:
            if not any(comparison.results.values()):
                raise _all_failed(failures)
            _write_tables(comparison, folder.path)
    if comparison.left:  # the failures of other parts are theirs to say
        comparison = replace(comparison, failures=failed)
    return comparison


def gathered(grid: Grid, folder: ComparisonFolder) -> Comparison:
    """What the folder of a comparison holds by now of a grid: results of finished cells, failures, and what is left."""
    failures = folder.failures()
    finished = [cell for cell in grid.cells if cell not in failures and (folder.path / cell / SUMMARY).is_file()]
    return _comparison(grid, folder, {cell: load(folder.path / cell) for cell in finished}, failures)


def _write_tables(result: Comparison, folder: Path) -> None:
    rows, columns = result.rows(), result.columns
    write_atomically(folder / "results.csv", results_csv(rows).encode())
    write_atomically(folder / "table.md", comparison_markdown(rows, columns).encode())
    write_atomically(folder / "table.tex", comparison_latex(rows, columns).encode())


# --- reading a folder -------------------------------------------------------------------------------------------------
def is_comparison(folder: Path) -> bool:
    """Whether a folder is the folder of a comparison."""
    return ComparisonFolder(folder).exists()


def read_comparison(folder: Path) -> Grid:
    """Read the grid that a comparison was started with from its folder."""
    record = ComparisonFolder(folder).read_whole()
    cells = {cell: resolve(None, given) for cell, given in record.settings.items()}
    return Grid(record.variants, record.seeds, cells, record.columns)
