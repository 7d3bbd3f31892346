"""One run whose rounds are timed, for `around.py`. It is run by its path, so that it times any checkout's code."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from protofed.data import Dataset
from protofed.experiment.run import run


def main() -> None:
    """Run the case that the first word describes as JSON, and print what it took as JSON."""
    spec = json.loads(sys.argv[1])
    shape, samples, clients = spec["shape"], spec["samples"], spec["settings"]["clients"]
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(clients * samples, *shape, generator=generator), torch.arange(clients * samples) % 10
    data = Dataset.from_arrays(x, y, x[:20], y[:20], num_classes=10, name="noise")
    ends: list[float] = []
    written = [0]

    def watch(record: Any, rounds: int) -> None:
        ends.append(time.perf_counter())
        if record.round == 1:
            written.append(_written())

    began, cpu = time.perf_counter(), time.process_time()
    run(spec["method"], data=data, out=Path(spec["folder"]), watch=watch, **spec["settings"])
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    reply = {
        "first_seconds": ends[0] - began,
        "round_seconds": [b - a for a, b in pairwise(ends)],
        "cpu_seconds": time.process_time() - cpu + children.ru_utime + children.ru_stime,
        "written_bytes": _written() - written[-1],
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    sys.stdout.write(json.dumps(reply) + "\n")


def _written() -> int:
    """The bytes that this process has given to the system to write."""
    lines = Path(f"/proc/{os.getpid()}/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


if __name__ == "__main__":
    main()
