"""What a round of FedAvg costs the server in memory, by the number of uploads: `python benchmarks/uploads.py [FILE.json]`

ResNet-18 on 3×32×32, two samples a client, one round on the plain loop; each number of clients in a process of its own.
`models` is the round's peak beyond what was there before it, in units of one model of float32.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CLIENTS = (4, 20, 50, 200)


def one_round(clients: int) -> dict[str, float]:
    """One round in this process."""
    import torch

    from protofed.bench.memory import tree_memory
    from protofed.data import Dataset
    from protofed.experiment.run import build
    from protofed.experiment.settings import resolve

    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(2 * clients, 3, 32, 32, generator=rng), torch.arange(2 * clients) % 2
    data = Dataset.from_arrays(x, y, x[:4], y[:4], num_classes=2)
    engine = {"engine": "loop", "layout": "contiguous", "threads": 2, "workers": 1, "evaluate_every": 1000}
    given = {"data": data, "partition": "iid", "clients": clients, "model": "resnet18", "batch": 2, **engine}
    _, federation = build(resolve("fedavg", {**given, "rounds": 2}))
    size = sum(v.numel() * 4 for v in federation.engine.starts[0].values())
    before = tree_memory()["now"]
    record = federation.step()
    assert not record.dropped and len(record.participants) == clients
    peak = tree_memory()["peak"]
    return {"clients": clients, "model_bytes": size, "peak_bytes": peak - before, "models": (peak - before) / size}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--clients"]:
        print(json.dumps(one_round(int(sys.argv[2]))))
    else:
        rows = []
        for clients in CLIENTS:
            done = subprocess.run(
                [sys.executable, __file__, "--clients", str(clients)], check=True, capture_output=True, text=True
            )
            rows.append(json.loads(done.stdout))
            print(f"{clients} uploads: {rows[-1]['models']:.1f} models")
        if sys.argv[1:]:
            Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
