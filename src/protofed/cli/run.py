"""The commands that run something: run, compare, sweep, reproduce, resume."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ProtofedError
from .console import CompareWatch, RunWatch, make_console, print_rows, print_table
from .options import (
    Columns,
    Config,
    Jobs,
    LauncherOption,
    Load,
    Out,
    Pairs,
    PartOption,
    Seeds,
    Words,
    given_settings,
    load_files,
    method_names,
    nothing_left,
    out_folder,
    parse_columns,
    parse_part,
    parse_seeds,
    writing_to,
)

if TYPE_CHECKING:
    from ..experiment.compare import Comparison, Grid
    from ..experiment.reproduce import Plan
    from ..outcome import Result


def run(
    method: Annotated[
        str | None,
        typer.Argument(help="The method; not needed where a file of settings names it.", autocompletion=method_names),
    ] = None,
    settings: Pairs = None,
    config: Config = None,
    out: Out = None,
    load: Load = None,
) -> None:
    """Run one method: `protofed run fedsap data=digits rounds=20`, or `protofed run --config settings.toml`."""
    from ..experiment.run import run as run_method
    from ..experiment.settings import resolve

    load_files(load)
    if method is not None and "=" in method:  # the first setting
        settings, method = [method, *(settings or ())], None
    if method is None and not config:
        raise typer.BadParameter("name one, or a file of settings that does", param_hint="METHOD")
    chosen = resolve(method, given_settings(config, settings))
    folder = out_folder(out, f"{chosen.method.name}-{getattr(chosen.data, 'title', 'data')}")
    with RunWatch(make_console(), chosen.method.name).live() as watch:
        result = run_method(chosen, out=folder, watch=watch)
    print_result(result)


def print_result(result: Result) -> None:
    """Print the table of a run and where its folder is. A run that failed ends the command with code 1."""
    from ..report.terminal import new_clients_table, summary_table
    from ..results.columns import Row
    from ..results.notes import losses_of

    console = make_console()
    console.print(summary_table(result.summary))
    if "new_clients" in result.summary:
        print_table(console, new_clients_table(result.summary))
    name = result.settings.method.name
    for note in losses_of([Row(name, name, {}, [result.summary])]):
        where = "summary.json says who" if note.startswith("attacked") else "rounds.jsonl says who and why"
        console.print(f"{note}; {where}", soft_wrap=True, markup=False)
    console.print(f"run folder: {result.folder}", soft_wrap=True)
    if result.failure:
        raise typer.Exit(1)


def compare(
    methods_and_settings: Words = None,
    no_local: Annotated[
        bool, typer.Option("--no-local", help="Leave Local out; with labels=server, server-only.")
    ] = False,
    controls: Annotated[
        bool, typer.Option("--controls", help="After each method that exchanges prototypes, its control (control=own).")
    ] = False,
    seeds: Seeds = "3",
    config: Config = None,
    out: Out = None,
    jobs: Jobs = None,
    part: PartOption = None,
    launcher: LauncherOption = None,
    columns: Columns = None,
    load: Load = None,
) -> None:
    """Compare methods under the same settings and seeds, Local among them: `protofed compare fedavg fedsap rounds=20`.

    A method may have a label and settings of its own: `"upper bound=fedavg?labels=all&lr=0.1"`.
    """
    from ..experiment.compare import make_grid, parse_words

    load_files(load)
    names, given = parse_words(methods_and_settings or ())
    grid = make_grid(
        names,
        local=not no_local,
        controls=controls,
        seeds=parse_seeds(seeds),
        config=config,
        columns=parse_columns(columns),
        given=given,
    )
    _run_grid(grid, folder_of(out, "compare", part), jobs, part, launcher, load)


def sweep(
    methods_and_settings: Words = None,
    over: Annotated[list[str] | None, typer.Option(help="An axis, key=v1,v2,v3; several make a product.")] = None,
    seeds: Seeds = "3",
    config: Config = None,
    out: Out = None,
    jobs: Jobs = None,
    part: PartOption = None,
    launcher: LauncherOption = None,
    columns: Columns = None,
    load: Load = None,
) -> None:
    """Run methods over values of settings: `protofed sweep fedsap --over scale=8,16,32 --over lr=0.01,0.05`."""
    from ..experiment.compare import make_grid, parse_axes, parse_words

    load_files(load)
    names, given = parse_words(methods_and_settings or ())
    grid = make_grid(
        names,
        over=parse_axes(over or []),
        seeds=parse_seeds(seeds),
        config=config,
        columns=parse_columns(columns),
        given=given,
    )
    _run_grid(grid, folder_of(out, "sweep", part), jobs, part, launcher, load)


def folder_of(out: Path | None, label: str, part: str | None) -> Path:
    """The folder that a comparison or a part of one writes. Parts meet in one folder, so it must have a name."""
    if part is not None and out is None:
        raise ProtofedError(f"--part {part}: the parts of a comparison meet in one folder; name it with --out")
    return out_folder(out, label)


def _run_grid(
    grid: Grid, folder: Path, jobs: int | None, part: str | None, launcher: str | None, load: list[Path] | None
) -> None:
    from ..experiment.compare import ComparisonFolder, gathered, run_grid

    chosen = parse_part(part)
    if launcher is not None:

        def make() -> None:
            ComparisonFolder.create(folder, grid.record()).close()

        if _launch(launcher, make, folder, len(grid.cells), jobs, part, load):
            _print_comparison(gathered(grid, ComparisonFolder(folder)))
        return
    cells = grid.cells if chosen is None else chosen.of_cells(grid.cells)
    with CompareWatch(make_console(), len(cells), grid.seeds).live() as watch:
        result = run_grid(grid, out=folder, jobs=jobs, watch=watch, part=chosen)
    _print_comparison(result)


def _launch(
    text: str,
    make: Callable[[], None],
    folder: Path,
    cells: int,
    jobs: int | None,
    part: str | None,
    load: list[Path] | None = None,
) -> bool:
    """Submit the parts of a comparison as an array job.

    Args:
        text: The option `--launcher`.
        make: Makes the folder, once the launcher is known to be there.
        folder: The folder.
        cells: The number of runs.
        jobs: The option `--jobs`, for each task.
        part: The option `--part`, which may not be given as well.
        load: The option `--load`, for each task.

    Returns:
        Whether all tasks have ended already.
    """
    from ..experiment.launch import Launcher
    from ..registry import parse_part as parse_choice

    if part is not None:
        raise ProtofedError(
            f"--launcher {text} and --part {part}: each task of the launcher has a part; use one of them"
        )
    launcher = parse_choice(Launcher.registry, text)
    with nothing_left(folder):
        launcher.check()
        make()
    words = [*(("--jobs", str(jobs)) if jobs else ())]
    for file in load or ():
        words += ["--load", str(file.resolve())]
    tasks = launcher.submit(folder, cells, words)
    console = make_console()
    ids = tasks[0].job_id.partition("_")[0]
    console.print(f"{len(tasks)} tasks of job {ids} run {cells} runs in {folder}", soft_wrap=True, markup=False)
    if not launcher.waits:
        line = f"the last task writes the tables; `protofed table {folder}` shows what has finished so far"
        console.print(line, soft_wrap=True, markup=False)
    return launcher.waits


def _print_comparison(result: Comparison) -> None:
    if any(result.results.values()):
        print_rows(result.rows(), result.columns)
    make_console().print(f"run folders: {result.folder}", soft_wrap=True)
    if result.left:
        line = f"{len(result.left)} runs are left to other parts; the last part to end writes the tables"
        make_console().print(line, soft_wrap=True)
    if failed := result.failed():
        advice = f"; `protofed resume {result.folder}` tries them again" if result.failures else ""
        line = f"failed: {', '.join(failed)}{advice}"
        make_console(stderr=True).print(line, style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1)


class Size(str, Enum):
    """The size of a reproduction."""

    laptop = "laptop"
    paper = "paper"


def reproduce(
    preset: Annotated[
        str | None, typer.Argument(metavar="[PAPER/TABLE]", help="The preset; without it, all are listed.")
    ] = None,
    settings: Pairs = None,
    size: Annotated[
        Size, typer.Option(help="laptop ends within the hour on two cores; paper has the paper's settings.")
    ] = Size.laptop,
    seeds: Annotated[str | None, typer.Option(help="How many seeds, or which; default: the preset's.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only columns that have this in their names.")] = None,
    rows: Annotated[list[str] | None, typer.Option(help="Only rows that have this name, or this in it.")] = None,
    jobs: Jobs = None,
    part: PartOption = None,
    launcher: LauncherOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder to write; one that was begun is continued.")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Write the ledger of what is measured in this folder of results.")
    ] = None,
) -> None:
    """Run a paper's table or figure, and print ours beside the paper's: `protofed reproduce fedsap/table1`."""
    from ..experiment import reproduce as reproductions
    from ..experiment.settings import parse_pairs

    if ledger is not None:
        for file in reproductions.write_ledger(ledger):
            make_console().print(str(file), soft_wrap=True, markup=False)
        return
    if preset is None:
        _print_presets()
        return
    seed_list = None if seeds is None else parse_seeds(seeds)
    given = parse_pairs(settings or [])
    plan = reproductions.plan(preset, size=size.value, seeds=seed_list, only=only or (), rows=rows or (), given=given)
    folder = out or Path("runs") / reproductions.folder_name(preset, size.value)
    writing_to(folder)
    if launcher is None:
        _reproduce(plan, folder, jobs, part)
    elif _launch(launcher, lambda: reproductions.begin_plan(plan, folder), folder, plan.cells, jobs, part):
        _reproduce(plan, folder, jobs)


def claims(
    results: Annotated[Path, typer.Argument(help="A folder of results, such as docs/results.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("claims.md"),
) -> None:
    """Write which of the papers' claims hold, from a folder of results: `protofed claims docs/results --out claims.md`."""
    from ..experiment.claims import write_claims

    write_claims(results, out)
    make_console().print(str(out), soft_wrap=True, markup=False)


