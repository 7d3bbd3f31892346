"""From data and a time budget to an answer: plan, race, verdict, and the files that hold it."""

from __future__ import annotations

import dataclasses
import json
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from ... import disk
from ...data import Dataset
from ...errors import ProtofedError, Stopped
from ...results.comparison import Variant
from ...results.folder import make_folder
from ...results.lock import FolderLock
from ..general import General
from ..keys import combine, with_dataset
from ..settings import Settings, read_toml
from . import words
from .plan import Division, Entry, chosen_methods, divide, entries_of, fitting_methods, parse_budget
from .race import makespan
from .record import FORMAT, record_of, verdict_of
from .run import Cell, Race, TimeUp, Watch, fitting_length, measured_pace

PLAN, RECORD, PAGE, SETTINGS = "plan.json", "advice.json", "advice.html", "settings.toml"


@dataclass(frozen=True)
class Advice:
    """The answer of a race of methods on a person's own data.

    Attributes:
        best: The variant to go on with: its label, its method, and the settings in which it differs from defaults.
        by: How it predicts: by `head`, by `prototype` or, as Constellation does, by a `mix` of both.
        certainty: `sure`, `fairly sure`, `not different` (from Local, which is then the advice) or `unknown`.
        table: A row for each entry of the race.
        sites: What each site gains or loses.
        sentences: The answer in words.
        not_tried: What was not tried, in words.
        settings: The file of settings to go on with; None where nothing was written.
        folder: The folder; None where nothing was written.
        record: All of it, as `advice.json` holds it.
        stopped: The exit code of what stopped the race, 0 where nothing did.
    """

    best: Variant
    by: str
    certainty: str
    table: list[dict[str, Any]]
    sites: list[dict[str, Any]]
    sentences: list[str]
    not_tried: list[str]
    settings: Path | None
    folder: Path | None
    record: dict[str, Any]
    stopped: int = 0

    @property
    def partial(self) -> bool:
        """Whether the race was stopped, or judged before its last round."""
        return bool(self.record["interrupted"]) or self.record["judged_after"] < self.record["rounds"]

    def __repr__(self) -> str:
        return f"Advice({self.best.label}, by {self.by}: {self.certainty})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the sentences, the sites and the table."""
        from .page import fragment

        return fragment(self.record)


def advise(
    data: Any,
    *,
    budget: str | float = "10m",
    out: str | Path | None = None,
    methods: Sequence[str] = (),
    weights: bool = True,
    jobs: int | None = None,
    watch: Watch | None = None,
    config: str | Path | Sequence[str | Path] | None = None,
    **given: Any,
) -> Advice:
    """Race methods and a few settings of each on data of one's own, and say which to go on with.

    The race sees no test row: a part of each site's training rows is held out for validation. At the end the best entry
    and Local are tested, once.

    Args:
        data: The data, as the setting `data` takes it.
        budget: The time there is: `"90s"`, `"10m"`, `"1h30m"`, or seconds.
        out: The folder to write. One that holds a race is gone on with; None writes nothing.
        methods: The methods to race beside Local; none takes the usual ones.
        weights: Whether weights of models may travel; otherwise prototypes alone.
        jobs: The number of runs at a time; None takes as many as there are cores.
        watch: A function that is called with the `Moment` of the race at each stage and after each round.
        config: One file of settings or several, which keywords override.
        **given: Settings, as on the command line. They hold for all entries.

    Returns:
        The answer. Where the race is interrupted, that of what was raced until then.

    Example: `pf.advise("digits", budget="5m", clients=10, partition="dirichlet").sentences`
    """
    began = time.monotonic()
    seconds = parse_budget(budget)
    files = [config] if isinstance(config, str | Path) else config or ()
    settings: dict[str, Any] = {}
    for file in files:
        settings = combine(settings, read_toml(Path(file)))
    settings = combine(settings, with_dataset({**given, "data": data}))
    names, left_out = chosen_methods(list(methods), weights, settings.get("labels", "all"), settings)
    division = divide(settings, names)
    names, unfit = fitting_methods(names, division)
    left_out |= unfit
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "race" if out is None else Path(out)
        race = _begin(folder, division, names, seconds, began, jobs, watch, stack)
        return _answer(race, left_out, None if out is None else folder)


