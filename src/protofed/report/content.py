"""The content of a report as plain numbers and text, which the page draws and the live view sends repeatedly."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..evaluate.confusion import PREDICTIONS
from ..results.confusions import Confusions
from ..results.read import Run, StoredResults, VariantRuns, read_folder
from ..results.rows import DIRECTIONS, FIGURE, JsonRow, number
from ..results.tables import (
    MEASURES,
    MISSING,
    NAME,
    OWN,
    Column,
    Row,
    caption,
    comparison_cells,
    default_columns,
    flat,
    losses_of,
    notes,
    parse_column,
    setting_text,
)
from ..version import __version__
from .space import Projection, read_snapshots, space

MOST_ROUNDS = 250  # points of a curve
MOST_EVALUATIONS = 60  # columns of a heat map
MOST_CLIENTS = 200
MOST_IN_DETAIL = 16  # runs with heat maps and spaces of their own; where there are more, the first seed of each variant
POINTS = 300_000  # of all embedding spaces together: about two megabytes
COLUMNS_OF_METRICS = ("accuracy", "weighted_", "f1_", "mae_", "ensemble_", "validation")
BYTE_KINDS = ("prototypes", "weights", "scalars", "framing", "secure")
SHARES = ("acceptance", "accuracy", "f1", "weighted", "ensemble", "validation", "pseudo", "rejection")

Content = dict[str, Any]


def content(folder: str | Path, projection: Projection = "pca") -> Content:
    """Collect everything that the page shows.

    Args:
        folder: The folder of a run, a comparison or a sweep.
        projection: How embedding spaces are brought to the plane, `pca` or `tsne`.

    Returns:
        The parts of the page by name. A part that was not measured is empty; `notes` says what could not be read.

    Example: `content("runs/digits")["table"]["rows"]`
    """
    results = read_folder(folder)
    detailed = _in_detail(results)
    spaces, space_notes = _spaces(detailed, projection)
    parts = {
        "title": results.path.resolve().name,
        "kind": "comparison" if results.comparison else "run",
        "version": __version__,
        "status": _status(results),
        "variants": [{"label": v.label, "method": v.method} for v in results.variants],
        "band": "seeds" if results.comparison else "clients",
        "table": _table(results),
        "curves": _curves(results),
        "clients": [_clients(run) for run in detailed if run.clients],
        "classes": [part for part in map(_classes, detailed) if part is not None],
        "spaces": spaces,
        "terms": [_terms(v) for v in results.variants if any(run.rounds for run in v.runs)],
        "measures": _measures(results),
        "bytes": _bytes(results),
        "settings": _settings(results),
        "versions": _versions(results),
    }
    left_out = len(results.runs) - len(detailed)
    limit = [f"Clients, classes and spaces are of the first seed of each variant; {left_out} runs are left out there."]
    return {**parts, "notes": [*results.notes(), *space_notes, *(limit if left_out else [])]}


def _in_detail(folder: StoredResults) -> list[Run]:
    """The runs that have heat maps and spaces of their own."""
    if len(folder.runs) <= MOST_IN_DETAIL:
        return folder.runs
    return [v.runs[0] for v in folder.variants if v.runs]


def short(value: float | None) -> float | int | None:
    """Round to five digits, which are as many as a chart shows, so that the page stays small.

    >>> short(0.123456789), short(20.0)
    (0.12346, 20)
    """
    if value is None:
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


# --- progress ---------------------------------------------------------------------------------------------------------
def _status(folder: StoredResults) -> Content:
    finished = sum(run.summary is not None for run in folder.runs)
    under_way = [
        {"name": run.name, "round": run.last, "rounds": run.planned} for run in folder.runs if run.summary is None
    ]
    failed = sum(len(variant.row().reasons()) for variant in folder.variants)
    return {"finished": finished, "failed": failed, "runs": folder.planned_runs, "under_way": under_way}


# --- the table --------------------------------------------------------------------------------------------------------
def _table(folder: StoredResults) -> Content:
    if not folder.comparison:
        return _run_table(folder.runs[0])
    rows = [variant.row() for variant in folder.variants]
    columns = [name for name in folder.columns or () if _is_column(name)] or None
    chosen = [parse_column(name) for name in columns or default_columns(run for row in rows for run in row.runs)]
    header, lines = comparison_cells(rows, columns)
    cells = [
        [{"text": row.title}] + [_cell(row, column, cell) for column, cell in zip(chosen, line[1:], strict=True)]
        for row, line in zip(rows, lines, strict=True)
    ]
    return {"header": header, "rows": cells, "caption": caption(rows), "notes": notes(rows, columns)}


def _is_column(name: Any) -> bool:
    return isinstance(name, str) and (name in (*DIRECTIONS, "seconds", OWN) or NAME.fullmatch(name) is not None)


def _cell(row: Row, column: Column, cell: Any) -> Content:
    values = list(column.by_seed(row).values())
    value = short(statistics.fmean(values)) if values else None
    return {"text": cell.text, "value": value, "mark": cell.mark}


def _run_table(run: Run) -> Content:
    """The table of one run: the last round, the mean of the last five and the best on validation, or the last evaluation."""
    parts: dict[str, Mapping[str, Any]] = {}
    if run.summary is not None:
        five = "rounds" if run.summary.get("format", 1) >= 2 else "evaluations"
        parts = {"last round": run.summary["last_round"], f"mean of the last five {five}": run.summary[FIGURE]}
        best = run.summary.get("best_on_validation")
        if isinstance(best, dict):
            parts[f"best on validation (round {best.get('round')})"] = best
    elif run.metrics:
        parts = {f"round {run.metrics[-1]['round']}, so far": run.metrics[-1]}
    measured = {key for values in parts.values() for key in values if NAME.fullmatch(key)}
    wanted = [f"{m}_{kind}" for m in MEASURES for kind in PREDICTIONS] + sorted(key for key in measured if "@" in key)
    columns = [parse_column(key) for key in wanted if key in measured]
    cells = [
        [{"text": label}, *(_over_clients(values, column) for column in columns)] for label, values in parts.items()
    ]
    about = "Mean ± standard deviation over clients; accuracy and F1 in %."
    lines = [Row(run.label, run.method, {}, [run.summary])] if run.summary is not None else []
    return {
        "header": ["figure", *(c.title for c in columns)],
        "rows": cells,
        "caption": about,
        "notes": losses_of(lines),
    }


def _over_clients(values: Mapping[str, Any], column: Column) -> Content:
    mean, deviation = number(values, column.key), number(values, f"{column.key}_std")
    if mean is None:
        return {"text": MISSING, "value": None, "mark": ""}
    text = f"{column.scale * mean:.{column.digits}f}"
    if deviation is not None:
        text += f" ± {column.scale * deviation:.{column.digits}f}"
    return {"text": text, "value": short(column.scale * mean), "mark": ""}


# --- curves -----------------------------------------------------------------------------------------------------------
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
    rounds = _evenly(sorted(by_round), MOST_ROUNDS)
    deviations = [statistics.stdev(v) if len(v := by_round[r]) > 1 else widths[r] for r in rounds]
    means = [statistics.fmean(by_round[r]) for r in rounds]
    series: Content = {"label": label, "x": rounds, "y": [short(m) for m in means]}
    if any(d is not None for d in deviations):
        series["low"] = [short(m - (d or 0.0)) for m, d in zip(means, deviations, strict=True)]
        series["high"] = [short(m + (d or 0.0)) for m, d in zip(means, deviations, strict=True)]
    return series


def _evenly(values: list[int], most: int) -> list[int]:
    if len(values) <= most:
        return values
    return [values[i] for i in np.linspace(0, len(values) - 1, most).round().astype(int)]


def _number_of(key: str, group: str | None = None, scale: float = 1.0) -> Values:
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


def _curves(folder: StoredResults) -> list[Content]:
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
            curve(v.label, (run.metrics for run in v.runs), _number_of(key, scale=scale), spread)
            for v in folder.variants
        ]
        group = "accuracy"
        charts.append({"key": key, "group": group, "title": title, "unit": "%" if share else "", "series": series})
    loss = [curve(v.label, (run.rounds for run in v.runs), _number_of("loss")) for v in folder.variants]
    charts.append({"key": "loss", "group": "loss", "title": "training loss", "unit": "", "series": loss})
    silhouettes = sorted(key for key in measured if key.startswith("silhouette"))
    for key in silhouettes:
        series = [curve(v.label, (run.metrics for run in v.runs), _number_of(key)) for v in folder.variants]
        title = key.replace("_", " ")
        charts.append({"key": key, "group": "silhouette", "title": title, "unit": "", "series": series})
    return [{**c, "series": [s for s in c["series"] if s]} for c in charts if any(c["series"])]


def _terms(variant: VariantRuns) -> Content:
    names = list(dict.fromkeys(name for run in variant.runs for row in run.rounds for name in _inside(row, "terms")))
    rows = [run.rounds for run in variant.runs]
    series = [curve(name, rows, _number_of(name, "terms")) for name in names]
    return {"label": variant.label, "series": [s for s in series if s], "phases": _phases(variant)}


def _inside(row: JsonRow, key: str) -> Mapping[str, Any]:
    value = row.get(key)
    return value if isinstance(value, Mapping) else {}


def _phases(variant: VariantRuns) -> list[Content]:
    """The ranges of rounds that have one phase, of the variant's first run."""
    ranges: list[Content] = []
    for row in variant.runs[0].rounds if variant.runs else []:
        phase = _inside(row, "measures").get("phase")
        if phase is None:
            continue
        name = setting_text(short(phase) if isinstance(phase, float) else phase)
        if ranges and ranges[-1]["name"] == name:
            ranges[-1]["to"] = row["round"]
        else:
            ranges.append({"name": name, "from": row["round"], "to": row["round"]})
    return ranges


