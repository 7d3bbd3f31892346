"""How personal are FedAPA's personalised prototypes? `python benchmarks/personalisation.py RUN...`

Reads the last checkpoint of each run and prints, averaged over classes that several clients hold, the cosine between two
clients' prototypes of a class, and a client's weight for its own prototype (Eq. 6) times the number of holders: 1 is the
plain average.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from protofed.bank import PrototypeBank, unit
from protofed.experiment.settings import read_toml


def personal(run: Path) -> tuple[float, float]:
    temperature = read_toml(run / "settings.toml")["method"]["temperature"]
    file = sorted(run.glob("checkpoint/round-*/server.safetensors"))[-1]
    tensors = load_file(file)
    clients = PrototypeBank(tensors["/reported/means"], tensors["/reported/counts"])
    cosines, own = [], []
    for c in range(clients.num_classes):
        means = unit(clients.means[clients.known[:, c], c])
        n = len(means)
        if n > 1:
            cosine = means @ means.T
            cosines.append((cosine.sum() - n) / (n * n - n))
            own.append(n * (cosine / temperature).softmax(1).diagonal().mean())
    return float(torch.stack(cosines).mean()), float(torch.stack(own).mean())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        cosine, weight = personal(Path(name))
        print(f"{name}: cosine {cosine:.3f}, own weight {weight:.3f} / n")
