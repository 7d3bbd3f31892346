"""The console: a progress bar on a terminal, plain lines elsewhere, and tables."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from .. import ranks

if TYPE_CHECKING:
    from ..experiment.advise import Moment
    from ..experiment.compare import Progress as CellProgress
    from ..federation import Record
    from ..results.columns import Row

LINES = 20  # about the number of lines that a run prints where there is no terminal


def make_console(stderr: bool = False) -> Console:
    """Make the console of standard output, or of standard error. Without a terminal it is wide and folds no table."""
    if ranks.rank() != 0:
        return Console(stderr=stderr, quiet=not stderr)  # among several ranks, only the first one prints
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=140)


def print_table(console: Console, table: Table) -> None:
    """Print a table. A terminal folds it; in a log or a pipe it is as wide as it needs to be."""
    if not console.is_terminal:
        console.width = max(
            console.width, console.measure(table, options=console.options.update(max_width=10_000)).maximum
        )
    console.print(table)


def print_rows(rows: list[Row], columns: list[str] | None) -> None:
    """Print the table of a comparison and the notes below it.

    Args:
        rows: The variants.
        columns: The names of the columns; None takes the default ones.
    """
    from ..report.terminal import comparison_table, comparison_tables
    from ..results.columns import new_client_columns
    from ..results.notes import notes

    console = make_console()
    for table in comparison_tables(rows, columns, console.width if console.is_terminal else None):
        print_table(console, table)
    for note in notes(rows, columns):
        console.out(note, highlight=False)
    joined = new_client_columns(run for row in rows for run in row.usable)
    if joined and columns is None:
        below = "Clients that joined after the last round: accuracy in % after 0, 1 and 5 epochs of local training."
        print_table(console, comparison_table(rows, joined, below))


def log_to(console: Console) -> None:
    """Send the log messages of protofed to this console: in colour on a terminal, as plain lines elsewhere."""
    handler: logging.Handler
    if console.is_terminal:
        from rich.logging import RichHandler

        handler = RichHandler(console=console, show_path=False, show_time=False)
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger = logging.getLogger("protofed")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO if ranks.rank() == 0 else logging.ERROR)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        console=console,
    )


class RunWatch:
    """A watcher that shows the progress of one run: `with RunWatch(console, "fedsap").live() as watch: ...`."""

    def __init__(self, console: Console, label: str) -> None:
        self.console, self.label = console, label
        self.progress: Progress | None = None
        self.began, self.first = time.monotonic(), 0
        self.accuracy = ""

    @contextmanager
    def live(self) -> Iterator[RunWatch]:
        """Within this context a terminal shows the progress bar."""
        if not self.console.is_terminal:
            yield self
            return
        with _bar(self.console) as self.progress:
            self.task = self.progress.add_task(self.label, total=None, note="")
            yield self

    def __call__(self, record: Record, rounds: int) -> None:
        from ..evaluate.confusion import PREDICTIONS

        if record.metrics:
            accuracies = {kind: record.metrics.get(f"accuracy_{kind}") for kind in PREDICTIONS}
            self.accuracy = "".join(f"{kind} {value:6.2%}  " for kind, value in accuracies.items() if value is not None)
        note = f"{self.accuracy}loss {record.loss:.4f}"
        if self.progress is not None:
            self.progress.update(self.task, total=rounds, completed=record.round, note=note)
            return
        if self.first == 0:
            self.first = record.round
            self.began = time.monotonic() - record.seconds
        step = max(1, rounds // LINES)
        if record.round % step == 0 or record.round == rounds:
            spent = time.monotonic() - self.began
            left = spent / (record.round - self.first + 1) * (rounds - record.round)
            self.console.print(f"{self.label} round {record.round}/{rounds}  {note}  {spent:.1f} s, {left:.0f} s left")


def runs_line(cells: int, seeds: Sequence[int]) -> str:
    """What a comparison is about to run, so that whoever mistook a number of seeds for a seed sees it at once.

    >>> runs_line(6, [1234, 1235, 1236])
    '6 runs, with 3 seeds: 1234 to 1236'
    """
    first, last, count = seeds[0], seeds[-1], len(seeds)
    in_row = count > 2 and list(seeds) == list(range(first, last + 1))
    names = f"{first} to {last}" if in_row else ", ".join(map(str, seeds))
    words = "seed" if count == 1 else f"{count} seeds:"
    return f"{cells} run{'s' * (cells != 1)}, with {words} {names}"


class CompareWatch:
    """A watcher that shows the progress of a comparison: of the whole, and of each cell that is under way."""

    def __init__(self, console: Console, cells: int, seeds: Sequence[int] = ()) -> None:
        self.console, self.cells, self.seeds = console, cells, seeds
        self.finished = 0
        self.progress: Progress | None = None
        self.tasks: dict[str, TaskID] = {}

    @contextmanager
    def live(self) -> Iterator[CompareWatch]:
        """Say how many runs there are with which seeds; within this context a terminal shows the progress bars."""
        if self.seeds:
            self.console.print(runs_line(self.cells, self.seeds), markup=False, soft_wrap=True)
        if not self.console.is_terminal:
            yield self
            return
        with _bar(self.console) as self.progress:
            self.whole = self.progress.add_task("runs", total=self.cells, note="")
            yield self

    def __call__(self, cell: CellProgress) -> None:
        is_finished = cell.round >= cell.rounds
        self.finished += is_finished
        note = "" if cell.accuracy is None else f"{cell.by} {cell.accuracy:6.2%}"
        note += "" if cell.loss is None or not note else f"  loss {cell.loss:.4f}"
        note = note if cell.failed is None else "failed"
        if self.progress is None:
            if is_finished:
                self.console.print(f"[{self.finished}/{self.cells}] {cell.cell}  {note}", markup=False)
            return
        if cell.cell not in self.tasks:
            self.tasks[cell.cell] = self.progress.add_task(cell.cell, total=cell.rounds, note="")
        task = self.tasks[cell.cell]
        self.progress.update(task, completed=cell.round)
        if note:
            self.progress.update(task, note=note)
        if is_finished:
            self.progress.remove_task(self.tasks.pop(cell.cell))
            self.progress.advance(self.whole)


class AdviceWatch:
    """A watcher that shows the progress of a race: its stage, the run that was heard of last, and the time that is left."""

    def __init__(self, console: Console) -> None:
        self.console, self.stage = console, ""
        self.progress: Progress | None = None

    @contextmanager
    def live(self) -> Iterator[AdviceWatch]:
        """Within this context a terminal shows the progress bar."""
        if not self.console.is_terminal:
            yield self
            return
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[note]}"))
        with Progress(*columns, console=self.console) as self.progress:
            self.task = self.progress.add_task("race", total=None, note="")
            yield self

    def __call__(self, moment: Moment) -> None:
        left = f"{max(0.0, moment.budget - moment.elapsed):.0f} s left"
        if self.progress is not None:
            cell = moment.cell
            run = "" if cell is None else f"  {cell.cell} {cell.round}/{cell.rounds}"
            done = min(moment.elapsed, moment.budget)
            self.progress.update(
                self.task, description=moment.stage, total=moment.budget, completed=done, note=f"{left}{run}"
            )
        elif moment.stage != self.stage:
            self.stage = moment.stage
            self.console.print(f"{moment.elapsed:.0f} s: {moment.stage}, {left}", markup=False)
