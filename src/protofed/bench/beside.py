"""This code compared with another checkout: the same engine on the same workload, in turns, in one run."""

from __future__ import annotations

import inspect
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import models
from ..errors import ProtofedError
from ..federation import choose
from .measure import machine
from .processes import Field
from .workloads import BESIDE, TRAINING, Say

THIS_CODE, OTHER_CODE = "this code", "the other"
LEAST_SECONDS = 20.0  # turns go on for this time at least, so that short rounds are measured often


def measure_beside(names: Iterable[str], checkout: Path, *, repeats: int, quick: bool, say: Say) -> dict[str, Any]:
    """Measure the seconds of a round with this code and with another checkout's.

    Each uses the engine that `auto` chooses in its own code, so the ratio is what a user gains. The other code may be
    older than a workload or its model, which are then handed in.

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
            others = f"or {', '.join(sorted(BESIDE))} in a run of their own"
            raise ProtofedError(f"bench --beside measures {', '.join(TRAINING)}, {others}; got {name}")
        workload = TRAINING[name].quick() if quick else TRAINING[name]
        say(f"{name}: {workload.describe()}")
        with tempfile.TemporaryDirectory(prefix="protofed-bench-") as folder:
            workload.write_samples(Path(folder))
            spec = {"kind": "engine", "workload": name, "quick": quick, "folder": folder, "clock": False}
            spec["settings"] = {"engine": "auto"}
            handed_in = {"handed_in": asdict(TRAINING[name]), "model_file": _file_of(workload.model)}
            with Field() as field:
                field.add(THIS_CODE, spec)
                field.add(OTHER_CODE, {**spec, "source": str(checkout.absolute()), **handed_in})
                field.turn()
                turns: list[dict[str, Any]] = []
                start_time = time.perf_counter()
                while len(turns) < repeats or (not quick and time.perf_counter() - start_time < LEAST_SECONDS):
                    turns.append(field.turn(backwards=len(turns) % 2 == 1))  # so that none is always first
        if field.skipped:
            raise ProtofedError(f"bench --beside {name}: {field.skipped}")
        rows[name] = {
            "description": workload.describe(),
            "settings": {label: runner.engine_settings for label, runner in field.runners.items()},
            **compared(turns),
        }
        speed, processor = rows[name]["speed"], rows[name]["speed_by_processor"]
        say(f"  speed in units of the other: best {speed['best']:.3f}, median of turns {speed['median']:.3f}")
        say(f"  by the processor's time:     best {processor['best']:.3f}, median of turns {processor['median']:.3f}")
    return {"machine": machine(), "repeats": repeats, "quick": quick, "workloads": rows}


def compared(turns: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """The seconds of each turn, and the speed of this code in units of the other's.

    `best` is the ratio of the best turns, `median` the median of the ratios within a turn. On a machine with other work
    the processor's time is disturbed less than the time that passes.
    """
    result: dict[str, Any] = {}
    for key, name in (("seconds", "speed"), ("processor_seconds", "speed_by_processor")):
        this, other = ([turn[label][key] for turn in turns] for label in (THIS_CODE, OTHER_CODE))
        ratios = [theirs / max(ours, 1e-9) for ours, theirs in zip(this, other, strict=True)]
        result[key] = {THIS_CODE: this, OTHER_CODE: other}
        result[name] = {"best": min(other) / max(min(this), 1e-9), "median": statistics.median(ratios)}
    return result


def beside_markdown(results: Mapping[str, Any]) -> str:
    """The comparison as a Markdown table."""
    machine, rows = results["machine"], results["workloads"]
    lines = [
        f"Measured with torch {machine['torch']}, Python {machine['python']} on {machine['cores']} cores "
        f"({machine['processor'] or machine['system']}); the time of this code over that of the other, old and new in turns"
        f"{', quick sizes: the figures mean nothing' if results['quick'] else ''}.",
        "",
        "| workload | this code | the other | turns | best s / round, this | the other | of the other, best | median "
        "| by the processor's time, best | median |",
        "| --- | --- | --- |" + " ---: |" * 7,
    ]
    for name, row in rows.items():
        ways = [choose.label(choose.EngineSettings(**row["settings"][code])) for code in (THIS_CODE, OTHER_CODE)]
        best = [min(row["seconds"][code]) for code in (THIS_CODE, OTHER_CODE)]
        shares = [1 / row[kind][which] for kind in ("speed", "speed_by_processor") for which in ("best", "median")]
        cells = [name, *ways, str(len(row["seconds"][THIS_CODE])), *(f"{s:.3f}" for s in best)]
        lines.append("| " + " | ".join([*cells, *(f"{share:.2f}" for share in shares)]) + " |")
    return "\n".join(lines) + "\n"


def _file_of(model: str) -> str:
    """The file that defines a registered model."""
    return inspect.getfile(models.registry[model])
