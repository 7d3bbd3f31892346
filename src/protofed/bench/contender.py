"""One contender in a process of its own: `python -m protofed.bench.contender SPEC`.

It builds what is measured, says that it is ready, and then answers each line on standard input ("run" or "memory") with
a line on standard output. The time of a round is taken in this process, so it does not include the pipe.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch

from .. import aggregate, methods
from ..bank import PrototypeBank, unit
from ..errors import ProtofedError
from ..experiment.build import build
from ..experiment.settings import resolve
from ..federation.choose import label
from ..federation.pages import keep_pages
from . import limit, plain
from .clock import Clock
from .memory import tree_memory
from .workloads import SEED, SERVER, TRAINING, Many, Server, Training

Spec = dict[str, Any]
Reply = dict[str, Any]


class Skip(Exception):
    """This contender cannot take part; the message says why."""


class Contender:
    """Something whose rounds are timed."""

    @property
    def about(self) -> str:
        """A description that says more than the label."""
        return ""

    @property
    def engine_settings(self) -> dict[str, Any]:
        """The engine's settings with what the rule chose."""
        return {}

    def run(self) -> Reply:
        """Run and time one round, or one call of a rule."""
        raise NotImplementedError

    def memory(self) -> Reply:
        """The memory of the contender's processes, where it is measured."""
        return {}

    def close(self) -> None:
        """There is nothing to release."""


def _workload(spec: Spec) -> Training:
    workload = TRAINING[spec["workload"]]
    return workload.quick() if spec["quick"] else workload


class Plain(Contender):
    """The hand-written loop of `plain.py`."""

    def __init__(self, spec: Spec) -> None:
        workload = _workload(spec)
        self.loop = plain.plain_loop(workload, *workload.load(spec["folder"]))

    def run(self) -> Reply:
        """Time one round."""
        start_time = time.perf_counter()
        self.loop.round()
        return {"seconds": time.perf_counter() - start_time}


class Engine(Contender):
    """One of protofed's engines, with the settings that a user would give."""

    def __init__(self, spec: Spec) -> None:
        workload = _workload(spec)
        self.clock = Clock() if spec.get("clock") else None
        if self.clock is not None:
            self.clock.attach(methods.registry[workload.method])
        self._build(workload, *workload.load(spec["folder"]), spec["settings"])

    def _build(self, workload: Training, x: torch.Tensor, y: torch.Tensor, extra: dict[str, Any]) -> None:
        self.participants: set[int] = set()
        try:
            settings = resolve(workload.method, {**workload.settings(x, y), **extra})
            self.settings, self.federation = build(settings)
        except ProtofedError as error:
            raise Skip(str(error).partition(" Known: ")[0]) from None

    @property
    def about(self) -> str:
        """The engine in a few words."""
        return label(self.settings.engine)

    @property
    def engine_settings(self) -> dict[str, Any]:
        """The engine's settings with what the rule chose."""
        return dataclasses.asdict(self.settings.engine)

    def run(self) -> Reply:
        """Time one round, and the seconds of computation in it where there is a clock."""
        clock_start = self.clock.read() if self.clock else []
        start_time = time.perf_counter()
        record = self.federation.step()
        seconds = time.perf_counter() - start_time
        if record.dropped:
            raise RuntimeError(f"clients were dropped, so the round is not comparable: {record.dropped}")
        self.participants.update(record.participants)
        reply: Reply = {"seconds": seconds}
        if self.clock is not None:
            clock_end = self.clock.read()
            busy = [end - start for end, start in zip_longest(clock_end, clock_start, fillvalue=0.0)]
            reply["compute_seconds"] = [spent for spent in busy if spent > 0]
        return reply

    def close(self) -> None:
        """Release the engine."""
        self.federation.engine.close()


class Crowd(Engine):
    """A federation of few or of many clients, with the same number of them in each round."""

    def __init__(self, spec: Spec) -> None:
        self.clock = None
        sizes = Many().quick() if spec["quick"] else Many()
        workload = sizes.federation(spec["clients"])
        x, y = workload.load(None)
        self._build(workload, x, y, spec["settings"])
        self.memory_when_built = tree_memory()
        per_sample = x[0].numel() * x.element_size() + 3 * 8  # its features, and its label, group and row number
        self.data_bytes = len(x) * per_sample
        self.model_bytes = sum(v.numel() * v.element_size() for v in self.federation.engine.starts[0].values())

    def memory(self) -> Reply:
        """The memory when the federation was built, now and at its peak, and the parts of it that are known."""
        memory = tree_memory()
        return {
            "built_bytes": self.memory_when_built["now"],
            "now_bytes": memory["now"],
            "peak_bytes": memory["peak"],
            "data_bytes": self.data_bytes,
            "saved_bytes": len(self.participants) * self.model_bytes,
            "took_part": len(self.participants),
        }