# --- the folder -------------------------------------------------------------------------------------------------------
def _begin(
    folder: Path,
    division: Division,
    names: Sequence[str],
    budget: float,
    began: float,
    jobs: int | None,
    watch: Watch | None,
    stack: ExitStack,
) -> Race:
    """The race of a folder, a new one or one to go on with. The folder is locked until `stack` ends."""
    stored = _stored(folder)
    base = division.base.general
    asked = division.given.get("rounds")
    if stored is not None and asked is not None and asked != stored["rounds"]:
        raise _other(folder, "rounds", stored["rounds"], asked)
    pace = measured_pace(division.raced(division.base, base.seed))
    given = {key: value for key, value in division.given.items() if key != "rounds"}

    def entries(rounds: int) -> list[Entry]:
        return entries_of(names, given, rounds, base.lr)

    rounds = asked or (stored["rounds"] if stored else None)
    made = entries(rounds or base.rounds)
    race = Race(division, made, rounds or base.rounds, folder, pace, budget, began, jobs, watch)
    if rounds is None:
        rounds = fitting_length(pace, len(made), race.left, race.jobs)
        race = Race(division, entries(rounds), rounds, folder, pace, budget, began, jobs, watch)
    _check_budget(race)
    plan = _plan(race)
    if stored is None:
        stack.callback(make_folder(folder, {PLAN: disk.sealed(plan)}).release)
    else:
        _check_same(folder, stored, plan)
        stack.callback(FolderLock(folder).acquire().release)
        plan["entries"] = {**stored["entries"], **plan["entries"]}
        disk.write_atomically(folder / PLAN, disk.sealed(plan))
    return race


def _plan(race: Race) -> dict[str, Any]:
    """The content of `plan.json`, by which a later call knows that it goes on with the same race."""
    division = race.division
    entries = {e.label: division.raced(e.settings, race.seed).to_dict() for e in race.entries}
    return {
        "format": FORMAT,
        "data": division.identity,
        "seed": race.seed,
        "validation_share": division.share,
        "rounds": race.rounds,
        "entries": json.loads(json.dumps(entries)),
    }


def _stored(folder: Path) -> dict[str, Any] | None:
    """The plan in a folder; None where there is none."""
    file = folder / PLAN
    if not file.is_file():
        return None
    content = disk.opened(file.read_bytes(), file)
    if content.get("format") != FORMAT:
        raise ProtofedError(f"{file}: format {content.get('format')!r}; this version goes on with {FORMAT}")
    return content


def _other(folder: Path, key: str, before: Any, now: Any) -> ProtofedError:
    return ProtofedError(
        f"{folder}: its race was begun with {key}={before}, here it is {now}; give the same, or choose another --out"
    )


