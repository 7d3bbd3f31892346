"""Traps in comparing prototype methods, each measured: `python benchmarks/traps.py [OUT.json] [SEEDS]`.

All on scikit-learn's digits with 20 sites, as in the example `situations/alike` (two images of each digit at a site) unless
the row says otherwise. Runs that OUT.json has already are not repeated; the tables are written beside it as Markdown.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import protofed as pf
from protofed.disk import write_atomically

OUT = Path("docs/results/traps.json")
FEW = {"config": "situations/alike", "rounds": 200, "evaluate_every": 200}
EACH = {"config": "situations/alike", "rounds": 200, "evaluate_every": 1}
THREE = {"config": "digits", "evaluate_every": 100}  # about three of the ten digits at a site, 15 images of each

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"unit / {reduction} / {weight}": ("fedproto", {**FEW, "reduction": reduction, "weight": weight})
        for reduction in ("mean", "sum")
        for weight in (0.1, 1.0, 10.0)
    },
    "start / local": ("local", FEW),
    "start / same": ("fedproto", FEW),
    "start / own": ("fedproto", {**FEW, "initial": "own"}),
    **{f"best / {method}": (method, EACH) for method in ("local", "fedproto", "fedavg")},
    **{
        f"rounds / {situation} / {rounds}": (
            "fedavg",
            {"config": f"situations/{situation}", "rounds": rounds, "evaluate_every": rounds},
        )
        for situation in ("alike", "wired")
        for rounds in (20, 50, 100, 200, 500)
    },
    **{
        f"scope / {scope} / {method}": (method, {**THREE, "scope": scope, "candidates": scope})
        for scope in ("own", "all")
        for method in ("local", "fedproto", "fedavg")
    },
}


def measure(method: str, settings: dict[str, Any], seed: int) -> dict[str, float | None]:
    """One run: the accuracies in % over the last five rounds, and those of the round that was best on the test set."""
    result = pf.run(method, **settings, seed=seed, silhouette=False, snapshots=0, workers=1, threads=1)
    figures: dict[str, float | None] = {}
    for kind in ("head", "prototype"):
        key = f"accuracy_{kind}"
        figures[kind] = None if result.failure else 100 * result.summary["last_five"][key]
        figures[f"best {kind}"] = None if result.failure else 100 * max(row[key] for row in result.metrics)
    return figures


def text(results: dict[str, Any], name: str, kind: str) -> str:
    """Mean ± deviation of a run over the seeds there are."""
    values = [r[kind] for key, r in results.items() if key.startswith(f"{name} / seed ")]
    if not values:
        return "–"
    if None in values:
        return "failed"
    return f"{statistics.fmean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The tables by name, in Markdown."""

    def table(header: list[str], rows: list[list[str]]) -> str:
        lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"

    both = ("head", "prototype")

    def pair(name: str) -> list[str]:
        return [text(results, name, kind) for kind in both]

    units = [
        [f"`reduction={reduction}`, `weight={weight:g}`", *pair(f"unit / {reduction} / {weight}")]
        for reduction in ("mean", "sum")
        for weight in (0.1, 1.0, 10.0)
    ]
    starts = [
        ["Local", *pair("start / local")],
        ["FedProto, one initial network for all (`initial=same`)", *pair("start / same")],
        ["FedProto, each site its own (`initial=own`)", *pair("start / own")],
    ]
    best = [
        [method, *(text(results, f"best / {method}", f"{which}{kind}") for kind in both for which in ("", "best "))]
        for method in ("local", "fedproto", "fedavg")
    ]
    counts = (20, 50, 100, 200, 500)
    rounds = [
        [title, *(text(results, f"rounds / {name} / {n}", "head") for n in counts)]
        for name, title in (("alike", "sites alike"), ("wired", "sensors wired differently"))
    ]
    scopes = [
        [method, *(text(results, f"scope / {scope} / {method}", kind) for scope in ("own", "all") for kind in both)]
        for method in ("local", "fedproto", "fedavg")
    ]
    by = ["head", "prototype"]
    return {
        "unit": table(["FedProto with", *by], units),
        "start": table(["", *by], starts),
        "best": table(["", "head", "head, best round", "prototype", "prototype, best round"], best),
        "rounds": table(["FedAvg by head after", *(f"{n} rounds" for n in counts)], rounds),
        "scope": table(["", "own classes, head", "own, prototype", "all classes, head", "all, prototype"], scopes),
    }


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    seeds = range(1234, 1234 + int(sys.argv[2] if len(sys.argv) > 2 else 3))
    results: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
    for name, (method, settings) in RUNS.items():
        for seed in seeds:
            key = f"{name} / seed {seed}"
            if key not in results:
                results[key] = measure(method, settings, seed)
                print(key, results[key], flush=True)
                write_atomically(out, json.dumps(results, indent=1).encode())
    for name, lines in tables(results).items():
        write_atomically(out.parent / f"{out.stem}-{name}.md", lines.encode())


if __name__ == "__main__":
    main()
