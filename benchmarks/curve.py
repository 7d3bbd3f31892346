"""The accuracy of each variant of a comparison by round: `python benchmarks/curve.py FOLDER OUT.md ROUND...`.

Means over the seeds that have evaluated a round, of runs that have finished or were stopped. FOLDER may be an archive.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

from protofed.disk import write_atomically
from protofed.results.read import read_folder


def main(folder: Path, out: Path, rounds: list[int]) -> None:
    """Write a Markdown table with a row for each variant and a column for each round."""
    lines = [
        f"| variant | {' | '.join(f'round {k}' for k in rounds)} | seeds |",
        "| --- |" + " ---: |" * (len(rounds) + 1),
    ]
    for variant in read_folder(folder).variants:
        runs = [{row["round"]: row["accuracy"] for row in run.metrics} for run in variant.runs]
        values = [[run[k] for run in runs if k in run] for k in rounds]
        cells = [f"{100 * fmean(there):.1f}" if there else "–" for there in values]
        lines.append(f"| {variant.label} | {' | '.join(cells)} | {len(runs)} |")
    write_atomically(out, ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(word) for word in sys.argv[3:]])
