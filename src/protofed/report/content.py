"""What a report shows, as plain numbers and text: the page draws it, and the live view sends it again and again."""

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
MOST_IN_DETAIL = 16  # runs that have their own heat maps and spaces; of more, the first seed of each variant
POINTS = 300_000  # of all embedding spaces together: about two megabytes
COLUMNS_OF_METRICS = ("accuracy", "weighted_", "f1_", "mae_", "ensemble_", "validation")
BYTE_KINDS = ("prototypes", "weights", "scalars", "framing")
SHARES = ("acceptance", "accuracy", "f1", "weighted", "ensemble", "validation", "pseudo", "rejection")

Content = dict[str, Any]


def content(folder: str | Path, projection: Projection = "pca") -> Content:
    """Everything the page shows. Files that cannot be read are in `notes`; parts that are not there are empty."""
    found = read_folder(folder)
    detailed = _in_detail(found)
    spaces, more = _spaces(detailed, projection)
    parts = {
        "title": found.path.resolve().name,
        "kind": "comparison" if found.comparison else "run",
        "version": __version__,
        "status": _status(found),
        "variants": [{"label": v.label, "method": v.method} for v in found.variants],
        "band": "seeds" if found.comparison else "clients",
        "table": _table(found),
        "curves": _curves(found),
        "clients": [_clients(run) for run in detailed if run.clients],
        "classes": [part for part in map(_classes, detailed) if part is not None],
        "spaces": spaces,
        "terms": [_terms(v) for v in found.variants if any(run.rounds for run in v.runs)],
        "measures": _measures(found),
        "bytes": _bytes(found),
        "settings": _settings(found),
        "versions": _versions(found),
    }
    left_out = len(found.runs) - len(detailed)
    said = [f"Clients, classes and spaces are of the first seed of each variant; {left_out} runs are left out there."]
    return {**parts, "notes": [*found.notes(), *more, *(said if left_out else [])]}


def _in_detail(folder: StoredResults) -> list[Run]:
    if len(folder.runs) <= MOST_IN_DETAIL:
        return folder.runs
    return [v.runs[0] for v in folder.variants if v.runs]


def short(value: float | None) -> float | int | None:
    """Five digits: nobody sees more, and the page stays light."""
    if value is None:
        return None
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


# --- how far it is ----------------------------------------------------------------------------------------------------
def _status(folder: StoredResults) -> Content:
    finished = sum(run.summary is not None for run in folder.runs)
    begun = [{"name": run.name, "round": run.last, "rounds": run.planned} for run in folder.runs if run.summary is None]
    return {"finished": finished, "runs": folder.planned_runs, "under_way": begun}


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
    """One run: each way of summing up, or the last evaluation while it goes on."""
    parts: dict[str, Mapping[str, Any]] = {}
    if run.summary is not None:
        five = "rounds" if run.summary.get("format", 1) >= 2 else "evaluations"
        parts = {"last round": run.summary["last_round"], f"mean of the last five {five}": run.summary[FIGURE]}
        best = run.summary.get("best_on_validation")
        if isinstance(best, dict):
            parts[f"best on validation (round {best.get('round')})"] = best
    elif run.metrics:
        parts = {f"round {run.metrics[-1]['round']}, so far": run.metrics[-1]}
    there = {key for values in parts.values() for key in values if NAME.fullmatch(key)}
    wanted = [f"{m}_{kind}" for m in MEASURES for kind in PREDICTIONS] + sorted(key for key in there if "@" in key)
    columns = [parse_column(key) for key in wanted if key in there]
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
    """Mean and deviation over seeds by round; `spread` gives the deviation of a single run (over its clients)."""
    by_round: dict[int, list[float]] = {}
    widths: dict[int, float | None] = {}
    for rows in runs:
        for row in rows:
            number_here = value(row)
            if number_here is not None:
                by_round.setdefault(row["round"], []).append(number_here)
                widths[row["round"]] = None if spread is None else spread(row)
    if not by_round:
        return None
    rounds = _evenly(sorted(by_round), MOST_ROUNDS)
    deviations = [statistics.stdev(v) if len(v := by_round[r]) > 1 else widths[r] for r in rounds]
    means = [statistics.fmean(by_round[r]) for r in rounds]
    found: Content = {"label": label, "x": rounds, "y": [short(m) for m in means]}
    if any(d is not None for d in deviations):
        found["low"] = [short(m - (d or 0.0)) for m, d in zip(means, deviations, strict=True)]
        found["high"] = [short(m + (d or 0.0)) for m, d in zip(means, deviations, strict=True)]
    return found


