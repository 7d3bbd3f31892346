"""Figures of a comparison: the gain over Local site by site, and what bytes bought."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from ..errors import ProtofedError
from ..results.columns import Row, parse_column
from ..results.confusions import By
from ..results.gains import Gain, gains_over_local
from ..results.verdict import best_gain
from .confusion import INK
from .cost import spent
from .style import DASHES, SERIES, STYLE, WIDTHS, Source, Width, new_figure, read_source

MOST_NAMED = 30  # sites that have a line and a name each; more are drawn as sorted curves


def sites_measured(rows: Sequence[Row]) -> list[By]:
    """The predictions by which a gain over Local is known site by site."""
    kinds: tuple[By, ...] = ("head", "prototype")
    return [kind for kind in kinds if any(gain.by_site for gain in gains_over_local(rows, parse_column(kind)))]


def plot_gains(source: Source | Sequence[Row], by: By | None = None, width: Width = "column") -> Figure:
    """Draw the gain over Local at every site, a dot for each variant; sites are sorted by what the best one gains.

    Up to 30 sites have a line and a name each. Where there are more, every variant is a curve from its largest gain to its
    largest loss.

    Args:
        source: A folder, results that were read from one, or the rows of a table.
        by: The prediction, the same for the variant and for Local; None takes that of the best variant.
        width: The width of the figure: a `column` or a `page`.

    Returns:
        The figure.

    Example: `plot_gains("runs/digits", by="head").savefig("gains.pdf")`
    """
    rows = _rows(source)
    best = best_gain(rows)
    kinds = sites_measured(rows)
    first = best.column.key.removeprefix("accuracy_") if best is not None else ""
    default: By = kinds[0] if kinds else "head"
    chosen: By = by if by is not None else next((kind for kind in kinds if kind == first), default)
    gains = [gain for gain in gains_over_local(rows, parse_column(chosen)) if gain.by_site]
    if not gains:
        raise ProtofedError(
            f"no gain over Local by {chosen} is known site by site: Local and another method must have finished"
        )
    colours = {row.label: SERIES[i % len(SERIES)] for i, row in enumerate(rows)}
    order = next((gain for gain in gains if best is not None and gain.label == best.label), gains[0])
    sites = sorted(order.by_site, key=lambda site: order.by_site[site])
    named = len(sites) <= MOST_NAMED
    with rc_context(STYLE):
        figure, axes = new_figure(width, 0.7 + 0.16 * len(sites) if named else 0.62 * WIDTHS[width])
        for k, gain in enumerate(gains):
            (_dots if named else _sorted)(axes, gain, sites, colours[gain.label], (k, len(gains)))
        (axes.axvline if named else axes.axhline)(0, color=INK, linewidth=0.9, zorder=1)
        text = f"gain over Local by {chosen} (points)"
        if named:
            axes.set_yticks(range(len(sites)), sites)
            axes.set(xlabel=text, ylim=(-0.7, len(sites) - 0.3))
        else:
            axes.set(xlabel="sites, the largest gain first", ylabel=text)
        axes.grid(axis="both" if named else "y")
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        if len(gains) > 1:
            figure.legend(loc="outside upper center", ncols=3 if width == "column" else 6, frameon=False)
        else:
            axes.set_title(gains[0].label, loc="left")
    return figure


def _dots(axes: Any, gain: Gain, sites: Sequence[str], colour: str, place: tuple[int, int]) -> None:
    """A dot at the line of each site, those of several variants a little apart."""
    k, number = place
    shift = 0.0 if number == 1 else (k / (number - 1) - 0.5) * min(0.5, 0.15 * number)
    known = [(gain.by_site[site], y - shift) for y, site in enumerate(sites) if site in gain.by_site]
    axes.scatter(*zip(*known, strict=True), s=14, color=colour, label=gain.label, zorder=3)


def _sorted(axes: Any, gain: Gain, sites: Sequence[str], colour: str, place: tuple[int, int]) -> None:
    """The gains of all sites from the largest to the smallest."""
    values = np.sort(np.array(list(gain.by_site.values())))[::-1]
    x = np.arange(1, len(values) + 1)
    axes.plot(x, values, color=colour, marker="o", markersize=1.8, linewidth=0.8, label=gain.label)


def _rows(source: Source | Sequence[Row]) -> Sequence[Row]:
    if isinstance(source, Sequence) and not isinstance(source, str):
        return source
    return [variant.row() for variant in read_source(source).without_interrupted().variants]


def plot_bytes(source: Source, by: By = "head", width: Width = "column") -> Figure:
    """Draw the accuracy against all bytes that were sent up to it; a variant that sends nothing is a level line.

    Args:
        source: A folder, or results that were read from one.
        by: The prediction.
        width: The width of the figure: a `column` or a `page`.

    Returns:
        The figure.
    """
    charts = spent(read_source(source).without_interrupted())
    if by not in charts:
        raise ProtofedError(f"no accuracy by {by} against bytes: expected one of {', '.join(charts) or 'none so far'}")
    with rc_context(STYLE):
        figure, axes = new_figure(width, 0.62 * WIDTHS[width] if width == "column" else 2.8)
        for i, line in enumerate(charts[by]):
            colour, dash = SERIES[i % len(SERIES)], DASHES[i // len(SERIES) % len(DASHES)]
            if line["x"]:
                x = [value / 1e6 for value in line["x"]]
                axes.plot(x, line["y"], color=colour, linestyle=dash, label=line["label"])
            else:
                axes.axhline(line["level"], color=colour, linestyle=":", label=f"{line['label']}, sends nothing")
        axes.set(xscale="log", xlabel="MB since the first round, up and down", ylabel=f"accuracy by {by} (%)")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        figure.legend(loc="outside upper center", ncols=2 if width == "column" else 4, frameon=False)
    return figure
