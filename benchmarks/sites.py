"""What a federation between processes costs beside training: `python benchmarks/sites.py docs/results/bench/sites.json`.

Three sites over NVIDIA FLARE with mutual TLS on this machine answer messages of 20 kB and 2 MB without any work; a hundred
sites in one process run rounds of FedProto on data of sixty samples each, which shows what the server itself takes.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch

from protofed.data import Dataset
from protofed.deploy.flare import Server, Site
from protofed.deploy.keys import Project, make_kits
from protofed.deploy.node import Node
from protofed.deploy.remote import Limits
from protofed.deploy.serve import serve
from protofed.deploy.transport import LocalTransport
from protofed.deploy.trial import free_port

TURNS = 30


class Echo:
    """A site that answers with what it was sent."""

    def handle(self, function: str, message: bytes) -> bytes:
        return message


def over_flare(folder: Path) -> dict[str, float]:
    """Milliseconds of a round without work, the median of some, by the size of a message."""
    names = ("north", "south", "west")
    kits = make_kits(Project("bench", "127.0.0.1", names, free_port()), folder)
    began = time.perf_counter()
    found: dict[str, float] = {}
    with Server(kits["server"], kits["admin"]) as server:
        sites = [Site(kits[name], Echo()) for name in names]
        try:
            server.wait_for(names, 60)
            found["seconds to the first call"] = round(time.perf_counter() - began, 2)
            found["MiB of FLARE at a site"] = round(statistics.median(memory(site.process.popen.pid) for site in sites))
            found["MiB of FLARE at the server"] = round(memory(server.process.popen.pid))
            for label, size in (("20 kB", 20_000), ("2 MB", 2_000_000)):
                message = np.random.default_rng(0).bytes(size)
                times = []
                for _ in range(TURNS):
                    start = time.perf_counter()
                    replies = server.call("echo", dict.fromkeys(names, message), 60)
                    times.append(time.perf_counter() - start)
                    assert all(reply == message for reply in replies.values())
                found[f"ms a round, {label}"] = round(1000 * statistics.median(times), 1)
        finally:
            for site in sites:
                site.close()
    return found


def memory(pid: int) -> float:
    """MiB that a process and its children hold."""
    process = psutil.Process(pid)
    return sum(p.memory_info().rss for p in (process, *process.children(recursive=True))) / 2**20


def many_sites(folder: Path, number: int = 100, rounds: int = 5) -> dict[str, float]:
    """Seconds a round and memory of a server with many sites, all of them in this process."""
    g = torch.Generator().manual_seed(0)
    nodes = {}
    for k in range(number):
        y = torch.arange(60) % 10
        x = torch.randn(60, 64, generator=g) + y[:, None]
        data = Dataset.from_arrays(x, y, x[:20], y[:20], num_classes=10)
        nodes[f"site-{k:03d}"] = Node(f"site-{k:03d}", folder / f"site-{k:03d}", data, "mlp?hidden=32&embedding=16")
    times = []
    keys = {"rounds": rounds, "checkpoint_every": rounds, "evaluate_every": rounds, "silhouette": False, "snapshots": 0}
    limits = Limits(600, number, 60)
    watch = lambda record, total: times.append(record.seconds)  # noqa: E731
    serve("fedproto", keys, LocalTransport(nodes), list(nodes), folder / "run", limits=limits, watch=watch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "sites": number,
        "seconds a round, training included": round(statistics.median(times), 2),
        "peak MiB": round(peak),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = {"many": many_sites(Path(folder) / "many"), "flare": over_flare(Path(folder) / "kits")}
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
