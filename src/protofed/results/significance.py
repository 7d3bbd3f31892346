"""Which of a column's means is the best, and whether the difference to the second is more than chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .columns import LOCAL, OWN, Column, Row, chosen_columns, own_predictions_differ
from .gains import gain_over, local_of, site_differences

SEEDS_FOR_A_TEST = 3
CLIENTS_FOR_A_TEST = 6  # with fewer that differ, the p of a signed-rank test cannot be below 0.03


def _ranking(rows: Sequence[Row], column: Column) -> list[tuple[str, float]]:
    """Labels and means, best first. Rows that lack a seed are left out: their means are not comparable."""
    measured = {row.label: column.by_seed(row) for row in rows}
    most = max((len(values) for values in measured.values()), default=0)
    means = {label: statistics.fmean(v.values()) for label, v in measured.items() if v and len(v) == most}
    if (
        column.over
        or column.better == "neither"
        or len(means) < 2
        or (column.key == OWN and own_predictions_differ(rows))
    ):
        return []
    return sorted(means.items(), key=lambda item: item[1], reverse=column.better == "higher")


def marks_of(rows: Sequence[Row], column: Column) -> dict[str, Literal["best", "second"]]:
    """By label, which means are the best and the second of a column. Equal means share their mark."""
    ranking = _ranking(rows, column)
    marks: dict[str, Literal["best", "second"]] = {}
    second: float | None = None
    for label, mean in ranking:
        if abs(mean - ranking[0][1]) < 1e-9:
            marks[label] = "best"
        elif second is None or abs(mean - second) < 1e-9:
            second = mean
            marks[label] = "second"
    return marks


def significance(rows: Sequence[Row], columns: Sequence[str] | None = None) -> list[str]:
    """Test each variant against Local, and the best against the second, in each column.

    Over seeds, where there are at least three, this is a paired t-test; for accuracies there is also a signed-rank test
    over the clients of all seeds. The latter is weaker evidence, because the clients of a run share their server and are
    not independent repetitions. Where several variants are tested against Local, their p are corrected by Holm. Of the
    default columns, only accuracies are tested against Local.

    Args:
        rows: The variants.
        columns: The names of the columns; None takes the default ones.

    Returns:
        A line for each test that can be made.
    """
    lines = []
    for column in chosen_columns(rows, columns):
        marks = marks_of(rows, column)
        best = next((row for row in rows if marks.get(row.label) == "best"), None)
        second = next((row for row in rows if marks.get(row.label) == "second"), None)
        if best is not None and second is not None and not (best.is_local or second.is_local):
            over_seeds, over_sites = seeds_test(best, second, column), sites_test(best, second, column)
            tests = [over_seeds.text(), over_sites.text()]
            if any(tests):
                lines.append(f"{column.title}: {best.label} vs {second.label}, {'; '.join(filter(None, tests))}")
        if column.better != "neither" and not column.over and (columns or column.key.startswith("accuracy_")):
            lines += _against_local(rows, column)
    return lines


@dataclass(frozen=True)
class SeedsTest:
    """A paired t-test over seeds; p is None where there are too few, or where they do not differ."""

    seeds: int
    p: float | None

    def text(self) -> str:
        """The words of a line under a table; empty where there is no test."""
        return "" if self.p is None else f"paired t-test over {self.seeds} seeds: {chance_text(self.p)}"


@dataclass(frozen=True)
class SitesTest:
    """A signed-rank test over the clients of all seeds; p is None where too few of them differ."""

    better: int
    worse: int
    clients: int
    p: float | None

    def text(self) -> str:
        """The words of a line under a table; empty where there is no test."""
        if self.p is None:
            return ""
        return (
            f"better for {self.better} and worse for {self.worse} of {self.clients} clients "
            f"(all seeds), signed-rank test: {chance_text(self.p)}"
        )


def seeds_test(one: Row, other: Row, column: Column) -> SeedsTest:
    """Test two variants over the seeds that both have."""
    gain = gain_over(one, other, column)
    differences = [] if gain is None else list(gain.by_seed.values())
    spread = max(differences, default=0.0) - min(differences, default=0.0)
    if len(differences) < SEEDS_FOR_A_TEST or spread <= 1e-9:
        return SeedsTest(len(differences), None)
    from scipy.special import stdtr  # here, because it is slow to load and most tables need none of it

    n = len(differences)
    t = abs(statistics.fmean(differences)) / (statistics.stdev(differences) / math.sqrt(n))
    return SeedsTest(n, 2 * float(stdtr(n - 1, -t)))


def sites_test(one: Row, other: Row, column: Column) -> SitesTest:
    """Test two variants over the clients of all seeds that both have."""
    differences = [difference for _, difference in site_differences(one, other, column)]
    differing = [difference for difference in differences if abs(difference) > 1e-9 * column.scale]
    better, worse = sum(d > 0 for d in differing), sum(d < 0 for d in differing)
    p = None
    if len(differing) >= CLIENTS_FOR_A_TEST:
        from scipy import stats

        p = float(stats.wilcoxon(differing).pvalue)
    return SitesTest(better, worse, len(differences), p)


def holm(chances: Sequence[float | None]) -> list[float | None]:
    """Correct the p of several tests by Holm, so that all of them together are wrong with the chance that each is said.

    Args:
        chances: The p of each test; None where there was no test.

    Returns:
        The corrected p, in the same order.

    >>> holm([0.04, None, 0.01])
    [0.04, None, 0.02]
    """
    order = sorted((p, i) for i, p in enumerate(chances) if p is not None)
    corrected: list[float | None] = [None] * len(chances)
    highest = 0.0
    for rank, (p, i) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p))
        corrected[i] = highest
    return corrected


def _against_local(rows: Sequence[Row], column: Column) -> list[str]:
    """The line that tests every variant against Local, where there is a test to make."""
    pairs = [(row, local) for row in rows if (local := local_of(row, rows)) is not None]
    over_seeds = [seeds_test(row, local, column) for row, local in pairs]
    over_sites = [sites_test(row, local, column) for row, local in pairs]
    chances = zip(holm([t.p for t in over_seeds]), holm([t.p for t in over_sites]), strict=True)
    parts = []
    for (row, _), sites, (p_seeds, p_sites) in zip(pairs, over_sites, chances, strict=True):
        tests = [] if p_seeds is None else [f"{chance_text(p_seeds)} over seeds"]
        if p_sites is not None:
            tests.append(f"{chance_text(p_sites)} over clients ({sites.better} better, {sites.worse} worse)")
        parts += [f"{row.label} {', '.join(tests)}"] if tests else []
    if not parts:
        return []
    seeds = max((t.seeds for t in over_seeds if t.p is not None), default=0)
    clients = max((t.clients for t in over_sites if t.p is not None), default=0)
    made = [f"paired t-test over {seeds} seeds"] if seeds else []
    made += [f"signed-rank test over {clients} clients (all seeds)"] if clients else []
    made += [f"p corrected by Holm for {len(parts)} variants"] if len(parts) > 1 else []
    return [f"{column.title}, against {LOCAL}: {'; '.join(parts)} ({', '.join(made)})"]


def chance_text(p: float) -> str:
    """The p of a test as lines under tables show it."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
