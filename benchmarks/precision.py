"""What `precision=bf16` does to accuracy, for every method, and to the time of a training step. Resumable.

    python benchmarks/precision.py [--out docs/results/precision.json]

The data are scikit-learn's digits as images of 16 × 16, which need no download; labels are at the clients, or at the
server where the method trains there. Each run is repeated in both precisions with three seeds. Steps are timed in CPU
seconds of one thread, the two precisions in turns, and the least of all turns counts. The table is written beside the
JSON file, with the ending .md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits

import protofed as pf
from protofed import methods
from protofed.data import Dataset
from protofed.experiment.build import build
from protofed.experiment.settings import resolve

SEEDS, PRECISIONS = (1, 2, 3), ("float32", "bf16")
RUN = {
    "model": "cnn", "clients": 5, "rounds": 12, "way": 3, "shot": 20, "spread": 1, "lr": 0.02, "batch": 10,
    "evaluate_every": 4, "snapshots": 0, "silhouette": False, "workers": 1,
}  # fmt: skip
UNLABELLED = {"labels": "client", "labels_per_class": 4}
STEPS = {
    "cnn on 28 × 28, batch 10": ("cnn", (1, 28, 28), 10, 200),
    "cnn on 32 × 32, batch 50": ("cnn", (3, 32, 32), 50, 200),
    "resnet18 on 32 × 32, batch 20": ("resnet18", (3, 32, 32), 20, 40),
    "mlp on 784 numbers, batch 10": ("mlp", (784,), 10, 400),
}
TURNS = 5


def digits() -> Dataset:
    """The digits as images of 16 × 16: each pixel four times."""
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    images = images.repeat_interleave(2, 2).repeat_interleave(2, 3)
    labels = torch.tensor(y)
    test = torch.arange(len(labels)) % 4 == 0
    return Dataset.from_arrays(
        images[~test], labels[~test], images[test], labels[test], num_classes=10, name="digits 16 × 16"
    )


def settings_for(method: str) -> dict[str, Any]:
    """The settings with which a method has what it trains on."""
    made = methods.get(method)
    if made.teacher is not None:
        return {"labels": "server", "server_labels": 60}
    return UNLABELLED if made.feed.reads_unlabelled else {}


def accuracies(results: dict[str, Any], save: Any) -> None:
    """Run what is left of the table of accuracies."""
    data = digits()
    for method in methods.available():
        for seed in SEEDS:
            for precision in PRECISIONS:
                place = results.setdefault(method, {}).setdefault(precision, {})
                if str(seed) in place:
                    continue
                result = pf.run(method, data=data, seed=seed, precision=precision, **RUN, **settings_for(method))
                figures = {"head": result.accuracy_head, "prototype": result.accuracy_prototype}
                place[str(seed)] = figures
                print(method, seed, precision, figures, flush=True)
                save()


def steps(results: dict[str, Any], save: Any) -> None:
    """Time the training of one client in both precisions, in turns."""
    for name, (model, shape, batch, samples) in STEPS.items():
        if name in results:
            continue
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(samples, *shape, generator=generator), torch.arange(samples) % 10
        data = Dataset.from_arrays(x, y, x[:10], y[:10], num_classes=10, name="noise")
        given = {"data": data, "model": model, "clients": 1, "partition": "iid", "batch": batch, "rounds": 100}
        federations = {
            p: build(resolve("fedproto", {**given, "precision": p, "evaluate_every": 100, "workers": 1}))[1]
            for p in PRECISIONS
        }
        least = dict.fromkeys(PRECISIONS, float("inf"))
        for federation in federations.values():
            federation.step()  # warm
        for _ in range(TURNS):
            for precision, federation in federations.items():
                began = time.process_time()
                federation.step()
                spent = (time.process_time() - began) / -(-samples // batch)
                least[precision] = min(least[precision], spent)
        results[name] = {precision: 1000 * seconds for precision, seconds in least.items()}
        print(name, results[name], flush=True)
        save()


def table(content: dict[str, Any]) -> str:
    """Both tables as Markdown."""
    lines = ["| one step of | float32, ms | bf16, ms | ratio |", "| --- | --- | --- | --- |"]
    for name, spent in content["steps"].items():
        a, b = (spent[precision] for precision in PRECISIONS)
        lines.append(f"| {name} | {a:.2f} | {b:.2f} | {b / a:.2f} |")
    lines += ["", "| method | by | float32 | bf16 | difference |", "| --- | --- | --- | --- | --- |"]
    for method, runs in content["accuracy"].items():
        for by in ("head", "prototype"):
            values = {p: [runs[p][str(s)][by] for s in SEEDS if str(s) in runs.get(p, {})] for p in PRECISIONS}
            if any(not v or None in v for v in values.values()) or len(values["float32"]) != len(values["bf16"]):
                continue
            pairs = [100 * (b - a) for a, b in zip(values["float32"], values["bf16"], strict=True)]
            cells = [f"{100 * statistics.mean(v):.1f} ± {100 * statistics.pstdev(v):.1f}" for v in values.values()]
            lines.append(f"| {method} | {by} | {' | '.join(cells)} | {statistics.mean(pairs):+.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results/precision.json"))
    out = parser.parse_args().out
    torch.set_num_threads(1)
    content = json.loads(out.read_text()) if out.is_file() else {"steps": {}, "accuracy": {}}

    def save() -> None:
        out.write_text(json.dumps(content, indent=1) + "\n")
        out.with_suffix(".md").write_text(table(content))

    steps(content["steps"], save)
    accuracies(content["accuracy"], save)
    save()


if __name__ == "__main__":
    main()
