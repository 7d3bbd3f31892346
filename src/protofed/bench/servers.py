"""Servers and messages: what a round costs beside training, how it grows, and the same with another checkout's code."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .processes import Failed
from .workloads import goal

CASE = Path(__file__).with_name("server_case.py")
THIS, OTHER = "this", "other"
MIB = 2**20


@dataclass(frozen=True)
class ServerCase:
    """A round of a server, with or without its clients' training."""

    label: str
    spec: dict[str, Any]
    measured: str  # which part of the round is compared: server, update or engine
    compared: bool = True  # whether another checkout is measured too
    smaller: tuple[tuple[str, int], ...] = (("clients", 4), ("samples", 8), ("dim", 8))

    def quick(self) -> ServerCase:
        """The same case in a tiny size."""
        spec = self.spec | dict(self.smaller) | {"classes": min(self.spec["classes"], 12), "rounds": 2}
        return replace(self, spec=spec)


def _case(label: str, kind: str, method: str, measured: str, compared: bool = True, **sizes: Any) -> ServerCase:
    spec = {"kind": kind, "method": method, "samples": 20, "upload": "bank", **sizes}
    engine = {} if kind == "round" else {"engine": "workers", "inner": "loop", "workers": os.cpu_count() or 1}
    return ServerCase(label, spec | {"settings": engine | sizes.get("settings", {})}, measured, compared)


APA: dict[str, Any] = {"classes": 21, "dim": 256, "held": 21, "rounds": 2}
TGP: dict[str, Any] = {"clients": 20, "dim": 512, "samples": 200, "rounds": 2, "settings": {"server_epochs": 2}}
WIDE: dict[str, Any] = {"clients": 80, "dim": 256, "samples": 200, "rounds": 3}
PAGR: dict[str, Any] = WIDE | {"dim": 64, "rounds": 2, "settings": {"projection": "consensus"}}
SMALL: dict[str, Any] = {"clients": 20, "samples": 100, "rounds": 4, "classes": 10, "dim": 64}
CLASSES = (10, 100, 1000, 10_000)
FASTER = {"FedTGP, 10 classes, two epochs of 100": 3.0, "FedTGP, 100 classes, two epochs of 100": 1.6}
"""The goals of cases that are compared: times the other checkout's speed."""

CASES: tuple[ServerCase, ...] = (
    _case("FedAPA, 100 clients", "round", "fedapa", "server", clients=100, **APA),
    _case("FedAPA, 1,000 clients", "round", "fedapa", "server", False, clients=1000, **APA),
    _case("FedTGP, 10 classes, two epochs of 100", "update", "fedtgp", "update", classes=10, **TGP),
    _case("FedTGP, 100 classes, two epochs of 100", "update", "fedtgp", "update", classes=100, **TGP),
    _case("FedTGP, 10 classes, width 8", "update", "fedtgp", "update", classes=10, **TGP | {"dim": 8}),
    _case("FedPAGR, 10,000 classes", "update", "fedpagr", "update", classes=10_000, **PAGR),
    *(
        _case(f"FedAvg, {n:,} clients", "receive", "fedavg", "server", clients=n, classes=10, dim=64, upload="weights")
        for n in (1000, 10_000)
    ),
    *(
        _case(f"FedProto, {c:,} classes, 80 clients", "receive", "fedproto", "server", c != 100, classes=c, **WIDE)
        for c in CLASSES
    ),
    _case("FedSAP, 10,000 classes, 80 clients", "receive", "fedsap", "server", classes=10_000, **WIDE),
    *(
        _case(f"FedProto trains, {c:,} classes", "round", "fedproto", "engine", c == 10_000, **SMALL | {"classes": c})
        for c in CLASSES
    ),
    _case("Local trains, 10,000 classes", "round", "local", "engine", False, **SMALL | {"classes": 10_000}),
    *(
        _case(f"FedProto, width {d:,}", "round", "fedproto", "server", False, **SMALL | {"dim": d})
        for d in (64, 512, 4096)
    ),
    *(
        _case(f"FedProto, {n:,} samples a client", "round", "fedproto", "server", False, **SMALL | {"samples": n})
        for n in (60, 600, 6000)
    ),
)


