"""One server workload in a process of its own. It is run as a file, with the code of this checkout or of another one.

`python server_case.py '{"kind": "receive", "method": "fedavg", …}'` prints a line of JSON. It needs nothing of protofed
that is younger than what it is compared with.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from protofed import wire
from protofed.bank import PrototypeBank
from protofed.bench.memory import tree_memory
from protofed.data import Dataset
from protofed.experiment.run import build
from protofed.experiment.settings import resolve
from protofed.federation.local import Outcome
from protofed.wire import Bundle

FOREVER = 10**9
MOST_UPLOADS = 500  # different uploads; with more clients they repeat
PRODUCTS = 50  # the steps of FedTGP whose matrix products are measured, five times over


class Stopwatch:
    """The wall time and the processor time of parts of a round."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, owner: Any, name: str, label: str) -> None:
        """Time a function of an object."""
        function = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - start

        object.__setattr__(owner, name, timed)  # also of a frozen one

    def iterated(self, items: Iterator[Any], label: str) -> Iterator[Any]:
        """Time what an iterator does for its items."""
        while True:
            start = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - start
            yield item


def data_of(spec: dict[str, Any]) -> Dataset:
    """Random samples, of which each client has some classes in its turn."""
    generator = torch.Generator().manual_seed(0)
    n, clients, classes = spec["samples"], spec["clients"], spec["classes"]
    x = torch.randn(clients * n, spec.get("inputs", 64), generator=generator)
    held = min(classes, spec.get("held", 100))
    first = torch.arange(clients).repeat_interleave(n) * held
    y = (first + torch.randint(held, (clients * n,), generator=generator)) % classes
    owner = torch.arange(clients).repeat_interleave(n)
    test = torch.randn(classes, x.shape[1], generator=generator), torch.arange(classes)
    return Dataset.from_arrays(x, y, *test, num_classes=classes, group_train=owner, name="bench")


def uploads_of(federation: Any, spec: dict[str, Any]) -> list[bytes]:
    """What clients would send, without their training."""
    generator = torch.Generator().manual_seed(1)
    uploads = []
    for client in range(min(spec["clients"], MOST_UPLOADS)):
        samples = {"samples": float(spec["samples"])}
        if spec["upload"] == "weights":
            start = federation.state.weights
            weights = {name: v + 0.01 * torch.randn(v.shape, generator=generator) for name, v in start.items()}
            content = Bundle(weights=weights, scalars=samples)
        else:
            classes, held = spec["classes"], min(spec["classes"], spec.get("held", 100))
            counts = torch.zeros(classes)
            counts[(client * held + torch.arange(held)) % classes] = spec["samples"] / (2 * held)
            means = torch.randn(classes, spec["dim"], generator=generator) * (counts > 0)[:, None]
            content = Bundle(bank=PrototypeBank(means, counts), scalars=samples)
        uploads.append(wire.encode(content))
    return uploads


def products(spec: dict[str, Any]) -> float | None:
    """The seconds in which all cores could do the matrix products of FedTGP's server step and nothing else.

    A step has six of them, of the classes with the two layers of the network: forward, backward, and the change of the
    weights. The best of five times is taken with one thread, and the other cores are taken to share the work evenly.
    """
    if spec["method"] != "fedtgp":
        return None
    classes, d = spec["classes"], spec["dim"]
    x, y = torch.randn(2, classes, d)
    layers = torch.randn(2, d, d)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(PRODUCTS):
            for layer in layers:
                torch.mm(x, layer.T)
                torch.mm(y, layer)
                layer.addmm_(x.T, y, alpha=1e-9)
        best = min(best, (time.perf_counter() - start) / PRODUCTS)
    torch.set_num_threads(threads)
    holders = spec["clients"] * min(classes, spec.get("held", 100))
    steps = spec["settings"]["server_epochs"] * -(-holders // 10)  # in batches of ten prototypes
    return best * steps / len(os.sched_getaffinity(0))


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Build the federation and time its rounds.

    Args:
        spec: the kind (`round` trains; `receive` and `update` are given uploads), the method, sizes and settings.

    Returns:
        the seconds of each round and of its parts, the memory of all processes, and the seconds of FedTGP's products.
    """
    settings = {
        "data": data_of(spec),
        "partition": "natural",
        "clients": spec["clients"],
        "rounds": FOREVER,
        "evaluate_every": FOREVER,
        "batch": spec.get("batch", 10),
        "lr": 0.01,
        "model": {"name": "mlp", "hidden": spec.get("hidden", (64,)), "embedding": spec["dim"]},
        **spec.get("settings", {}),
    }
    _, federation = build(resolve(spec["method"], settings))
    watch = Stopwatch()
    watch.around(federation, "downloads", "downloads")
    whole = hasattr(federation, "_update")  # code of before has the method's own step alone
    watch.around(federation if whole else federation.method, "_update" if whole else "update", "update")
    train = federation.engine.train
    if spec["kind"] != "round":
        uploads = uploads_of(federation, spec)
        size = len(uploads)
        train = lambda downloads: ((c, Outcome(uploads[c % size], {"ce": 1.0})) for c in downloads.clients)  # noqa: E731
    engine: Any = federation.engine
    engine.train = lambda downloads: watch.iterated(iter(train(downloads)), "engine")
    before, peak = tree_memory(), [0]

    def look() -> None:
        while True:
            peak[0] = max(peak[0], tree_memory()["now"])
            time.sleep(0.2)

    if spec["kind"] == "round":
        threading.Thread(target=look, daemon=True).start()
    rounds = []
    for _ in range(spec.get("rounds", 3)):
        watch.seconds = {}
        start, processor = time.perf_counter(), time.process_time()
        record = federation.step()
        seconds = {"round": time.perf_counter() - start, **watch.seconds, "processor": time.process_time() - processor}
        seconds["server"] = seconds["round"] - seconds.get("engine", 0.0)
        rounds.append({"seconds": seconds, "down": sum(record.down.values()), "up": sum(record.up.values())})
    memory = {"before": before["peak"], "peak": tree_memory()["peak"], "shared_once": peak[0]}
    federation.engine.close()
    return {"rounds": rounds, "memory": memory, "products": products(spec)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
