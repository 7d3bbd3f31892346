"""Tables of results for the terminal and for Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

Summaries = Mapping[str, Sequence[Mapping[str, Any]]]
FIGURE = "last_five"
CAPTION = "Accuracy in %: mean over clients, mean of the last five evaluations, mean ± standard deviation over seeds."


@dataclass(frozen=True)
class Cell:
    text: str
    best: bool = False


def mean_and_deviation(values: Sequence[float], digits: int = 2) -> str:
    """`91.20 ± 0.31`; without the deviation where there is one value only."""
    text = f"{statistics.fmean(values):.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.{digits}f}"


def comparison_cells(summaries: Summaries) -> tuple[list[str], list[list[Cell]]]:
    """Header and rows. The best mean of each accuracy column is marked."""
    header = ["method", "head", "prototype", "kB up / round", "kB down / round", "seconds"]
    accuracies = {
        kind: {m: [100 * s[FIGURE][kind] for s in runs] for m, runs in summaries.items()}
        for kind in ("accuracy_head", "accuracy_prototype")
    }
    best = {kind: max(statistics.fmean(v) for v in by.values()) for kind, by in accuracies.items()}
    rows = []
    for method, runs in summaries.items():
        row = [Cell(method)]
        for kind, by in accuracies.items():
            values = by[method]
            row.append(Cell(mean_and_deviation(values), statistics.fmean(values) >= best[kind] - 1e-9))
        for direction in ("bytes_up", "bytes_down"):
            per_round = [sum(s[direction].values()) / s["rounds"] / 1000 for s in runs]
            row.append(Cell(f"{statistics.fmean(per_round):,.1f}"))
        row.append(Cell(f"{statistics.fmean(s['seconds'] for s in runs):.1f}"))
        rows.append(row)
    return header, rows


def comparison_table(summaries: Summaries, title: str = "") -> Table:
    header, rows = comparison_cells(summaries)
    seeds = max(len(runs) for runs in summaries.values())
    table = Table(
        title=title or None, caption=f"{CAPTION} {seeds} seed{'s' if seeds > 1 else ''}.", caption_justify="left"
    )
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(f"[bold]{c.text}[/bold]" if c.best else c.text for c in row))
    return table


def comparison_markdown(summaries: Summaries) -> str:
    header, rows = comparison_cells(summaries)
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    lines += ["| " + " | ".join(f"**{c.text}**" if c.best else c.text for c in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def summary_table(summary: Mapping[str, Any]) -> Table:
    """One run: each way of summing up, by head and by prototype."""
    table = Table(title=f"{summary['method']}, seed {summary['seed']}, {summary['rounds']} rounds")
    for i, name in enumerate(("accuracy in %, mean ± deviation over clients", "head", "prototype")):
        table.add_column(name, justify="left" if i == 0 else "right")
    names = {"last_round": "last round", "last_five": "mean of the last five evaluations"}
    if "best_on_validation" in summary:
        names["best_on_validation"] = f"best on validation (round {summary['best_on_validation']['round']})"
    for key, label in names.items():
        values = summary[key]
        cells = [
            f"{100 * values[k]:.2f} ± {100 * values[k + '_std']:.2f}" for k in ("accuracy_head", "accuracy_prototype")
        ]
        table.add_row(label, *cells)
    return table
