"""How many rounds methods take to an accuracy, and what they accept: `python benchmarks/rounds_to.py OUT.md FOLDER:0.8 ...`.

FOLDER is a comparison, which may be an archive, and 0.8 the accuracy. Of every run it is the first evaluated round whose
accuracy is at least that high; the table has the mean over seeds, with the number of seeds that get there where not all
do. A second table has the share of unlabelled samples whose pseudo-label was accepted in the first ten rounds, which is what
a cold start lacks, that of the last ten, and how many of these were right.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from protofed.disk import write_atomically
from protofed.results.read import read_folder
from protofed.results.tables import MISSING, Cell, cells_markdown

SPAN = 10  # rounds
SHARES = ((slice(SPAN), "acceptance"), (slice(-SPAN, None), "acceptance"), (slice(-SPAN, None), "pseudo_accuracy"))


def main(out: Path, folders: Sequence[tuple[Path, float]]) -> None:
    """Write both tables, with a row for each variant and a column for each folder."""
    columns = [(f"`{folder.parent.name}/{folder.name}`", folder, wanted) for folder, wanted in folders]
    runs: dict[str, dict[Path, list[Any]]] = {}
    for _, folder, _ in columns:
        for variant in read_folder(folder).variants:
            if variant.finished:
                runs.setdefault(variant.label, {})[folder] = [run for run in variant.runs if run.summary is not None]
    if not runs:
        raise SystemExit(f"{', '.join(str(folder) for folder, _ in folders)}: no finished runs")
    reached = [
        [label, *(_reached([run.metrics for run in own.get(folder, ())], wanted) for _, folder, wanted in columns)]
        for label, own in runs.items()
    ]
    accepted = [
        [label, *(_accepted([run.rounds for run in own.get(folder, ())]) for _, folder, _ in columns)]
        for label, own in runs.items()
    ]
    tables = [(["rounds to", *(f"{name}, {wanted:.0%}" for name, _, wanted in columns)], reached)]
    header = f"accepted in the first {SPAN} rounds / in the last {SPAN} / right of these, in %"
    tables.append(
        ([header, *(name for name, _, _ in columns)], [line for line in accepted if set(line[1:]) != {MISSING}])
    )
    text = "\n".join(cells_markdown(header, [[Cell(t) for t in line] for line in lines]) for header, lines in tables)
    write_atomically(out, text.encode())


def _reached(evaluated: Sequence[Sequence[dict]], wanted: float) -> str:
    if not evaluated:
        return MISSING
    first = [next((r["round"] for r in own if r["accuracy"] >= wanted), None) for own in evaluated]
    found = [r for r in first if r is not None]
    text = f"{fmean(found):.1f}" if found else "never"
    return text if len(found) in (0, len(first)) else f"{text} ({len(found)} of {len(first)} seeds)"


def _accepted(rounds: Sequence[Sequence[dict]]) -> str:
    texts = []
    for part, name in SHARES:
        values = [row.get("measures", {}).get(name) for own in rounds for row in own[part]]
        known = [value for value in values if value is not None]
        texts.append(f"{100 * fmean(known):.1f}" if known else MISSING)
    return " / ".join(texts) if set(texts) != {MISSING} else MISSING


if __name__ == "__main__":
    if len(sys.argv) < 3 or not all(":" in word for word in sys.argv[2:]):
        raise SystemExit(__doc__)
    pairs = [word.rsplit(":", 1) for word in sys.argv[2:]]
    main(Path(sys.argv[1]), [(Path(folder), float(wanted)) for folder, wanted in pairs])
