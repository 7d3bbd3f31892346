"""The command `demo`: the first run, which shows when averaging networks and exchanging prototypes help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import CompareWatch, make_console, print_table
from .options import Jobs, Seeds, out_folder, parse_seeds, writing_to

if TYPE_CHECKING:
    from ..experiment.demo import Shown


def demo(
    situations: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SITUATION]...", help="alike, wired, enough, networks; default: the first three."),
    ] = None,
    seeds: Seeds = "3",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder to write; one that was begun is continued.")
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Show when averaging networks and when exchanging prototypes helps, in small situations: `protofed demo`."""
    from ..experiment.demo import LESSON, cells, chosen, demonstrate

    names, seed_list = situations or [], parse_seeds(seeds)
    some = chosen(names)
    folder = writing_to(out) if out is not None else out_folder(None, "demo")
    shown: list[Shown] = []
    with CompareWatch(make_console(), cells(some, folder, seed_list)).live() as watch:
        for each in demonstrate(folder, names, seeds=seed_list, jobs=jobs, watch=watch):
            shown.append(each)
    for each in shown:
        _print(each)
    console = make_console()
    console.print(f"also in {folder / LESSON}", soft_wrap=True, markup=False)
    console.print(f"run folders: {folder} (`protofed report {folder}/{some[0].name}` makes a page)", soft_wrap=True)


def _print(shown: Shown) -> None:
    from ..report.terminal import comparison_tables

    console = make_console()
    console.print(f"\n{shown.situation.title}", style="bold", markup=False, soft_wrap=True)
    result = shown.comparison
    width = console.width if console.is_terminal else None
    for table in comparison_tables(result.rows(), result.columns, width):
        print_table(console, table)
    console.print(" ".join(shown.lesson), soft_wrap=True, markup=False)