def _reproduce(plan: Plan, folder: Path, jobs: int | None, part: str | None = None) -> None:
    from ..experiment.reproduce import TABLE, parts_of_columns, run_plan
    from ..report.terminal import plain_table

    console = make_console()
    chosen, cells = parse_part(part), plan.cells
    if chosen is not None:
        parts = parts_of_columns(plan, chosen)
        cells = sum(len(parts[column].of_cells(plan.grids[column].cells)) for column in plan.columns)
    with CompareWatch(console, cells, plan.seeds).live() as watch:
        result = run_plan(plan, out=folder, jobs=jobs, watch=watch, part=chosen)
    for title, (header, *lines) in result.tables():
        print_table(console, plain_table(header, lines, title))
    for note in (*(f"note: {note}" for note in plan.preset.file.notes), *result.below()):
        console.print(note, soft_wrap=True, markup=False)
    console.print(f"also in {folder / TABLE}, with the settings that differ", soft_wrap=True, markup=False)
    if result.failed:
        raise typer.Exit(1)


def _print_presets() -> None:
    from rich.table import Table
    from rich.text import Text

    from ..experiment import reproduce as reproductions

    table = Table("preset", "what", "runs", "laptop needs", "paper needs", title="papers' tables and figures")
    for name in reproductions.available():
        preset = reproductions.load_preset(name)
        runs = "none" if preset.file.counted else f"{len(preset.file.rows)} × {len(preset.file.columns)}"
        needs = ("\n".join(preset.all_needs(size)) or "nothing" for size in reproductions.SIZES)
        table.add_row(*map(Text, (name, preset.file.title, runs, *needs)))
    print_table(make_console(), table)


def resume(folder: Path, jobs: Jobs = None, part: PartOption = None, load: Load = None) -> None:
    """Continue a run, a comparison, a sweep or a reproduction that was stopped, from its last checkpoint."""
    from ..experiment import reproduce as reproductions
    from ..experiment.compare import is_comparison, read_comparison, resume_comparison
    from ..experiment.run import resume as resume_run

    load_files(load)
    writing_to(folder)
    if reproductions.is_reproduction(folder):
        _reproduce(reproductions.resumed_plan(folder), folder, jobs, part)
    elif is_comparison(folder):
        chosen, grid = parse_part(part), read_comparison(folder)
        cells = grid.cells if chosen is None else chosen.of_cells(grid.cells)
        with CompareWatch(make_console(), len(cells), grid.seeds).live() as watch_cells:
            result = resume_comparison(folder, jobs=jobs, watch=watch_cells, part=chosen)
        _print_comparison(result)
    elif part is not None:
        raise ProtofedError(f"--part {part}: {folder} is no comparison, and one run has no parts")
    else:
        with RunWatch(make_console(), folder.name).live() as watch:
            finished = resume_run(folder, watch=watch)
        print_result(finished)
