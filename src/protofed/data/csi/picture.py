"""A window before and after each setting of the signal chain, as a picture, and what became of captures, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ProtofedError
from ..picture import FORMATS
from .source import Account, Stage

if TYPE_CHECKING:
    from rich.table import Table

_INK, _QUIET, _BLUE = "#1b2733", "#66727f", "#2f6f9f"


def draw_stages(stages: Sequence[Stage], path: Path, title: str) -> None:
    """Draw one window after each setting of the chain: its first antenna, and the subcarrier that moves most.

    Args:
        stages: The window after each setting, as `CSI.stages` gives them.
        path: The file, whose suffix says whether it is a PNG, SVG or PDF.
        title: The title of the picture.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in FORMATS:
        raise ProtofedError(f"{path}: expected a file name ending in .png, .svg or .pdf")
    figure = Figure(figsize=(9.5, 0.9 + 1.65 * len(stages)), layout="constrained", facecolor="white")
    axes = figure.subplots(len(stages), 2, squeeze=False, width_ratios=(3, 2))
    tone = int(np.argmax(stages[0].window[0].std(axis=0)))
    for (left, right), stage in zip(axes, stages, strict=True):
        antennas, time, tones = stage.window.shape
        image = left.imshow(stage.window[0].T, aspect="auto", origin="lower", cmap="viridis", interpolation="nearest")
        figure.colorbar(image, ax=left, pad=0.01, aspect=12).ax.tick_params(labelsize=7, length=0)
        left.set_title(f"{stage.setting}   ({antennas} × {time} × {tones})", loc="left", fontsize=9, color=_INK)
        left.set_ylabel("subcarrier", fontsize=7, color=_QUIET)
        shown = min(tone, tones - 1)
        right.plot(stage.window[0, :, shown], color=_BLUE, linewidth=0.9, marker="." if time < 10 else None)
        right.set_title(f"channel 1 of {antennas}, subcarrier {shown}", loc="left", fontsize=8, color=_QUIET)
        for axis in (left, right):
            axis.tick_params(labelsize=7, length=2, colors=_QUIET)
            axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("sample in the window", fontsize=8, color=_QUIET)
    figure.suptitle(title, fontsize=10, color=_INK, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
    with rc_context({"svg.hashsalt": "protofed"}):
        figure.savefig(path, dpi=140, metadata=undated)


def accounts_table(accounts: Sequence[Account]) -> Table:
    """What became of each capture, as a table for a terminal.

    Args:
        accounts: The captures.

    Returns:
        A table to print.
    """
    from rich.table import Table

    table = Table(title="Captures", box=None, pad_edge=False, title_justify="left")
    table.add_column("file", style="bold", overflow="fold")
    for name in ("packets", "antennas", "subcarriers", "gaps", "windows"):
        table.add_column(name, justify="right")
    table.add_column("left out")
    for account in accounts:
        reasons = [f"{number:,} {reason}" for reason, number in account.tally.left_out.most_common()]
        table.add_row(
            Path(account.name).name,
            f"{account.tally.given:,}",
            *map(str, account.shape),
            f"{account.gaps:,}",
            f"{account.windows:,}",
            "; ".join([*reasons, *([account.damage] if account.damage else [])]) or "–",
        )
    return table
