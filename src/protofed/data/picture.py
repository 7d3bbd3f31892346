"""What clients hold: numbers of samples by client and class, as a picture and as a table for the terminal, and samples as
each client sees them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from ..errors import ProtofedError
from .types import FederatedData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage
    from rich.table import Table
    from rich.text import Text

_INK, _QUIET, _BLUE = "#1b2733", "#66727f", "#2f6f9f"
_SHADES = ("#ffffff", "#e3eef7", "#b5d3e8", "#6ca6cf", "#2f6f9f", "#123a5c")
_BLOCKS = " ░▒▓█"
MOST_CLIENTS, MOST_CLASSES, STRIP = 40, 30, 50
PICTURED_CLIENTS, PICTURED_CLASSES = 12, 10
LONGEST = 24  # characters of a client's name


FORMATS = ("png", "svg", "pdf")


def draw_counts(
    counts: Tensor,
    names: Sequence[str],
    path: Path,
    title: str = "Training samples by client and class",
    clients: Sequence[str] = (),
) -> None:
    """Write a picture of the number of samples by client and class.

    Args:
        counts: `[clients, classes]`, numbers of samples.
        names: the classes' names; numbers are used where there are not as many names as classes.
        path: the file, whose suffix says whether it is a PNG, SVG or PDF.
        title: the title of the picture.
        clients: the clients' names, where they have some; otherwise their numbers are used.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    check_format(path)
    table = counts.cpu().numpy()
    labels = _names(names, table.shape[1])
    sites = [_cut(name, LONGEST) for name in clients] if len(clients) == len(table) else []
    page = _Page.for_table(table, labels, sites)
    norm = PowerNorm(0.5, vmin=0, vmax=max(float(table.max()), 1.0))
    figure = Figure(figsize=(page.width, page.height), layout=None, facecolor="white")
    grid = figure.add_axes(page.area(page.left, page.bottom, page.grid_width, page.grid_height))
    image = _draw_grid(grid, table, labels, sites, page, norm)
    bars_area = page.area(page.left, page.bottom + page.grid_height + 0.1, page.grid_width, page.bars)
    _draw_totals(figure.add_axes(bars_area, sharex=grid), table)
    grid.set_xlim(-0.5, len(table) - 0.5)
    scale_area = page.area(page.left + page.grid_width + 0.25, page.bottom, 0.13, min(page.grid_height, 2.2))
    _draw_scale(figure, figure.add_axes(scale_area), image, norm)
    text_left = page.left / page.width
    figure.text(text_left, 1 - 0.2 / page.height, title, fontsize=11, weight="bold", color=_INK, va="center")
    figure.text(text_left, 1 - 0.42 / page.height, _summary(table), fontsize=8, color=_QUIET, va="center")
    _write(figure, path)


def check_format(path: Path) -> None:
    """Raise a `ProtofedError` for a file name whose suffix is not that of a picture."""
    if Path(path).suffix.lower().removeprefix(".") not in FORMATS:
        raise ProtofedError(f"{path}: expected a file name ending in .png, .svg or .pdf")


def _write(figure: Figure, path: Path) -> None:
    """Write a picture, without a date and random ids: the same content gives the same file."""
    from matplotlib import rc_context

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    with rc_context({"svg.hashsalt": "protofed"}):
        figure.savefig(path, dpi=160, metadata=undated)


def draw_samples(data: FederatedData, path: Path) -> None:
    """Write a picture of one test sample of each class as each client sees it; a client is a row.

    Clients with one test set show the same samples, so that what differs is how they look. Of many clients and classes
    only the first are drawn.

    Args:
        data: The data of all clients, whose samples are images or CSI windows (of which the first antenna is drawn).
        path: The file, whose suffix says whether it is a PNG, SVG or PDF.
    """
    from matplotlib.figure import Figure

    check_format(path)
    if len(data.sample_shape) != 3:
        raise ProtofedError(f"{data.name}: samples of shape {list(data.sample_shape)} are no pictures to draw")
    labels = _names(data.class_names, data.num_classes)[:PICTURED_CLASSES]
    clients = data.clients[:PICTURED_CLIENTS]
    names = (data.client_names or [f"client {c}" for c in range(len(data.clients))])[: len(clients)]
    cell, left, top = 0.55, 0.35 + 0.075 * min(max(map(len, names)), 24), 0.62
    width, height = left + cell * max(len(labels), 7) + 0.15, top + cell * len(clients) + 0.1
    figure = Figure(figsize=(width, height), layout=None, facecolor="white")
    for row, client in enumerate(clients):
        y = 1 - (top + cell * (row + 0.5)) / height
        figure.text((left - 0.12) / width, y, _cut(names[row], 24), fontsize=8, color=_INK, ha="right", va="center")
        own = client.test.labels
        for c in range(len(labels)):
            area = ((left + cell * c) / width, y - 0.47 * cell / height, 0.94 * cell / width, 0.94 * cell / height)
            axes = figure.add_axes(area)
            axes.axis("off")
            if bool((own == c).any()):
                axes.imshow(
                    _pixels(client.test.take((own == c).nonzero()[0])[0][0], data, row), cmap="gray", vmin=0, vmax=1
                )
    for c, label in enumerate(labels):
        x = (left + cell * (c + 0.47)) / width
        figure.text(x, 1 - 0.53 / height, _cut(label, 8), fontsize=8, color=_QUIET, ha="center", va="center")
    title = "Samples as clients see them"
    figure.text(0.12 / width, 1 - 0.2 / height, title, fontsize=11, weight="bold", color=_INK, va="center")
    _write(figure, path)


