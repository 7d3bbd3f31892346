"""`protofed bench`: the speed of the engines, compared with a hand-written loop and with what the hardware allows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..disk import write_atomically
from ..errors import ProtofedError, unknown
from . import measure
from .beside import beside_markdown, measure_beside
from .report import markdown, print_results
from .workloads import BESIDE, NAMES, TRAINING

__all__ = ["NAMES", "markdown", "measure", "print_results", "run_bench"]


def run_bench(
    workloads: Sequence[str] = (),
    *,
    repeats: int | None = None,
    quick: bool = False,
    json_file: Path | None = None,
    markdown_file: Path | None = None,
    beside: Path | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure workloads, print tables and write files.

    Args:
        workloads: The names of the workloads; all of them where none is named.
        repeats: The number of turns.
        quick: Whether tiny sizes are measured, which test the program and say nothing about speed.
        json_file: The file for all results.
        markdown_file: The file for the tables.
        beside: Another checkout of protofed, with whose code training takes turns, or `evaluation`, `servers` and `around`
            where only these are measured.
        console: Where tables are printed.

    Returns:
        All results. `run_bench(["cnn28"], repeats=3)`
    """
    console = console or Console()
    for name in workloads:
        if name not in NAMES:
            raise unknown("workload", name, NAMES)
    for file in (json_file, markdown_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise ProtofedError(f"{file}: its folder does not exist")
    turns = repeats if repeats is not None else 2 if quick else 3

    def say(text: str) -> None:
        console.print(text, markup=False, style="dim", soft_wrap=True)

    if beside is not None and (not workloads or not BESIDE.issuperset(workloads)):
        results = measure_beside(workloads or TRAINING, beside, repeats=turns, quick=quick, say=say)
        if json_file is not None:
            write_atomically(json_file, (json.dumps(results, indent=1) + "\n").encode())
        if markdown_file is not None:
            write_atomically(markdown_file, beside_markdown(results).encode())
        return results
    results = measure.measure(dict.fromkeys(workloads or NAMES), repeats=turns, quick=quick, say=say, beside=beside)
    print_results(results, console)
    if json_file is not None:
        write_atomically(json_file, (json.dumps(results, indent=1) + "\n").encode())
    if markdown_file is not None:
        write_atomically(markdown_file, markdown(results).encode())
    return results