def _check_same(folder: Path, stored: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
    """Raise an error where a folder's race is another one: other data, or other settings of an entry of the same name."""
    for key in ("seed", "validation_share", "rounds"):
        if stored[key] != plan[key]:
            raise _other(folder, key, stored[key], plan[key])
    for label, settings in plan["entries"].items():
        before = stored["entries"].get(label, settings)
        for key in settings:
            if before.get(key) != settings[key]:
                raise _other(folder, key, before.get(key), settings[key])
    if stored["data"] != plan["data"]:
        raise ProtofedError(f"{folder}: its race was begun with other data; choose another --out")


def _check_budget(race: Race) -> None:
    """Raise an error where not even Local and one method fit the time, with their test."""
    first = race.entries[:2]
    costs = [race.cost(e, max(0, race.rounds - race.cell(e).reached)) for e in first]
    costs += [race.cost(e, race.rounds) for e in first if not race.tested(e)]
    needed = makespan(costs, race.jobs) + race.elapsed
    if needed > race.budget:
        least = f"{int(needed / 60) + 1}m" if needed > 55 else f"{int(1.2 * needed) + 1}s"
        raise ProtofedError(
            f"budget {words.duration(race.budget)}: the smallest race here ({first[0].label} and {first[1].label}, "
            f"{race.rounds} rounds each, and their test) takes about {words.duration(needed)}; give a budget of {least} "
            "at least, or fewer rounds"
        )


# --- race and verdict -------------------------------------------------------------------------------------------------
def _answer(race: Race, left_out: Mapping[str, str], out: Path | None) -> Advice:
    """Race, judge and write. An interrupt leaves the answer of what there is by then."""
    stopped = 0
    test: dict[str, Cell] = {}
    try:
        race.halve()
        race.add_seeds()
        verdict = verdict_of(race, race.rounds)
        if verdict is not None:
            contender, local = race.entry(verdict.contender.label), race.entry(verdict.local.label)
            race.control(contender, list(verdict.contender.accuracies))
            test = race.test([contender, local])
    except TimeUp:
        pass
    except KeyboardInterrupt as error:
        stopped = error.code if isinstance(error, Stopped) else 130
    at = next((r for r in reversed(race.rungs) if verdict_of(race, r) is not None), 0)
    verdict = verdict_of(race, at) if at else None
    if verdict is None:
        why = "; ".join(f"{label}: {reason}" for label, reason in race.failures.items())
        if stopped:
            where = "" if out is None else f" with --out {shlex.quote(str(out))}"
            raise Stopped(f"stopped before Local and one method had a figure; the same command{where} goes on", stopped)
        raise ProtofedError(
            f"no answer: {why}" if why else "the budget was spent before Local and one method had a figure; give more"
        )
    record = record_of(race, verdict, at, test, left_out, bool(stopped))
    advised = race.entry(verdict.advised.label)
    if out is not None:
        _write(out, record, advised)
    return Advice(
        advised.variant,
        verdict.advised.by,
        verdict.certainty,
        record["table"],
        record["site_gains"],
        record["sentences"],
        record["not_tried"],
        None if out is None else out / SETTINGS,
        out,
        record,
        stopped,
    )


# --- files ------------------------------------------------------------------------------------------------------------
def _write(folder: Path, record: dict[str, Any], advised: Entry) -> None:
    """Write the answer: the record, the page, and the settings to go on with."""
    from .page import render

    settings, data = folder / SETTINGS, advised.settings.data
    record["settings"] = SETTINGS
    record["command"] = f"protofed run --config {shlex.quote(str(settings))}"
    if isinstance(data, Dataset):
        options = "".join(f", {key}={value!r}" for key, value in data.options.items())
        record["command"] = f"pf.run(config={str(settings)!r}, data=…{options})"
    disk.write_atomically(settings, settings_text(advised.settings, record).encode())
    disk.write_atomically(folder / RECORD, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    disk.write_atomically(folder / PAGE, render(record).encode())


def settings_text(settings: Settings, record: Mapping[str, Any]) -> str:
    """The text of `settings.toml`: what differs from the defaults, and the four choices with all their settings."""
    content = settings.to_dict()
    defaults = dataclasses.asdict(General())
    kept = {
        key: value
        for key, value in content.items()
        if key not in defaults or key in ("rounds", "seed") or value != _listed(defaults[key])
    }
    in_memory = isinstance(settings.data, Dataset)
    if in_memory:
        del kept["data"]
    lines = [
        f"# What protofed advise found best: {record['advised']['label']}, by {record['advised']['by']}.",
        f"# {record['command']}",
        *(["# The data was given in Python."] if in_memory else []),
    ]
    return "\n".join(lines) + "\n\n" + tomli_w.dumps(kept)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def read_advice(folder: str | Path) -> dict[str, Any]:
    """Read the record of an answer from its folder: `read_advice("runs/advice")["certainty"]`."""
    file = Path(folder) / RECORD
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProtofedError(f"{file}: not readable ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ProtofedError(f"{file}: not an answer of advise, or of another version")
    return content
