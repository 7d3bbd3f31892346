"""What a composition costs beside the method that it stands for: `python benchmarks/compose.py docs/results/compose.json`.

Both are trained in turns in one process, with the engine that `auto` chooses, and a round's CPU seconds are compared.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from protofed.disk import write_atomically
from protofed.experiment.build import build
from protofed.experiment.settings import resolve

TURNS = 60
RAMP = "weight.shape=cosine&weight.end=50&temperature=0.5"
COMMON = {"data": "digits", "clients": 20, "rounds": 10_000, "evaluate_every": 10_000, "threads": 1, "workers": 1}
PAIRS: dict[str, dict[str, Any]] = {
    "fedproto": {"loss": ["ce", "align"], "predict": "prototype"},
    "fedsap": {
        "loss": ["ce", "align?weight.shape=linear&weight.start=20&weight.end=100&weight.maximum=0.7", "proxy"],
        "reduce": "mean?by=holders",
    },
    "fedpagr": {
        "loss": ["ce", "contrast?temperature=0.1", "spread?weight=0.1&temperature=0.1"],
        "anchor": True,
        "returned_prototypes": "directions",
        "initial_bank": "random",
        "reduce": "mean?by=directions",
        "after": ["refine"],
        "predict": "prototype?metric=cosine&temperature=0.1&space=consensus",
    },
    "fedapa": {
        "loss": ["ce", f"contrast?{RAMP}", f"peers?{RAMP}"],
        "reduce": "personal",
        "predict": "head?prefers=own",
    },
}


def seconds(federation: Any) -> float:
    start = time.process_time()
    federation.step()
    return time.process_time() - start


def main(out: Path) -> None:
    torch.set_num_threads(1)
    rows = []
    for name, composed in PAIRS.items():
        own = build(resolve(name, COMMON))[1]
        made = build(resolve("compose", {**COMMON, **composed}))[1]
        for federation in (own, made):
            federation.step()
        taken: dict[str, list[float]] = {"own": [], "composed": []}
        for turn in range(TURNS):  # neither is always the first
            for which in ("own", "composed") if turn % 2 else ("composed", "own"):
                taken[which].append(seconds(own if which == "own" else made))
        best = min(taken["composed"]) / min(taken["own"])
        median = statistics.median(taken["composed"]) / statistics.median(taken["own"])
        rows.append({"method": name, "best": round(best, 3), "median": round(median, 3), "turns": TURNS})
        print(json.dumps(rows[-1]), flush=True)
    write_atomically(out, (json.dumps({"rows": rows}, indent=1) + "\n").encode())
    lines = ["| method | best round | median round |", "| --- | ---: | ---: |"]
    lines += [f"| {row['method']} | {row['best']:.3f} | {row['median']:.3f} |" for row in rows]
    write_atomically(out.with_suffix(".md"), ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/results/compose.json"))