def measure_servers(
    repeats: int, quick: bool, say: Callable[[str], None], beside: Path | None = None, only: str = ""
) -> dict[str, Any]:
    """Measure every case, each in processes of its own.

    Args:
        repeats: How many processes of each case, in turns with those of the other checkout.
        quick: Whether tiny sizes are measured.
        say: A function that reports progress.
        beside: Another checkout, whose code is measured too.
        only: A part of the label of the cases that are measured; without it all are.

    Returns:
        Of each case the seconds of all rounds but the first of each process, and the memory.
    """
    rows: list[dict[str, Any]] = []
    for case in (c for c in CASES if only in c.label):
        case = case.quick() if quick else case
        say(f"  {case.label}")
        codes = {THIS: None, OTHER: beside} if beside is not None and case.compared else {THIS: None}
        runs: dict[str, list[dict[str, Any]]] = {label: [] for label in codes}
        skipped: dict[str, str] = {}
        for turn in range(repeats):
            for label in list(codes)[:: -1 if turn % 2 else 1]:
                try:
                    runs[label].append(_run(case, codes[label]))
                except Failed as error:
                    skipped[label] = str(error)
        row = {"label": case.label, "measured": case.measured, "spec": case.spec, "skipped": skipped}
        rows.append(row | {label: _summary(answers, case.measured) for label, answers in runs.items() if answers})
    compared = [row for row in rows if THIS in row and OTHER in row and row["label"] in FASTER]
    speeds = {row["label"]: row[OTHER]["best"] / row[THIS]["best"] for row in compared}
    goals = [goal(f"{label}: times the other's speed", speeds[label], FASTER[label], at_least=True) for label in speeds]
    return {"kind": "servers", "rows": rows, "goals": goals}


def _run(case: ServerCase, source: Path | None) -> dict[str, Any]:
    folder = Path(__file__).parents[2] if source is None else source / "src"
    command = [sys.executable, str(CASE), json.dumps(case.spec)]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if answer.returncode:
        lines = answer.stderr.strip().splitlines()
        raise Failed(lines[-1] if lines else f"ended with {answer.returncode}")
    result: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return result


def _summary(answers: list[dict[str, Any]], measured: str) -> dict[str, Any]:
    """The seconds of the measured part and of the processor; the first round of a process warms it up."""
    rounds = [entry for answer in answers for entry in answer["rounds"][1:]]
    seconds = [entry["seconds"].get(measured, 0.0) for entry in rounds]
    return {
        "seconds": seconds,
        "best": min(seconds),
        "median": statistics.median(seconds),
        "processor": min(entry["seconds"]["processor"] for entry in rounds),
        "parts": {name: min(entry["seconds"].get(name, 0.0) for entry in rounds) for name in rounds[0]["seconds"]},
        "down": rounds[-1]["down"],
        "up": rounds[-1]["up"],
        "peak_bytes": min(answer["memory"]["peak"] for answer in answers),
        "before_bytes": min(answer["memory"]["before"] for answer in answers),
        "shared_once_bytes": min(answer["memory"]["shared_once"] for answer in answers),
        "products": min((answer["products"] for answer in answers if answer.get("products")), default=None),
    }


def table(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    """The header, the rows and the notes of the table."""
    compared = any(OTHER in row for row in result["rows"])
    header = ["case", "part", "s", "processor s", "MB down", "MiB peak"]
    header += ["s, other", "processor s, other", "MiB, other", "× faster", "× processor"] if compared else []
    rows = []
    for row in result["rows"]:
        if THIS not in row:
            continue
        ours, other = row[THIS], row.get(OTHER)
        cells = [row["label"], row["measured"], _s(ours["best"]), _s(ours["processor"])]
        cells += [f"{ours['down'] / 1e6:,.1f}", f"{ours['peak_bytes'] / MIB:,.0f}"]
        if compared and other is not None:
            cells += [_s(other["best"]), _s(other["processor"]), f"{other['peak_bytes'] / MIB:,.0f}"]
            cells += [f"{other['best'] / ours['best']:.2f}", f"{other['processor'] / ours['processor']:.2f}"]
        elif compared:
            cells += ["–"] * 5
        rows.append(cells)
    notes = [f"skipped {r['label']}, {who}: {why}" for r in result["rows"] for who, why in r["skipped"].items()]
    bounded = (row for row in result["rows"] if row["label"] in FASTER and row.get(THIS, {}).get("products"))
    return header, rows, notes + [_bound(row) for row in bounded]


def _bound(row: Mapping[str, Any]) -> str:
    """What a case's matrix products alone would take, and how much faster than the other checkout that allows."""
    seconds = row[THIS]["products"]
    most = (
        f", so no server that does them can be more than {row[OTHER]['best'] / seconds:.1f} times as fast as the other"
        if OTHER in row
        else ""
    )
    return f"{row['label']}: the matrix products alone would take {_s(seconds)} s on all cores{most}"


def _s(seconds: float) -> str:
    return f"{seconds:.3f}"
