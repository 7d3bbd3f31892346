"""Figures for a notebook or a paper, drawn with matplotlib in the width of a column or of a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from ..errors import ProtofedError
from ..results.columns import OWN, own_predictions
from ..results.confusions import By
from ..results.read import Run, StoredResults, VariantRuns, read_folder
from ..results.rows import JsonRow, number
from .comparison_figures import plot_bytes, plot_gains, sites_measured
from .confusion import INK, QUIET, SHADES
from .cost import spent
from .curves import curve, over_clients
from .page import check_projection
from .space import Plane, Projection, project, read_snapshots, thin
from .style import CLASSES, DASHES, FORMATS, SERIES, STYLE, WIDTHS, Drawing, Source, Width, new_figure, read_source

__all__ = [
    "CLASSES",
    "SERIES",
    "in_memory",
    "plot_accuracy",
    "plot_bytes",
    "plot_clients",
    "plot_confusion",
    "plot_embedding",
    "plot_gains",
    "plot_loss",
    "write_figures",
]

POINTS = 1500
MOST_CLASSES = 30  # that a legend lists
MOST_NAMED = 40  # clients whose names stand at the side


def in_memory(label: str, metrics: Sequence[JsonRow], summary: Mapping[str, Any] | None) -> StoredResults:
    """Make a source of figures from a result that was never written to a folder.

    Args:
        label: The label of the curves.
        metrics: One row per evaluated round.
        summary: The summary of the run.

    Returns:
        Results with one run, which has neither clients' rows nor confusions nor snapshots.
    """
    finished = None if summary is None else dict(summary)
    run = Run(Path(label), label, 0, {}, metrics, metrics, [], finished)
    return StoredResults(run.path, False, [VariantRuns(label, label, {}, [run])])


def plot_accuracy(source: Source, by: By | None = None, width: Width = "column") -> Figure:
    """Draw the accuracy by round, a line for each variant. The band is the deviation over seeds, or over a run's clients.

    Args:
        source: A folder, or results that were read from one.
        by: The prediction. None takes that of the methods' papers where it is the same for all variants, else the head,
            or the prototypes where a variant trains no head.
        width: The width of the figure: a `column` or a `page`.

    Returns:
        The figure.

    Example: `plot_accuracy("runs/digits", by="head").savefig("accuracy.pdf")`
    """
    folder = read_source(source)
    rows = [row for run in folder.runs for row in run.metrics]
    if by is None and _has_one_own_way(folder):
        return _lines(folder, "metrics", OWN, "accuracy (%)", 100.0, width)
    by = by or ("head" if all("accuracy_head" in row for row in rows) else "prototype")
    return _lines(folder, "metrics", f"accuracy_{by}", f"accuracy by {by} (%)", 100.0, width)


def _has_one_own_way(folder: StoredResults) -> bool:
    """Whether all variants predict in the same way in their papers, so that one picture compares like with like."""
    rows = [row for run in folder.runs for row in run.metrics if number(row, OWN) is not None]
    return bool(rows) and (len(folder.variants) == 1 or bool(set.intersection(*map(own_predictions, rows))))


def plot_loss(source: Source, width: Width = "column") -> Figure:
    """Draw the training loss by round, a line for each variant: `plot_loss("runs/digits", width="page")`."""
    return _lines(read_source(source), "rounds", "loss", "training loss", 1.0, width)


def plot_clients(source: Source, run: str | None = None, by: By | None = None, width: Width = "column") -> Figure:
    """Draw the accuracy of every client at every evaluation of one run.

    Args:
        source: A folder, or results that were read from one.
        run: The name of the run's folder, where there are several runs.
        by: The prediction; None takes the head where the method trains one.
        width: The width of the figure: a `column` or a `page`.

    Returns:
        The figure.
    """
    chosen = _chosen_run(read_source(source), run)
    if not chosen.clients:
        raise ProtofedError(f"{chosen.path}: no client has been evaluated yet (clients.jsonl)")
    total = len(chosen.clients[-1]["samples"])
    by = by or ("head" if "accuracy_head" in chosen.clients[-1] else "prototype")
    rows = [row for row in chosen.clients if len(row["samples"]) == total and f"accuracy_{by}" in row]
    if not rows:
        raise ProtofedError(f"{chosen.path}: no accuracy by {by}, as this method has none")
    shares = np.array([[100 * (number({"v": v}, "v") or 0.0) for v in row[f"accuracy_{by}"]] for row in rows]).T
    with rc_context(STYLE):
        height = min(1.0 + 0.11 * total, 1.6 * WIDTHS[width])
        figure, axes = new_figure(width, max(height, 1.6))
        image = axes.imshow(
            shares,
            aspect="auto",
            interpolation="nearest",
            cmap=_shades(),
            vmin=np.percentile(shares, 5),
            vmax=shares.max(),
        )
        ticks = np.unique(np.linspace(0, len(rows) - 1, min(6, len(rows))).round().astype(int))
        axes.set_xticks(ticks, [str(rows[m]["round"]) for m in ticks])
        axes.set(xlabel="round")
        names = chosen.client_names(total)
        if total <= MOST_NAMED and any(name != f"client {c}" for c, name in enumerate(names)):
            axes.set_yticks(range(total), names)
        else:
            axes.set(ylabel="client")
            axes.yaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=axes, extend="min", pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label(f"accuracy by {by} (%)")
        bar.ax.tick_params(length=0)
    return figure


def plot_confusion(source: Source, run: str | None = None, by: By | None = None, width: Width = "column") -> Figure:
    """Draw the confusion matrix over all clients of one run. A row is a true class, and a shade is a share of it.

    Args:
        source: A folder, or results that were read from one.
        run: The name of the run's folder, where there are several runs.
        by: The prediction; None takes the head where the method trains one.
        width: The width of the figure: a `column` or a `page`.

    Returns:
        The figure.
    """
    chosen = _chosen_run(read_source(source), run)
    confusions = chosen.confusions(by)
    if confusions is None:
        problem = chosen.notes[-1] if chosen.notes else f"{chosen.path}: it has no confusion.json yet"
        raise ProtofedError(problem)
    rows = np.concatenate([client.rows for client in confusions.clients.values()])
    classes = np.union1d(rows[:, 0], rows[:, 1])
    counts = np.zeros((len(classes), len(classes)))
    np.add.at(counts, tuple(np.searchsorted(classes, rows[:, :2]).T), rows[:, 2])
    shares = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    with rc_context(STYLE):
        figure, axes = new_figure(width, 0.9 * WIDTHS[width])
        image = axes.imshow(np.ma.masked_equal(shares, 0.0), cmap=_shades(), vmin=0, vmax=100, interpolation="nearest")
        if len(classes) <= 12:
            for t, p in zip(*np.nonzero(counts), strict=True):
                colour = "white" if shares[t, p] > 55 else INK
                axes.text(p, t, f"{counts[t, p]:.0f}", ha="center", va="center", fontsize=6, color=colour)
        ticks = np.arange(0, len(classes), math.ceil(len(classes) / 25))
        names = [confusions.name(int(classes[m]))[:14] for m in ticks]
        axes.set_xticks(ticks, names, rotation=0 if max(map(len, names)) <= 2 else 90)
        axes.set_yticks(ticks, names)
        axes.set(xlabel="taken for", ylabel="true")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=axes, pad=0.02, shrink=0.85)
        bar.outline.set_visible(False)
        bar.set_label("share of the true class (%)")
        bar.ax.tick_params(length=0)
    return figure


def plot_embedding(
    source: Source, run: str | None = None, projection: Projection = "pca", width: Width = "column"
) -> Figure:
    """Draw the embedding space of one run with its prototypes as stars.

    Args:
        source: A folder, or results that were read from one.
        run: The name of the run's folder, where there are several runs.
        projection: How the space is brought to the plane, `pca` or `tsne`.
        width: A `column` shows the last snapshot, a `page` the first, the middle and the last.

    Returns:
        The figure.
    """
    chosen = _chosen_run(read_source(source), run)
    snapshots, notes = read_snapshots(chosen.path)
    if not snapshots:
        raise ProtofedError(notes[0] if notes else f"{chosen.path}: it has no snapshots of the embedding space")
    planes, axes_text = project(thin(snapshots, POINTS), projection)
    selection = (
        [planes[-1]] if width == "column" else [planes[i] for i in sorted({0, len(planes) // 2, len(planes) - 1})]
    )
    with rc_context(STYLE):
        figure = Drawing(figsize=(WIDTHS[width], WIDTHS[width] / len(selection) + 0.3), layout="constrained")
        panels = figure.subplots(1, len(selection), sharex=True, sharey=True, squeeze=False)[0]
        for axes, plane in zip(panels, selection, strict=True):
            colours = [CLASSES[c % len(CLASSES)] for c in plane.snapshot.y]
            axes.scatter(*plane.points.T, s=4, c=colours, alpha=0.6, linewidths=0)
            stars = [CLASSES[int(c) % len(CLASSES)] for c in plane.stars[:, 2]]
            axes.scatter(*plane.stars[:, :2].T, s=60, marker="*", c=stars, edgecolors="white", linewidths=0.6, zorder=3)
            axes.set_title(f"round {plane.snapshot.round}", loc="left")
            axes.set(xticks=[], yticks=[], aspect="equal")
            axes.spines[:].set_visible(True)
        figure.supxlabel(axes_text, fontsize=6, color=QUIET)
        _class_legend(figure, chosen, selection)
    return figure


def _class_legend(figure: Figure, run: Run, planes: Sequence[Plane]) -> None:
    """Name the classes by their colours beside the space, where they are not too many to tell apart."""
    from matplotlib.lines import Line2D

    classes = sorted({int(c) for plane in planes for c in plane.snapshot.y})
    if len(classes) > MOST_CLASSES:
        return
    confusions = run.confusions()
    names = {c: str(c) if confusions is None or c >= len(confusions.names) else confusions.name(c) for c in classes}
    look: dict[str, Any] = {"marker": "o", "markersize": 4, "linestyle": ""}
    handles = [Line2D([], [], color=CLASSES[c % len(CLASSES)], label=names[c], **look) for c in classes]
    columns = max(1, min(len(classes), int(figure.get_size_inches()[0] * 14 / (max(map(len, names.values())) + 4))))
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False, handletextpad=0.1)


def write_figures(
    folder: str | Path,
    format: str = "pdf",
    width: str = "column",
    out: str | Path | None = None,
    projection: Projection = "pca",
) -> list[Path]:
    """Draw and write every figure for which the folder has numbers.

    Args:
        folder: The folder of a run, a comparison or a sweep. Of several seeds, the first one of each variant has figures
            of clients, confusions and spaces.
        format: The format of the files: `pdf`, `svg` or `png`.
        width: The width of the figures: a `column` or a `page`.
        out: The folder to write to; None takes `figures` in the folder.
        projection: How embedding spaces are brought to the plane, `pca` or `tsne`.

    Returns:
        The files.

    Example: `write_figures("runs/digits", format="svg", width="page")`
    """
    if format not in FORMATS:
        raise ProtofedError(f"--format {format!r}: expected one of {', '.join(FORMATS)}")
    check_projection(projection)
    if width not in WIDTHS:
        raise ProtofedError(f"--width {width!r}: expected one of {', '.join(WIDTHS)}")
    chosen: Width = "column" if width == "column" else "page"
    results = read_folder(folder).without_interrupted()
    target = Path(folder) / "figures" if out is None else Path(out)
    figures: dict[str, Figure] = {}
    rows = [variant.row() for variant in results.variants]
    for by in sites_measured(rows):
        figures[f"gains-{by}"] = plot_gains(rows, by, chosen)
    if _has_one_own_way(results):
        figures["accuracy"] = plot_accuracy(results, None, chosen)
    for by in ("head", "prototype"):
        if any(number(row, f"accuracy_{by}") is not None for run in results.runs for row in run.metrics):
            figures[f"accuracy-{by}"] = plot_accuracy(results, by, chosen)
    if any(number(row, "loss") is not None for run in results.runs for row in run.rounds):
        figures["loss"] = plot_loss(results, chosen)
    if results.comparison and (charts := spent(results)):
        figures["bytes"] = plot_bytes(results, "head" if "head" in charts else "prototype", chosen)
    for run in (variant.runs[0] for variant in results.variants if variant.runs):
        name = f"-{run.name}" if results.comparison else ""
        if run.clients:
            figures[f"clients{name}"] = plot_clients(results, run.name, width=chosen)
        if run.confusions() is not None:
            figures[f"confusion{name}"] = plot_confusion(results, run.name, width=chosen)
        if read_snapshots(run.path)[0]:
            figures[f"embedding{name}"] = plot_embedding(results, run.name, projection, chosen)
    if not figures:
        raise ProtofedError(f"{folder}: there is nothing to draw yet; no round has been written")
    try:
        target.mkdir(parents=True, exist_ok=True)
        return [_save(figure, target / f"{name}.{format}") for name, figure in figures.items()]
    except OSError as error:
        raise ProtofedError(f"{target}: cannot be written ({error.strerror})") from None


def _save(figure: Figure, path: Path) -> Path:
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(path.suffix[1:])
    with rc_context(STYLE):
        figure.savefig(path, dpi=300, metadata=metadata)
    return path


def _chosen_run(folder: StoredResults, name: str | None) -> Run:
    runs = {run.name: run for run in folder.runs}
    if name is None and len(runs) == 1:
        return folder.runs[0]
    if name in runs:
        return runs[name]
    problem = "there are several runs" if name is None else f"no run {name!r}"
    raise ProtofedError(f"{folder.path}: {problem}; name one of {', '.join(runs) or 'none (no run has begun)'}")


def _shades() -> LinearSegmentedColormap:
    return LinearSegmentedColormap.from_list("shares", list(SHADES))


def _lines(
    folder: StoredResults, file: Literal["metrics", "rounds"], key: str, title: str, scale: float, width: Width
) -> Figure:
    def value(row: JsonRow) -> float | None:
        measured = number(row, key)
        return None if measured is None else scale * measured

    spread = None if folder.comparison else over_clients(key, scale)
    curves = [curve(v.label, (getattr(run, file) for run in v.runs), value, spread) for v in folder.variants]
    if not any(curves):
        raise ProtofedError(f"{folder.path}: {key} has not been measured yet ({file}.jsonl)")
    with rc_context(STYLE):
        figure, axes = new_figure(width, 0.62 * WIDTHS[width] if width == "column" else 2.8)
        for i, line in enumerate(curves):
            if line is None:
                continue
            colour = SERIES[i % len(SERIES)]
            dash = DASHES[i // len(SERIES) % len(DASHES)]
            marker = "o" if len(line["x"]) == 1 else ""
            axes.plot(line["x"], line["y"], color=colour, linestyle=dash, marker=marker, label=line["label"])
            if "low" in line:
                axes.fill_between(line["x"], line["low"], line["high"], color=colour, alpha=0.15, linewidth=0)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.set(xlabel="round", ylabel=title)
        if scale == 100.0:
            axes.set_ylim(top=min(axes.get_ylim()[1], 101))
        if sum(line is not None for line in curves) > 1:
            axes.legend(frameon=False, ncols=2 if width == "column" else 4)
    return figure
