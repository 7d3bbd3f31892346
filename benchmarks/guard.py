"""How far honest uploads are apart, which the guard's bound must exceed: `python benchmarks/guard.py [FILE.json]`.

Every method that exchanges something is run on digits, over several partitions, cohorts, mixes of architectures and
learning rates. For each upload of each round the guard computes how many times as large its norm is as that of the
others (their median, or what the client was sent). The table has the largest such ratio of each case, by what it is a
norm of; `first` is that of the first round alone. Nothing is refused in these runs. FedMatch, which diverges with the
default learning rate, is run with 0.002, and not in the case of a larger one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from protofed import methods
from protofed.errors import ProtofedError
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation.guard import Inspection, Judged

BASE: dict[str, Any] = {
    "data": "digits",
    "rounds": 10,
    "clients": 12,
    "evaluate_every": 1000,
    "engine": "loop",
    "threads": 1,
    "workers": 1,
    "silhouette": False,
    "snapshots": 0,
    "guard": 1e9,
}
CASES: dict[str, dict[str, Any]] = {
    "n-way": {"partition": "n-way", "shot": 10},
    "dirichlet 0.1": {"partition": "dirichlet", "alpha": 0.1},
    "dirichlet 0.1, three a round": {"partition": "dirichlet", "alpha": 0.1, "participation": 0.25},
    "dirichlet 0.1, lr 0.1": {"partition": "dirichlet", "alpha": 0.1, "lr": 0.1},
    "three architectures": {"partition": "n-way", "models": ["mlp?hidden=16", "mlp?hidden=200", "mlp?hidden=64,64"]},
    "each its own start": {"partition": "n-way", "initial": "own", "shot": 3},
}


def ratios(method: str, given: dict[str, Any]) -> dict[str, list[float]]:
    """The ratios of one run by kind: the largest of the first round, and the largest of all rounds."""
    found: dict[str, list[float]] = {}
    original, federation = Inspection.ratios, build(resolve(method, {**BASE, **given}))[1]

    def recorded(self: Inspection, judged: Judged, medians: Any) -> dict[str, float]:
        result = original(self, judged, medians)
        for name, ratio in result.items():
            entry = found.setdefault(name, [0.0, 0.0])
            entry[1] = max(entry[1], ratio)
            if federation.round == 0:
                entry[0] = max(entry[0], ratio)
        return result

    with mock.patch.object(Inspection, "ratios", recorded):
        for record in federation:
            assert not any("guard" in reason for reason in record.dropped.values()), record.dropped
            assert not record.notes, record.notes
    return found


def main(files: list[str]) -> None:
    rows = []
    for method in methods.available():
        trains = methods.get(method).teacher is not None
        if not methods.get(method).exchange.up:
            continue
        for case, given in CASES.items():
            labels = {"labels": "server", "server_labels": 100} if trains else {}
            slower = {"lr": 0.002} if method.startswith("fedmatch") else {}  # its loss is multiplied by λ_s = 10
            if slower and "lr" in given:
                continue  # it diverges there, and the guard refuses what it sends
            try:
                result = ratios(method, {**given, **labels, **slower})
            except ProtofedError as error:
                print(f"{method}, {case}: {error}")
                continue
            for kind, (first, largest) in result.items():
                rows.append({"method": method, "case": case, "of": kind, "first": first, "largest": largest})
                print(f"{method:16} {case:30} {kind:24} {first:8.2f} {largest:8.2f}", flush=True)
    print(f"largest: {max(row['largest'] for row in rows):.2f}")
    if files:
        rounded = [{k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in rows]
        Path(files[0]).write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
