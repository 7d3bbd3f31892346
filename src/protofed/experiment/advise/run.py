"""The race itself: runs in a folder, several at a time, within a time budget. What is on disk is never run again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ProtofedError
from ...evaluate.confusion import PREDICTIONS
from ...federation.choose import cores, threads_kept
from ...results.read import Run, is_run, read_run
from ...results.rows import LAST
from ..build import build
from ..cells import Failure, Progress, run_cells
from ..settings import Settings
from .plan import Division, Entry
from .race import WINDOW, Curve, Standing, affordable, beaten, in_order, level, makespan, projected, rungs
from .verdict import LEAST, Interval, Measured, better_ways, close_to, differences, interval

RACE, FINAL = "race", "final"  # folders of the runs that are raced, and of those that are tested
LENGTHS = (300, 100, 30)  # rounds of a run, of which the longest is taken that fits the time
MOST_SEEDS = 10
MOST_CLOSE = 4  # entries that get further seeds beside the leader and Local
CAUTION = 1.5  # a method whose pace is not known is taken to be slower than Local by so much
GRACE = 1.05  # of the budget, after which what runs is stopped
SHARES = (0.4, 0.4, 0.5)  # of the time that is left for racing, the most that a rung may take
FILL = 0.6  # of the budget, that a race of the length that is chosen may take by the estimate
TRIAL = 3  # rounds of Local by which the pace is first measured


class TimeUp(Exception):
    """The budget is spent; what runs is stopped, and goes on in the next call."""


@dataclass(frozen=True)
class Moment:
    """How far the race is, which a watcher gets at each stage and after each round of a run."""

    stage: str
    elapsed: float
    budget: float
    cell: Progress | None = None


Watch = Callable[[Moment], None]


# --- reading ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Cell:
    """What is on disk of one entry with one seed."""

    run: Run | None

    @property
    def reached(self) -> int:
        """The last round it has run."""
        return 0 if self.run is None else self.run.last

    @property
    def failure(self) -> str | None:
        """Why a finished run has no usable figures, if it has none."""
        return None if self.run is None or self.run.summary is None else self.run.summary.get("failure")

    def ways(self) -> list[str]:
        """The ways of predicting that were measured."""
        rows = [] if self.run is None else self.run.clients
        return [by for by in PREDICTIONS if rows and f"accuracy_{by}" in rows[-1]]

    def curve(self, by: str, until: int) -> Curve:
        """The mean accuracy over sites by round, until a round."""
        assert self.run is not None
        points = {row["round"]: _mean(row[f"accuracy_{by}"]) for row in self.run.clients if row["round"] <= until}
        return Curve(tuple(points), tuple(points.values()))

    def accuracies(self, by: str, at: int, rounds: int) -> list[float | None]:
        """Each site's accuracy at a round: the mean of the last five rounds of a whole run, else of the last fifth."""
        assert self.run is not None
        rows = [row for row in self.run.clients if row["round"] <= at]
        recent = [row for row in rows if row["round"] > (rounds - LAST if at == rounds else WINDOW * at)] or rows[-1:]
        by_site = zip(*(row[f"accuracy_{by}"] for row in recent), strict=True)
        return [_mean(values) if any(v is not None for v in values) else None for values in by_site]

    def samples(self) -> list[int]:
        """The number of rows on which each site is scored."""
        return [] if self.run is None or not self.run.clients else list(self.run.clients[-1]["samples"])

    def bytes_per_round(self) -> tuple[float, float]:
        """The bytes up and down of a round, all sites together."""
        rows = [] if self.run is None else self.run.rounds
        sums = [sum(sum(row[way].values()) for row in rows) / max(1, len(rows)) for way in ("up", "down")]
        return sums[0], sums[1]

    def seconds_per_round(self) -> float | None:
        """The seconds of a round, without evaluation."""
        rows = [] if self.run is None else self.run.rounds
        return sum(row["seconds"] for row in rows) / len(rows) if rows else None


def _mean(values: Iterable[float | None]) -> float:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else 0.0


