"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ..results.tables import (
    COSTS,
    EPSILON,
    MISSING,
    Column,
    Row,
    caption,
    comparison_cells,
    default_columns,
    parse_column,
    privacy_text,
)


def comparison_table(rows: Sequence[Row], columns: Sequence[str] | None = None) -> Table:
    """Make the table of a comparison for the terminal, the best of each column bold and the second underlined.

    Args:
        rows: The variants.
        columns: The names of the columns; None takes the default ones.

    Returns:
        The table.
    """
    header, lines = comparison_cells(rows, columns)
    table = Table(caption=caption(rows), caption_justify="left")
    for i, name in enumerate(header):
        table.add_column(Text(name), justify="left" if i == 0 else "right", no_wrap=i > 0, overflow="fold")
    styles = {"": "", "best": "bold", "second": "underline"}
    for line in lines:
        table.add_row(*(Text(cell.text, styles[cell.mark]) for cell in line))
    return table


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Make the table of one run for the terminal: the last round, the mean of the last five and the best on validation."""
    table = Table(title=f"{summary['method']}, seed {summary['seed']}, {summary['rounds']} rounds")
    columns = [parse_column(name) for name in default_columns([summary]) if name not in (*COSTS, EPSILON)]
    table.add_column("accuracy in %, mean ± deviation over clients")
    for column in columns:
        table.add_column(column.title, justify="right")
    five = "rounds" if summary.get("format", 1) >= 2 else "evaluations"
    names = {"last_round": "last round", "last_five": f"mean of the last five {five}"}
    if "best_on_validation" in summary:
        names["best_on_validation"] = f"best on validation (round {summary['best_on_validation']['round']})"
    for part, label in names.items():
        table.add_row(label, *(_over_clients(summary[part], column) for column in columns))
    if "privacy" in summary:
        spent = summary["privacy"][EPSILON]
        amount = "∞" if spent is None else f"{spent:.3g}"
        table.caption, table.caption_justify = f"ε = {amount}; {privacy_text(summary['privacy'])}", "left"
    return table


def _over_clients(values: Mapping[str, Any], column: Column) -> str:
    mean, deviation = values.get(column.key), values.get(f"{column.key}_std")
    if mean is None:
        return MISSING
    text = f"{column.scale * mean:.{column.digits}f}"
    return text if deviation is None else f"{text} ± {column.scale * deviation:.{column.digits}f}"
