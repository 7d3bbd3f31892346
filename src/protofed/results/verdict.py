"""What a comparison says, in words that follow from its gains by the rule in `gains.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from ..evaluate.confusion import PREDICTIONS
from .columns import LOCAL, Column, Row, measured, parse_column
from .gains import Gain, control_of, gain_in, gain_over, gain_text, gains_over_local
from .rows import DIRECTIONS

MOST_NAMES = 8  # in one sentence
VERBS = {  # of one variant and of several
    "gains": ("gains", "gain"),
    "loses": ("loses", "lose"),
    "not different": ("is not different", "are not different"),
    "undecided: one seed": ("is undecided: one seed", "are undecided: one seed"),
}
NO_LOCAL = (
    "Local is not among the variants, so no gain over it is shown; `compare` adds it by itself, a sweep by its name"
)


def gain_notes(rows: Sequence[Row], columns: Sequence[Column], by_default: bool) -> list[str]:
    """The lines under a table that say in words what its columns of gains show.

    Args:
        rows: The variants.
        columns: The columns of the table.
        by_default: Whether the columns are the default ones, in which the gain over Local is expected.

    Returns:
        A line for each column of gains, and what is missing to read them.
    """
    shown = [column for column in columns if column.over]
    if not shown:
        missing = by_default and any(row.usable for row in rows) and not any(row.is_local for row in rows)
        return [NO_LOCAL] if missing else []
    lines = []
    for column in shown:
        gains = [gain for row in rows if (gain := gain_in(row, rows, column)) is not None]
        if gains:
            over = LOCAL if column.over == "local" else "its own control, the same loss with nothing exchanged"
            lines.append(f"{column.title}, over {over}: {_groups(gains)}{_basis(gains)}")
    lines += control_notes(rows, columns)
    return lines


def control_notes(rows: Sequence[Row], columns: Sequence[Column]) -> list[str]:
    """What the exchange is worth where controls were run, and the variants for which none was."""
    lines = []
    if not any(column.over == "control" for column in columns):
        for column in (column for column in columns if column.over == "local"):
            plain = parse_column(column.key)
            found = [gain for row in rows if (gain := gain_over(row, control_of(row, rows), plain)) is not None]
            parts = [f"{gain.label} {VERBS[gain.verdict][0]} ({gain.text})" for gain in found]
            if parts:
                lines.append(
                    f"{plain.title}, over its own control, the same loss with nothing exchanged: {'; '.join(parts)}"
                )
    without = [row.label for row in without_control(rows)]
    if without:
        lines.append(
            f"no control was run for {names_text(without)}: `--controls` adds it where a method has one, the same loss with "
            "nothing exchanged; without it a gain may be the loss's and not the exchange's"
        )
    return lines


def without_control(rows: Sequence[Row]) -> list[Row]:
    """The variants that exchange prototypes and have no control beside them."""
    methods = [row for row in rows if row.control is None and not row.is_local]
    return [row for row in methods if row.exchanges_prototypes and control_of(row, rows) is None]


def names_text(names: Sequence[str]) -> str:
    """Names as a sentence lists them.

    >>> names_text(["a", "b", "c"])
    'a, b and c'
    """
    if len(names) > MOST_NAMES:
        return f"{', '.join(names[: MOST_NAMES - 1])} and {len(names) - MOST_NAMES + 1} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _groups(gains: Iterable[Gain], numbers: bool = False) -> str:
    """Which variants gain, lose and are not different, as one sentence."""
    gains = list(gains)
    parts = []
    for verdict, (one, several) in VERBS.items():
        same = [gain for gain in gains if gain.verdict == verdict]
        if same:
            names = [f"{gain.label} ({gain.text})" if numbers else gain.label for gain in same]
            parts.append(f"{names_text(names)} {one if len(same) == 1 else several}")
    return "; ".join(parts)


def _basis(gains: Sequence[Gain]) -> str:
    """What the intervals are of, or that there are none."""
    counts = sorted({len(gain.by_seed) for gain in gains})
    if counts == [1]:
        return " (no interval; `--seeds 3` gives one)"
    return f" (95 % interval over {'–'.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds)"


def verdict(rows: Sequence[Row]) -> list[str]:
    """What a comparison says, in sentences of which the first is the whole of it.

    Args:
        rows: The variants.

    Returns:
        The sentences; none where no run has finished.

    Example: `verdict(read_rows(Path("runs/digits"))[0])[0]`
    """
    usable = [row for row in rows if row.usable]
    if not usable:
        return []
    if not any(row.is_local for row in usable):
        return [f"{NO_LOCAL}."]
    kinds = {kind: parse_column(kind) for kind in PREDICTIONS}
    methods = [row for row in usable if row.control is None]
    gains = {kind: found for kind, column in kinds.items() if (found := gains_over_local(methods, column))}
    if not gains:
        return ["Local has no other method beside it that has finished."] if usable else []
    best = best_gain(rows)
    sentences = [_headline(rows, [gain for found in gains.values() for gain in found], best)]
    for kind, found in gains.items():
        sentences.append(f"By {kind}, over Local: {_groups(found, numbers=True)}{_basis(found)}.")
    if best is not None:
        sentences += _of_sites(best)
        sentences += _of_bytes(next(row for row in rows if row.label == best.label))
    sentences += [f"{line[:1].upper()}{line[1:]}." for line in control_notes(rows, [*map(_gain_of, kinds)])]
    return sentences


def _gain_of(kind: str) -> Column:
    return parse_column(f"gain_{kind}")


def best_gain(rows: Sequence[Row]) -> Gain | None:
    """The gain over Local of the best variant: of those that gain, the one with the highest accuracy by either prediction.

    Where none gains it is the one with the highest accuracy of all. Controls are left out.
    """
    methods = [row for row in rows if row.control is None]
    found = [gain for kind in PREDICTIONS for gain in gains_over_local(methods, parse_column(kind))]
    by_label = {row.label: row for row in rows}

    def rank(gain: Gain) -> tuple[bool, float]:
        return gain.verdict == "gains", _mean(by_label[gain.label], gain.column)

    return max(found, key=rank, default=None)


def _mean(row: Row, column: Column) -> float:
    return statistics.fmean(column.by_seed(row).values())


def _headline(rows: Sequence[Row], gains: Sequence[Gain], best: Gain | None) -> str:
    verdicts = {gain.verdict for gain in gains}
    if best is not None and best.verdict == "gains":
        row, local = (next(r for r in rows if r.label == label) for label in (best.label, best.over))
        accuracy, kind = _mean(row, best.column), best.column.title
        text = f"{best.label} gains over Local: {accuracy:.2f} % by {kind}, {best.text} points."
        others = [parse_column(other) for other in PREDICTIONS if other != kind]
        better = [c for c in others if c.by_seed(local) and _mean(local, c) >= accuracy]
        return text + "".join(f" But Local by {c.title} has {_mean(local, c):.2f} %." for c in better)
    if verdicts == {"undecided: one seed"}:
        return "Undecided: with one seed a gain over Local cannot be told from chance."
    if verdicts == {"not different"}:
        return "No method is different from Local."
    return "No method gains over Local."


def _of_sites(gain: Gain) -> list[str]:
    values = gain.by_site
    if not values:
        return []
    better, worse = (sum(sign * v > 1e-9 for v in values.values()) for sign in (1, -1))
    worst = min(values, key=lambda site: values[site])
    lost = f"; the worst is {worst} ({gain_text(values[worst])})" if worse else ""
    return [
        f"Site by site, {gain.label} by {gain.column.title} is better than Local at {better} and worse at {worse} of "
        f"{len(values)} sites{lost}."
    ]


def _of_bytes(row: Row) -> list[str]:
    up, down = (
        statistics.fmean(value for run in row.usable if (value := measured(run, f"total_{way}")) is not None) / 1e6
        for way in DIRECTIONS
    )
    return [f"{row.label} sends {up:,.1f} MB up and {down:,.1f} MB down in a whole run, all clients together."]