def _evenly(values: list[int], most: int) -> list[int]:
    if len(values) <= most:
        return values
    return [values[i] for i in np.linspace(0, len(values) - 1, most).round().astype(int)]


def _picked(key: str, inside: str | None = None, scale: float = 1.0) -> Values:
    def value(row: JsonRow) -> float | None:
        place = row if inside is None else row.get(inside)
        found = number(place, key) if isinstance(place, Mapping) else None
        return None if found is None else scale * found

    return value


def over_clients(key: str, scale: float) -> Values:
    """The deviation over clients. The accuracy in the method's own way has that of the head or the prototype: one it is."""

    def value(row: JsonRow) -> float | None:
        same = (
            [f"{OWN}_{kind}" for kind in PREDICTIONS if row.get(f"{OWN}_{kind}") == row.get(OWN)]
            if key == OWN
            else [key]
        )
        found = number(row, f"{same[0]}_std") if same else None
        return None if found is None else scale * found

    return value


def _curves(folder: StoredResults) -> list[Content]:
    """Accuracies, F1, MAE, the loss and the silhouette: a chart for each, a line for each variant."""
    there = {key for run in folder.runs for row in run.metrics for key in row}
    plain = sorted(key for key in there if key.startswith(COLUMNS_OF_METRICS) and not key.endswith("_std"))
    first = [*(f"accuracy_{kind}" for kind in PREDICTIONS), OWN]
    keys = [key for key in first if key in there] + [key for key in plain if key not in first]
    charts = []
    for key in keys:
        share = not key.startswith("mae_")
        scale = 100.0 if share else 1.0
        spread = None if folder.comparison else over_clients(key, scale)
        title = key.replace("_", " ").replace("@", " @ ").replace("f1", "F1").replace("mae", "MAE")
        title = "accuracy, each method's own way" if key == OWN else title
        found = [
            curve(v.label, (run.metrics for run in v.runs), _picked(key, scale=scale), spread) for v in folder.variants
        ]
        group = "accuracy"
        charts.append({"key": key, "group": group, "title": title, "unit": "%" if share else "", "series": found})
    loss = [curve(v.label, (run.rounds for run in v.runs), _picked("loss")) for v in folder.variants]
    charts.append({"key": "loss", "group": "loss", "title": "training loss", "unit": "", "series": loss})
    silhouettes = sorted(key for key in there if key.startswith("silhouette"))
    for key in silhouettes:
        found = [curve(v.label, (run.metrics for run in v.runs), _picked(key)) for v in folder.variants]
        title = key.replace("_", " ")
        charts.append({"key": key, "group": "silhouette", "title": title, "unit": "", "series": found})
    return [{**c, "series": [s for s in c["series"] if s]} for c in charts if any(c["series"])]


def _terms(variant: VariantRuns) -> Content:
    names = list(dict.fromkeys(name for run in variant.runs for row in run.rounds for name in _inside(row, "terms")))
    rows = [run.rounds for run in variant.runs]
    series = [curve(name, rows, _picked(name, "terms")) for name in names]
    return {"label": variant.label, "series": [s for s in series if s], "phases": _phases(variant)}


def _inside(row: JsonRow, key: str) -> Mapping[str, Any]:
    value = row.get(key)
    return value if isinstance(value, Mapping) else {}


def _phases(variant: VariantRuns) -> list[Content]:
    """Stretches of rounds with one phase, of the variant's first run."""
    stretches: list[Content] = []
    for row in variant.runs[0].rounds if variant.runs else []:
        phase = _inside(row, "measures").get("phase")
        if phase is None:
            continue
        name = setting_text(short(phase) if isinstance(phase, float) else phase)
        if stretches and stretches[-1]["name"] == name:
            stretches[-1]["to"] = row["round"]
        else:
            stretches.append({"name": name, "from": row["round"], "to": row["round"]})
    return stretches


def _measures(folder: StoredResults) -> list[Content]:
    """What methods measured of themselves: thresholds, acceptance and so on; a chart each."""
    rows = [row for run in folder.runs for row in run.rounds]
    names = list(dict.fromkeys(name for row in rows for name in _inside(row, "measures") if name != "phase"))
    charts = []
    for name in names:
        share = name.startswith(SHARES)
        value = _picked(name, "measures", 100.0 if share else 1.0)
        series = [curve(v.label, (run.rounds for run in v.runs), value) for v in folder.variants]
        kept = [s for s in series if s]
        if kept:
            charts.append({"key": name, "title": name.replace("_", " "), "unit": "%" if share else "", "series": kept})
    return charts


