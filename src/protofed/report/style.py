"""The look of figures: widths, colours, and a figure that a notebook shows by itself."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from ..results.read import StoredResults, read_folder
from .confusion import INK, LINE, QUIET

Source = str | Path | StoredResults
Width = Literal["column", "page"]
WIDTHS: dict[Width, float] = {"column": 3.3, "page": 6.9}  # inches
FORMATS = ("png", "svg", "pdf")
SERIES = ("#0072b2", "#d55e00", "#008a65", "#b0558a", "#a87400", "#3c9bd0", "#66727f")
CLASSES = ("#332288", "#4aa8d8", "#2f9c8c", "#117733", "#83831a", "#c9a227", "#cc6677", "#882255", "#aa4499", "#7a8591")
DASHES: tuple[Any, ...] = ("-", (0, (6, 4)), (0, (2, 4)), (0, (9, 3, 2, 3)))
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.edgecolor": "#c9d1d9",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LINE,
    "lines.linewidth": 1.3,
    "svg.hashsalt": "protofed",  # no random ids: the same run gives the same file
    "pdf.fonttype": 42,
    "text.parse_math": False,
}


class Drawing(Figure):
    """A figure that a notebook shows by itself, whether or not pyplot was imported."""

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.savefig(data, format="png", dpi=160)
        return data.getvalue()


def new_figure(width: Width, height: float) -> tuple[Figure, Any]:
    """A figure of a width and height in inches, and its axes."""
    figure = Drawing(figsize=(WIDTHS[width], height), layout="constrained")
    return figure, figure.subplots()


def read_source(source: Source) -> StoredResults:
    """The results of a source of figures."""
    return source if isinstance(source, StoredResults) else read_folder(source)