# --- running ----------------------------------------------------------------------------------------------------------
@dataclass
class Pace:
    """How long a round of each entry takes, as it was seen."""

    start_up: float
    round: float
    seen: dict[str, tuple[float, int]] = field(default_factory=dict)

    def note(self, label: str, seconds: float, rounds: int) -> None:
        """Take note of some rounds of an entry."""
        if rounds < 1:
            return
        before, number = self.seen.get(label, (0.0, 0))
        self.seen[label] = before + seconds, number + rounds

    def cost(self, label: str, method: str, rounds: int) -> float:
        """The seconds of some rounds of an entry: by its own pace, else by that of its method, else by Local's."""
        own = self.seen.get(label) or next((v for k, v in self.seen.items() if k.split()[0] == method), None)
        pace = CAUTION * self.round if own is None else own[0] / own[1]
        return self.start_up + rounds * pace if rounds else 0.0


def measured_pace(settings: Settings) -> Pace:
    """Run a few rounds of Local, of which nothing is kept, to know how long a round takes."""
    began = time.perf_counter()
    with threads_kept():
        _, federation = build(settings.with_general(rounds=TRIAL))
        try:
            ready = time.perf_counter()
            for _ in federation:
                pass
        finally:
            federation.engine.close()
    return Pace(ready - began + 0.1, (time.perf_counter() - ready) / TRIAL)


def race_rounds(entries: int) -> float:
    """The rounds of a whole race in units of one run's: all entries to the first rung, half to the second, a quarter to
    the last; two more seeds for three entries; the test of two, and a control."""
    return entries / 9 + entries / 2 * (1 / 3 - 1 / 9) + entries / 4 * (2 / 3) + 6 + 3


def fitting_length(pace: Pace, entries: int, seconds: float, jobs: int) -> int:
    """The longest of the usual lengths of a run of which a whole race fits the time with room to spare, or the shortest.

    Args:
        pace: The pace of Local.
        entries: The number of entries.
        seconds: The budget.
        jobs: The number of runs at a time.

    Returns:
        The number of rounds.
    """
    for rounds in LENGTHS:
        runs = entries * 1.75 + 9
        needed = race_rounds(entries) * rounds * CAUTION * pace.round + runs * pace.start_up
        if needed / jobs <= FILL * seconds:
            return rounds
    return LENGTHS[-1]


