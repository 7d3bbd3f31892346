"""What a report says of bytes: those of a round and of a whole run, against the accuracy that they bought."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import accumulate

from ..evaluate.confusion import PREDICTIONS, SINGLE
from ..results.columns import OWN
from ..results.read import Run, StoredResults, VariantRuns
from ..results.rows import FIGURE, JsonRow, number
from .curves import MOST_ROUNDS, Content, evenly, inside, short

MOST_LISTED = 8  # clients and reasons of what was dropped
BYTE_KINDS = ("prototypes", "weights", "scalars", "framing", "secure")


def bytes_of(folder: StoredResults) -> Content:
    """The bytes of a round by direction and kind, as means over rounds and seeds, and the accuracy of each run."""
    lines = []
    for variant in folder.variants:
        kinds = {d: {k: _mean_bytes(variant, d, k) for k in BYTE_KINDS} for d in ("up", "down")}
        usable = [run for run in variant.runs if run.summary is not None and not run.summary.get("failure")]
        runs = usable if variant.finished else variant.runs  # as in the table
        points = [point for run in runs if (point := _point(run)) is not None]
        if points:
            lines.append({"label": variant.label, **kinds, "points": points})
    return {"kinds": list(BYTE_KINDS), "lines": lines}


def spent(folder: StoredResults) -> dict[str, list[Content]]:
    """By prediction, for each variant the accuracy against the bytes of all rounds up to it, as means over seeds.

    A variant that sends nothing has no such curve; its last accuracy is given as `level`.
    """
    charts: dict[str, list[Content]] = {}
    for kind in PREDICTIONS:
        lines = [line for variant in folder.variants if (line := _spent_by(variant, f"accuracy_{kind}")) is not None]
        if any(line["x"] for line in lines):
            charts[kind] = lines
    return charts


def _spent_by(variant: VariantRuns, key: str) -> Content | None:
    by_round: dict[int, list[tuple[float, float]]] = {}
    for run in variant.runs:
        totals = dict(
            zip((row["round"] for row in run.rounds), accumulate(map(_bytes_of_round, run.rounds)), strict=True)
        )
        for row in run.metrics:
            share = number(row, key)
            if share is not None and row["round"] in totals:
                by_round.setdefault(row["round"], []).append((totals[row["round"]], 100 * share))
    if not by_round:
        return None
    rounds = evenly(sorted(by_round), MOST_ROUNDS)
    means = [[statistics.fmean(values) for values in zip(*by_round[r], strict=True)] for r in rounds]
    if not any(_mean_bytes(variant, d, k) for d in ("up", "down") for k in BYTE_KINDS if k != "framing"):
        rounds, means = [], means[-1:]  # messages without content have a frame all the same
    x, y = ([short(pair[i]) for pair in means] if rounds else [] for i in (0, 1))
    return {"label": variant.label, "level": short(means[-1][1]), "rounds": rounds, "x": x, "y": y}


def _bytes_of_round(row: JsonRow) -> float:
    return sum(v for d in ("up", "down") for k in inside(row, d) if (v := number(inside(row, d), k)) is not None)


def dropped(folder: StoredResults) -> list[Content]:
    """Of each variant that lost any, the client rounds that were dropped, by client and by reason, over all seeds."""
    lines = []
    for variant in folder.variants:
        sites: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        asked = 0
        for run in variant.runs:
            names = run.client_names(len(run.clients[-1]["samples"])) if run.clients else []
            for row in run.rounds:
                participants = row.get("participants")
                asked += len(participants) if isinstance(participants, list) else 0
                for client, reason in inside(row, "dropped").items():
                    known = client.isdecimal() and int(client) < len(names)
                    sites[names[int(client)] if known else f"client {client}"] += 1
                    reasons[str(reason)] += 1
        if sites:
            counts = {"dropped": sites.total(), "asked": asked}
            by = {"sites": sites.most_common(MOST_LISTED), "reasons": reasons.most_common(MOST_LISTED)}
            lines.append({"label": variant.label, **counts, "others": max(0, len(sites) - MOST_LISTED), **by})
    return lines


def _mean_bytes(variant: VariantRuns, direction: str, kind: str) -> float | int | None:
    values = [number(inside(row, direction), kind) for run in variant.runs for row in run.rounds]
    counts = [v for v in values if v is not None]
    return short(statistics.fmean(counts)) if counts else None


def _point(run: Run) -> Content | None:
    """The mean bytes of a round, both directions together, and the accuracies of this run."""
    per_round = [_bytes_of_round(row) for row in run.rounds]
    figures = run.summary[FIGURE] if run.summary is not None else run.metrics[-1] if run.metrics else {}
    kinds = [kind for kind in PREDICTIONS if kind in SINGLE or f"accuracy_{kind}" in figures]
    accuracy = {"own": number(figures, OWN), **{kind: number(figures, f"accuracy_{kind}") for kind in kinds}}
    if not per_round or all(v is None for v in accuracy.values()):
        return None
    return {
        "bytes": short(statistics.fmean(per_round)),
        **{kind: None if v is None else short(100 * v) for kind, v in accuracy.items()},
    }
