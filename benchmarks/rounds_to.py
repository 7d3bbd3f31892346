"""How many rounds each method of a comparison takes to an accuracy: `python benchmarks/rounds_to.py FOLDER 0.68 0.70 0.72`.

Of every run the first evaluated round whose accuracy is at least that high, and the mean over seeds; "never" where a seed
does not get there. Beside it the share of pseudo-labels accepted in the first rounds, which is what a cold start lacks.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

FIRST = 10  # rounds whose acceptance is averaged


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def main(folder: Path, wanted: list[float]) -> None:
    runs: dict[str, list[Path]] = defaultdict(list)
    for summary in sorted(folder.glob("*/summary.json")):
        runs[summary.parent.name.rpartition("-seed")[0]].append(summary.parent)
    if not runs:
        raise SystemExit(f"{folder}: no finished runs")
    print(f"{'run':28s}" + "".join(f"{f'{w:.0%}':>16s}" for w in wanted) + f"{f'accepted, 1-{FIRST}':>18s}")
    for label, places in runs.items():
        reached: dict[float, list[int | None]] = {w: [] for w in wanted}
        accepted = []
        for place in places:
            metrics = rows(place / "metrics.jsonl")
            for w in wanted:
                reached[w].append(next((r["round"] for r in metrics if r["accuracy"] >= w), None))
            shares = [r.get("measures", {}).get("acceptance") for r in rows(place / "rounds.jsonl")[:FIRST]]
            accepted += [s for s in shares if s is not None]
        cells = []
        for w in wanted:
            found = [r for r in reached[w] if r is not None]
            text = "never" if not found else f"{fmean(found):.1f}"
            cells.append(text if len(found) in (0, len(places)) else f"{text} ({len(found)} of {len(places)})")
        print(
            f"{label:28s}"
            + "".join(f"{c:>16s}" for c in cells)
            + f"{f'{fmean(accepted):.1%}' if accepted else '-':>18s}"
        )


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), [float(w) for w in sys.argv[2:]])
