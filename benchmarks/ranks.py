"""A round of two ranks by torchrun beside one of two worker processes: `python benchmarks/ranks.py [TURNS]`.

Both train `cnn28` of `protofed bench` (20 clients × 300 images, FedProto) by the engine that is chosen for it, in turns,
with evaluation and checkpoints off. Writes docs/results/bench/ranks.json: the seconds of all rounds but the first of
each run.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

CLIENTS, SAMPLES, ROUNDS = 20, 300, 6
OUT = Path("docs/results/bench/ranks.json")
RANKS = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "protofed"]
WAYS = {"two workers": [sys.executable, "-m", "protofed"], "two ranks": RANKS}
MORE = {"two workers": ["engine=workers", "workers=2", "threads=1"], "two ranks": ["workers=1", "threads=1"]}


def seconds(way: str, data: Path, out: Path) -> list[float]:
    """The seconds of the rounds of one run."""
    settings = [
        f"clients={CLIENTS}",
        f"rounds={ROUNDS}",
        "partition=iid",
        "model=cnn",
        "channels=32,64",
        "embedding=512",
    ]
    settings += [
        "batch=8",
        "evaluate_every=1000",
        "checkpoint_every=1000",
        "silhouette=false",
        "snapshots=0",
        "keep_models=0",
    ]
    words = [*WAYS[way], "run", "fedproto", f"data={data}", *settings, *MORE[way], "--out", str(out)]
    subprocess.run(words, check=True, capture_output=True)
    return [json.loads(line)["seconds"] for line in (out / "rounds.jsonl").read_text().splitlines()][1:]


def main(turns: int) -> None:
    rng = np.random.default_rng(0)
    number = CLIENTS * SAMPLES
    arrays = {"x_train": rng.integers(0, 256, (number, 28, 28), np.uint8), "y_train": np.arange(number) % 10}
    arrays |= {"x_test": arrays["x_train"][:20], "y_test": arrays["y_train"][:20]}
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as place:
        np.savez(Path(place) / "data.npz", **arrays)
        for turn in range(turns):
            for way in WAYS if turn % 2 else reversed(WAYS):
                found[way] += seconds(way, Path(place) / "data.npz", Path(place) / f"{way}-{turn}")
                print(way, [round(s, 3) for s in found[way][1 - ROUNDS :]], flush=True)
    ratio = {
        "best": min(found["two ranks"]) / min(found["two workers"]),
        "median": statistics.median(found["two ranks"]) / statistics.median(found["two workers"]),
    }
    OUT.write_text(json.dumps({"seconds": found, "two ranks / two workers": ratio}, indent=1) + "\n")
    print(ratio)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
