"""The curves of a report: what was measured by round, as means over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..evaluate.confusion import PREDICTIONS
from ..results.columns import OWN
from ..results.read import StoredResults, VariantRuns
from ..results.rows import JsonRow, number
from ..results.tables import setting_text

MOST_ROUNDS = 250  # points of a curve
COLUMNS_OF_METRICS = ("accuracy", "weighted_", "f1_", "mae_", "ensemble_", "validation")
SHARES = ("acceptance", "accuracy", "f1", "weighted", "ensemble", "validation", "pseudo", "rejection")

Content = dict[str, Any]


def short(value: float | None) -> float | int | None:
    """Round to five digits, which are as many as a chart shows, so that the page stays small.

    >>> short(0.123456789), short(20.0)
    (0.12346, 20)
    """
    if value is None:
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def inside(row: JsonRow, key: str) -> Mapping[str, Any]:
    """The mapping under a key of a row; empty where there is none."""
    value = row.get(key)
    return value if isinstance(value, Mapping) else {}


Values = Callable[[JsonRow], float | None]


def curve(label: str, runs: Iterable[Sequence[JsonRow]], value: Values, spread: Values | None = None) -> Content | None:
    """Make a curve of means over seeds by round, with their deviation as a band.

    Args:
        label: What the curve is called.
        runs: The rows of each run.
        value: A function from a row to the number that is drawn, or None.
        spread: A function from a row to the deviation of a single run over its clients; None draws no band for it.

    Returns:
        `label`, `x`, `y` and, where there is a deviation, `low` and `high`; None where there is no number.
    """
    by_round: dict[int, list[float]] = {}
    widths: dict[int, float | None] = {}
    for rows in runs:
        for row in rows:
            measured = value(row)
            if measured is not None:
                by_round.setdefault(row["round"], []).append(measured)
                widths[row["round"]] = None if spread is None else spread(row)
    if not by_round:
        return None
    rounds = evenly(sorted(by_round), MOST_ROUNDS)
    deviations = [statistics.stdev(v) if len(v := by_round[r]) > 1 else widths[r] for r in rounds]
    means = [statistics.fmean(by_round[r]) for r in rounds]
    series: Content = {"label": label, "x": rounds, "y": [short(m) for m in means]}
    if any(d is not None for d in deviations):
        series["low"] = [short(m - (d or 0.0)) for m, d in zip(means, deviations, strict=True)]
        series["high"] = [short(m + (d or 0.0)) for m, d in zip(means, deviations, strict=True)]
    return series


def evenly(values: list[int], most: int) -> list[int]:
    """At most so many of the values, the first and the last among them."""
    if len(values) <= most:
        return values
    return [values[i] for i in np.linspace(0, len(values) - 1, most).round().astype(int)]


def number_of(key: str, group: str | None = None, scale: float = 1.0) -> Values:
    """A function from a row to its number under a key, or under a key of a group such as `terms`."""

    def value(row: JsonRow) -> float | None:
        values = row if group is None else row.get(group)
        measured = number(values, key) if isinstance(values, Mapping) else None
        return None if measured is None else scale * measured

    return value


def over_clients(key: str, scale: float) -> Values:
    """A function from a row to the deviation of a figure over clients.

    Args:
        key: The figure. The accuracy by the method's own prediction has the deviation of the head or of the prototypes,
            whichever it equals.
        scale: A factor, 100 for percent.

    Returns:
        The function, which gives None where a row has no deviation.
    """

    def value(row: JsonRow) -> float | None:
        same = (
            [f"{OWN}_{kind}" for kind in PREDICTIONS if row.get(f"{OWN}_{kind}") == row.get(OWN)]
            if key == OWN
            else [key]
        )
        deviation = number(row, f"{same[0]}_std") if same else None
        return None if deviation is None else scale * deviation

    return value


def curves_of(folder: StoredResults) -> list[Content]:
    """Accuracies, F1, MAE, the loss and the silhouette: a chart for each, a line for each variant."""
    measured = {key for run in folder.runs for row in run.metrics for key in row}
    plain = sorted(key for key in measured if key.startswith(COLUMNS_OF_METRICS) and not key.endswith("_std"))
    first = [*(f"accuracy_{kind}" for kind in PREDICTIONS), OWN]
    keys = [key for key in first if key in measured] + [key for key in plain if key not in first]
    charts = []
    for key in keys:
        share = not key.startswith("mae_")
        scale = 100.0 if share else 1.0
        spread = None if folder.comparison else over_clients(key, scale)
        title = key.replace("_", " ").replace("@", " @ ").replace("f1", "F1").replace("mae", "MAE")
        title = "accuracy, each method's own prediction" if key == OWN else title
        series = [
            curve(v.label, (run.metrics for run in v.runs), number_of(key, scale=scale), spread)
            for v in folder.variants
        ]
        group = "accuracy"
        charts.append({"key": key, "group": group, "title": title, "unit": "%" if share else "", "series": series})
    loss = [curve(v.label, (run.rounds for run in v.runs), number_of("loss")) for v in folder.variants]
    charts.append({"key": "loss", "group": "loss", "title": "training loss", "unit": "", "series": loss})
    silhouettes = sorted(key for key in measured if key.startswith(("silhouette", "pooled_silhouette")))
    for key in silhouettes:
        series = [curve(v.label, (run.metrics for run in v.runs), number_of(key)) for v in folder.variants]
        title = key.replace("_", " ")
        charts.append({"key": key, "group": "silhouette", "title": title, "unit": "", "series": series})
    return [{**c, "series": [s for s in c["series"] if s]} for c in charts if any(c["series"])]


def terms_of(variant: VariantRuns) -> Content:
    """The loss terms of a variant by round, and its phases."""
    names = list(dict.fromkeys(name for run in variant.runs for row in run.rounds for name in inside(row, "terms")))
    rows = [run.rounds for run in variant.runs]
    series = [curve(name, rows, number_of(name, "terms")) for name in names]
    return {"label": variant.label, "series": [s for s in series if s], "phases": _phases(variant)}


def _phases(variant: VariantRuns) -> list[Content]:
    """The ranges of rounds that have one phase, of the variant's first run."""
    ranges: list[Content] = []
    for row in variant.runs[0].rounds if variant.runs else []:
        phase = inside(row, "measures").get("phase")
        if phase is None:
            continue
        name = setting_text(short(phase) if isinstance(phase, float) else phase)
        if ranges and ranges[-1]["name"] == name:
            ranges[-1]["to"] = row["round"]
        else:
            ranges.append({"name": name, "from": row["round"], "to": row["round"]})
    return ranges


def measures_of(folder: StoredResults) -> list[Content]:
    """A chart for each number that methods report of themselves, such as a threshold or the share accepted."""
    rows = [row for run in folder.runs for row in run.rounds]
    names = list(dict.fromkeys(name for row in rows for name in inside(row, "measures") if name != "phase"))
    charts = []
    for name in names:
        share = name.startswith(SHARES)
        value = number_of(name, "measures", 100.0 if share else 1.0)
        series = [curve(v.label, (run.rounds for run in v.runs), value) for v in folder.variants]
        drawable = [s for s in series if s]
        if drawable:
            charts.append(
                {"key": name, "title": name.replace("_", " "), "unit": "%" if share else "", "series": drawable}
            )
    return charts
