"""A comparison: variants × seeds, each cell a run of its own with its own folder, as many at a time as there are cores.

`compare` has the variants that are listed; `sweep` has their product with axes.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..disk import write_atomically
from ..errors import ProtofedError, Stopped
from ..grammar import parse_axes
from ..outcome import Result
from ..results.archive import is_archive
from ..results.comparison import ComparisonFolder, ComparisonRecord, Variant, failures_of
from ..results.tables import Row, comparison_latex, comparison_markdown, results_csv
from .cells import Failure, Progress, Watch, run_cells
from .settings import resolve
from .variants import Files, Grid, make_grid, parse_entries, parse_words

__all__ = [
    "Comparison",
    "ComparisonFolder",
    "ComparisonRecord",
    "Grid",
    "Progress",
    "Variant",
    "Watch",
    "compare",
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


@dataclass(frozen=True)
class Comparison:
    """Results by label of the variant, one for each seed whose run has finished.

    `failures` has the reasons of the runs that failed, by the name of the cell: `fedavg-seed1234`.
    """

    results: dict[str, list[Result]]
    folder: Path | None = None
    variants: list[Variant] = field(default_factory=list)
    columns: list[str] | None = None
    failures: dict[str, str] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=list)

    def summaries(self) -> dict[str, list[dict[str, Any]]]:
        return {label: [r.summary for r in runs] for label, runs in self.results.items()}

    def failed(self) -> dict[str, str]:
        """Every run that is worth nothing, and why: those that failed, and those in which all clients were dropped."""
        empty = {
            variant.cell(result.summary["seed"]): result.failure
            for variant in self.variants
            for result in self.results[variant.label]
            if result.failure is not None
        }
        return {**self.failures, **empty}

    def rows(self) -> list[Row]:
        """The lines of a table."""
        return [
            Row(v.label, v.method, v.settings, runs, failures_of(v, self.seeds, self.failures))
            for v in self.variants
            for runs in [[result.summary for result in self.results[v.label]]]
        ]


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
    """Run every method with every seed under the same settings: `compare(["fedavg", "fedsap"], rounds=20)`.

    Args:
        names: methods. One may have a label and settings of its own: `"upper bound=fedavg?labels=all"`.
        local: whether Local is run beside them.
        seeds: `3` means three from `seed` on; a list says which.
        out: the folder to write, which must not exist yet; without it nothing is written.
        jobs: runs at a time; by default as many as there are cores.
        watch: is told of each round of each run.
        config: one file of settings or several; later ones go over earlier ones, and keywords over all.
        columns: the columns of the tables that are written.
        given: settings, as on the command line.

    Returns:
        The results of the runs that finished, and why the others failed. An error is raised where all of them failed.
    """
    grid = make_grid(names, local=local, seeds=seeds, config=config, columns=columns, given=given)
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
    """Run every method with every combination of values and every seed: `sweep(["fedsap"], over={"lr": [0.01, 0.1]})`.

    Args:
        names: methods, as `compare` has them.
        over: the axes, any key with its values. A method that an axis does not speak to (`fedsap.scale`) is run once
            for all its values.
        seeds, out, jobs, watch, config, columns, given: as `compare` has them.

    Returns:
        As `compare` does.
    """
    grid = make_grid(names, over=over or {}, seeds=seeds, config=config, columns=columns, given=given)
    return run_grid(grid, out=out, jobs=jobs, watch=watch)


def run_grid(grid: Grid, *, out: str | Path | None, jobs: int | None, watch: Watch | None) -> Comparison:
    """Run all cells of a grid, in a new folder where one is named."""
    folder = None if out is None else ComparisonFolder.create(Path(out), grid.record())
    return _run_in(folder, grid, jobs, watch)


def resume_comparison(folder: Path, *, jobs: int | None = None, watch: Watch | None = None) -> Comparison:
    """Finish a comparison that was stopped: finished runs are kept, begun ones resumed, failed ones tried again."""
    if is_archive(folder):
        raise ProtofedError(f"{folder}: an archive of a comparison; there is nothing in it to go on from")
    grid = read_comparison(folder)
    return _run_in(ComparisonFolder.open(folder), grid, jobs, watch)


def _run_in(folder: ComparisonFolder | None, grid: Grid, jobs: int | None, watch: Watch | None) -> Comparison:
    """Run what is left of a grid, and say how to go on where it is stopped."""
    try:
        return _run(grid, folder, jobs, watch)
    except KeyboardInterrupt as error:
        if folder is None:
            raise
        code = error.code if isinstance(error, Stopped) else 130
        raise Stopped(f"stopped; `protofed resume {shlex.quote(str(folder.path))}` goes on", code) from None
    finally:
        if folder is not None:
            folder.close()


def _run(grid: Grid, folder: ComparisonFolder | None, jobs: int | None, watch: Watch | None) -> Comparison:
    results: dict[str, Result] = {}
    failures = {} if folder is None else {k: v for k, v in folder.failures().items() if k in grid.cells}
    with closing(run_cells(grid.cells, None if folder is None else folder.path, jobs, watch)) as outcomes:  # type: ignore[type-var]
        for cell, outcome in outcomes:
            before = failures.pop(cell, None)
            if isinstance(outcome, Failure):
                log.warning("%s failed: %s", cell, outcome.reason)
                failures[cell] = outcome.reason
            else:
                results[cell] = outcome
            if folder is not None and failures.get(cell) != before:
                folder.write_failures(failures)
    if not results:
        cell, reason = next(iter(failures.items()))
        raise ProtofedError(f"{cell}: {reason}" + (f" (all {len(failures)} runs failed)" if len(failures) > 1 else ""))
    found = {v.label: [results[c] for seed in grid.seeds if (c := v.cell(seed)) in results] for v in grid.variants}
    failures = {cell: failures[cell] for cell in grid.cells if cell in failures}
    comparison = Comparison(
        found, None if folder is None else folder.path, grid.variants, grid.columns, failures, grid.seeds
    )
    if folder is not None:
        _write_tables(comparison, folder.path)
    return comparison


def _write_tables(result: Comparison, folder: Path) -> None:
    rows, columns = result.rows(), result.columns
    write_atomically(folder / "results.csv", results_csv(rows).encode())
    write_atomically(folder / "table.md", comparison_markdown(rows, columns).encode())
    write_atomically(folder / "table.tex", comparison_latex(rows, columns).encode())


# --- what a folder holds ----------------------------------------------------------------------------------------------
def is_comparison(folder: Path) -> bool:
    """Whether a folder is a comparison's."""
    return ComparisonFolder(folder).exists()


def read_comparison(folder: Path) -> Grid:
    """The grid that a folder was begun with."""
    record = ComparisonFolder(folder).read_whole()
    cells = {cell: resolve(None, given) for cell, given in record.settings.items()}
    return Grid(record.variants, record.seeds, cells, record.columns)
