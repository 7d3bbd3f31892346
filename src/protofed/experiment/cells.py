"""Run the cells of a comparison one after another, or side by side in processes of their own.

A cell that fails does not stop the others. A process that is killed (by the kernel when memory is short, or by a person)
is started again, and its run goes on from its last checkpoint.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

from ..data import Dataset
from ..errors import ProtofedError, Stopped
from ..federation import Record, checkpoint
from ..federation.choose import cores
from ..outcome import Result
from ..results.rows import SUMMARY
from . import stop
from .run import resume, run
from .settings import Settings
from .shares import Pace

log = logging.getLogger("protofed")

PATIENCE = 0.5  # seconds between two checks of whether the parent process still runs
TRIES = 3  # of a cell whose process is killed
LEAVE = 10.0  # seconds that a process has to end by itself


@dataclass(frozen=True)
class Progress:
    """The progress of one cell, which a watcher gets after every round and when the cell has failed."""

    cell: str
    round: int
    rounds: int
    loss: float | None
    accuracy: float | None
    by: Literal["head", "accuracy"] = "head"
    """The prediction of the accuracy: by head, or the method's own where it trains no head."""
    failed: str | None = None
    """Why the cell has failed, if it has; this is then its last progress."""


Watch = Callable[[Progress], None]


@dataclass(frozen=True)
class Failure:
    """A cell that gave no result, and why."""

    reason: str


@dataclass(frozen=True)
class Cell:
    """One run of a comparison: its name, its settings, and the folder it writes, if any."""

    name: str
    settings: Settings
    folder: Path | None
    until: int | None = None
    """The round after which it pauses; None runs all of them."""

    @property
    def rounds(self) -> int:
        """The number of rounds to which it is run."""
        rounds = self.settings.general.rounds
        return rounds if self.until is None else min(self.until, rounds)

    @property
    def left(self) -> float:
        """The share of its rounds that is left to run, by the last checkpoint in its folder."""
        if self.folder is None:
            return 1.0
        if (self.folder / SUMMARY).is_file():
            return 0.0
        saved = checkpoint.rounds_in(self.folder / "checkpoint")
        done = int(saved[0].name.removeprefix("round-")) if saved else 0
        return max(0.0, 1 - done / self.rounds)

    def with_workers(self, workers: int) -> Cell:
        """The same cell with a number of worker processes, on which results do not depend."""
        return replace(self, settings=self.settings.with_engine(replace(self.settings.engine, workers=workers)))

    def failed(self, reason: str) -> Progress:
        """The progress that says that this cell has failed."""
        return Progress(self.name, self.rounds, self.rounds, None, None, failed=reason)


