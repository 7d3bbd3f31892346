"""ProtoFSSL's three readings of its distance, measured: `python benchmarks/protofssl_distances.py OUT.json [FOLDER]`.

The paper calls d Euclidean; its code takes the mean of squared differences; their sum is what prototypical networks use.
Each is run with three seeds on Fashion-MNIST with and without batch norm, with a new RMSprop for each client and round (ρ
0.99, 3e-4) and with the published code's one RMSprop for all (ρ 0.9, 1e-3); and on CIFAR-10 with batch norm and the first.
FOLDER has `fashion-mnist` (the four idx files) and `cifar10.npz` (made by `benchmarks/prepare.py`). Runs that OUT.json has
already are not repeated; the table is written beside it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import protofed as pf

METRICS = ("mean", "squared", "euclidean")
SEEDS = (1234, 1235, 1236)
COMMON: dict[str, Any] = {
    "labels": "client",
    "labels_per_class": 5,
    "partition": "iid",
    "epochs": 10,
    "momentum": 0,
    "weight_decay": 1e-4,
    "optimiser": "rmsprop",
    "evaluate_every": 5,
    "snapshots": 0,
    "silhouette": False,
    "engine": "loop",
    "workers": 1,
    "threads": 1,
}
OPTIMISERS = {
    "new each round": {"lr": 3e-4},
    "shared": {"lr": 1e-3, "smoothing": 0.9, "shared_optimiser": True},
}


def sets(folder: Path) -> dict[str, dict[str, Any]]:
    """The data sets at laptop size, each with its federation and model."""
    images = {"resize": 16, "limit_test": 2000}
    few = {"clients": 10, "participation": 0.5, "unlabelled_limit": 490}
    more = {"clients": 40, "participation": 0.1, "unlabelled_limit": 250, "helpers": 4, "unlabelled_queries": 50}
    cnn = {"name": "cnn", "channels": [16, 32], "kernel": 3}
    resnet = {"name": "resnet8", "width": 0.25}
    fashion = {"name": "fashion-mnist", "path": str(folder / "fashion-mnist"), "limit_train": 10000, **images}
    cifar = {"name": "npz", "path": str(folder / "cifar10.npz"), **images}
    return {
        "Fashion-MNIST, batch norm": {"data": fashion, "model": {**cnn, "norm": "batch"}, "rounds": 30, **few},
        "Fashion-MNIST, no norm": {"data": fashion, "model": cnn, "rounds": 30, **few},
        "CIFAR-10, batch norm": {"data": cifar, "model": {**resnet, "norm": "batch"}, "rounds": 20, **more},
    }


def cells(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every run by name, with its settings; those with a new RMSprop first, CIFAR-10 last."""
    for slow in (False, True):
        for optimiser, given in OPTIMISERS.items():
            for seed in SEEDS:
                for data, own in sets(folder).items():
                    if data.startswith("CIFAR") != slow or (slow and optimiser == "shared"):
                        continue
                    for metric in METRICS:
                        name = f"{data} / RMSprop {optimiser} / {metric} / {seed}"
                        yield name, {**COMMON, **own, **given, "metric": metric, "seed": seed}


def main(out: Path, folder: Path) -> None:
    runs: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for name, given in cells(folder):
        if name in runs:
            continue
        curve: dict[int, float] = {}

        def watch(record: Any, rounds: int, curve: dict[int, float] = curve) -> None:
            if "accuracy_prototype" in record.metrics:
                curve[record.round] = round(record.metrics["accuracy_prototype"], 4)

        pf.run("protofssl", watch=watch, **given)
        runs[name] = {str(key): value for key, value in curve.items()}
        out.write_text(json.dumps(runs, indent=1) + "\n")
        print(name, list(curve.values())[-1], flush=True)
    out.with_suffix(".md").write_text(table(runs) + "\n")


def table(runs: dict[str, dict[str, float]]) -> str:
    """Accuracy in % at some rounds, mean ± deviation over seeds, in Markdown."""
    groups: dict[tuple[str, ...], list[dict[str, float]]] = {}
    for name, curve in runs.items():
        groups.setdefault(tuple(name.split(" / ")[:3]), []).append(curve)
    lines = ["| data | RMSprop | metric | round 5 | round 10 | round 20 | round 30 | seeds |", "| --- " * 8 + "|"]
    for (data, optimiser, metric), curves in groups.items():
        columns = [[100 * c[r] for c in curves if r in c] for r in ("5", "10", "20", "30")]
        cells = [
            f"{statistics.fmean(c):.1f} ± {statistics.stdev(c):.1f}" if len(c) > 1 else f"{c[0]:.1f}" if c else "–"
            for c in columns
        ]
        lines.append(
            f"| {data} | {optimiser.removeprefix('RMSprop ')} | {metric} | {' | '.join(cells)} | {len(curves)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "data"))