# --- clients and classes ----------------------------------------------------------------------------------------------
def _clients(run: Run) -> Content:
    """Accuracy of each client (in thousandths) at each evaluation."""
    rows = [run.clients[i] for i in _evenly(list(range(len(run.clients))), MOST_EVALUATIONS)]
    number_of = len(rows[-1]["samples"])
    rows = [row for row in rows if len(row["samples"]) == number_of and row.keys() == rows[-1].keys()]
    shown = min(number_of, MOST_CLIENTS)

    def thousandths(kind: str) -> list[list[int | None]]:
        lists = [row[f"accuracy_{kind}"][:shown] for row in rows]
        return [[_thousandth(values[c]) for values in lists] for c in range(shown)]

    confusions = run.confusions()
    names = list(confusions.clients) if confusions is not None and len(confusions.clients) == number_of else None
    return {
        "run": run.name,
        "rounds": [row["round"] for row in rows],
        "names": (names or [f"client {c}" for c in range(number_of)])[:shown],
        "clients": number_of,
        **{kind: thousandths(kind) for kind in PREDICTIONS if f"accuracy_{kind}" in rows[-1]},
    }


def _thousandth(value: Any) -> int | None:
    found = number({"value": value}, "value")
    return None if found is None else round(1000 * found)


def _classes(run: Run) -> Content | None:
    """Test samples of each client by class, how many of them were right, and all confusions together."""
    head = run.confusions()  # of a method that trains no head, those by prototype
    if head is None:
        return None
    ways = [head, *filter(None, [run.confusions(by) for by in head.predictions if by != head.by])]
    rows = [c.rows for way in ways for c in way.clients.values()]
    size = max(1 + max(int(r[:, :2].max()) for r in rows), len(head.names))
    clients = list(head.clients)[:MOST_CLIENTS]
    samples = np.stack([_count(head, client, size).sum(axis=1) for client in clients])
    return {
        "run": run.name,
        "round": head.round,
        "names": clients,
        "clients": len(head.clients),
        "classes": [head.name(c) for c in range(size)],
        "samples": samples.tolist(),
        "right": {c.by: np.stack([_count(c, k, size).diagonal() for k in clients]).tolist() for c in ways},
        "confusion": {c.by: _all_pairs(c, size) for c in ways},
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
    found = []
    for run, snapshots, _ in read:
        if snapshots:
            confusions = run.confusions()
            names = list(confusions.names) if confusions is not None else []
            found.append({"run": run.name, "names": names, **space(snapshots, projection, most)})
    return found, [note for _, _, told in read for note in told]


# --- bytes, settings, versions ----------------------------------------------------------------------------------------
def _bytes(folder: StoredResults) -> Content:
    """Bytes of a round by direction and kind, and the accuracy they came to: mean over rounds and seeds."""
    lines = []
    for variant in folder.variants:
        kinds = {d: {k: _mean_bytes(variant, d, k) for k in BYTE_KINDS} for d in ("up", "down")}
        shown = [run for run in variant.runs if run.summary is not None] or variant.runs  # as in the table
        points = [point for run in shown if (point := _point(run)) is not None]
        if points:
            lines.append({"label": variant.label, **kinds, "points": points})
    return {"kinds": list(BYTE_KINDS), "lines": lines}


def _mean_bytes(variant: VariantRuns, direction: str, kind: str) -> float | int | None:
    values = [number(_inside(row, direction), kind) for run in variant.runs for row in run.rounds]
    there = [v for v in values if v is not None]
    return short(statistics.fmean(there)) if there else None


def _point(run: Run) -> Content | None:
    """Bytes a round, both directions together, against the accuracies of this run."""
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
    """Settings that all runs share, and those in which variants differ (the seed apart)."""
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
    """What the finished runs were made with; several lines where it was not the same."""
    seen: dict[str, Content] = {}
    for run in folder.runs:
        versions = _inside(run.summary or {}, "versions")
        if versions:
            text = ", ".join(f"{name} {version}" for name, version in versions.items())
            seen.setdefault(text, {"text": text, "runs": 0})["runs"] += 1
    return list(seen.values())