class Race:
    """A race in a folder."""

    def __init__(
        self,
        division: Division,
        entries: Sequence[Entry],
        rounds: int,
        folder: Path,
        pace: Pace,
        budget: float,
        began: float,
        jobs: int | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.division, self.entries, self.rounds, self.folder = division, list(entries), rounds, folder
        self.pace, self.budget, self.began, self.watch = pace, budget, began, watch
        widest = max(max(1, e.settings.general.threads, e.settings.general.workers) for e in entries)
        self.jobs = jobs or max(1, cores() // widest)
        self.seed = division.base.general.seed
        self.every = division.raced(entries[0].settings, self.seed).general.evaluate_every
        self.rungs = rungs(rounds, self.every)
        self.dropped: dict[str, int] = {}  # by label, the round after which it was beaten
        self.failures: dict[str, str] = {}
        self.stage = ""
        self._cells: dict[Path, Cell] = {}

    # --- time
    @property
    def elapsed(self) -> float:
        """The seconds since the call."""
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        """The seconds that are left of the budget."""
        return self.budget - self.elapsed

    def cost(self, entry: Entry, rounds: int) -> float:
        """The seconds of some further rounds of an entry."""
        return self.pace.cost(entry.label, entry.method, rounds)

    def reserve(self) -> float:
        """The seconds that the control and the test of the winner and of Local will take, as far as one can know."""
        return makespan([self.usual_cost(self.rounds)] * 3, self.jobs)

    def usual_cost(self, rounds: int) -> float:
        """The seconds of some rounds of an entry like most."""
        return statistics.median(self.cost(e, rounds) for e in self.alive() or self.entries)

    # --- cells
    def alive(self) -> list[Entry]:
        """The entries that are neither dropped nor have failed."""
        return [e for e in self.entries if e.label not in self.dropped and e.label not in self.failures]

    def path(self, entry: Entry, seed: int, control: bool = False) -> Path:
        """The folder of an entry's run with a seed."""
        return (
            self.folder / RACE / (f"{entry.variant.folder}-control-seed{seed}" if control else entry.variant.cell(seed))
        )

    def cell(self, entry: Entry, seed: int | None = None, control: bool = False) -> Cell:
        """What there is of an entry's run with a seed."""
        return self._read(self.path(entry, self.seed if seed is None else seed, control))

    def _read(self, path: Path) -> Cell:
        if path not in self._cells:
            self._cells[path] = Cell(read_run(path) if is_run(path) else None)
        return self._cells[path]

    def tell(self, stage: str, cell: Progress | None = None) -> None:
        """Tell the watcher how far the race is."""
        self.stage = stage
        if self.watch is not None:
            self.watch(Moment(stage, self.elapsed, self.budget, cell))

    def run(self, runs: Mapping[Path, tuple[Entry, Settings]], until: int, stage: str) -> None:
        """Run what is left until a round of some runs, all in one folder, several at a time.

        Args:
            runs: The entry and the settings of each run, by its folder.
            until: The round after which they pause.
            stage: What is being done, in words.
        """
        todo = {path: one for path, one in runs.items() if self._read(path).reached < until}
        if not todo:
            return
        self.tell(stage)
        owner = {path.name: (path, entry) for path, (entry, _) in todo.items()}
        last: dict[str, tuple[float, int]] = {}

        def follow(progress: Progress) -> None:
            now = time.monotonic()
            if progress.cell in last and progress.failed is None:
                before, round = last[progress.cell]
                self.pace.note(owner[progress.cell][1].label, now - before, max(0, progress.round - round))
            last[progress.cell] = now, progress.round
            self.tell(stage, progress)
            if self.elapsed > GRACE * self.budget:
                raise TimeUp

        place = next(iter(todo)).parent
        cells = {path.name: settings for path, (_, settings) in todo.items()}
        try:
            with closing(run_cells(cells, place, self.jobs, follow, until)) as outcomes:  # type: ignore[type-var]
                for name, outcome in outcomes:
                    path, entry = owner[name]
                    self._cells.pop(path, None)
                    if isinstance(outcome, Failure):
                        self.failures[entry.label] = outcome.reason
                    elif outcome.failure is not None:
                        self.failures[entry.label] = outcome.failure
        finally:
            for path in todo:
                self._cells.pop(path, None)

    def run_entries(self, entries: Sequence[Entry], seed: int, until: int, stage: str) -> None:
        """Run entries of the race with a seed until a round."""
        runs = {self.path(e, seed): (e, self.division.raced(e.settings, seed)) for e in entries}
        self.run(runs, until, stage)

    # --- stages
    def halve(self) -> None:
        """Run the first seed, rung by rung. What cannot reach the leader is dropped; what does not fit the time waits."""
        waiting = list(self.entries)  # Local's and FedAvg's defaults are the first of them
        for number, rung in enumerate(self.rungs):
            room = SHARES[number - len(self.rungs)] * (self.left - self.reserve() - self._finish(rung))
            names = affordable(
                [e.label for e in waiting],
                lambda label, rung=rung: self._left_to(self.entry(label), rung),  # type: ignore[misc]
                room,
                self.jobs,
            )
            taken = waiting[: max(len(names), 3)]  # Local, FedAvg and one more always go on
            self.run_entries(taken, self.seed, rung, f"{rung} of {self.rounds} rounds, {len(taken)} entries")
            reached = [e for e in taken if e.label not in self.failures]
            if number < len(self.rungs) - 1:
                standings = self.standings(reached, rung)
                self.dropped |= dict.fromkeys(beaten(standings), rung)
                waiting = [self.entry(s.name) for s in in_order(standings) if s.name not in self.dropped]

    def _left_to(self, entry: Entry, rung: int) -> float:
        return self.cost(entry, max(0, rung - self.cell(entry).reached))

    def _finish(self, rung: int) -> float:
        """The seconds that Local, FedAvg and one more take from a rung to the end."""
        return makespan([self.usual_cost(self.rounds - rung)] * 3, self.jobs) if rung < self.rounds else 0.0

    def entry(self, label: str) -> Entry:
        """The entry of a label."""
        return next(e for e in self.entries if e.label == label)

    def standings(self, entries: Sequence[Entry], rung: int) -> list[Standing]:
        """The standings of entries that have reached a rung."""
        best = better_ways(self.measured(rung, entries))
        found = []
        for measured in best:
            entry, cell = self.entry(measured.label), self.cell(self.entry(measured.label))
            curves = [cell.curve(by, rung) for by in cell.ways()]
            gap = self.interval(best[0], measured)
            margin = 0.0 if gap.low is None else gap.mean - gap.low
            now = max(level(c, rung) for c in curves)
            later = max(projected(c, rung, self.rounds) for c in curves)
            found.append(Standing(entry.label, entry.method, now, later, margin, rung >= entry.ripe))
        return found

    def measured(self, at: int, entries: Sequence[Entry] | None = None) -> list[Measured]:
        """What has reached a round, by all ways of predicting and with all seeds."""
        found = []
        for entry in self.alive() if entries is None else entries:
            cells = {seed: self.cell(entry, seed) for seed in self.seeds}
            there = {s: c for s, c in cells.items() if c.reached >= at and c.failure is None and c.ways()}
            ways = next(iter(there.values())).ways() if there else []
            for by in ways:
                values = {s: c.accuracies(by, at, self.rounds) for s, c in there.items()}
                found.append(Measured(entry.label, entry.method, by, values))
        return found

    @property
    def seeds(self) -> range:
        """All seeds that the race may use."""
        return range(self.seed, self.seed + MOST_SEEDS)

    def add_seeds(self) -> None:
        """Give the leader, Local and what is close to the leader further seeds, while it is open and there is time."""
        while True:
            ranked = better_ways(self.measured(self.rounds))
            local = next((m for m in ranked if m.method == "local"), None)
            others = [m for m in ranked if m.method != "local"]
            if local is None or not others:
                return
            leader = others[0]
            close = close_to(leader, others, self.division.share, sum(self.division.samples))[:MOST_CLOSE]
            gain = self.interval(leader, local)
            shared = len(leader.accuracies.keys() & local.accuracies.keys())
            if shared >= LEAST and not close and not gain.open:
                return
            wanted = [leader, local, *close]
            target = min(len(m.accuracies) for m in wanted) + 1
            if target > MOST_SEEDS:
                return
            short = [m.label for m in wanted if len(m.accuracies) < target]
            needed = [label for label in short if label in (leader.label, local.label)]
            later = [self.cost(self.entry(m.label), self.rounds) for m in (leader, local)] * max(0, LEAST - target)
            room = self.left - self.reserve() - makespan(later, self.jobs)
            taken = affordable(short, lambda label: self.cost(self.entry(label), self.rounds), room, self.jobs)
            if not taken or len(taken) < len(needed):
                return
            seed = self.seeds[target - 1]
            before = dict(self.failures)
            self.run_entries([self.entry(n) for n in taken], seed, self.rounds, f"seed {target}: {', '.join(taken)}")
            if self.failures != before:
                return

    def interval(self, ours: Measured, theirs: Measured) -> Interval:
        """The paired difference of two entries with its interval."""
        found = differences(ours.accuracies, theirs.accuracies)
        return interval(found, self.division.share, sum(self.division.samples))

    def control(self, entry: Entry, seeds: Sequence[int]) -> None:
        """Run the control of an entry, in which nothing is exchanged, with as many of these seeds as fit the time."""
        settings: Any = {}
        for seed in seeds:
            try:
                controlled = self.division.raced(entry.settings, seed).with_general(control="own")
            except ProtofedError:
                return
            settings[self.path(entry, seed, control=True)] = entry, controlled
        room = self.left - makespan([self.cost(entry, self.rounds)] * 2, self.jobs)
        names = affordable([str(p) for p in settings], lambda _: self.cost(entry, self.rounds), room, self.jobs)
        failures = dict(self.failures)
        self.run(dict(list(settings.items())[: max(1, len(names))]), self.rounds, f"control of {entry.label}")
        self.failures = failures  # a control that cannot be run says nothing against its method

    def test(self, entries: Sequence[Entry]) -> dict[str, Cell]:
        """Run entries on all rows that are not for testing, and test them."""
        runs = {self.folder / FINAL / e.variant.folder: (e, e.settings) for e in entries}
        failures = dict(self.failures)
        self.run(runs, self.rounds, "test, looked at once")
        self.failures = failures
        return {entry.label: self._read(path) for path, (entry, _) in runs.items()}

    def looks(self) -> int:
        """How many methods other than Local have been tested in this folder."""
        place = self.folder / FINAL
        found = [read_run(path) for path in sorted(place.iterdir()) if is_run(path)] if place.is_dir() else []
        return sum(run.method != "local" for run in found)

    def tested(self, entry: Entry) -> bool:
        """Whether an entry was tested already."""
        return self._read(self.folder / FINAL / entry.variant.folder).reached >= self.rounds