def run_cells(
    settings: Mapping[str, Settings],
    folder: Path | None,
    jobs: int | None = None,
    watch: Watch | None = None,
    until: int | None = None,
) -> Iterator[tuple[str, Result | Failure]]:
    """Run cells, or the rounds that are left of them.

    Args:
        settings: The settings of each cell, by its name.
        folder: The folder in which each cell has a folder of its own name; None writes nothing.
        jobs: The number of runs at a time; None takes as many as there are cores for.
        watch: A function that is called with the progress of a cell after each round.
        until: The round after which every cell pauses, so that it can go on later; None runs all rounds.

    Returns:
        An iterator over the cells' names and results, in the order in which they end. Closing it stops what runs.
    """
    if not settings:
        return _one_by_one([], watch)
    widest = max(max(1, s.general.threads, s.general.workers) for s in settings.values())
    jobs = min(len(settings), jobs or max(1, cores() // widest))
    if jobs > 1 and multiprocessing.current_process().daemon:
        log.warning("a daemonic process may not start others; the runs go one after another")
        jobs = 1
    share = max(1, cores() // jobs)
    cells = []
    open_ended = set()
    for name, one in settings.items():
        cell = Cell(name, one, None if folder is None else folder / name, until)
        if not one.engine.workers and not one.local.shared_optimiser:  # one that is passed on needs one process
            open_ended.add(name)
            cell = cell.with_workers(share)
        cells.append(cell)
    return _one_by_one(cells, watch) if jobs == 1 else _side_by_side(Queue(cells, open_ended), jobs, watch)


class Queue:
    """The cells that wait, of which the longest is taken first, so that no core is left idle for long at the end.

    How long a cell takes is estimated from its settings, and from the time that finished cells took.
    """

    def __init__(self, cells: list[Cell], open_ended: Collection[str] = ()) -> None:
        """
        Args:
            cells: The cells, in the order of which equally long ones are taken.
            open_ended: The names of those whose number of workers is not theirs to say.
        """
        self.waiting, self.open_ended, self.pace = list(cells), open_ended, Pace()
        self.left = {cell.name: cell.left for cell in cells}
        self.begun: dict[str, tuple[Cell, float]] = {}

    def expected(self, cell: Cell) -> float:
        """The seconds that what is left of a cell is expected to take; before any has finished, its work."""
        return self.pace.expected(cell.settings) * self.left[cell.name]

    def take(self) -> Cell:
        """The next cell to begin. The last one gets all cores where those that run will soon have ended."""
        cell = max(self.waiting, key=self.expected)
        self.waiting.remove(cell)
        running = [max(0.0, self.expected(c) - (time.monotonic() - t)) for c, t in self.begun.values()]
        alone = self.pace.ratios and 2 * max(running, default=0.0) < self.expected(cell)
        if not self.waiting and alone and cell.name in self.open_ended:
            cell = cell.with_workers(cores())
        self.begun[cell.name] = cell, time.monotonic()
        return cell

    def give_back(self, cell: Cell) -> None:
        """Put a cell back whose process has died, or could not be started."""
        self.begun.pop(cell.name, None)
        self.left[cell.name] = cell.left
        self.waiting.insert(0, cell)

    def ended(self, cell: Cell, result: object) -> None:
        """Note that a cell has ended and, where it has a result, how long it took."""
        _, began = self.begun.pop(cell.name)
        if not isinstance(result, Failure):
            self.pace.add(cell.settings, time.monotonic() - began, self.left[cell.name])


# --- one cell ---------------------------------------------------------------------------------------------------------
def _attempt(cell: Cell, watch: Watch | None) -> Result | Failure:
    """Run one cell. An error in it is its failure; an error in `watch` is raised to the caller."""
    watch_errors: list[Exception] = []

    def tell(progress: Progress) -> None:
        try:
            if watch is not None:
                watch(progress)
        except Exception as error:
            watch_errors.append(error)
            raise

    try:
        return _run_cell(cell, tell)
    except ProtofedError as error:
        reason = _one_line(str(error))
    except Exception as error:
        if error in watch_errors:
            raise
        log.debug("%s", cell.name, exc_info=True)
        reason = _one_line(f"{type(error).__name__}: {error}")
    tell(cell.failed(reason))
    return Failure(reason)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _run_cell(cell: Cell, tell: Watch) -> Result:
    last = 0

    def report(record: Record, rounds: int) -> None:
        nonlocal last
        last = record.round
        tell(Progress(cell.name, record.round, min(rounds, cell.rounds), record.loss, *_accuracy(record.metrics)))

    folder = cell.folder
    if folder is not None and (folder / "settings.toml").is_file():
        data = cell.settings.data
        result = resume(folder, data=data if isinstance(data, Dataset) else None, watch=report, until=cell.until)
    else:
        result = run(cell.settings, out=folder, watch=report, until=cell.until)
    if folder is None:  # or a comparison in memory would hold the data and models of all its runs
        result = replace(result, remake=None)
    if last < cell.rounds:  # nothing was left to run
        tell(Progress(cell.name, cell.rounds, cell.rounds, None, *_accuracy(result.summary["last_round"])))
    return result


def _accuracy(metrics: Mapping[str, Any]) -> tuple[float | None, Literal["head", "accuracy"]]:
    """The accuracy by head, or the method's own where it trains no head, and which of the two it is."""
    head = metrics.get("accuracy_head")
    return (metrics["accuracy"], "accuracy") if head is None and "accuracy" in metrics else (head, "head")


# --- many cells -------------------------------------------------------------------------------------------------------
def _one_by_one(cells: list[Cell], watch: Watch | None) -> Iterator[tuple[str, Result | Failure]]:
    with stop.listening():  # a request in a run's last round would otherwise be gone with the run
        for cell in cells:
            if stop.requested():
                raise Stopped("stopped", 143)
            yield cell.name, _attempt(cell, watch)


def _side_by_side(queue: Queue, jobs: int, watch: Watch | None) -> Iterator[tuple[str, Result | Failure]]:
    with stop.interrupting():
        yield from _processes(queue, jobs, watch)


def _processes(queue: Queue, jobs: int, watch: Watch | None) -> Iterator[tuple[str, Result | Failure]]:
    """Run each cell in a process of its own: one that dies ends no other, and its memory is freed with it."""
    tries = Counter[str]()
    running: dict[Any, tuple[Cell, Any]] = {}  # by the pipe through which a process sends
    ready: Any
    graceful = False
    try:
        while queue.waiting or running:
            while queue.waiting and len(running) < jobs:
                cell = queue.take()
                try:
                    messages, process = _begin(cell)
                except OSError as error:
                    queue.give_back(cell)
                    jobs = len(running)
                    log.warning("no further process could be started (%s); %d at a time", error, max(1, jobs))
                    break
                running[messages] = cell, process
            if not running:
                yield from _one_by_one(queue.waiting, watch)
                return
            for ready in connection.wait(list(running)):
                cell, process = running[ready]
                message = _receive(ready)
                if isinstance(message, Progress):
                    if watch is not None:
                        watch(message)
                    continue
                del running[ready]
                ready.close()
                _join(process)
                if message is not None:
                    queue.ended(cell, message)
                    yield cell.name, message if isinstance(message, Failure) else Result(cell.settings, *message)
                    continue
                tries[cell.name] += 1
                if (failure := _died(queue, cell, process.exitcode, tries[cell.name])) is not None:
                    if watch is not None:
                        watch(cell.failed(failure.reason))
                    yield cell.name, failure
    except Stopped:  # after SIGTERM every run finishes its round
        graceful = True
        raise
    finally:
        for _, process in running.values():  # the comparison is stopped, so nobody would use their results
            process.terminate() if graceful else process.kill()
        for messages, (_, process) in running.items():
            _drain(messages)
            process.join()


def _died(queue: Queue, cell: Cell, code: int | None, tries: int) -> Failure | None:
    """Give a cell whose process died back to the queue; None, or its failure where it was tried too often."""
    reason = _death(code)
    if tries < TRIES:
        log.warning("%s: %s; it is started again", cell.name, reason)
        queue.give_back(cell)
        return None
    failure = Failure(f"{reason}, {TRIES} times")
    queue.ended(cell, failure)
    return failure


def _begin(cell: Cell) -> tuple[connection.Connection, Any]:
    """Start a cell's process. It is forked where possible, which is quick and keeps methods and data of a person's own.

    Messages come through a pipe, because queues need semaphores, for which a small `/dev/shm` has no room.
    """
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    messages, end = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(os.getpid(), cell, end))  # type: ignore[attr-defined]
    try:
        process.start()
    except OSError:
        messages.close()
        raise
    finally:
        end.close()  # the other end is the process's alone, so that its death closes the pipe
    return messages, process


def _receive(messages: Any) -> Any:
    """The next message, or None where the process died before it had sent all of it."""
    try:
        return messages.recv()
    except (EOFError, OSError):
        return None


def _drain(messages: Any) -> None:
    """Read until the process closes its end: one that waits for room in the pipe would never end."""
    while _receive(messages) is not None:
        pass
    messages.close()


def _join(process: Any) -> None:
    process.join(LEAVE)
    if process.is_alive():
        process.kill()
        process.join()


def _death(code: int | None) -> str:
    """The reason why a process ended without a result."""
    if code is not None and code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process ended with code {code} and no result"


def _work(parent: int, cell: Cell, messages: connection.Connection) -> None:
    """Run a cell in its process, and send its progress and its result to the parent.

    The run is in a thread of its own: OpenMP's other threads do not survive the fork, and the main thread would wait
    for them where the parent has computed with several.
    """
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of a terminal; the parent stops this one
    stop.listen()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        with ThreadPoolExecutor(1) as thread:
            outcome = thread.submit(_attempt, cell, messages.send).result()
    except Stopped:  # its round is finished and saved
        return
    messages.send(outcome if isinstance(outcome, Failure) else (outcome.metrics, outcome.summary, outcome.folder))


def _end_with(parent: int) -> None:
    """End this process when its parent has ended: otherwise it would write into a folder that `resume` has taken over."""
    while os.getppid() == parent:
        time.sleep(PATIENCE)
    os._exit(1)