class Limit(Contender):
    """One merged model with one choice of batch and memory format."""

    def __init__(self, spec: Spec) -> None:
        workload = _workload(spec)
        x, y = workload.load(spec["folder"])
        self.choice = f"batch {spec['batch']}, {spec['layout']}, threads {spec['threads']}"
        self.choice += ", allocator keeps its pages" if spec["keep_pages"] else ""
        self.merged = limit.Merged(
            workload, limit.in_layout(x, spec["layout"]), y, batch=spec["batch"], layout=spec["layout"]
        )

    @property
    def about(self) -> str:
        """The choice of batch, memory format, threads and allocator."""
        return self.choice

    def run(self) -> Reply:
        """Time one round."""
        timed = self.merged.round()
        return {"seconds": timed.seconds, "training_seconds": timed.training}


class OwnBatch(Contender):
    """One model for each core, trained in steps of the clients' own batch size."""

    def __init__(self, spec: Spec) -> None:
        workload = _workload(spec)
        self.models = limit.OwnBatch(workload, *workload.load(spec["folder"]), spec["processes"])

    @property
    def about(self) -> str:
        """The number of processes and the memory format."""
        count = len(self.models.pipes)
        return f"{count} process{'es' if count > 1 else ''}, {self.models.layout}, allocator keeps its pages"

    def run(self) -> Reply:
        """Time one round of all processes."""
        start_time = time.perf_counter()
        self.models.round()
        return {"seconds": time.perf_counter() - start_time}


class LimitSweep(Contender):
    """Tries every batch and memory format for a short time; threads and allocator are those of the process."""

    def __init__(self, spec: Spec) -> None:
        self.workload = _workload(spec)
        self.x, self.y = self.workload.load(spec["folder"])
        self.cap: float = spec["cap"]

    def run(self) -> Reply:
        """Time a few steps of every combination."""
        rows = []
        for layout in limit.layouts(self.workload):
            x = limit.in_layout(self.x, layout)
            for batch in limit.batches(self.workload):
                merged = limit.Merged(self.workload, x, self.y, batch, layout)
                merged.round(cap=0.0)  # one step to warm up
                timed = merged.round(cap=self.cap, min_steps=2)
                rows.append(
                    {
                        "batch": batch,
                        "layout": layout,
                        "seconds": timed.seconds,
                        "training_seconds": timed.training,
                    }
                )
        return {"rows": rows}


class ServerRule(Contender):
    """One aggregation rule, of which time and memory are measured."""

    def __init__(self, spec: Spec) -> None:
        case = SERVER[spec["case"]]
        self.call = server_call(case.quick() if spec["quick"] else case)

    def run(self) -> Reply:
        """Time one call, and measure the memory before it and at its peak."""
        memory = tree_memory()
        start_time = time.perf_counter()
        self.call()
        return {
            "seconds": time.perf_counter() - start_time,
            "inputs_bytes": memory["now"],
            "peak_bytes": tree_memory()["peak"],
        }


def server_call(case: Server) -> Callable[[], object]:
    """A call of the rule whose inputs are ready. Every client holds every class, which is the most expensive case."""
    generator = torch.Generator().manual_seed(SEED)
    means = torch.empty(case.clients, case.classes, case.dim)
    centres = torch.randn(case.classes, case.dim, generator=generator)
    if case.close:
        centres = centres + 2 * torch.randn(case.dim, generator=generator)
    for client_means in means:  # client by client, so that making the inputs takes no more memory than they do
        client_means.copy_(unit(centres + 0.3 * torch.randn(case.classes, case.dim, generator=generator)))
    counts = torch.randint(1, 20, (case.clients, case.classes), generator=generator).float()
    banks = PrototypeBank(means, counts)
    if case.rule == "refine":
        start = PrototypeBank(unit(centres), counts.sum(0))
        return lambda: aggregate.refine(banks, start)
    rule: Callable[[PrototypeBank], PrototypeBank] = getattr(aggregate, case.rule)
    return lambda: rule(banks)


CONTENDERS: dict[str, Callable[[Spec], Contender]] = {
    "plain": Plain,
    "engine": Engine,
    "many": Crowd,
    "limit": Limit,
    "own-batch": OwnBatch,
    "limit-sweep": LimitSweep,
    "server": ServerRule,
}


def make(spec: Spec) -> Contender:
    """The contender that a spec describes, after the process's threads and allocator are set."""
    if spec.get("keep_pages"):
        keep_pages()
    if spec.get("threads"):
        torch.set_num_threads(spec["threads"])
    return CONTENDERS[spec["kind"]](spec)


def main() -> None:
    """Build the contender that the first argument describes, and answer commands until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not disturb the replies

    def reply(content: Reply) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    try:
        contender = make(json.loads(sys.argv[1]))
    except Skip as reason:
        reply({"skip": str(reason)})
        return
    reply({"about": contender.about, "settled": contender.engine_settings})
    try:
        for line in sys.stdin:
            reply(contender.memory() if json.loads(line) == "memory" else contender.run())
    finally:
        contender.close()
    os._exit(0)  # at once, without finalising the interpreter


if __name__ == "__main__":
    main()
