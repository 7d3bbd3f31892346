"""The command that measures speed: bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import make_console


def bench(
    workloads: Annotated[
        list[str] | None, typer.Argument(metavar="[WORKLOAD]...", help="The workloads; default: all.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything that was measured here.")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the tables here.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Turns of each contender; default: 3.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, to see that it works.")] = False,
    beside: Annotated[
        Path | None, typer.Option(help="Another checkout of protofed: train in turns with its code, and compare.")
    ] = None,
) -> None:
    """Measure the engines beside a hand-written loop and beside the limit: `protofed bench cnn28`."""
    from ..bench import run_bench

    files = {"json_file": json_file, "markdown_file": markdown_file, "beside": beside}
    run_bench(workloads or (), repeats=repeats, quick=quick, console=make_console(), **files)