def _measures(folder: StoredResults) -> list[Content]:
    """A chart for each number that methods report of themselves, such as a threshold or the share accepted."""
    rows = [row for run in folder.runs for row in run.rounds]
    names = list(dict.fromkeys(name for row in rows for name in _inside(row, "measures") if name != "phase"))
    charts = []
    for name in names:
        share = name.startswith(SHARES)
        value = _number_of(name, "measures", 100.0 if share else 1.0)
        series = [curve(v.label, (run.rounds for run in v.runs), value) for v in folder.variants]
        drawable = [s for s in series if s]
        if drawable:
            charts.append(
                {"key": name, "title": name.replace("_", " "), "unit": "%" if share else "", "series": drawable}
            )
    return charts


# --- clients and classes ----------------------------------------------------------------------------------------------
def _clients(run: Run) -> Content:
    """The accuracy of each client, in thousandths, at each evaluation."""
    rows = [run.clients[i] for i in _evenly(list(range(len(run.clients))), MOST_EVALUATIONS)]
    total = len(rows[-1]["samples"])
    rows = [row for row in rows if len(row["samples"]) == total and row.keys() == rows[-1].keys()]
    clients = min(total, MOST_CLIENTS)

    def thousandths(kind: str) -> list[list[int | None]]:
        lists = [row[f"accuracy_{kind}"][:clients] for row in rows]
        return [[_thousandth(values[c]) for values in lists] for c in range(clients)]

    confusions = run.confusions()
    names = list(confusions.clients) if confusions is not None and len(confusions.clients) == total else None
    return {
        "run": run.name,
        "rounds": [row["round"] for row in rows],
        "names": (names or [f"client {c}" for c in range(total)])[:clients],
        "clients": total,
        **{kind: thousandths(kind) for kind in PREDICTIONS if f"accuracy_{kind}" in rows[-1]},
    }


