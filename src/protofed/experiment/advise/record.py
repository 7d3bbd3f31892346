"""The record of an answer, which `advice.json` holds and of which sentences, tables and the page are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ...results.rows import finite
from ...version import __version__
from . import words
from .plan import Entry
from .race import FACTOR, LEAST_MARGIN, level, projected
from .run import Cell, Race
from .verdict import Measured, Verdict, better_ways, differences, interval, judge, mean_of, scores

FORMAT = 1


def verdict_of(race: Race, at: int) -> Verdict | None:
    """The verdict of what has reached a round; None where Local or everything else is missing."""
    division = race.division
    return judge(race.measured(at), division.share, division.sites, division.samples, division.natural)


def record_of(
    race: Race, verdict: Verdict, at: int, test: Mapping[str, Cell], left_out: Mapping[str, str], interrupted: bool
) -> dict[str, Any]:
    """The content of `advice.json`.

    Args:
        race: The race.
        verdict: Its verdict.
        at: The round after which it was judged.
        test: The runs that were tested, by label.
        left_out: Why methods were not raced.
        interrupted: Whether the race was stopped.

    Returns:
        All that is said, as JSON can hold it.
    """
    division = race.division
    entries = race.measured(at)
    up, down = race.cell(race.entry(verdict.contender.label)).bytes_per_round()
    record: dict[str, Any] = {
        "format": FORMAT,
        "protofed": __version__,
        "interrupted": interrupted,
        "data": division.view.name,
        "sites": list(division.sites),
        "sites_are_assumed": not division.natural,
        "rounds": race.rounds,
        "judged_after": at,
        "seeds": sorted({seed for entry in entries for seed in entry.accuracies}),
        "validation_share": division.share,
        "budget_seconds": race.budget,
        "elapsed_seconds": round(race.elapsed, 1),
        "methods_compared": len({e.method for e in entries if e.method != "local"}),
        "certainty": verdict.certainty,
        "advised": _described(race, verdict.advised, verdict.seeds),
        "contender": _described(race, verdict.contender, verdict.seeds),
        "local": _described(race, verdict.local, verdict.seeds),
        "gain": dataclasses.asdict(verdict.gain),
        "close": [entry.label for entry in verdict.close],
        "cost": {
            "up_per_round": up,
            "down_per_round": down,
            "up": up * race.rounds,
            "down": down * race.rounds,
        },
        "control": _control(race, verdict),
        "site_gains": [dataclasses.asdict(site) for site in verdict.sites],
        "losers": verdict.losers,
        "test": _tested(race, verdict, test),
        "table": _table(race, at, verdict),
        "curves": _curves(race),
        "notes": list(division.notes),
        "not_tried": _not_tried(race, verdict, left_out),
    }
    record["sentences"] = words.sentences(record)
    whole: dict[str, Any] = finite(record)
    return whole


def _described(race: Race, measured: Measured, seeds: Sequence[int]) -> dict[str, Any]:
    """An entry with its accuracy over these seeds."""
    entry = race.entry(measured.label)
    return {
        "label": entry.label,
        "method": entry.method,
        "by": measured.by,
        "settings": entry.variant.settings,
        "accuracy": mean_of({seed: measured.accuracies[seed] for seed in seeds}),
        "seeds": len(seeds),
    }


def _control(race: Race, verdict: Verdict) -> dict[str, Any] | None:
    """How much of the contender's gain its loss gives by itself, where its control was run."""
    entry, by = race.entry(verdict.contender.label), verdict.contender.by
    cells = {seed: race.cell(entry, seed, control=True) for seed in verdict.contender.accuracies}
    values = {
        seed: cell.accuracies(by, race.rounds, race.rounds)
        for seed, cell in cells.items()
        if cell.reached >= race.rounds and by in cell.ways()
    }
    if not values:
        return None
    control = Measured(f"{entry.label}, nothing exchanged", entry.method, by, values)
    exchange, loss = race.interval(verdict.contender, control), race.interval(control, verdict.local)
    return {
        "accuracy": control.mean,
        "by_exchange": dataclasses.asdict(exchange),
        "by_loss": dataclasses.asdict(loss),
        "seeds": len(values),
    }


def _tested(race: Race, verdict: Verdict, test: Mapping[str, Cell]) -> dict[str, Any] | None:
    """The test of the contender and of Local, each by the way of predicting that was chosen before."""
    pairs = {"contender": verdict.contender, "local": verdict.local}
    values: dict[str, list[float | None]] = {}
    for name, measured in pairs.items():
        cell = test.get(measured.label)
        if cell is None or cell.reached < race.rounds or measured.by not in cell.ways():
            return None
        values[name] = cell.accuracies(measured.by, race.rounds, race.rounds)
    ours, theirs = ({race.seed: values[name]} for name in pairs)
    rows = sum(test[verdict.local.label].samples())
    sites = race.division.sites
    return {
        "looks": race.looks(),
        **{name: Measured("", "", "", {0: values[name]}).mean for name in pairs},
        "gain": dataclasses.asdict(interval(differences(ours, theirs), race.division.share, rows)),
        "sites": [
            {"name": sites[k] if k < len(sites) else f"client {k}", "contender": a, "local": b}
            for k, (a, b) in enumerate(zip(values["contender"], values["local"], strict=True))
        ],
    }


