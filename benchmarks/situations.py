"""What methods gain over Local in situations with real data: `python benchmarks/situations.py docs/results OUT.md`.

A row for each situation: what Local has, and the gains over it by head and by prototype, of like with like and seed by
seed, as `protofed table` has them. A variant whose interval contains 0 is named among those that are not different.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from protofed.disk import write_atomically
from protofed.results.columns import Column, Row, parse_column
from protofed.results.gains import gains_over_local, local_of
from protofed.results.read import read_rows
from protofed.results.tables import MISSING, Cell, cells_markdown
from protofed.results.verdict import names_text

LINEAR = ", linear head"
SITUATIONS = (
    ("Fashion-MNIST, about 3 of 10 classes a site, one network", "fedsap-fashion-mnist", ""),
    ("Fashion-MNIST, five networks with FedPAGR's (consensus) head", "fedpagr-table1-laptop/fashion-mnist", ""),
    ("the same with linear heads", "fedpagr-table1-laptop/fashion-mnist", LINEAR),
    ("clinical text, language models of three depths with FedPAGR's head", "fedpagr-table1-laptop/mimic-iv", ""),
    ("the same with linear heads", "fedpagr-table1-laptop/mimic-iv", LINEAR),
    (
        "CIFAR-10, 3 classes a site, a pretrained network that is fine-tuned",
        "fedsap-pretrained-laptop/cifar-10-n-3-fine-tuned",
        "",
    ),
    ("Wi-Fi crowd counting, sites are sessions in rooms", "fedapa-table3-laptop/one-architecture", ""),
    ("Wi-Fi activities, sites are people in rooms", "fedapa-activity-laptop/one-architecture", ""),
    ("the same with three networks", "fedapa-activity-laptop/three-architectures", ""),
    ("the same people and rooms, three labelled windows of each activity", "fedapa-few-laptop/lr-0.05", ""),
)
NAMES = {
    "caring": "CARING",
    "fedapa": "FedAPA",
    "fedavg": "FedAvg",
    "fedproto": "FedProto",
    "fedsap": "FedSAP",
    "wifederated": "WiFederated",
}


def main(results: Path, out: Path) -> None:
    """Write the table."""
    columns = [parse_column(name) for name in ("head", "prototype")]
    header = [
        "situation",
        f"Local, {' / '.join(column.title for column in columns)}, in %",
        *(f"over Local, by {column.title}" for column in columns),
        "`docs/results`",
    ]
    lines = []
    for title, folder, kind in SITUATIONS:
        rows = [row for row in read_rows(results / folder)[0] if row.label.endswith(LINEAR) == bool(kind)]
        rows = [row for row in rows if not is_ablation(row, rows)]
        [local] = [row for row in rows if row.is_local]
        alone = " / ".join(f"{fmean(column.by_seed(local).values()):.1f}" for column in columns)
        gained = [gain_cell(rows, column) for column in columns]
        lines.append([Cell(text) for text in (title, alone, *gained, f"`{folder}`")])
    write_atomically(out, cells_markdown(header, lines).encode())


def gain_cell(rows: Sequence[Row], column: Column) -> str:
    """The gains and losses of all variants, and the names of those that are not different."""
    names = {row.label: shown_name(row, rows) for row in rows}
    gains = gains_over_local(rows, column)
    apart = [f"{names[gain.label]} {gain.text}" for gain in gains if gain.verdict != "not different"]
    alike = [names[gain.label] for gain in gains if gain.verdict == "not different"]
    return "; ".join([*apart, *([f"not different: {names_text(alike)}"] if alike else [])]) or MISSING


def is_ablation(row: Row, rows: Sequence[Row]) -> bool:
    """Whether a variant is a part of another one: `FedSAP, proxy` beside `FedSAP`."""
    return any(row.label.startswith(f"{other.label}, ") for other in rows)


def shown_name(row: Row, rows: Sequence[Row]) -> str:
    """The name of a variant as the papers write it; that of a control says so."""
    if local_of(row, rows) is not None and row.control:
        several = len({other.method for other in rows if other.control}) > 1
        return f"own prototypes ({NAMES[row.method]}'s loss)" if several else "own prototypes"
    label = row.label.removesuffix(LINEAR)
    return NAMES.get(label, label)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