def _thousandth(value: Any) -> int | None:
    share = number({"value": value}, "value")
    return None if share is None else round(1000 * share)


def _classes(run: Run) -> Content | None:
    """The test samples of each client by class, how many of them were predicted right, and the sum of all confusions."""
    first = run.confusions()  # by head, or by prototype where the method trains no head
    if first is None:
        return None
    predictions = [first, *filter(None, [run.confusions(by) for by in first.predictions if by != first.by])]
    rows = [c.rows for confusions in predictions for c in confusions.clients.values()]
    size = max(1 + max(int(r[:, :2].max()) for r in rows), len(first.names))
    clients = list(first.clients)[:MOST_CLIENTS]
    samples = np.stack([_count(first, client, size).sum(axis=1) for client in clients])
    return {
        "run": run.name,
        "round": first.round,
        "names": clients,
        "clients": len(first.clients),
        "classes": [first.name(c) for c in range(size)],
        "samples": samples.tolist(),
        "right": {c.by: np.stack([_count(c, k, size).diagonal() for k in clients]).tolist() for c in predictions},
        "confusion": {c.by: _all_pairs(c, size) for c in predictions},
    }


def _count(confusions: Confusions, client: str, size: int) -> np.ndarray:
    true, predicted, count = confusions.clients[client].rows.T
    counts = np.zeros((size, size), dtype=int)
    np.add.at(counts, (true, predicted), count)
    return counts


