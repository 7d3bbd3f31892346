"""The content of a report as plain numbers and text, which the page draws and the live view sends repeatedly."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ProtofedError
from ..evaluate.confusion import PREDICTIONS
from ..results.columns import MEASURES, NAME, Column, Row, chosen_columns, parse_column
from ..results.confusions import Confusions
from ..results.gains import values_by_seed
from ..results.notes import losses_of, notes
from ..results.read import Run, StoredResults, read_folder
from ..results.rows import FIGURE, number
from ..results.tables import Cell, caption, comparison_cells, flat, over_clients_text
from ..version import __version__
from .cost import bytes_of, dropped, spent
from .curves import Content, curves_of, evenly, inside, measures_of, short, terms_of
from .opening import about, opening_run, verdict_of
from .space import Projection, read_snapshots, space

MOST_EVALUATIONS = 60  # columns of a heat map
MOST_CLIENTS = 200
MOST_IN_DETAIL = 16  # runs with heat maps and spaces of their own; where there are more, the first seed of each variant
POINTS = 300_000  # of all embedding spaces together: about two megabytes


def content(folder: str | Path, projection: Projection = "pca") -> Content:
    """Collect everything that the page shows.

    Args:
        folder: The folder of a run, a comparison or a sweep.
        projection: How embedding spaces are brought to the plane, `pca` or `tsne`.

    Returns:
        The parts of the page by name. A part that was not measured is empty; `notes` says what could not be read.

    Example: `content("runs/digits")["table"]["rows"]`
    """
    everything = read_folder(folder)
    results = everything.without_interrupted()
    detailed = _in_detail(results)
    spaces, space_notes = _spaces(detailed, projection)
    parts = {
        **about(everything),
        "version": __version__,
        "status": _status(everything),
        "variants": [{"label": v.label, "method": v.method} for v in results.variants],
        "verdict": verdict_of(results),
        "opens": opening_run(results, detailed),
        "band": "seeds" if results.comparison else "clients",
        "table": _table(results),
        "curves": curves_of(results),
        "clients": [_clients(run) for run in detailed if run.clients],
        "classes": [part for part in map(_classes, detailed) if part is not None],
        "spaces": spaces,
        "terms": [terms_of(v) for v in results.variants if any(run.rounds for run in v.runs)],
        "measures": measures_of(results),
        "bytes": {**bytes_of(results), "spent": spent(results)},
        "dropped": dropped(results),
        "settings": _settings(everything),
        "versions": _versions(results),
    }
    left_out = len(results.runs) - len(detailed)
    limit = [f"Clients, classes and spaces are of the first seed of each variant; {left_out} runs are left out there."]
    return {**parts, "notes": [*results.notes(), *space_notes, *(limit if left_out else []), *_interrupted(everything)]}


def _in_detail(folder: StoredResults) -> list[Run]:
    """The runs that have heat maps and spaces of their own."""
    if len(folder.runs) <= MOST_IN_DETAIL:
        return folder.runs
    return [v.runs[0] for v in folder.variants if v.runs]


# --- progress ---------------------------------------------------------------------------------------------------------
def _status(folder: StoredResults) -> Content:
    failed = {variant.label: variant.row().reasons() for variant in folder.variants}
    unfinished = [run for run in folder.runs if run.summary is None and run.seed not in failed[run.label]]
    runs = {
        state: [
            {"name": run.name, "round": run.last, "rounds": run.planned} for run in unfinished if run.state == state
        ]
        for state in ("under way", "interrupted")
    }
    return {
        "finished": sum(run.summary is not None for run in folder.runs),
        "failed": sum(map(len, failed.values())),
        "runs": folder.planned_runs,
        "under_way": runs["under way"],
        "interrupted": runs["interrupted"],
    }


def _interrupted(folder: StoredResults) -> list[str]:
    """A note for each run that was interrupted."""
    runs = [(run["name"], run["round"], run["rounds"]) for run in _status(folder)["interrupted"]]
    where = "shown as far as it came" if len(folder.runs) == 1 else "left out of all means"
    advice = f"`protofed resume {folder.path}` goes on"
    return [
        f"{name}: interrupted after round {round}{f' of {rounds}' if rounds else ''}, {where}; {advice}"
        for name, round, rounds in runs
    ]


# --- the table --------------------------------------------------------------------------------------------------------
def _table(folder: StoredResults) -> Content:
    if not folder.comparison:
        return _run_table(folder.runs[0])
    rows = [variant.row() for variant in folder.variants]
    columns = [name for name in folder.columns or () if _is_column(name)] or None
    chosen = chosen_columns(rows, columns)
    header, lines = comparison_cells(rows, columns)
    cells = [
        [{"text": row.title}]
        + [_cell(values_by_seed(row, column, rows), cell) for column, cell in zip(chosen, line[1:], strict=True)]
        for row, line in zip(rows, lines, strict=True)
    ]
    return {"header": header, "rows": cells, "caption": caption(rows, columns), "notes": notes(rows, columns)}


def _is_column(name: Any) -> bool:
    try:
        return isinstance(name, str) and bool(parse_column(name))
    except ProtofedError:
        return False


def _cell(by_seed: Mapping[int, float], cell: Cell) -> Content:
    value = short(statistics.fmean(by_seed.values())) if by_seed else None
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
        state = "so far" if run.state == "under way" else "the last before it was interrupted"
        parts = {f"round {run.metrics[-1]['round']}, {state}": run.metrics[-1]}
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
    mean = number(values, column.key)
    value = None if mean is None else short(column.scale * mean)
    return {"text": over_clients_text(values, column), "value": value, "mark": ""}


# --- clients and classes ----------------------------------------------------------------------------------------------
def _clients(run: Run) -> Content:
    """The accuracy of each client, in thousandths, at each evaluation."""
    rows = [run.clients[i] for i in evenly(list(range(len(run.clients))), MOST_EVALUATIONS)]
    total = len(rows[-1]["samples"])
    rows = [row for row in rows if len(row["samples"]) == total and row.keys() == rows[-1].keys()]
    clients = min(total, MOST_CLIENTS)

    def thousandths(kind: str) -> list[list[int | None]]:
        lists = [row[f"accuracy_{kind}"][:clients] for row in rows]
        return [[_thousandth(values[c]) for values in lists] for c in range(clients)]

    return {
        "run": run.name,
        "rounds": [row["round"] for row in rows],
        "names": run.client_names(total)[:clients],
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
            clients = run.client_names(len(run.clients[-1]["samples"])) if run.clients else []
            spaces.append({"run": run.name, "names": names, "clients": clients, **space(snapshots, projection, most)})
    return spaces, [note for _, _, notes in read for note in notes]


# --- bytes, settings, versions ----------------------------------------------------------------------------------------
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
        versions = inside(run.summary or {}, "versions")
        if versions:
            text = ", ".join(f"{name} {version}" for name, version in versions.items())
            lines.setdefault(text, {"text": text, "runs": 0})["runs"] += 1
    return list(lines.values())
