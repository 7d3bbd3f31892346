"""Tables of results: the cells, and the texts in plain text, Markdown, HTML, LaTeX and CSV.

The best is marked within its column.
"""

from __future__ import annotations

import csv
import html
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..evaluate.confusion import PREDICTIONS
from .columns import (
    COSTS,
    EPSILON,
    MEASURES,
    OWN,
    Column,
    Row,
    chosen_columns,
    default_columns,
    measured,
    own_predictions,
    own_predictions_differ,
    parse_column,
)
from .gains import gain_in, values_by_seed
from .notes import losses_of, notes
from .rows import DIRECTIONS, FIGURE, number
from .significance import marks_of, significance

__all__ = [
    "MEASURES",
    "Cell",
    "Column",
    "Row",
    "caption",
    "cells_latex",
    "cells_markdown",
    "comparison_cells",
    "comparison_latex",
    "comparison_markdown",
    "default_columns",
    "flat",
    "losses_of",
    "mean_and_deviation",
    "notes",
    "own_predictions",
    "own_predictions_differ",
    "parse_column",
    "results_csv",
    "setting_text",
    "significance",
]

MISSING, FAILED = "–", "failed"


def caption(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """The sentence that says what a table's numbers are. Runs of format 1 have means of five evaluations, not rounds."""
    gains = any(column.over for column in chosen_columns(rows, columns))
    early = any(run.get("format", 1) < 2 for row in rows for run in row.runs)
    seeds = max((len(row.runs) for row in rows), default=0)
    return (
        f"Mean over clients, mean of the last five {'evaluations' if early else 'rounds'}, mean ± standard deviation "
        f"over seeds ({seeds} seed{'' if seeds == 1 else 's'}); accuracy and F1 in %. Best bold, second underlined."
        + (" Gains are in points, seed by seed, ± half of the 95 % interval over seeds." if gains else "")
    )


@dataclass(frozen=True)
class Cell:
    """The text of a table's cell, and whether it is the best or the second of its column."""

    text: str
    mark: Literal["", "best", "second"] = ""


def mean_and_deviation(values: Sequence[float], digits: int = 2) -> str:
    """The mean and the standard deviation as text; one value has no deviation.

    >>> mean_and_deviation([90.0, 92.0])
    '91.00 ± 1.41'
    """
    text = f"{statistics.fmean(values):,.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):,.{digits}f}"


def comparison_cells(rows: Sequence[Row], columns: Sequence[str] | None = None) -> tuple[list[str], list[list[Cell]]]:
    """The cells of a table. In each column where higher or lower is better, the best and the second mean are marked.

    Args:
        rows: The variants.
        columns: The names of the columns; None takes those of `default_columns`.

    Returns:
        The header, and for each row its cells.
    """
    chosen = chosen_columns(rows, columns)
    first = "variant" if any(row.settings or row.label != row.method for row in rows) else "method"
    cells = [[Cell(row.title)] for row in rows]
    for column in chosen:
        marks = marks_of(rows, column)
        for row, line in zip(rows, cells, strict=True):
            line.append(Cell(_cell_text(row, column, rows), marks.get(row.label, "")))
    return [first, *(column.title for column in chosen)], cells


def _cell_text(row: Row, column: Column, rows: Sequence[Row]) -> str:
    if column.over and (gain := gain_in(row, rows, column)) is not None:
        return gain.text
    values = list(values_by_seed(row, column, rows).values())
    if not values:
        return FAILED if row.reasons() and not row.usable else MISSING
    if not column.deviation:
        return f"{statistics.fmean(values):,.{column.digits}f}"
    text = mean_and_deviation(values, column.digits)
    if column.key != OWN or not own_predictions_differ(rows):
        return text
    kinds = set.intersection(*(own_predictions(run[FIGURE]) for run in row.usable if OWN in run[FIGURE]))
    return f"{text} ({' or '.join(kind for kind in PREDICTIONS if kind in kinds) or 'mixed'})"


def comparison_markdown(rows: Sequence[Row], columns: Sequence[str] | None = None, *, noted: bool = True) -> str:
    """Write the table in Markdown, with notes below it where they are wanted; the best is bold, the second underlined."""
    return cells_markdown(*comparison_cells(rows, columns), notes(rows, columns) if noted else ())


def cells_markdown(header: Sequence[str], cells: Sequence[Sequence[Cell]], below: Sequence[str] = ()) -> str:
    """Write cells in Markdown, with sentences below them; the best is bold, the second underlined."""
    around = {"": "{}", "best": "**{}**", "second": "<u>{}</u>"}
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    for row in cells:
        texts = [around[cell.mark].format(cell.text.replace("|", "\\|")) for cell in row]
        lines.append("| " + " | ".join(texts) + " |")
    for note in below:
        lines += ["", note]
    return "\n".join(lines) + "\n"


def comparison_text(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Write the table in plain text, with the notes below it; nothing is marked."""
    header, cells = comparison_cells(rows, columns)
    lines = [header, *([cell.text for cell in line] for line in cells)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    aligned = [
        "  ".join([line[0].ljust(widths[0]), *(t.rjust(w) for t, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    return "\n".join([*aligned, *notes(rows, columns)])


def comparison_html(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Write the table in HTML, as a notebook shows it, with the notes below it."""
    return html_table(*comparison_cells(rows, columns), [caption(rows, columns), *notes(rows, columns)])


def html_table(header: Sequence[str], lines: Sequence[Sequence[Cell]], below: Sequence[str] = ()) -> str:
    """Write cells in HTML, the best bold and the second underlined.

    Args:
        header: The headings.
        lines: The cells of each line.
        below: Sentences below the table.

    Returns:
        A `table` that can be scrolled sideways, and paragraphs.
    """
    around = {"": "{}", "best": "<b>{}</b>", "second": "<u>{}</u>"}

    def line(texts: Iterable[str], tag: str) -> str:
        first, *rest = texts
        right = "".join(f'<{tag} style="text-align:right;white-space:nowrap">{text}</{tag}>' for text in rest)
        return f'<tr><th style="text-align:left">{first}</th>{right}</tr>'

    body = "".join(line((around[c.mark].format(html.escape(c.text)) for c in cells), "td") for cells in lines)
    head = line(map(html.escape, header), "th")
    said = "".join(f'<p style="font-size:smaller;margin:0.2em 0">{html.escape(text)}</p>' for text in below)
    return f'<div style="overflow-x:auto"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>{said}'


def summary_cells(summary: Mapping[str, Any]) -> tuple[list[str], list[list[Cell]]]:
    """The cells of one run's table: the last round, the mean of the last five and the best on validation.

    Returns:
        The header, and for each line its cells; numbers are means ± deviations over clients.
    """
    costs = (*COSTS, EPSILON)
    columns = [parse_column(name) for name in default_columns([summary]) if name not in costs]
    five = "rounds" if summary.get("format", 1) >= 2 else "evaluations"
    names = {"last_round": "last round", "last_five": f"mean of the last five {five}"}
    if "best_on_validation" in summary:
        names["best_on_validation"] = f"best on validation (round {summary['best_on_validation']['round']})"
    lines = [
        [Cell(label), *(Cell(over_clients_text(summary[part], column)) for column in columns)]
        for part, label in names.items()
    ]
    return ["", *(column.title for column in columns)], lines


def over_clients_text(values: Mapping[str, Any], column: Column) -> str:
    """A mean over clients and its deviation, as a run's table shows them."""
    mean, deviation = number(values, column.key), number(values, f"{column.key}_std")
    if mean is None:
        return MISSING
    text = f"{column.scale * mean:.{column.digits}f}"
    return text if deviation is None else f"{text} ± {column.scale * deviation:.{column.digits}f}"


LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "–": "--",
    "−": "$-$",
}
LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"}


def comparison_latex(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Write the table in LaTeX, a `tabular` for the package booktabs. The notes are comments below it."""
    return cells_latex(*comparison_cells(rows, columns), notes(rows, columns))


def cells_latex(header: Sequence[str], cells: Sequence[Sequence[Cell]], below: Sequence[str] = ()) -> str:
    """Write cells in LaTeX, a `tabular` for the package booktabs, with sentences below it as comments."""
    around = {"": "{}", "best": r"\textbf{{{}}}", "second": r"\underline{{{}}}"}

    def line(texts: Iterable[str]) -> str:
        return " & ".join(texts) + r" \\"

    lines = [f"\\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}", r"\toprule", line(map(_latex, header)), r"\midrule"]
    lines += [line(around[cell.mark].format(_latex(cell.text)) for cell in row) for row in cells]
    lines += [r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in below)]
    return "\n".join(lines) + "\n"


def _latex(text: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in text)


def results_csv(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Write one line per variant and seed, with the numbers as measured (shares, bytes).

    Args:
        rows: The variants.
        columns: The names of the numbers; None takes every figure of the summaries and the bytes. Seconds are not among
            these, so that the same runs give the same text.

    Returns:
        The table as CSV. Where clients were dropped or runs failed, two more columns say how many client rounds and why; a
        run that failed has no numbers.
    """
    axes = list(dict.fromkeys(key for row in rows for key in row.settings))
    keys = [*dict.fromkeys(key for row in rows for run in row.runs for key in run[FIGURE]), *DIRECTIONS]
    chosen = [Column(key, key) for key in keys] if columns is None else [parse_column(name) for name in columns]
    titles = [f"{column.name}_per_round" if column.key in DIRECTIONS else column.name for column in chosen]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    losses = ["dropped_clients", "failure"] if losses_of(rows) else []
    writer.writerow(["label", "method", *axes, "seed", *titles, *losses])
    for row in rows:
        values = [setting_text(row.settings[key]) if key in row.settings else "" for key in axes]
        reasons, dropped = row.reasons(), {run["seed"]: run.get("dropped_clients", 0) for run in row.runs}
        gains = {c.name: values_by_seed(row, c, rows) for c in chosen if c.over}
        numbers = {run["seed"]: [_number(run, column, gains) for column in chosen] for run in row.usable}
        for seed in dict.fromkeys((*(run["seed"] for run in row.runs), *reasons)):
            lost = [dropped.get(seed), reasons.get(seed)] if losses else []
            writer.writerow([row.label, row.method, *values, seed, *numbers.get(seed, [None] * len(chosen)), *lost])
    return text.getvalue()


def _number(run: Mapping[str, Any], column: Column, gains: Mapping[str, Mapping[int, float]]) -> float | None:
    """A number of a run as measured, or its gain as a difference of such numbers."""
    if not column.over:
        return measured(run, column.key)
    gain = gains[column.name].get(run["seed"])
    return None if gain is None else gain / column.scale


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The texts of settings by their whole keys.

    Args:
        settings: Settings, which may hold settings in turn.
        prefix: What every key begins with.

    Returns:
        A text for each value that is no mapping.

    >>> flat({"method": {"name": "fedsap", "alignment": {"shape": "linear"}}})
    {'method.name': 'fedsap', 'method.alignment.shape': 'linear'}
    """
    lines: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            lines |= flat(value, f"{prefix}{key}.")
        else:
            lines[prefix + str(key)] = setting_text(value)
    return lines


def setting_text(value: Any) -> str:
    """The value of a setting as labels, folders' names and tables show it: a choice begins with its name.

    It is for reading. `grammar.write_value` is the text that can be parsed again, with quotes where it needs them.

    >>> setting_text({"name": "dirichlet", "alpha": 0.1})
    'dirichlet,alpha=0.1'
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        name = [str(value["name"])] if "name" in value else []
        return ",".join(name + [f"{key}={setting_text(v)}" for key, v in value.items() if key != "name"])
    if isinstance(value, list | tuple):
        return "[" + ",".join(setting_text(v) for v in value) + "]"
    return str(value)
