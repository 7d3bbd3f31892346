"""A table and a picture of the confusion matrices that a run wrote, client by client."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from ..errors import ProtofedError
from ..evaluate.confusion import Confusion
from ..results.confusions import Confusions
from ..results.tables import MISSING

FORMATS = ("png", "svg", "pdf")
PANELS = 12  # a picture of more is not readable
SIDE = 3.0  # inches of a panel
LONGEST = 14  # letters of a class's name in the picture
INK, QUIET, LINE = "#1b2733", "#66727f", "#e8ecf0"
SHADES = ("#e3eef7", "#b5d3e8", "#6ca6cf", "#2f6f9f", "#123a5c")


def most_frequent(confusion: Confusion) -> tuple[int, int, int, int] | None:
    """The most frequent confusion of a client.

    Among equally frequent ones, the one with the larger share of its class comes first, then the one of the first class.

    Returns:
        The true class, the class it was taken for, how often, and the number of samples of the true class; None where
        every sample is right.
    """
    true, predicted, count = confusion.rows.T
    totals = np.bincount(true, count).astype(int)
    wrong = confusion.rows[true != predicted].tolist()
    if not wrong:
        return None
    t, p, n = min(wrong, key=lambda row: (-row[2], totals[row[0]], row[0], row[1]))
    return t, p, n, int(totals[t])


def confusion_table(confusions: Confusions) -> Table:
    """Make the table of a run's confusions for the terminal.

    Args:
        confusions: The confusions of all clients.

    Returns:
        A row for each client: samples, accuracy, F1, MAE where classes are numbers, and the most frequent confusion.
    """
    table = Table(title=f"by {confusions.by}, round {confusions.round}", caption="Accuracy and macro F1 in %.")
    table.caption_justify = "left"
    titles = ["test samples", "accuracy", "F1", *(["MAE"] if confusions.values else [])]
    table.add_column("client", overflow="fold")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("most frequent confusion", overflow="fold")
    for client, confusion in confusions.clients.items():
        cells = [f"{confusion.samples:,}", f"{100 * _accuracy(confusion):.2f}", f"{100 * confusion.macro_f1():.2f}"]
        if confusions.values:
            cells.append(f"{confusion.mean_absolute_error(confusions.values):.2f}")
        worst = most_frequent(confusion)
        text = MISSING
        if worst is not None:
            true, predicted, count, total = worst
            text = f"{confusions.name(true)} taken for {confusions.name(predicted)}: {count:,} of {total:,}"
        table.add_row(Text(client), *cells, Text(text))
    return table


def _accuracy(confusion: Confusion) -> float:
    return confusion.correct / confusion.samples


def draw_confusions(confusions: Confusions, path: Path) -> None:
    """Write a picture with a panel for each of the first twelve clients.

    Args:
        confusions: The confusions of all clients.
        path: The file; its suffix, `.png`, `.svg` or `.pdf`, says the format.
    """
    from matplotlib import rc_context
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise ProtofedError(f"{path}: expected a file name ending in .png, .svg or .pdf")
    panels = list(confusions.clients.items())[:PANELS]
    columns = len(panels) if len(panels) <= 3 else math.ceil(math.sqrt(len(panels)))
    lines = math.ceil(len(panels) / columns)
    present = {c for _, confusion in panels for c in confusion.rows[:, :2].ravel().tolist()}
    letters = min(max(len(confusions.name(c)) for c in present), LONGEST)
    left_margin = 0.5 + 0.07 * letters  # room for the classes' names
    bottom_margin = 0.5 + (0.07 * letters if letters > 2 else 0.1)
    step_x, step_y = left_margin + SIDE + 0.2, 0.5 + SIDE + bottom_margin
    width, height = step_x * columns + 0.95, step_y * lines + 0.65

    # Without mathematics in names, a date and random ids, the same run gives the same picture.
    with rc_context({"svg.hashsalt": "protofed", "text.parse_math": False}):
        figure = Figure(figsize=(width, height), layout=None, facecolor="white")
        scale = ScalarMappable(Normalize(0, 1), LinearSegmentedColormap.from_list("shares", list(SHADES)))
        for i, (client, confusion) in enumerate(panels):
            line, column = divmod(i, columns)
            x, y = step_x * column + left_margin, height - 0.65 - step_y * line - 0.5 - SIDE
            axes = figure.add_axes((x / width, y / height, SIDE / width, SIDE / height))
            _draw_panel(axes, client, confusion, confusions, scale, upright=letters <= 2)
        bar = figure.add_axes(
            ((step_x * columns + 0.15) / width, (height - 0.65 - 0.5 - SIDE) / height, 0.13 / width, SIDE / height)
        )
        figure.colorbar(scale, cax=bar, format=PercentFormatter(1.0)).outline.set_visible(False)
        bar.tick_params(length=0, labelsize=7, labelcolor=QUIET)
        bar.set_ylabel("share of the true class", color=QUIET, fontsize=8)
        title = f"What each client takes for what, by {confusions.by}"
        figure.text(0.45 / width, 1 - 0.22 / height, title, fontsize=12, weight="bold", color=INK, va="center")
        about = f"{shown_of(confusions)}, round {confusions.round}; correct predictions stand in a frame"
        figure.text(0.45 / width, 1 - 0.46 / height, about, fontsize=8, color=QUIET, va="center")
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        figure.savefig(path, dpi=150, metadata=metadata)


def _draw_panel(
    axes: Any, client: str, confusion: Confusion, confusions: Confusions, scale: Any, *, upright: bool
) -> None:
    """Draw the matrix of a client: rows are true classes, columns predicted ones, of those classes that occur."""
    from matplotlib.patches import Rectangle

    true, predicted, count = confusion.rows.T
    classes = np.union1d(true, predicted)
    size = len(classes)
    counts = np.zeros((size, size), dtype=int)
    np.add.at(counts, (np.searchsorted(classes, true), np.searchsorted(classes, predicted)), count)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(
        np.ma.masked_equal(shares, 0.0), cmap=scale.cmap, norm=scale.norm, aspect="auto", interpolation="nearest"
    )
    cell = SIDE * 72 / size  # in points, as fonts are
    font = min(cell / (0.62 * len(f"{counts.max():,}") + 0.5), cell * 0.55, 9.0)
    if font >= 4.5:
        for t, p in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[t, p] > 0.55 else INK
            axes.text(p, t, f"{counts[t, p]:,}", ha="center", va="center", fontsize=font, color=colour)
    if cell >= 6:
        axes.set_xticks(np.arange(size + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(size + 1) - 0.5, minor=True)
        axes.grid(which="minor", color=LINE, linewidth=0.7)
    frame: dict[str, Any] = {"fill": False, "edgecolor": QUIET, "linewidth": min(0.08 * cell, 0.9), "zorder": 3}
    for c in range(size):  # the correct predictions
        axes.add_patch(Rectangle((c - 0.5, c - 0.5), 1, 1, **frame))
    label = max(min(cell / 1.7, 7.0), 5.0) if upright else 7.0  # two digits side by side
    ticks = np.arange(0, size, math.ceil(8 / cell))  # a name every eight points at most
    names = [_cut(confusions.name(int(classes[m]))) for m in ticks]
    axes.tick_params(which="both", length=0, labelsize=label, labelcolor=INK)
    axes.set_xticks(ticks, names, rotation=0 if upright else 90)
    axes.set_yticks(ticks, names)
    axes.set_xlim(-0.5, size - 0.5)
    axes.set_ylim(size - 0.5, -0.5)
    axes.set_xlabel("taken for", color=QUIET, fontsize=8)
    axes.set_ylabel("true", color=QUIET, fontsize=8)
    axes.spines[:].set_color("#c9d1d9")
    share = f"{100 * _accuracy(confusion):.1f} % of {confusion.samples:,} right"
    font = min(9.0, 340 / max(len(client), 1))  # the name in full, at the width of the panel
    axes.text(0, 1.1, client, transform=axes.transAxes, fontsize=font, weight="bold", color=INK)
    axes.text(0, 1.03, share, transform=axes.transAxes, fontsize=8, color=QUIET)


def shown_of(confusions: Confusions) -> str:
    """The text that says how many clients a picture shows."""
    number = len(confusions.clients)
    if number > PANELS:
        return f"the first {PANELS} of {number} clients"
    return "1 client" if number == 1 else f"{number} clients"


def _cut(name: str, length: int = LONGEST) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"
