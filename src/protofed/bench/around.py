"""What stands around the training: the cost of checkpoints, and the CPU time until a run has ended its first round.

Runs with a checkpoint after every round take turns with runs without, and where another checkout is given, with its code.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..errors import ProtofedError

THIS_CODE, OTHER_CODE = "this code", "the other"
SCRIPT = Path(__file__).with_name("around_case.py")
# every round is evaluated, because codes differ in which of the last rounds they evaluate anyway
PLAIN = {"evaluate_every": 1, "snapshots": 0, "silhouette": False, "partition": "iid", "batch": 8}
CASES: dict[str, dict[str, Any]] = {
    "8 × ResNet-18, all take part": {
        "method": "fedproto",
        "shape": (3, 32, 32),
        "samples": 8,
        "settings": {**PLAIN, "model": "resnet18", "clients": 8, "rounds": 4},
    },
    "200 × MLP, a tenth takes part": {
        "method": "fedproto",
        "shape": (784,),
        "samples": 40,
        "settings": {**PLAIN, "model": "mlp", "clients": 200, "participation": 0.1, "rounds": 12},
    },
}
START = ["run", "fedproto", "data=digits", "rounds=1", "clients=4"]


def measure_around(repeats: int, quick: bool, say: Any, beside: Path | None = None) -> dict[str, Any]:
    """Measure checkpoints and the start of a run.

    Args:
        repeats: The number of turns.
        quick: Whether tiny sizes are measured.
        say: A function that reports progress.
        beside: Another checkout of protofed, whose code takes turns with this one.

    Returns:
        The result: for each case and code, what a checkpoint adds to a round, what it writes and the peak of memory.
    """
    codes = {THIS_CODE: Path(__file__).parents[2]}
    if beside is not None:
        codes[OTHER_CODE] = beside.absolute() / "src"
    replies: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
    starts: dict[str, list[float]] = {"import torch": [], **{code: [] for code in codes}}
    with tempfile.TemporaryDirectory(prefix="protofed-bench-") as folder:
        numbers = {code: number for number, code in enumerate(codes)}
        for turn in range(repeats):
            for position, (name, case) in enumerate(CASES.items()):
                say(f"checkpoints: {name}, turn {turn + 1} of {repeats}")
                for code, source in codes.items():
                    for every in (1, 1000):
                        place = Path(folder) / f"{position}-{turn}-{numbers[code]}-{every}"
                        by_code = replies.setdefault(name, {}).setdefault(code, {})
                        by_code.setdefault(str(every), []).append(_timed(_sized(case, quick), every, place, source))
            say(f"start of a run, turn {turn + 1} of {repeats}")
            starts["import torch"].append(_cpu(["-c", "import torch"], codes[THIS_CODE]))
            for code, source in codes.items():
                words = ["-m", "protofed", *START, "--out", str(Path(folder) / f"start-{turn}-{numbers[code]}")]
                starts[code].append(_cpu(words, source))
    rows = {
        name: {code: _summary(by_every["1"], by_every["1000"]) for code, by_every in by_code.items()}
        for name, by_code in replies.items()
    }
    return {"kind": "around", "rows": rows, "start_cpu_seconds": starts, "replies": replies, "goals": []}


def _sized(case: dict[str, Any], quick: bool) -> dict[str, Any]:
    """The case, or a tiny one of the same kind."""
    if not quick:
        return case
    small = {"model": "mlp", "clients": min(10, case["settings"]["clients"]), "rounds": 3}
    return {**case, "shape": (16,), "samples": 8, "settings": {**case["settings"], **small}}


def _timed(case: dict[str, Any], every: int, folder: Path, source: Path) -> dict[str, Any]:
    """Run a case in a process of its own with the code of a checkout."""
    spec = {**case, "folder": str(folder), "settings": {**case["settings"], "checkpoint_every": every}}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(spec)],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ProtofedError(f"bench around: {' '.join(done.stderr.split())[-300:]}")
    reply: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reply


def _cpu(words: list[str], source: Path) -> float:
    """The CPU seconds of a command of Python, with its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _summary(saved: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, float]:
    """What checkpoints add to rounds: best and median over the rounds of all turns, bytes a round, and memory."""
    with_them = [seconds for reply in saved for seconds in reply["round_seconds"]]
    without = [seconds for reply in plain for seconds in reply["round_seconds"]]
    rounds = len(saved[0]["round_seconds"])
    return {
        "round_best": min(without),
        "saved_best": min(with_them),
        "round_median": statistics.median(without),
        "saved_median": statistics.median(with_them),
        "added_cpu": (min(r["cpu_seconds"] for r in saved) - min(r["cpu_seconds"] for r in plain)) / rounds,
        "written_bytes": (saved[0]["written_bytes"] - plain[0]["written_bytes"]) / rounds,
        "added_peak": min(r["peak_bytes"] for r in saved) - min(r["peak_bytes"] for r in plain),
    }


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    """The header, the lines and the notes of the table of a result."""
    header = ["case", "code", "round, s", "with a checkpoint, s", "MB written a round", "peak, MB more"]
    lines = [
        [
            name,
            code,
            f"{row['round_best']:.2f} ({row['round_median']:.2f})",
            f"{row['saved_best']:.2f} ({row['saved_median']:.2f})",
            f"{row['written_bytes'] / 1e6:.1f}",
            f"{row['added_peak'] / 1e6:.0f}",
        ]
        for name, by_code in result["rows"].items()
        for code, row in by_code.items()
    ]
    best = {name: min(values) for name, values in result["start_cpu_seconds"].items()}
    notes = [f"CPU seconds of `protofed {' '.join(START)}`, {name}: {value:.2f}" for name, value in best.items()]
    notes[0] = f"CPU seconds of `import torch`: {best['import torch']:.2f}"
    return header, lines, ["seconds are the best round, and the median in brackets", *notes]
