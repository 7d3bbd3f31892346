"""The processor's time of a round: `python benchmarks/fedarpl_time.py OUT.json FOLDER [ROUNDS]`.

Of Fed-ARPL, SemiFL and (FL)², and of the same methods where the received model labels a step's samples in that step, in
place of all of them once a round before the first step.

FOLDER has MNIST's four idx files. The setting is that of `fedarpl_choices.py` with 100 unlabelled samples a client and five
epochs at clients and server, as the papers have; one thread, nothing is evaluated. All federations live in one process and
take turns, a round each, so that what slows the machine slows them alike; what is counted is the process's own time, not the
clock's. The first two rounds are not counted. Fed-ARPL's later phases begin at once. The table is
written beside OUT.json.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedarpl_choices import COMMON

from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.methods import register
from protofed.methods.fedarpl import FedARPL
from protofed.methods.fl2 import FL2
from protofed.methods.semifl import SemiFL
from protofed.parts import Feed

WARM = 2
FIRST = "SemiFL"
AT_ONCE: dict[str, Any] = {"fss_window": 1, "fss_mean": -1e9, "fss_deviation": 1e9}
FEEDBACK = {**AT_ONCE, "gcplca_window": 1, "gcplca_mean": -1e9, "gcplca_deviation": 1e9}


@register("semifl-each-step", paper="SemiFL, labelling at each step")
@dataclass(frozen=True)
class SemiFLEachStep(SemiFL):
    @property
    def feed(self) -> Feed:
        return replace(super().feed, prepare=None)


@register("fl2-each-step", paper="(FL)², labelling at each step")
@dataclass(frozen=True)
class FL2EachStep(FL2):
    @property
    def feed(self) -> Feed:
        return replace(super().feed, prepare=None)


@register("fedarpl-each-step", paper="Fed-ARPL, labelling at each step")
@dataclass(frozen=True)
class FedARPLEachStep(FedARPL):
    @property
    def feed(self) -> Feed:
        return replace(super().feed, prepare=None)


ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "server alone": ("server-only", {}),
    FIRST: ("semifl", {}),
    "SemiFL, labels at each step": ("semifl-each-step", {}),
    "(FL)²": ("fl2", {}),
    "(FL)², labels at each step": ("fl2-each-step", {}),
    "Fed-ARPL, phase 1": ("fedarpl", {"phases": 1}),
    "Fed-ARPL, phase 1, labels at each step": ("fedarpl-each-step", {"phases": 1}),
    "Fed-ARPL, phase 1, one weak view a round": ("fedarpl", {"phases": 1, "labelled_each": "round"}),
    "Fed-ARPL, phase 2": ("fedarpl", {"phases": 2, **AT_ONCE}),
    "Fed-ARPL, phase 3": ("fedarpl", {"phases": 3, **FEEDBACK}),
}


def main(out: Path, folder: Path, rounds: int) -> None:
    data = {"name": "mnist", "path": str(folder), "resize": 16, "limit_train": 8000, "limit_test": 100}
    epochs = {"epochs": 5, "epochs_at_server": 5, "unlabelled_limit": 100}
    more = WARM + rounds + 5  # the last five are evaluated, and not run
    given = {
        **COMMON,
        **epochs,
        "data": data,
        "server_labels": 50,
        "seed": 1234,
        "rounds": more,
        "evaluate_every": more,
    }
    runs = {row: iter(build(resolve(method, {**given, **own}))[1]) for row, (method, own) in ROWS.items()}
    seconds: dict[str, list[float]] = {row: [] for row in ROWS}
    phases: dict[str, float] = {}
    for _ in range(WARM + rounds):
        for row, run in runs.items():
            began = time.process_time()
            record = next(run)
            seconds[row].append(time.process_time() - began)
            phases[row] = record.measures.get("phase", 0.0)
    for row in ("Fed-ARPL, phase 2", "Fed-ARPL, phase 3"):
        if phases[row] != float(row[-1]):
            raise SystemExit(f"{row}: it was in phase {phases[row]:.0f}")
    counted = {row: [round(value, 4) for value in values[WARM:]] for row, values in seconds.items()}
    out.write_text(json.dumps({"settings": given, "seconds": counted}, indent=1) + "\n")
    out.with_suffix(".md").write_text(table(counted) + "\n")


def table(seconds: dict[str, list[float]]) -> str:
    """The median of a row's rounds, and of their shares of SemiFL's in the same turn, with the smallest and the largest."""
    lines = ["| | seconds of the processor a round | of SemiFL's | rounds |", "| --- | ---: | ---: | ---: |"]
    for row, values in seconds.items():
        shares = [value / other for value, other in zip(values, seconds[FIRST], strict=True)]
        share = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
        lines.append(f"| {row} | {statistics.median(values):.2f} | {share} | {len(values)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 8)
