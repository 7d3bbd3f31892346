"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ..results.columns import EPSILON, Row, new_client_columns, parse_column
from ..results.notes import privacy_text
from ..results.tables import MISSING, caption, comparison_cells, summary_cells

NAMES = 6  # of new clients that a title lists


def comparison_table(rows: Sequence[Row], columns: Sequence[str] | None = None, below: str = "") -> Table:
    """Make the table of a comparison for the terminal, the best of each column bold and the second underlined.

    Args:
        rows: The variants.
        columns: The names of the columns; None takes the default ones.
        below: The sentence below the table; the usual one where it is not given.

    Returns:
        The table.
    """
    table = comparison_tables(rows, columns, width=None)[0]
    table.caption = below or table.caption
    return table


def comparison_tables(rows: Sequence[Row], columns: Sequence[str] | None, width: int | None) -> list[Table]:
    """Make the table of a comparison in as many parts as it takes to cut no cell.

    Args:
        rows: The variants.
        columns: The names of the columns; None takes the default ones.
        width: The number of letters that a line may have; None makes one part.

    Returns:
        The parts, each with the names of the variants; the last one has the caption.
    """
    header, lines = comparison_cells(rows, columns)
    longest = [max((len(line[i].text) for line in lines), default=0) for i in range(len(header))]
    titles = header if width is None else [_folded(*pair) for pair in zip(header, longest, strict=True)]
    widths = [
        max(room, *map(len, title.split("\n"))) + 3 for title, room in zip(titles, longest, strict=True)
    ]  # with the line and the blanks beside a cell
    parts: list[list[int]] = [[]]
    for i in range(1, len(header)):
        if parts[-1] and width is not None and widths[0] + sum(widths[k] for k in parts[-1]) + widths[i] >= width:
            parts.append([])
        parts[-1].append(i)
    styles = {"": "", "best": "bold", "second": "underline"}
    tables = []
    for part in parts:
        table = Table()
        for i in (0, *part):
            table.add_column(Text(titles[i]), justify="left" if i == 0 else "right", no_wrap=i > 0, overflow="fold")
        for line in lines:
            table.add_row(*(Text(line[i].text, styles[line[i].mark]) for i in (0, *part)))
        tables.append(table)
    tables[-1].caption, tables[-1].caption_justify = caption(rows, columns), "left"
    return tables


def plain_table(header: Sequence[str], lines: Sequence[Sequence[str]], title: str = "") -> Table:
    """Make a table of texts for the terminal; nothing is marked.

    Args:
        header: The headings.
        lines: The texts of each line.
        title: What stands above the table.

    Returns:
        The table.
    """
    table = Table(title=Text(title) if title else None, title_justify="left")
    for name in header:
        table.add_column(Text(name))
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _folded(title: str, width: int) -> str:
    """A heading in two lines where it is wider than what stands below it."""
    mark = " / " if " / " in title else " "
    return title if len(title) <= width else title.replace(mark, "\n" + mark.lstrip(), 1)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Make the table of one run for the terminal: the last round, the mean of the last five and the best on validation."""
    control = f", control={summary['control']}" if "control" in summary else ""
    table = Table(title=f"{summary['method']}{control}, seed {summary['seed']}, {summary['rounds']} rounds")
    (_, *titles), lines = summary_cells(summary)
    table.add_column("accuracy in %, mean ± deviation over clients")
    for title in titles:
        table.add_column(title, justify="right")
    for line in lines:
        table.add_row(*(cell.text for cell in line))
    if "privacy" in summary:
        spent = summary["privacy"][EPSILON]
        amount = "∞" if spent is None else f"{spent:.3g}"
        table.caption, table.caption_justify = f"ε = {amount}; {privacy_text(summary['privacy'])}", "left"
    return table


def new_clients_table(summary: Mapping[str, Any]) -> Table:
    """Make the table of the clients that joined after the last round: the method beside Local from scratch."""
    joined = summary["new_clients"]
    names = ", ".join(joined["clients"]) if len(joined["clients"]) <= NAMES else f"{len(joined['clients'])} clients"
    table = Table(title=f"new after the last round: {names}")
    table.add_column("accuracy in %, by local epochs")
    columns = [parse_column(name) for name in new_client_columns([summary])]
    for column in columns:
        table.add_column(column.title.removeprefix("new "), justify="right")
    learners = {summary["method"]: "new", **({"Local from scratch": "newlocal"} if "local" in joined else {})}
    for label, family in learners.items():
        keys = [column.key.replace("new", family, 1) for column in columns]
        values = [parse_column(key).value(summary) for key in keys]
        table.add_row(label, *(MISSING if value is None else f"{value:.2f}" for value in values))
    return table
