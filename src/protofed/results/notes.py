"""The lines under a table: how clients were scored, what was tested, what failed or was dropped, what privacy was kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .columns import LOCAL, OWN, Column, Row, chosen_columns, own_predictions_differ
from .gains import values_by_seed
from .protocol import protocol_notes
from .significance import significance
from .verdict import gain_notes


def notes(rows: Sequence[Row], columns: Sequence[str] | None = None) -> list[str]:
    """The lines under a table: protocol, verdicts, significance, failures, dropped clients, and what was not measured."""
    chosen = chosen_columns(rows, columns)
    lines = [*protocol_notes(rows), *gain_notes(rows, chosen, by_default=not columns), *significance(rows, columns)]
    incomplete = incomplete_of([row for row in rows if row.usable or not row.reasons()], rows)
    if incomplete:
        lines.append(f"fewer seeds than the others, and not ranked: {', '.join(incomplete)}")
    lines += losses_of(rows)
    lines += privacy_of(rows)
    for column in chosen:
        if not any(values_by_seed(row, column, rows) for row in rows) and any(row.usable for row in rows):
            lines.append(f"{column.name}: {_absence(column)}")
        elif column.key == OWN and own_predictions_differ(rows):
            lines.append(
                "accuracy: by head or by prototype, as each method's paper predicts; these are two ways of predicting, so "
                "none is marked as the best"
            )
    return lines


def incomplete_of(some: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """The labels of those rows that have fewer usable runs than there are seeds, with both numbers."""
    most = max((len(row.usable) + len(row.reasons()) for row in rows), default=0)
    return [f"{row.label} ({len(row.usable)} of {most})" for row in some if len(row.usable) < most]


def _absence(column: Column) -> str:
    if not column.over:
        return "no run has measured it"
    return f"there is no {LOCAL if column.over == 'local' else 'control'} to compare with, or no run has measured it"


def losses_of(rows: Sequence[Row]) -> list[str]:
    """The lines of what was lost: runs that failed and why, client rounds and states that were dropped, and attackers."""
    return [
        line
        for row in rows
        for line in (*_failure_lines(row), _dropped_line(row), *_round_lines(row), _attacked_line(row))
        if line
    ]


def privacy_text(guarantee: Mapping[str, Any]) -> str:
    """Whose presence a run's differential privacy hides, by whose noise, with which δ.

    Args:
        guarantee: `privacy` of a run's summary.
    """
    whose = "the server, which sees what clients send," if guarantee["placement"] == "central" else "each client"
    return (
        f"ε with δ = {guarantee['delta']:g} hides the presence of one {guarantee['unit']} in what clients send in "
        f"training; {whose} adds the noise; accuracies are outside it"
    )


def privacy_of(rows: Sequence[Row]) -> list[str]:
    """A line for each differential privacy that runs have."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        for guarantee in [run["privacy"] for run in row.usable if "privacy" in run][:1]:
            lines.setdefault(privacy_text(guarantee), []).append(row.label)
    return [f"{text} ({', '.join(labels)})" for text, labels in lines.items()]


def _failure_lines(row: Row) -> list[str]:
    """A line for each reason, with the seeds that failed because of it."""
    reasons, lines = row.reasons(), []
    for reason in dict.fromkeys(reasons.values()):
        seeds = [str(seed) for seed, why in sorted(reasons.items()) if why == reason]
        lines.append(f"failed: {row.label}, seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}: {reason}")
    return lines


def _attacked_line(row: Row) -> str:
    """How many clients of a run attacked; the attackers of other seeds are others."""
    attacked = [run for run in row.runs if run.get("attackers")]
    if not attacked:
        return ""
    number, clients = len(attacked[0]["attackers"]), attacked[0]["clients"]
    return f"attacked: {row.title}, {number} of {clients} clients are attackers; figures are those of the others"


def _dropped_line(row: Row) -> str:
    dropped = sum(run.get("dropped_clients", 0) for run in row.runs)
    if not dropped:
        return ""
    asked = sum(run.get("client_rounds", 0) for run in row.runs)
    text = f"dropped: {row.title}, {dropped:,}{f' of {asked:,}' if asked else ''} client rounds"
    if row.empty_rounds:
        text += f"; in {row.empty_rounds:,} rounds no client returned anything usable, and the server kept its state"
    return text


def _round_lines(row: Row) -> list[str]:
    """Of each run, what the server did beside the method's equations: the first such round, and how many there were."""
    noted = [(run["seed"], lines) for run in row.runs if (lines := run.get("round_notes"))]
    more = {seed: f" (and {len(lines) - 1:,} more)" if len(lines) > 1 else "" for seed, lines in noted}
    return [f"noted: {row.title}, seed {seed}, {lines[0]}{more[seed]}" for seed, lines in noted]