def _pixels(sample: Tensor, data: FederatedData, client: int) -> np.ndarray:
    """A sample as pixels from 0 to 1: standardisation is undone, and values beyond are scaled by the sample's range."""
    x = sample.float().cpu()
    mean, std = data.scaling(client)
    if mean is not None and std is not None:
        x = x * std.cpu()[:, None, None] + mean.cpu()[:, None, None]
    x = x if len(x) == 3 else x[:1]
    if data.kind == "csi" or float(x.min()) < -1 or float(x.max()) > 2:
        x = (x - x.min()) / (x.max() - x.min()).clamp(min=1e-9)
    return x.clamp(0, 1).permute(1, 2, 0).numpy()


@dataclass(frozen=True)
class _Page:
    """The measures of the picture in inches: the grid of cells, bars above it, a scale to its right."""

    cell_width: float
    cell_height: float
    grid_width: float
    grid_height: float
    left: float
    font: float  # the font size of the numbers in the cells, in points
    right: float = 1.15
    bottom: float = 0.62
    bars: float = 0.62
    top: float = 0.62

    @classmethod
    def for_table(cls, table: np.ndarray, labels: Sequence[str], sites: Sequence[str]) -> _Page:
        """Cells as large as the page allows."""
        clients, classes = table.shape
        cell_width, cell_height = min(9.0 / clients, 0.62), min(6.5 / classes, 0.34)
        digits = len(f"{int(table.max()):,}")
        font = min(cell_width * 72 / (0.62 * digits + 0.5), cell_height * 72 * 0.55, 9.0)
        left_margin = 0.75 + 0.075 * min(max(map(len, labels)), 16)
        bottom = 0.62 + 0.035 * max(map(len, sites), default=0)  # names stand at a slant
        grid_width, grid_height = max(cell_width * clients, 4.4), max(cell_height * classes, 0.9)
        return cls(cell_width, cell_height, grid_width, grid_height, left_margin, font, bottom=bottom)

    @property
    def width(self) -> float:
        return self.left + self.grid_width + self.right

    @property
    def height(self) -> float:
        return self.bottom + self.grid_height + 0.1 + self.bars + self.top

    def area(self, x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
        """A rectangle as shares of the page."""
        return x / self.width, y / self.height, width / self.width, height / self.height


def _draw_grid(
    axes: Axes, table: np.ndarray, labels: Sequence[str], sites: Sequence[str], page: _Page, norm: Normalize
) -> AxesImage:
    """Clients × classes, the darker the more samples; numbers are written where they can be read."""
    from matplotlib.colors import LinearSegmentedColormap

    clients, classes = table.shape
    colours = LinearSegmentedColormap.from_list("counts", list(_SHADES[1:])).with_extremes(bad=_SHADES[0])
    cells = np.ma.masked_equal(table.T.astype(float), 0.0)
    image = axes.imshow(cells, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    if page.font >= 4.5:
        for client, c in zip(*np.nonzero(table), strict=True):
            colour = "white" if norm(table[client, c]) > 0.55 else _INK
            text = f"{table[client, c]:,}"
            axes.text(client, c, text, ha="center", va="center", fontsize=page.font, color=colour)
    if page.cell_width * 72 >= 8 and page.cell_height * 72 >= 8:
        axes.set_xticks(np.arange(clients + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(classes + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="#e8ecf0", linewidth=0.8)
    axes.tick_params(which="both", length=0, labelsize=8, labelcolor=_INK)
    columns = _ticks(clients, page.grid_width / 0.3)
    axes.set_xticks(columns)
    if sites:
        axes.set_xticks(columns, [sites[c] for c in columns], rotation=40, ha="right", rotation_mode="anchor")
    rows = _ticks(classes, page.grid_height / 0.15)
    axes.set_yticks(rows, [_cut(labels[c], 16) for c in rows])
    axes.set_xlabel("client", color=_QUIET, fontsize=9)
    axes.set_ylabel("class", color=_QUIET, fontsize=9)
    axes.spines[:].set_visible(False)
    return image


def _draw_totals(axes: Axes, table: np.ndarray) -> None:
    """A bar for each client's number of samples."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    clients = len(table)
    axes.bar(np.arange(clients), table.sum(axis=1), width=0.8 if clients <= 60 else 1.0, color=_BLUE)
    axes.tick_params(which="both", length=0, labelbottom=False, labelsize=7, labelcolor=_QUIET)
    axes.yaxis.set_major_locator(MaxNLocator(2, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(axis="y", color="#e8ecf0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylabel("total", color=_QUIET, fontsize=8, rotation=0, ha="right", va="center", labelpad=16)
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=True, color="#c9d1d9")


def _draw_scale(figure: Figure, axes: Axes, image: AxesImage, norm: Normalize) -> None:
    """The scale of shades, with ticks of round values at even distances on the page."""
    from matplotlib.ticker import FuncFormatter

    scale = figure.colorbar(image, cax=axes)
    scale.outline.set_visible(False)
    ticks = {_round(float(norm.inverse(part))) for part in (0.0, 0.25, 0.5, 0.75, 1.0)}
    scale.set_ticks(sorted(m for m in ticks if m <= float(norm.vmax or 1.0)))
    scale.formatter = FuncFormatter(lambda value, _: f"{value:,.0f}")
    scale.minorticks_off()
    axes.tick_params(length=0, labelsize=7, labelcolor=_QUIET)
    axes.set_ylabel("samples", color=_QUIET, fontsize=8)


def counts_table(counts: Tensor, names: Sequence[str], width: int | None = None, clients: Sequence[str] = ()) -> Table:
    """The counts as a shaded table for a terminal.

    Many classes become one strip of shades for each client, and of many clients only the first are shown; the caption
    says how many are not.

    Args:
        counts: `[clients, classes]`, numbers of samples.
        names: the classes' names.
        width: the width of the terminal in characters; by default that of the current terminal.
        clients: the clients' names, where they have some; otherwise their numbers are used.

    Returns:
        a table to print.
    """
    from rich.table import Table
    from rich.text import Text

    table = counts.cpu().numpy()
    number, classes = table.shape
    labels = _names(names, classes)
    sites = [_cut(name, LONGEST) for name in _names(clients, number)]
    first = max(6, max(map(len, sites)))
    largest = max(int(table.max()), 1)
    width = shutil.get_terminal_size().columns if width is None else width
    cell_room = (width - 12 - first) // classes - 1  # what the columns of clients and totals leave to a class
    cell = max(len(f"{largest:,}"), min(max(map(len, labels)), cell_room, 9))
    in_full = classes <= MOST_CLASSES and cell <= cell_room

    caption = [_summary(table)]
    view = Table(title="Training samples by client and class", box=None, padding=(0, 0), pad_edge=False)
    view.add_column("client", justify="right" if not clients else "left", style="bold", no_wrap=True)
    if in_full:
        for name in labels:
            view.add_column(" " + _cut(name, cell), justify="right", min_width=cell + 1, no_wrap=True)
    else:
        bins = min(classes, STRIP)
        block_meaning = "one class" if bins == classes else f"about {classes / bins:.1f} classes"
        caption.append(f"a block is {block_meaning}, from {labels[0]} to {labels[-1]}; the darker, the more samples")
        view.add_column(f"  {classes} classes", no_wrap=True)
        view.add_column("  classes", justify="right")
    view.add_column("  total", justify="right", style="bold")
    for client in range(min(number, MOST_CLIENTS)):
        row = table[client]
        cells = [Text(sites[client])]
        if in_full:
            cells += [_shaded(int(n), largest, cell + 1) for n in row]
        else:
            parts = np.array([part.sum() for part in np.array_split(row, bins)])
            cells += [Text("  " + _strip(parts, largest)), Text(str(np.count_nonzero(row)))]
        view.add_row(*cells, f"{int(row.sum()):,}")
    if number > MOST_CLIENTS:
        hidden_rows = table[MOST_CLIENTS:]
        caption.append(
            f"{number - MOST_CLIENTS} more clients ({MOST_CLIENTS} to {number - 1}) "
            f"with {int(hidden_rows.sum()):,} samples are not shown"
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
    """How many clients, classes and samples there are, in one line."""
    totals, class_counts = table.sum(axis=1), (table > 0).sum(axis=1)
    return (
        f"{table.shape[0]} clients, {table.shape[1]} classes, {int(table.sum()):,} samples; "
        f"{_range(totals)} samples and {_range(class_counts)} classes a client"
    )


def _round(value: float) -> float:
    """To one significant digit, to two from ten on."""
    return float(f"{value:.{2 if value >= 10 else 1}g}")


def _range(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"
