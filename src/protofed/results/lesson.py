"""What a comparison teaches about averaging networks and exchanging prototypes, in a sentence that follows from its numbers.

Each method is taken at its better way of predicting, by head or by prototype, and so is Local: this is what a site would
use. Differences are taken seed by seed, and the rule of `gains.py` gives the verdict. In the conclusion, what is less than
a point counts as nothing, however sure it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..evaluate.confusion import PREDICTIONS
from .columns import Column, Row, measured, parse_column
from .gains import Gain, control_of, gain_text
from .rows import DIRECTIONS

HELPS, HURTS = "gains", "loses"
LEAST = 1.0  # point that a difference must have to be one in the conclusion


@dataclass(frozen=True)
class Best:
    """A variant by its better way of predicting.

    Attributes:
        row: The variant.
        column: The accuracy by head or by prototype, whichever has the higher mean.
    """

    row: Row
    column: Column

    @property
    def by_seed(self) -> dict[int, float]:
        """The accuracies in per cent, by seed."""
        return self.column.by_seed(self.row)

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.by_seed.values())

    @property
    def text(self) -> str:
        """The variant, how it predicts, and its accuracy."""
        return f"{self.row.label} by {self.column.title}, {self.mean:.1f} %"

    def over(self, other: Best) -> Gain:
        """The difference from another variant at its own better way."""
        ours, theirs = self.by_seed, other.by_seed
        by_seed = {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}
        return Gain(self.row.label, other.row.label, Column("", "", digits=1), by_seed, {})


def best_of(row: Row | None) -> Best | None:
    """A variant by its better way of predicting; None where it has no accuracy."""
    if row is None or not row.usable:
        return None
    found = [Best(row, column) for kind in PREDICTIONS if (column := parse_column(kind)).by_seed(row)]
    return max(found, key=lambda best: best.mean, default=None)


def averages_networks(row: Row) -> bool:
    """Whether weights travelled in a variant's runs."""
    return any(run[way].get("weights") for run in row.usable for way in DIRECTIONS)


@dataclass(frozen=True)
class Figures:
    """What a comparison says of averaging and of prototypes: the best variant of each kind, Local, and the control."""

    local: Best
    averaging: Best
    prototypes: Best
    control: Best | None

    def cells(self) -> list[str]:
        """The accuracies, and the gains over Local, for one line of a table; the header is `OVERVIEW`."""
        others = (self.averaging, self.prototypes, self.control)
        texts = ["–" if best is None else _with_gain(best, best.over(self.local)) for best in others]
        return [f"{self.local.mean:.1f}", *texts]


OVERVIEW = ["alone", "averaging networks", "exchanging prototypes", "the same loss, nothing exchanged"]


def _with_gain(best: Best, gain: Gain) -> str:
    return f"{best.mean:.1f} ({gain_text(gain.mean, gain.half, 1)})"


def figures_of(rows: Sequence[Row]) -> Figures | None:
    """The figures of a comparison that has Local, a variant that averages networks and one that exchanges prototypes alone.

    Args:
        rows: The variants.

    Returns:
        The figures; None where one of these is missing.
    """
    local = next((best for row in rows if row.is_local and (best := best_of(row))), None)
    methods = [row for row in rows if row.control is None and not row.is_local]
    averaging = _best([row for row in methods if averages_networks(row)])
    prototypes = _best([row for row in methods if row.exchanges_prototypes and not averages_networks(row)])
    if local is None or averaging is None or prototypes is None:
        return None
    return Figures(local, averaging, prototypes, best_of(control_of(prototypes.row, rows)))


def lesson(rows: Sequence[Row]) -> list[str]:
    """Say what averaging networks and exchanging prototypes are worth in a comparison.

    Args:
        rows: The variants: Local, at least one that averages networks and one that exchanges prototypes alone, and controls.

    Returns:
        Sentences, of which the last is the conclusion; none where Local or one of the two kinds is missing.

    Example: `lesson(read_rows(Path("runs/digits"))[0])[-1]`
    """
    figures = figures_of(rows)
    if figures is None:
        return []
    local, averaging, prototypes, control = figures.local, figures.averaging, figures.prototypes, figures.control
    averaged, exchanged = averaging.over(local), prototypes.over(local)
    sentences = [
        f"Alone, a site has {local.mean:.1f} % ({local.row.label} by {local.column.title}).",
        f"Averaging networks {_worth(averaged)} ({averaging.text}).",
        f"Exchanging prototypes {_worth(exchanged)} ({prototypes.text}{_fewer(prototypes.row, averaging.row)}).",
    ]
    if control is not None:
        sentences.append(f"The same loss with nothing exchanged {_worth(control.over(local))}.")
    return [*sentences, _conclusion(averaged, exchanged, averaging.over(prototypes))]


def _best(rows: Sequence[Row]) -> Best | None:
    return max((best for row in rows if (best := best_of(row))), key=lambda best: best.mean, default=None)


def _worth(gain: Gain) -> str:
    words = {HELPS: "gains", HURTS: "loses", "not different": "is not different:"}
    verb = words.get(gain.verdict, "differs by (one seed, so no interval)")
    return f"{verb} {gain_text(gain.mean, gain.half, 1)} points"


def _fewer(row: Row, other: Row) -> str:
    """How many times fewer bytes a variant sends in both directions than another."""
    ours, theirs = (
        statistics.fmean(sum(measured(run, f"total_{way}") or 0.0 for way in DIRECTIONS) for run in r.usable)
        for r in (row, other)
    )
    return f", with {theirs / ours:.0f} times fewer bytes" if ours and theirs / ours >= 1.5 else ""


def _effect(gain: Gain) -> str:
    """The verdict of a difference that is large enough to matter; that of no difference otherwise."""
    return gain.verdict if abs(gain.mean) >= LEAST else "not different"


def _conclusion(averaged: Gain, exchanged: Gain, difference: Gain) -> str:
    """The sentence that follows from three verdicts."""
    if exchanged.half is None:
        return "One seed decides nothing: `--seeds 3` gives intervals."
    average, exchange, more = map(_effect, (averaged, exchanged, difference))
    if average == HELPS and exchange == HELPS:
        if more == HELPS:
            return "So both help here, and averaging helps more: average where you may."
        also = " They also help more." if more == HURTS else ""
        return f"So both help here, and prototypes cost less.{also}"
    if exchange == HELPS:
        return f"So prototypes help here, and averaging {'hurts' if average == HURTS else 'brings nothing'}."
    if average == HELPS:
        return "So averaging helps here, and prototypes do not."
    return "So nothing is gained here: a site does as well alone, within a point."