def _table(race: Race, at: int, verdict: Verdict) -> list[dict[str, Any]]:
    """A row for each entry: those that were judged first, the best of them first."""
    rows = []
    ranked = better_ways(race.measured(at))
    for measured, score in zip(ranked, scores(ranked), strict=True):
        gain = None if measured.method == "local" else dataclasses.asdict(race.interval(measured, verdict.local))
        rows.append(_row(race, race.entry(measured.label), measured, gain, score))
    judged = {measured.label for measured in ranked}
    for entry in race.entries:
        if entry.label in judged:
            continue
        reached = max((r for r in race.rungs if race.cell(entry).reached >= r), default=0)
        last = better_ways(race.measured(reached, [entry])) if reached else []
        rows.append(_row(race, entry, last[0] if last else None, None, last[0].mean if last else None))
    return rows


def _row(
    race: Race, entry: Entry, measured: Measured | None, gain: dict[str, Any] | None, accuracy: float | None
) -> dict[str, Any]:
    cell = race.cell(entry)
    up, down = cell.bytes_per_round()
    return {
        "label": entry.label,
        "method": entry.method,
        "settings": entry.variant.settings,
        "by": None if measured is None else measured.by,
        "accuracy": accuracy,
        "gain": gain,
        "up_per_round": up,
        "down_per_round": down,
        "seconds_per_round": cell.seconds_per_round(),
        "seeds": 0 if measured is None else len(measured.accuracies),
        "rounds": cell.reached,
        "fate": _fate(race, entry, cell.reached),
    }


def _fate(race: Race, entry: Entry, reached: int) -> str:
    if entry.label in race.failures:
        return f"failed: {race.failures[entry.label]}"
    if entry.label in race.dropped:
        return f"dropped after {race.dropped[entry.label]} rounds"
    if reached >= race.rounds:
        return "to the end"
    return f"no time after {reached} rounds" if reached else "no time"


def _curves(race: Race) -> dict[str, Any]:
    """The validation accuracy by round of each entry's better way, with the first seed."""
    curves = {}
    for entry in race.entries:
        cell = race.cell(entry)
        ways = {by: cell.curve(by, race.rounds) for by in cell.ways()}
        if ways:
            by = max(ways, key=lambda way: level(ways[way], cell.reached))
            curves[entry.label] = {"by": by, "rounds": ways[by].rounds, "values": ways[by].values}
    return curves


def _not_tried(race: Race, verdict: Verdict, left_out: Mapping[str, str]) -> list[str]:
    """What was not tried, or not to its end, in sentences."""
    told = []
    waiting = [
        f"{e.label} ({race.cell(e).reached} of {race.rounds} rounds)"
        for e in race.alive()
        if race.cell(e).reached < race.rounds
    ]
    if waiting:
        told.append(
            f"There was no time for {words.listed(waiting, 20)}; the same command with a larger budget goes on."
        )
    told += [f"{label} failed: {reason}." for label, reason in race.failures.items()]
    rising = _rising(race, verdict)
    if rising:
        told.append(
            f"Still rising after {race.rounds} rounds: {words.listed(rising, 20)}. With more rounds the order may change: "
            f"rounds={FACTOR * race.rounds} in another folder."
        )
    told.append(
        "Of settings, the main weight of a method and the learning rate were varied, one at a time and with two values "
        "each. Other models, optimisers, batch sizes and numbers of local epochs were not tried."
    )
    reasons: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        reasons.setdefault("it is not among the usual ones" if "usual" in reason else reason, []).append(name)
    told += [f"Not raced, because {reason}: {words.listed(names, 30)}." for reason, names in reasons.items()]
    return told


def _rising(race: Race, verdict: Verdict) -> list[str]:
    """The entries at the last round that may get above the contender if they went on."""
    rising = []
    least = max(LEAST_MARGIN, 3 / sum(race.division.samples))
    for entry in race.alive():
        cell = race.cell(entry)
        if cell.reached < race.rounds:
            continue
        for by in cell.ways():
            curve = cell.curve(by, race.rounds)
            later = projected(curve, race.rounds, FACTOR * race.rounds)
            if later > max(verdict.contender.mean, level(curve, race.rounds)) + least:
                rising.append(entry.label)
                break
    return rising
