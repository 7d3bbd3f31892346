"""This code beside another checkout of it: the same engine on the same workload, in turns, in one run."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import ProtofedError
from .measure import Say, machine, settled
from .processes import Field
from .workloads import TRAINING

HERE, BESIDE = "this code", "the other"
LEAST_SECONDS = 20.0  # of turns, so that short rounds are measured often


def measure_beside(names: Iterable[str], other: Path, *, repeats: int, quick: bool, say: Say) -> dict[str, Any]:
    """Seconds a round of both, and how fast this code is in units of the other.

    The engine is the one that `auto` chooses here; the other is given the same settings, so that the code is all that
    differs.
    """
    if not (other / "src" / "protofed").is_dir():
        raise ProtofedError(f"{other}: not a checkout of protofed (it has no src/protofed)")
    rows: dict[str, Any] = {}
    for name in names:
        if name not in TRAINING:
            raise ProtofedError(f"bench --beside measures training: {', '.join(TRAINING)}; got {name}")
        workload = TRAINING[name].quick() if quick else TRAINING[name]
        say(f"{name}: {workload.describe()}")
        with tempfile.TemporaryDirectory(prefix="protofed-bench-") as folder:
            workload.write_samples(Path(folder))
            spec = {"kind": "engine", "workload": name, "quick": quick, "folder": folder, "clock": False}
            chosen = settled({**spec, "settings": {"engine": "auto"}})
            spec["settings"] = chosen
            with Field() as field:
                field.add(HERE, spec)
                field.add(BESIDE, {**spec, "source": str(other.absolute())})
                field.turn()
                turns: list[dict[str, Any]] = []
                began = time.perf_counter()
                while len(turns) < repeats or (not quick and time.perf_counter() - began < LEAST_SECONDS):
                    turns.append(field.turn(backwards=len(turns) % 2 == 1))  # neither is always the first
        if field.skipped:
            raise ProtofedError(f"bench --beside {name}: {field.skipped}")
        seconds = {label: [turn[label]["seconds"] for turn in turns] for label in (HERE, BESIDE)}
        pairs = zip(seconds[BESIDE], seconds[HERE], strict=True)
        rows[name] = {
            "settings": chosen,
            "seconds": seconds,
            "speed_best": min(seconds[BESIDE]) / min(seconds[HERE]),
            "speed_median": statistics.median(other_seconds / seconds for other_seconds, seconds in pairs),
        }
        best, median = rows[name]["speed_best"], rows[name]["speed_median"]
        say(f"  speed in units of the other: best {best:.3f}, median of turns {median:.3f}")
    return {"machine": machine(), "repeats": repeats, "quick": quick, "workloads": rows}
