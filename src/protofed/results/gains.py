"""What a variant gains over Local, and over its own control, by the same way of predicting.

A gain is a difference of like with like: head with head, prototype with prototype, and seed with seed, because a seed gives
both variants the same clients and data. Its interval is that of Student's t over the seeds' differences.

| verdict | when |
| --- | --- |
| gains | the whole 95 % interval is above 0 |
| loses | the whole interval is below 0 |
| not different | the interval contains 0 |
| undecided: one seed | there is one seed, and so no interval |
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .columns import Column, Row

LEVEL = 0.95
Verdict = Literal["gains", "loses", "not different", "undecided: one seed"]


@dataclass(frozen=True)
class Gain:
    """The gain of one variant over another in one measure.

    Attributes:
        label: The variant.
        over: The label of the variant that it is compared with.
        column: The measure.
        by_seed: By seed, the difference in the unit of the table; above 0 is better.
        by_site: By the name of the client, its difference as a mean over seeds; empty where runs did not write it.
    """

    label: str
    over: str
    column: Column
    by_seed: Mapping[int, float]
    by_site: Mapping[str, float]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.by_seed.values())

    @property
    def half(self) -> float | None:
        """Half of the 95 % interval of the mean; None where there is one seed."""
        return half_interval(list(self.by_seed.values()))

    @property
    def verdict(self) -> Verdict:
        """What the interval says."""
        if self.half is None:
            return "undecided: one seed"
        if abs(self.mean) <= self.half + 1e-9:
            return "not different"
        return "gains" if self.mean > 0 else "loses"

    @property
    def text(self) -> str:
        """The mean with its sign, and half of the interval."""
        return gain_text(self.mean, self.half, self.column.digits)


def half_interval(values: Sequence[float], level: float = LEVEL, overlap: float = 0.0) -> float | None:
    """Half of the interval of a mean, by Student's t; None where there is one value.

    Args:
        values: The values, such as the differences of all seeds.
        level: The probability with which the interval is to hold the true mean.
        overlap: What is added to the 1/n of the mean's variance where values are not independent.

    Returns:
        The quantile of t times the deviation of the mean.

    >>> round(half_interval([1.0, 2.0, 3.0]), 3)
    2.484
    """
    if len(values) < 2:
        return None
    from scipy.special import stdtrit  # here, because most commands need none of it

    quantile = float(stdtrit(len(values) - 1, (1 + level) / 2))
    return quantile * statistics.stdev(values) * math.sqrt(1 / len(values) + overlap)


def gain_text(mean: float, half: float | None = None, digits: int = 2) -> str:
    """A gain as tables show it.

    >>> gain_text(-1.5, 0.25)
    '−1.50 ± 0.25'
    """
    rounded = round(mean, digits) + 0.0  # adding nought turns −0.0 into 0.0
    text = f"{rounded:+,.{digits}f}".replace("-", "−")
    return text if half is None else f"{text} ± {half:,.{digits}f}"


def local_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The Local that a variant is compared with; None where there is none, or where the variant is Local itself.

    In a sweep this is the one whose settings are all the variant's own: `fedsap lr=0.1 scale=8` is compared with
    `local lr=0.1`. Where none is, and there is one Local only, it was put there to be compared with.
    """
    if row.is_local:
        return None
    every = [r for r in rows if r.is_local]
    fitting = [r for r in every if all(row.settings.get(k) == v for k, v in r.settings.items())]
    if not fitting and len(every) == 1:
        return every[0]
    return max(fitting, key=lambda r: len(r.settings), default=None)


def control_of(row: Row, rows: Sequence[Row], control: str = "own") -> Row | None:
    """The control of a variant: the same method and settings, but nothing exchanged. None where it was not run."""
    if row.control is not None:
        return None
    settings = _without_control(row)
    same = (r for r in rows if r.control == control and r.method == row.method and _without_control(r) == settings)
    return next(same, None)


def _without_control(row: Row) -> dict[str, object]:
    return {key: value for key, value in row.settings.items() if key != "control"}


def gain_over(row: Row, other: Row | None, column: Column) -> Gain | None:
    """The gain of a variant over another.

    Args:
        row: The variant.
        other: The variant that it is compared with.
        column: The measure, the same for both.

    Returns:
        The gain; None where they have no seed in common for which both have measured it.

    Example: `gain_over(fedsap, local, parse_column("head")).verdict`
    """
    if other is None:
        return None
    sign = -1 if column.better == "lower" else 1
    ours, theirs = column.by_seed(row), column.by_seed(other)
    by_seed = {seed: sign * (ours[seed] - theirs[seed]) for seed in ours if seed in theirs}
    if not by_seed:
        return None
    by_site: dict[str, list[float]] = {}
    for site, difference in site_differences(row, other, column):
        by_site.setdefault(site, []).append(difference)
    means = {site: statistics.fmean(values) for site, values in by_site.items()}
    return Gain(row.label, other.label, column, by_seed, means)


def gain_in(row: Row, rows: Sequence[Row], column: Column) -> Gain | None:
    """The gain that a column such as `gain_head` or `exchange_head` shows of a variant; None where it shows none."""
    other = control_of(row, rows) if column.over == "control" else local_of(row, rows)
    return gain_over(row, other, column) if column.over else None


def gains_over_local(rows: Sequence[Row], column: Column) -> list[Gain]:
    """The gains of all variants over Local in one measure, as far as they were measured."""
    found = (gain_over(row, local_of(row, rows), column) for row in rows)
    return [gain for gain in found if gain is not None]


def values_by_seed(row: Row, column: Column, rows: Sequence[Row]) -> dict[int, float]:
    """The numbers of a variant in a column, by seed: what it measured, or what it gains."""
    if not column.over:
        return column.by_seed(row)
    gain = gain_in(row, rows, column)
    return {} if gain is None else dict(gain.by_seed)


def site_differences(one: Row, other: Row, column: Column) -> list[tuple[str, float]]:
    """Each client's difference for every seed that both variants have, with the client's name; above 0 is better."""
    ours, theirs = ({run["seed"]: run for run in row.usable} for row in (one, other))
    sign = -1 if column.better == "lower" else 1
    differences = []
    for seed in sorted(ours.keys() & theirs.keys()):
        pair = [run.get("per_client", {}).get(column.key, []) for run in (ours[seed], theirs[seed])]
        if len(pair[0]) != len(pair[1]):
            continue
        names = ours[seed].get("client_names") or [f"client {c}" for c in range(len(pair[0]))]
        differences += [
            (str(name), sign * column.scale * (a - b))
            for name, a, b in zip(names, *pair, strict=False)
            if a is not None and b is not None
        ]
    return differences
