"""What a rebuild changed in numbers: `python benchmarks/held.py BEFORE FILE.json`, BEFORE another checkout of protofed.

Small runs of every method on the plain loop and on a stack, with labels for all, few labels and two architectures, by the
code of both checkouts; of each run the largest difference of loss, of accuracies and of what the server would send next.
Counted bytes are compared too, but for the number of samples, which did not always travel.
"""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SMALL = {
    "clients": 5, "rounds": 3, "partition": "n-way", "way": 2, "shot": 8, "shot_spread": 3.0, "participation": 0.8,
    "epochs": 2, "batch": 5, "model": "mlp", "embedding": 5, "hidden": [7], "projection_dropout": 0,
}  # fmt: skip
SEMI = {"labels": "client", "labels_per_class": 4, "shot": 16}
AT_SERVER = ("fedarpl", "fedmatch-server", "fl2", "pfedknow", "semifl", "server-only")
MIX = {"models": ["mlp?hidden=7&embedding=5", "mlp?hidden=3&embedding=4"], "dim": 6}
OWN = {
    "fedarpl": {"fss_window": 1, "fss_mean": 0.0, "gcplca_window": 1, "gcplca_mean": 0.0},
    "fedsap": {"alignment": {"start": 0, "end": 2}, "supervised_rounds": 1},
    "fedapa": {"warm_up": {"start": 0, "end": 2}},
}


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Settings by name of the case."""
    from protofed import methods

    found = {}
    for method in methods.available():
        server = {"labels": "server", "server_labels": 12} if method in AT_SERVER else {}
        own = {**SMALL, **OWN.get(method, {})}
        found[f"{method}"] = method, {**own, **server}
        found[f"{method}, few labels"] = method, {**own, **SEMI, **server}
        if method not in AT_SERVER:
            alone = {k: v for k, v in own.items() if k not in ("model", "embedding", "hidden")}
            found[f"{method}, two architectures"] = method, {**alone, **MIX}
    return found


def outcome(method: str, given: dict[str, Any], engine: str) -> dict[str, Any]:
    """One run by the code that is on the path."""
    import torch

    from protofed import wire
    from protofed.data import Dataset
    from protofed.experiment.build import build
    from protofed.experiment.settings import resolve
    from protofed.federation.choose import EngineSettings

    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(4).repeat_interleave(60)
    x = torch.randn(len(y), 6, generator=rng) + 2 * torch.randn(4, 6, generator=rng)[y]
    data = Dataset.from_arrays(x, y, x[::4], y[::4], num_classes=4)
    settled = EngineSettings(engine, engine, "contiguous", "grouped", 1, 1)  # type: ignore[arg-type]
    _, federation = build(resolve(method, {**given, "data": data}).with_engine(settled))
    records = list(federation)
    old = hasattr(federation, "_send")
    sent, _ = (federation._send if old else federation.downloads)(range(5), len(records) + 1)
    numbers: dict[str, Any] = {}
    for client in range(5):
        bundle = wire.decode(sent[client])
        for name, bank in bundle.all_banks().items():
            numbers[f"{client}/{name}"] = bank.means
        for name, value in bundle.weights.items():
            if "/" not in name or name.startswith("psi/"):  # not a helper's, which once travelled among the weights
                numbers[f"{client}/{name.replace('psi/', 'psi.')}"] = value
    up = [{k: v for k, v in r.up.items() if k in ("prototypes", "weights")} for r in records]
    return {"loss": [r.loss for r in records], "metrics": [r.metrics for r in records], "sent": numbers, "up": up}


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The largest differences between two outcomes."""
    losses = [abs(a - b) for a, b in zip(before["loss"], after["loss"], strict=True) if math.isfinite(a)]
    shared = [(a, b, k) for a, b in zip(before["metrics"], after["metrics"], strict=True) for k in a.keys() & b.keys()]
    accuracy = [abs(a[k] - b[k]) for a, b, k in shared if k.startswith("accuracy")]
    only = {k for a, b in zip(before["metrics"], after["metrics"], strict=True) for k in a.keys() ^ b.keys()}
    tensors = [
        float((value.double() - after["sent"][name].double()).abs().max())
        for name, value in before["sent"].items()
        if name in after["sent"]
    ]
    row = {"loss": max(losses, default=0.0), "accuracy": max(accuracy, default=0.0), "sent": max(tensors, default=0.0)}
    return {**row, "same_bytes": before["up"] == after["up"], "only_in_one": sorted(k for k in only if "accuracy" in k)}


def main(before: Path, file: Path) -> None:
    import os

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for label, source in (("before", before), ("after", Path(__file__).parent.parent)):
            out = Path(folder) / label
            environment = {**os.environ, "PYTHONPATH": str(source / "src")}
            subprocess.run([sys.executable, __file__, "--record", str(out)], check=True, env=environment)
            found[label] = pickle.loads(out.read_bytes())
    rows = {name: difference(found["before"][name], found["after"][name]) for name in found["before"]}
    file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    exact = [n for n, r in rows.items() if not (r["loss"] or r["accuracy"] or r["sent"] or r["only_in_one"])]
    print(f"{len(exact)} of {len(rows)} runs are equal to the bit; the others:")
    for name, row in rows.items():
        if name not in exact:
            print(f"  {name}: {row}")


if __name__ == "__main__":
    if sys.argv[1] == "--record":
        results = {
            f"{name}, {engine}": outcome(method, given, engine)
            for name, (method, given) in cases().items()
            for engine in ("loop", "stack")
        }
        Path(sys.argv[2]).write_bytes(pickle.dumps(results))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
