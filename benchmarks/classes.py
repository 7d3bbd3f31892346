"""What methods do with a class that appears and one that vanishes: `python benchmarks/classes.py docs/results/classes.json`.

Digits, 10 clients of about 5 classes with 10 samples each, every client tested on all classes that are there. Class 3
appears in round 11, and class 7 vanishes in round 21; a second run of each has both at all times. The confusions of each
client and round give the accuracy of the new class, of the others, and the share taken for the class that is gone.
Further arguments name the variants to measure again.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import protofed as pf
from protofed.disk import write_atomically
from protofed.experiment.build import prepare_data
from protofed.experiment.settings import resolve

NEW, GONE, APPEARS, VANISHES, ROUNDS = 3, 7, 11, 21, 30
SEEDS = (1234, 1235, 1236)
PREDICTIONS = ("prototype", "head")
COMMON: dict[str, Any] = {
    **{"data": "digits", "clients": 10, "way": 5, "shot": 10, "lr": 0.05, "rounds": ROUNDS, "threads": 1, "workers": 1},
    **{"scope": "all", "candidates": "all", "engine": "loop", "silhouette": False, "snapshots": 0},
    "score_prototypes": "always",
}
CHANGES = {"classes_appear": f"{NEW}@{APPEARS}", "classes_vanish": f"{GONE}@{VANISHES}"}
LOSS = ["ce", "align", "proxy"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("local", "fedavg", "fedproto", "fedsap", "fedpagr", "fedapa", "fedtgp", "fedmps")},
    "fedproc": ("fedproc", {}),
    "compose": ("compose", {"loss": LOSS}),
    "compose, momentum": ("compose", {"loss": LOSS, "after": ["momentum?share=0.7"]}),
    "compose, forget after 5": ("compose", {"loss": LOSS, "after": ["forget?after=5"]}),
    "compose, forget after 1": ("compose", {"loss": LOSS, "after": ["forget?after=1"]}),
}


def figures(record: Any, kind: str, holders: Sequence[bool]) -> dict[str, float | None]:
    """Of one round: accuracies of the new class and of the others, and the share that is taken for the one that is gone."""
    right: dict[str, list[float]] = {"new_holders": [], "new_others": [], "rest": [], "gone": []}
    for client, scores in record.board.items():
        confusion = getattr(scores, f"by_{kind}")
        if confusion is None:
            continue
        true, predicted, count = np.asarray(confusion.rows).T
        new, gone = true == NEW, true == GONE
        if new.any():
            share = float(count[new & (predicted == NEW)].sum() / count[new].sum())
            right["new_holders" if holders[client] else "new_others"].append(share)
        rest = ~new & ~gone
        right["rest"].append(float(count[rest & (predicted == true)].sum() / count[rest].sum()))
        right["gone"].append(float(count[~gone & (predicted == GONE)].sum() / count[~gone].sum()))
    return {name: round(statistics.fmean(values), 5) if values else None for name, values in right.items()}


def measured(method: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """The figures of every round of one run, by prediction."""
    given = {**COMMON, **options, "seed": seed}
    whole = {key: value for key, value in given.items() if key not in CHANGES}
    holders = (prepare_data(resolve(method, whole)).class_counts()[:, NEW] > 0).tolist()
    rounds: dict[str, list[Any]] = {kind: [] for kind in PREDICTIONS}

    def watch(record: Any, total: int) -> None:
        for kind in PREDICTIONS:
            rounds[kind].append(figures(record, kind, holders))

    pf.run(method, watch=watch, **given)
    return rounds


def mean(runs: Sequence[Any], kind: str, round: int, name: str) -> float | None:
    values = [run[kind][round - 1][name] for run in runs]
    return None if any(value is None for value in values) else statistics.fmean(values)


def cell(runs: Sequence[Any], kind: str, name: str, rounds: Sequence[int]) -> str:
    values = [mean(runs, kind, round, name) for round in rounds]
    return " → ".join("–" if value is None else f"{100 * value:.1f}" for value in values)


def table(found: dict[str, Any]) -> str:
    """The table of the page: means over seeds, in %."""
    first, last = (APPEARS, APPEARS + 1, APPEARS + 4, VANISHES - 1), (VANISHES - 1, VANISHES, VANISHES + 4, ROUNDS)
    blocks = []
    for kind in PREDICTIONS:
        blocks += [
            f"By {kind}:",
            "",
            f"| method | class {NEW} at its holders, rounds {' → '.join(map(str, first))} | always there, {VANISHES - 1} "
            f"| class {NEW} at the others, {VANISHES - 1} | always there | other classes, {APPEARS - 1} → {APPEARS} → "
            f"{VANISHES - 1} | always there | taken for class {GONE}, {' → '.join(map(str, last))} | other classes, "
            f"{VANISHES - 1} → {ROUNDS} | always there |",
            "| --- |" + " ---: |" * 9,
        ]
        for name, runs in found.items():
            changed, whole = runs["changed"], runs["whole"]
            end = (VANISHES - 1,)
            cells = [
                cell(changed, kind, "new_holders", first),
                cell(whole, kind, "new_holders", end),
                cell(changed, kind, "new_others", end),
                cell(whole, kind, "new_others", end),
                cell(changed, kind, "rest", (APPEARS - 1, APPEARS, VANISHES - 1)),
                cell(whole, kind, "rest", end),
                cell(changed, kind, "gone", last),
                cell(changed, kind, "rest", (VANISHES - 1, ROUNDS)),
                cell(whole, kind, "rest", (ROUNDS,)),
            ]
            blocks.append(f"| {name} | {' | '.join(cells)} |")
        blocks.append("")
    return "\n".join(blocks)


def main(out: Path, names: Sequence[str]) -> None:
    described = {"new": NEW, "gone": GONE, "appears": APPEARS, "vanishes": VANISHES, "seeds": SEEDS, "settings": COMMON}
    found: dict[str, Any] = json.loads(out.read_text())["variants"] if names and out.is_file() else {}
    for name in names or VARIANTS:
        method, options = VARIANTS[name]
        found[name] = {
            "changed": [measured(method, {**options, **CHANGES}, seed) for seed in SEEDS],
            "whole": [measured(method, options, seed) for seed in SEEDS],
        }
        print(name, cell(found[name]["changed"], "prototype", "new_holders", (APPEARS, VANISHES - 1)), flush=True)
        found = {name: found[name] for name in VARIANTS if name in found}
        write_atomically(out, (json.dumps({**described, "variants": found}) + "\n").encode())
        write_atomically(out.with_suffix(".md"), table(found).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
