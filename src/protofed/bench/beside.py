"""This code compared with another checkout: the same engine on the same workload, in turns, in one run."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import ProtofedError
from .measure import chosen_settings, machine
from .processes import Field
from .workloads import TRAINING, Say

THIS_CODE, OTHER_CODE = "this code", "the other"
LEAST_SECONDS = 20.0  # turns go on for this time at least, so that short rounds are measured often


def measure_beside(names: Iterable[str], checkout: Path, *, repeats: int, quick: bool, say: Say) -> dict[str, Any]:
    """Measure the seconds of a round with this code and with another checkout's.

    Both use the engine that `auto` chooses in this code, so that they differ in nothing but the code.

    Args:
        names: The names of training workloads.
        checkout: The folder of the other checkout.
        repeats: The least number of turns.
        quick: Whether tiny sizes are measured.
        say: A function that reports progress.

    Returns:
        The seconds of both, and the speed of this code in units of the other's.
    """
    if not (checkout / "src" / "protofed").is_dir():
        raise ProtofedError(f"{checkout}: not a checkout of protofed (it has no src/protofed)")
    rows: dict[str, Any] = {}
    for name in names:
        if name not in TRAINING:
            raise ProtofedError(f"bench --beside measures training: {', '.join(TRAINING)}; got {name}")
        workload = TRAINING[name].quick() if quick else TRAINING[name]
        say(f"{name}: {workload.describe()}")
        with tempfile.TemporaryDirectory(prefix="protofed-bench-") as folder:
            workload.write_samples(Path(folder))
            spec = {"kind": "engine", "workload": name, "quick": quick, "folder": folder, "clock": False}
            engine_settings = chosen_settings({**spec, "settings": {"engine": "auto"}})
            spec["settings"] = engine_settings
            with Field() as field:
                field.add(THIS_CODE, spec)
                field.add(OTHER_CODE, {**spec, "source": str(checkout.absolute())})
                field.turn()
                turns: list[dict[str, Any]] = []
                start_time = time.perf_counter()
                while len(turns) < repeats or (not quick and time.perf_counter() - start_time < LEAST_SECONDS):
                    turns.append(field.turn(backwards=len(turns) % 2 == 1))  # so that none is always first
        if field.skipped:
            raise ProtofedError(f"bench --beside {name}: {field.skipped}")
        seconds = {label: [turn[label]["seconds"] for turn in turns] for label in (THIS_CODE, OTHER_CODE)}
        pairs = zip(seconds[OTHER_CODE], seconds[THIS_CODE], strict=True)
        rows[name] = {
            "settings": engine_settings,
            "seconds": seconds,
            "speed_best": min(seconds[OTHER_CODE]) / min(seconds[THIS_CODE]),
            "speed_median": statistics.median(other_seconds / seconds for other_seconds, seconds in pairs),
        }
        best, median = rows[name]["speed_best"], rows[name]["speed_median"]
        say(f"  speed in units of the other: best {best:.3f}, median of turns {median:.3f}")
    return {"machine": machine(), "repeats": repeats, "quick": quick, "workloads": rows}
