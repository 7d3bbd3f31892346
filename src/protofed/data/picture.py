"""Who holds what, at a glance: a picture of clients × classes for a page, a table for the terminal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from ..errors import ProtofedError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_INK, _QUIET, _BLUE = "#1b2733", "#66727f", "#2f6f9f"
_SHADES = ("#ffffff", "#e3eef7", "#b5d3e8", "#6ca6cf", "#2f6f9f", "#123a5c")
_BLOCKS = " ░▒▓█"
MOST_CLIENTS, MOST_CLASSES, STRIP = 40, 30, 50


def draw_counts(
    counts: Tensor, names: Sequence[str], path: Path, title: str = "Training samples by client and class"
) -> None:
    """Write a picture of `counts [clients, classes]` as PNG, SVG or PDF, by the suffix of `path`."""
    from matplotlib import rc_context
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg", "pdf"):
        raise ProtofedError(f"{path}: expected a file name ending in .png, .svg or .pdf")
    table = counts.cpu().numpy()
    clients, classes = table.shape
    labels = _names(names, classes)
    longest = max(map(len, labels))

    # Cells are as large as the page allows; their numbers are written where they fit.
    cell_w = min(9.0 / clients, 0.62)
    cell_h = min(6.5 / classes, 0.34)
    digits = len(f"{int(table.max()):,}")
    font = min(cell_w * 72 / (0.62 * digits + 0.5), cell_h * 72 * 0.55, 9.0)
    left, right, bottom, bars, top = 0.75 + 0.075 * min(longest, 16), 1.15, 0.62, 0.62, 0.62
    grid_w, grid_h = max(cell_w * clients, 4.4), max(cell_h * classes, 0.9)
    width, height = left + grid_w + right, bottom + grid_h + 0.1 + bars + top
    figure = Figure(figsize=(width, height), layout=None, facecolor="white")

    def area(x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
        return x / width, y / height, w / width, h / height

    grid = figure.add_axes(area(left, bottom, grid_w, grid_h))
    colours = LinearSegmentedColormap.from_list("counts", list(_SHADES[1:])).with_extremes(bad=_SHADES[0])
    top_count = max(float(table.max()), 1.0)
    norm = PowerNorm(0.5, vmin=0, vmax=top_count)
    shown = np.ma.masked_equal(table.T.astype(float), 0.0)
    image = grid.imshow(shown, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    if font >= 4.5:
        for client, c in zip(*np.nonzero(table), strict=True):
            dark = norm(table[client, c]) > 0.55
            grid.text(
                client,
                c,
                f"{table[client, c]:,}",
                ha="center",
                va="center",
                fontsize=font,
                color="white" if dark else _INK,
            )
    if cell_w * 72 >= 8 and cell_h * 72 >= 8:
        grid.set_xticks(np.arange(clients + 1) - 0.5, minor=True)
        grid.set_yticks(np.arange(classes + 1) - 0.5, minor=True)
        grid.grid(which="minor", color="#e8ecf0", linewidth=0.8)
    grid.tick_params(which="both", length=0, labelsize=8, labelcolor=_INK)
    grid.set_xticks(_ticks(clients, grid_w / 0.3))
    rows = _ticks(classes, grid_h / 0.15)
    grid.set_yticks(rows, [_cut(labels[c], 16) for c in rows])
    grid.set_xlabel("client", color=_QUIET, fontsize=9)
    grid.set_ylabel("class", color=_QUIET, fontsize=9)

    above = figure.add_axes(area(left, bottom + grid_h + 0.1, grid_w, bars), sharex=grid)
    above.bar(np.arange(clients), table.sum(axis=1), width=0.8 if clients <= 60 else 1.0, color=_BLUE)
    above.tick_params(which="both", length=0, labelbottom=False, labelsize=7, labelcolor=_QUIET)
    above.yaxis.set_major_locator(MaxNLocator(2, integer=True))
    above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    above.grid(axis="y", color="#e8ecf0", linewidth=0.8)
    above.set_axisbelow(True)
    above.set_ylabel("total", color=_QUIET, fontsize=8, rotation=0, ha="right", va="center", labelpad=16)
    for axes in (grid, above):
        axes.spines[:].set_visible(False)
    above.spines["bottom"].set(visible=True, color="#c9d1d9")
    grid.set_xlim(-0.5, clients - 0.5)

    bar = figure.add_axes(area(left + grid_w + 0.25, bottom, 0.13, min(grid_h, 2.2)))
    scale = figure.colorbar(image, cax=bar)
    scale.outline.set_visible(False)
    # Evenly spaced on the page, not in value, and rounded to what reads well.
    marks = {_round(float(norm.inverse(part))) for part in (0.0, 0.25, 0.5, 0.75, 1.0)}
    scale.set_ticks(sorted(m for m in marks if m <= top_count))
    scale.formatter = FuncFormatter(lambda value, _: f"{value:,.0f}")
    scale.minorticks_off()
    bar.tick_params(length=0, labelsize=7, labelcolor=_QUIET)
    bar.set_ylabel("samples", color=_QUIET, fontsize=8)
    figure.text(left / width, 1 - 0.2 / height, title, fontsize=11, weight="bold", color=_INK, va="center")
    figure.text(left / width, 1 - 0.42 / height, _summary(table), fontsize=8, color=_QUIET, va="center")

    path.parent.mkdir(parents=True, exist_ok=True)
    # No date and no random ids in the file: the same counts give the same picture.
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with rc_context({"svg.hashsalt": "protofed"}):
        figure.savefig(path, dpi=160, metadata=undated)


def counts_table(counts: Tensor, names: Sequence[str], width: int | None = None) -> Table:
    """The counts as a shaded table for a terminal `width` characters wide (as wide as it is, where not given).

    Many classes become one strip of shades a client, many clients are cut; the caption says what was left out.
    """
    from rich.table import Table
    from rich.text import Text

    table = counts.cpu().numpy()
    clients, classes = table.shape
    labels = _names(names, classes)
    most = max(int(table.max()), 1)
    width = shutil.get_terminal_size().columns if width is None else width
    room = (width - 18) // classes - 1  # beside the columns of clients and totals; names are cut before counts
    cell = max(len(f"{most:,}"), min(max(map(len, labels)), room, 9))
    in_full = classes <= MOST_CLASSES and cell <= room

    caption = [_summary(table)]
    view = Table(title="Training samples by client and class", box=None, padding=(0, 0), pad_edge=False)
    view.add_column("client", justify="right", style="bold")
    if in_full:
        for name in labels:
            view.add_column(" " + _cut(name, cell), justify="right", min_width=cell + 1, no_wrap=True)
    else:
        bins = min(classes, STRIP)
        each = "one class" if bins == classes else f"about {classes / bins:.1f} classes"
        caption.append(f"a block is {each}, from {labels[0]} to {labels[-1]}; the darker, the more samples")
        view.add_column(f"  {classes} classes", no_wrap=True)
        view.add_column("  classes", justify="right")
    view.add_column("  total", justify="right", style="bold")
    for client in range(min(clients, MOST_CLIENTS)):
        row = table[client]
        cells = [Text(str(client))]
        if in_full:
            cells += [_shaded(int(n), most, cell + 1) for n in row]
        else:
            parts = np.array([part.sum() for part in np.array_split(row, bins)])
            cells += [Text("  " + _strip(parts, most)), Text(str(np.count_nonzero(row)))]
        view.add_row(*cells, f"{int(row.sum()):,}")
    if clients > MOST_CLIENTS:
        rest = table[MOST_CLIENTS:]
        caption.append(
            f"{clients - MOST_CLIENTS} more clients ({MOST_CLIENTS} to {clients - 1}) with {int(rest.sum()):,} samples "
            "are not shown"
        )
    view.caption = "\n".join(caption)
    view.caption_justify = "left"
    view.title_justify = "left"
    return view


def _shaded(count: int, most: int, width: int) -> Text:
    from rich.text import Text

    text = f"{count:,}".rjust(width)
    if not count:
        return Text("·".rjust(width), style="dim")
    level = 1 + round((len(_SHADES) - 2) * (count / most) ** 0.5)
    return Text(text, style=f"{'white' if level >= 4 else 'black'} on {_SHADES[level]}")


def _strip(parts: np.ndarray, most: int) -> str:
    levels = np.ceil((len(_BLOCKS) - 1) * np.sqrt(np.minimum(parts / most, 1.0))).astype(int)
    return "".join(_BLOCKS[level] for level in levels)


def _names(names: Sequence[str], classes: int) -> list[str]:
    return list(map(str, names)) if len(names) == classes else [str(c) for c in range(classes)]


def _cut(name: str, length: int) -> str:
    return name if len(name) <= length else name[: length - 1] + "…"


def _ticks(number: int, room: float) -> np.ndarray:
    """Evenly spaced numbers 0 … number − 1, as many as there is room for."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if number / s <= max(room, 1))
    return np.arange(0, number, step)


def _summary(table: np.ndarray) -> str:
    totals, held = table.sum(axis=1), (table > 0).sum(axis=1)
    return (
        f"{table.shape[0]} clients, {table.shape[1]} classes, {int(table.sum()):,} samples; "
        f"{_range(totals)} samples and {_range(held)} classes a client"
    )


def _round(value: float) -> float:
    """To one significant digit, to two from ten on."""
    return float(f"{value:.{2 if value >= 10 else 1}g}")


def _range(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"
