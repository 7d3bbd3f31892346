"""Accuracy, membership and inversion against ε: `python benchmarks/privacy.py docs/results/privacy.jsonl`.

Fashion-MNIST, 500 clients with three classes and twelve samples of each, 15 rounds, the privacy of a client. Noise at the
server (`central`) and at the clients (`local`). Each run that finishes is a line of the file; the script may be stopped,
and goes on with what is missing. `--table` writes the table beside the file, as `privacy.md`,
and the figure of docs/differential-privacy.md.

The clips were set before any of these runs, from norms of prototypes that three rounds with another seed gave on
training samples; nothing was tuned on test samples.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import torch

import protofed as pf
from protofed.auditing import audit_numbers
from protofed.disk import write_atomically
from protofed.results.tables import mean_and_deviation

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SETTING = {
    "data": "fashion-mnist", "limit_train": 20_000, "limit_test": 1_000, "clients": 500, "way": 3, "shot": 12,
    "rounds": 15, "epochs": 1, "model": "mlp", "hidden": [64], "embedding": 32,
    "snapshots": 0, "silhouette": False, "evaluate_every": 100, "checkpoint_every": 100, "workers": 1, "engine": "stack",
}  # fmt: skip
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedproto": ("clip=4", {}),
    "fedsap": ("clip=6", {}),
    "fedpagr": ("clip=1", {}),
    "protofssl": ("clip=1&update=1", {"labels": "client", "labels_per_class": 4, "helpers": 50}),
}
EPSILONS = (math.inf, 8.0, 4.0, 2.0, 1.0)
LOCAL = (8.0, 1.0)  # with noise at the clients there is little between them
SEEDS = (1, 2, 3)
AUDITED = 12  # clients
DOCS = Path(__file__).parents[1] / "docs"


def cases() -> list[dict[str, Any]]:
    """Every run, those that answer most first."""
    found = [{"method": "local", "epsilon": None, "placement": "none", "seed": seed} for seed in SEEDS]
    for seed in SEEDS:
        for method in METHODS:
            for epsilon in EPSILONS:
                places = ("central", "local") if epsilon in LOCAL else ("central",)
                for placement in ("none",) if math.isinf(epsilon) else places:
                    given = None if math.isinf(epsilon) else epsilon
                    found.append({"method": method, "epsilon": given, "placement": placement, "seed": seed})
    return found


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One run: its accuracies, and what the next message of some clients would give away."""
    bounds, more = METHODS.get(case["method"], ("", {}))
    privacy = ""
    if case["epsilon"]:
        privacy = f"client?epsilon={case['epsilon']:g}&classes=3&placement={case['placement']}&{bounds}"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        result = pf.run(case["method"], **{**SETTING, **more}, seed=case["seed"], privacy=privacy, out=out)
        lost = result.summary["dropped_clients"]
        if result.failure or lost:
            raise RuntimeError(f"{case}: {result.failure or f'{lost} client rounds were dropped'}")
        figures = {k: v for k, v in result.summary["last_five"].items() if k in ("accuracy_head", "accuracy_prototype")}
        found = {**case, **figures, "privacy": result.summary.get("privacy"), "seconds": result.summary["seconds"]}
        if case["method"] != "local" and case["placement"] != "central":
            numbers = audit_numbers(out, clients=AUDITED)
            found["audit"] = {k: v for k, v in numbers.items() if isinstance(v, int | float)}
    return found


def missing(file: Path) -> list[dict[str, Any]]:
    """The runs that are not in the file yet."""
    rows = read(file)
    keys = ("method", "epsilon", "placement", "seed")
    done = {tuple(row[k] for k in keys) for row in rows}
    return [case for case in cases() if tuple(case[k] for k in keys) not in done]


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of the file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def values(rows: list[dict[str, Any]], key: str, **where: Any) -> list[float]:
    """A number of the runs for which all of `where` holds."""
    chosen = [row for row in rows if all(row[k] == v for k, v in where.items())]
    found = [row.get(key, row.get("audit", {}).get(key)) for row in chosen]
    return [value for value in found if value is not None]


def cell(rows: list[dict[str, Any]], key: str, scale: float = 100.0, digits: int = 1, **where: Any) -> str:
    """Mean and deviation over seeds."""
    found = [scale * value for value in values(rows, key, **where)]
    return mean_and_deviation(found, digits) if found else "–"


def table(rows: list[dict[str, Any]]) -> str:
    """The table as Markdown."""
    lines = [
        "| method | ε | noise at the server: prototype | head | noise at the clients: prototype | head | classes held, AUC "
        "| membership, AUC | inversion nearer to own |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for method in METHODS:
        for epsilon in EPSILONS:
            given = None if math.isinf(epsilon) else epsilon
            places = ("none", "none") if given is None else ("central", "local")
            accuracies = [
                cell(rows, key, method=method, epsilon=given, placement=place)
                for place in places
                for key in ("accuracy_prototype", "accuracy_head")
            ]
            audits = [
                cell(rows, key, 1.0, 2, method=method, epsilon=given, placement=places[1])
                for key in ("class_auc", "auc", "own_nearer")
            ]
            lines.append(
                f"| {method} | {'∞' if given is None else f'{epsilon:g}'} | {' | '.join([*accuracies, *audits])} |"
            )
    local = [cell(rows, key, method="local") for key in ("accuracy_prototype", "accuracy_head")]
    lines.append(f"| Local | nothing leaves | {' | '.join(local)} | {' | '.join(local)} | – | – | – |")
    return "\n".join(lines)


def figure(rows: list[dict[str, Any]], file: Path) -> None:
    """Accuracy by prototype against ε, one panel for each place of the noise."""
    plt.rcParams["svg.hashsalt"] = "protofed"
    drawing, panels = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True)
    positions = list(range(len(EPSILONS)))
    for panel, placement, title in zip(
        panels, ("central", "local"), ("noise at the server", "noise at the clients"), strict=True
    ):
        for method in METHODS:
            points: dict[int, float] = {}
            for position, epsilon in enumerate(EPSILONS):
                given, place = (None, "none") if math.isinf(epsilon) else (epsilon, placement)
                found = values(rows, "accuracy_prototype", method=method, epsilon=given, placement=place)
                if found:
                    points[position] = 100 * sum(found) / len(found)
            panel.plot(list(points), list(points.values()), marker="o", label=method)
        local = values(rows, "accuracy_prototype", method="local")
        if local:
            panel.axhline(100 * sum(local) / len(local), color="grey", linestyle="--", label="Local")
        panel.set_xticks(positions, ["∞" if math.isinf(e) else f"{e:g}" for e in EPSILONS])
        panel.set_xlabel("ε (δ = 1e-5)")
        panel.set_title(title)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy by prototype, %")
    panels[1].legend(fontsize="small")
    drawing.tight_layout()
    drawing.savefig(file, metadata={"Date": None})


def main() -> None:
    """Run what is missing, or write the table and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--table", action="store_true", help="write table and figure from the file")
    options = parser.parse_args()
    if options.table:
        rows = read(options.file)
        write_atomically(options.file.with_suffix(".md"), f"{table(rows)}\n".encode())
        figure(rows, DOCS / "assets" / "privacy-epsilon.svg")
        return
    torch.set_num_threads(1)
    options.file.parent.mkdir(parents=True, exist_ok=True)
    for case in missing(options.file):
        row = run(case)
        with options.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")
        print({k: v for k, v in row.items() if k != "audit"}, flush=True)


if __name__ == "__main__":
    main()
