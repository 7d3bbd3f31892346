"""Choices that Fed-ARPL leaves open, measured: `python benchmarks/fedarpl_choices.py OUT.json DATA FOLDER [SEEDS]`.

DATA is `mnist` (50 labels at the server) or `fashion-mnist` (100), FOLDER has its four idx files. A small CNN with static
batch norm on pictures of 16 × 16, ten clients of 500 unlabelled samples of which five take part, Dirichlet 0.5, 25 rounds,
training and augmentation as in SemiFL's code. Each choice is changed alone. In the rows of phase 2, it begins after round 12
whatever the separation, so that what happens there can be compared with the same run without it. Runs that OUT.json has
already are not repeated; the table is written beside it.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from protofed.experiment.build import build
from protofed.experiment.settings import resolve

COMMON: dict[str, Any] = {
    "clients": 10,
    "participation": 0.5,
    "rounds": 25,
    "epochs": 1,
    "batch": 25,
    "lr": 0.03,
    "lr_schedule": "cosine",
    "momentum": 0.9,
    "nesterov": True,
    "clip": 1.0,
    "weight_decay": 5e-4,
    "labels": "server",
    "partition": {"name": "dirichlet", "alpha": 0.5},
    "unlabelled_limit": 500,
    "model": {"name": "cnn", "channels": [16, 32], "kernel": 3, "norm": "static"},
    "randaugment": [2, 10],
    "randaugment_scale": 10,
    "randaugment_pool": "semifl",
    "epochs_at_server": 10,
    "candidates": "all",
    "evaluate_every": 1,
    "snapshots": 0,
    "silhouette": False,
    "engine": "loop",
    "layout": "channels_last",
    "workers": 1,
    "threads": 1,
}
LATER = {"phases": 2, "fss_window": 13, "fss_mean": -1e9, "fss_deviation": 1e9, "threshold_view": "weak"}
WEAK = {"phases": 1, "threshold_view": "weak"}
FREE = {"clip": 0.0, "nesterov": False}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "phase 1": ("fedarpl", {"phases": 1}),
    "phase 1, τ on weak views": ("fedarpl", WEAK),
    "phase 2 from round 13, τ on weak views": ("fedarpl", LATER),
    "phase 1, τ on weak views, not clipped": ("fedarpl", {**WEAK, **FREE}),
    "phase 2 from round 13, τ on weak views, not clipped": ("fedarpl", {**LATER, **FREE}),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "phase 2 from round 13, τ on weak views, not clipped, λ_plc 0.1": (
        "fedarpl",
        {**LATER, **FREE, "client_weight": 0.1},
    ),
    "server only": ("server-only", {}),
    "SemiFL": ("semifl", {}),
    "phase 2 from round 13, norm as printed": ("fedarpl", {**LATER, "reduction": "sum"}),
    "phase 1, τ on weak views, RandAugment 10 of 30": (
        "fedarpl",
        {**WEAK, "randaugment_scale": 30, "randaugment_pool": "signed"},
    ),
    "(FL)², thresholds of a batch": ("fl2", {"thresholds": "batch"}),
    "(FL)², thresholds of a round": ("fl2", {"thresholds": "round"}),
    "phase 1, τ on weak views, labelled once a round": ("fedarpl", {**WEAK, "labelled_each": "round"}),
    "phase 1, τ on weak views, statistics of all": ("fedarpl", {**WEAK, "server_statistics": "all"}),
    "phase 1, τ on weak views, server's optimiser kept": ("fedarpl", {**WEAK, "keep_server_optimiser": True}),
}
KEPT = ("threshold", "acceptance", "pseudo_accuracy", "fss", "gcplca", "phase")


def run(method: str, given: dict[str, Any]) -> dict[str, list[float]]:
    """The accuracy by head, what the server keeps, the terms of the loss, and how long prototypes are, of each round."""
    curves: dict[str, list[float]] = {}
    _, federation = build(resolve(method, given))
    for record in federation:
        found = {"accuracy": record.metrics["accuracy_head"], **{k: record.measures.get(k, 0.0) for k in KEPT}}
        found |= {f"term {name}": record.terms.get(name, 0.0) for name in ("unlabelled", "align", "server ce")}
        prototypes = getattr(federation.state, "prototypes", None)
        found["prototype norm"] = 0.0 if prototypes is None else float(prototypes.means.norm(dim=1).mean())
        for name, value in found.items():
            curves.setdefault(name, []).append(float(f"{value:.4g}"))
    return {name: values for name, values in curves.items() if any(values)}


def main(out: Path, data: str, folder: Path, seeds: int) -> None:
    runs: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    source = {"name": data, "path": str(folder), "resize": 16, "limit_train": 8000, "limit_test": 2000}
    every = [
        (seed, row, own) for rows in (ROWS, MORE) for seed in range(1234, 1234 + seeds) for row, own in rows.items()
    ]
    for seed, row, (method, own) in every:
        name = f"{data} / {row} / {seed}"
        if name in runs:
            continue
        labels = {"mnist": 50, "fashion-mnist": 100}[data]
        runs[name] = run(method, {**COMMON, "data": source, "server_labels": labels, "seed": seed, **own})
        out.write_text(json.dumps(runs) + "\n")
        print(name, runs[name]["accuracy"][-1], flush=True)
    out.with_suffix(".md").write_text(table(runs) + "\n")


def table(runs: dict[str, dict[str, list[float]]]) -> str:
    """Accuracy in % after round 12, in rounds 13 to 15 and of the last five, and the last round's pseudo-labels."""
    groups: dict[tuple[str, str], list[dict[str, list[float]]]] = {}
    for name, curves in runs.items():
        data, row, _ = name.split(" / ")
        groups.setdefault((data, row), []).append(curves)
    header = "| data | | round 12 | rounds 13–15 | last five | τ | accepted | right | seeds |"
    lines = [header, "| --- " * 9 + "|"]
    for (data, row), each in groups.items():
        columns = [[100 * c["accuracy"][11] for c in each]]
        columns += [[100 * statistics.fmean(c["accuracy"][a:b]) for c in each] for a, b in ((12, 15), (-5, None))]
        cells = [
            f"{statistics.fmean(c):.1f}" + (f" ± {statistics.stdev(c):.1f}" if len(c) > 1 else "") for c in columns
        ]
        for key in ("threshold", "acceptance", "pseudo_accuracy"):
            values = [c[key][-1] for c in each if key in c]
            cells.append(f"{statistics.fmean(values):.2f}" if values else "–")
        lines.append(f"| {data} | {row} | {' | '.join(cells)} | {len(each)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 3)