def _all_pairs(confusions: Confusions, size: int) -> list[list[int]]:
    """Rows of true class, predicted class and count, over all clients."""
    total = sum((_count(confusions, client, size) for client in confusions.clients), np.zeros((size, size), dtype=int))
    return [[int(t), int(p), int(total[t, p])] for t, p in zip(*np.nonzero(total), strict=True)]


def _spaces(runs: Sequence[Run], projection: Projection) -> tuple[list[Content], list[str]]:
    read = [(run, *read_snapshots(run.path)) for run in runs]
    frames = sum(len(snapshots) for _, snapshots, _ in read)
    most = max(50, min(1000, POINTS // max(frames, 1)))
    spaces = []
    for run, snapshots, _ in read:
        if snapshots:
            confusions = run.confusions()
            names = list(confusions.names) if confusions is not None else []
            spaces.append({"run": run.name, "names": names, **space(snapshots, projection, most)})
    return spaces, [note for _, _, notes in read for note in notes]


# --- bytes, settings, versions ----------------------------------------------------------------------------------------
def _bytes(folder: StoredResults) -> Content:
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


def _mean_bytes(variant: VariantRuns, direction: str, kind: str) -> float | int | None:
    values = [number(_inside(row, direction), kind) for run in variant.runs for row in run.rounds]
    counts = [v for v in values if v is not None]
    return short(statistics.fmean(counts)) if counts else None


def _point(run: Run) -> Content | None:
    """The mean bytes of a round, both directions together, and the accuracies of this run."""
    per_round = [
        sum(v for d in ("up", "down") for k in _inside(row, d) if (v := number(_inside(row, d), k)) is not None)
        for row in run.rounds
    ]
    figures = run.summary[FIGURE] if run.summary is not None else run.metrics[-1] if run.metrics else {}
    accuracy = {"own": number(figures, OWN), **{kind: number(figures, f"accuracy_{kind}") for kind in PREDICTIONS}}
    if not per_round or all(v is None for v in accuracy.values()):
        return None
    return {
        "bytes": short(statistics.fmean(per_round)),
        **{kind: None if v is None else short(100 * v) for kind, v in accuracy.items()},
    }


def _settings(folder: StoredResults) -> Content:
    """The settings that all runs share, and those in which variants differ; the seed is neither."""
    by_variant = {v.label: flat(v.runs[0].settings) for v in folder.variants if v.runs}
    keys = list(dict.fromkeys(key for lines in by_variant.values() for key in lines))
    if folder.comparison:
        keys = [key for key in keys if key != "seed"]
    shared = [k for k in keys if len({lines.get(k) for lines in by_variant.values()}) == 1]
    return {
        "shared": [[key, next(iter(by_variant.values()))[key]] for key in shared],
        "labels": list(by_variant),
        "differ": [[k, *(lines.get(k) for lines in by_variant.values())] for k in keys if k not in shared],
        "seeds": sorted({run.seed for run in folder.runs}) if folder.comparison else [],
    }


def _versions(folder: StoredResults) -> list[Content]:
    """The versions of the libraries that finished runs were made with, one line for each set of versions."""
    lines: dict[str, Content] = {}
    for run in folder.runs:
        versions = _inside(run.summary or {}, "versions")
        if versions:
            text = ", ".join(f"{name} {version}" for name, version in versions.items())
            lines.setdefault(text, {"text": text, "runs": 0})["runs"] += 1
    return list(lines.values())
