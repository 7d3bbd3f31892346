"""How many rounds each method of a comparison takes to an accuracy: `python benchmarks/rounds_to.py FOLDER 0.68 0.70 0.72`.

Of every run the first evaluated round whose accuracy is at least that high, and the mean over seeds; "never" where a seed
does not get there. Beside it the share of unlabelled samples whose pseudo-label was accepted in the first ten rounds, which
is what a cold start lacks, that of the last ten, and how many of these were right.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from protofed.results.read import read_folder

SPAN = 10  # rounds


def main(folder: Path, wanted: list[float]) -> None:
    variants = [variant for variant in read_folder(folder).variants if variant.finished]
    if not variants:
        raise SystemExit(f"{folder}: no finished runs")
    heads = [*(f"{w:.0%}" for w in wanted), f"first {SPAN}", f"last {SPAN}", "right"]
    print(f"{'run':28s}" + "".join(f"{head:>14s}" for head in heads))
    for variant in variants:
        runs = [run for run in variant.runs if run.summary is not None]
        cells = [_reached([run.metrics for run in runs], w) for w in wanted]
        rounds = [run.rounds for run in runs]
        for part, name in (
            (slice(SPAN), "acceptance"),
            (slice(-SPAN, None), "acceptance"),
            (slice(-SPAN, None), "pseudo_accuracy"),
        ):
            values = [r.get("measures", {}).get(name) for own in rounds for r in own[part]]
            there = [v for v in values if v is not None]
            cells.append(f"{fmean(there):.1%}" if there else "-")
        print(f"{variant.label:28s}" + "".join(f"{cell:>14s}" for cell in cells))


def _reached(evaluated: list[Sequence[dict]], wanted: float) -> str:
    first = [next((r["round"] for r in own if r["accuracy"] >= wanted), None) for own in evaluated]
    found = [r for r in first if r is not None]
    text = f"{fmean(found):.1f}" if found else "never"
    return text if len(found) in (0, len(first)) else f"{text} ({len(found)}/{len(first)})"


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), [float(w) for w in sys.argv[2:]])
