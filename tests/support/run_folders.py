"""Run folders made by hand, with known numbers, and a stored one: what a report reads, without training anything."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

FIRST_VERSION = Path(__file__).parent.parent / "stored" / "first-version"
"""A comparison on Fashion-MNIST that the first version of protofed made: its summaries have format 1."""
CLASSES = ["cat", "dog", "fox"]
KINDS = {"prototypes": 100, "weights": 0, "scalars": 8, "framing": 20}


def accuracy(seed: int, round: int, offset: float = 0.0) -> float:
    return 0.5 + 0.04 * round + 0.01 * seed + offset


def make_run(
    place: Path,
    *,
    method: str = "fedsap",
    seed: int = 1,
    rounds: int = 10,
    planned: int | None = None,
    clients: int = 4,
    finished: bool = True,
    offset: float = 0.0,
    measures: bool = False,
    snapshots: int = 0,
    headless: bool = False,
) -> Path:
    """Evaluated every second round. Client c of n has accuracy(seed, round) + 0.01·c."""
    place.mkdir(parents=True)
    planned = planned or rounds
    tables = f'[method]\nname = "{method}"\n[data]\nname = "pets"\n'
    (place / "settings.toml").write_text(f"rounds = {planned}\nclients = {clients}\nseed = {seed}\nlr = 0.05\n{tables}")
    lines, metrics, by_client = [], [], []
    for r in range(1, rounds + 1):
        row = {
            "round": r,
            "participants": list(range(clients)),
            "dropped": {},
            "loss": 2.0 / r,
            "terms": {"ce": 1.5 / r, "align": 0.5 / r},
            "up": KINDS,
            "down": {**KINDS, "weights": 1000 if method == "fedavg" else 0},
            "seconds": 0.1,
        }
        if measures:
            row["measures"] = {"acceptance": r / 20, "threshold": 0.9, "phase": 1 + (r > 6)}
        lines.append(row)
        if r % 2 == 0:
            mean = accuracy(seed, r, offset)
            kinds = ("prototype",) if headless else ("head", "prototype")
            figures = {f"accuracy_{k}": mean for k in kinds} | {f"accuracy_{k}_std": 0.02 for k in kinds}
            figures |= {"accuracy": mean} if headless else {}
            silhouette = {"silhouette": r / 20} if measures else {}
            metrics.append({"round": r, **figures, **silhouette, "loss": 2.0 / r, "bytes_up": 128, "bytes_down": 128})
            each = [mean + 0.01 * c for c in range(clients)]
            by_client.append({"round": r, **{f"accuracy_{k}": each for k in kinds}, "samples": [9] * clients})
    write_rows(place / "rounds.jsonl", lines)
    if metrics:
        write_rows(place / "metrics.jsonl", metrics)
        write_rows(place / "clients.jsonl", by_client)
        by = {"head": [[0, 0, 4], [0, 1, 1], [1, 1, 4]], "prototype": [[0, 0, 5], [1, 1, 3], [1, 2, 1]]}
        confusion = {f"client {c}": {k: by[k] for k in kinds} for c in range(clients)}
        stored = {"round": rounds, "classes": CLASSES, "values": [], "rows": [], "clients": confusion}
        (place / "confusion.json").write_text(json.dumps(stored))
    for i in range(snapshots):
        make_snapshot(place / "snapshots" / f"round-{2 * (i + 1):06d}.npz", grown=i + 1)
    if finished:
        figures = {k: v for k, v in metrics[-1].items() if k.startswith("accuracy")}
        summary = {
            "method": method,
            "seed": seed,
            "rounds": rounds,
            "clients": clients,
            "last_round": figures,
            "last_five": figures,
            "bytes_up": {k: v * rounds for k, v in KINDS.items()},
            "bytes_down": {k: v * rounds for k, v in KINDS.items()},
            "seconds": 0.1 * rounds,
            "dropped_clients": 0,
            "versions": {"protofed": "0.1.0", "python": "3.11"},
        }
        (place / "summary.json").write_text(json.dumps(summary))
    return place


def make_snapshot(file: Path, *, grown: float = 1.0, banks: int = 0, samples: int = 60, dim: int = 5) -> Path:
    g = np.random.default_rng(0)
    y = np.arange(samples) % len(CLASSES)
    centres = 2 * np.eye(len(CLASSES), dim)
    z = grown * centres[y] + 0.1 * g.normal(size=(samples, dim))
    prototypes = (grown * centres).astype(np.float32)
    known = np.array([True, True, False])
    if banks:
        prototypes, known = np.stack([prototypes] * banks), np.stack([known] * banks)
    file.parent.mkdir(parents=True, exist_ok=True)
    arrays = {"z": z.astype(np.float16), "y": y, "client": y % 2, "prototypes": prototypes, "known": known}
    np.savez(file, **arrays)
    return file


def make_comparison(place: Path, *, seeds: int = 3, finished: bool = True, **how: object) -> Path:
    """local, fedsap (the best) and fedavg."""
    place.mkdir(parents=True)
    names = {"local": 0.0, "fedsap": 0.05, "fedavg": -0.1}
    variants = [{"label": n, "method": n, "settings": {}, "folder": n} for n in names]
    (place / "comparison.json").write_text(
        json.dumps({"variants": variants, "seeds": list(range(1, seeds + 1)), "settings": {}})
    )
    if finished:
        for name, offset in names.items():
            for seed in range(1, seeds + 1):
                make_run(place / f"{name}-seed{seed}", method=name, seed=seed, offset=offset, **how)  # type: ignore[arg-type]
    return place


def write_rows(file: Path, rows: list) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
