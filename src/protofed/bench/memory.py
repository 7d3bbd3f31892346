"""Memory and processor's time of a process and of those it started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PROC = Path("/proc")


def tree_memory() -> dict[str, int]:
    """The memory in bytes of this process and those it started.

    `now` counts shared pages once; `peak` is the sum of each process's highest mark. On Linux both are read from /proc,
    because the `ru_maxrss` of a started process begins at its parent's. Elsewhere both are `ru_maxrss`.
    """
    try:
        pids = _tree(os.getpid())
        return {
            "now": sum(_field(pid, "smaps_rollup", "Pss:") for pid in pids),
            "peak": sum(_field(pid, "status", "VmHWM:") for pid in pids),
        }
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"now": highest, "peak": highest}


def tree_seconds(pid: int) -> float:
    """The processor's time of a process and of those it started, all that still run; 0 where there is no /proc."""
    try:
        stats = [(PROC / str(member) / "stat").read_text().rpartition(")")[2].split() for member in _tree(pid)]
    except OSError:
        return 0.0
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for process in PROC.iterdir():
        if process.name.isdigit():
            try:
                fields = (process / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # the process has ended in the meantime
            children.setdefault(int(fields[1]), []).append(int(process.name))
    family, todo = [], [root]
    while todo:
        family.append(todo.pop())
        todo += children.get(family[-1], [])
    return family


def _field(pid: int, file: str, name: str) -> int:
    try:
        lines = (PROC / str(pid) / file).read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        if pid == os.getpid():
            raise
        return 0  # a child that has ended
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)
