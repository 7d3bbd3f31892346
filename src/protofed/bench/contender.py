"""One contender in a process of its own: `python -m protofed.bench.contender SPEC`.

It builds what is to be measured, says that it is ready, and then answers each line on standard input (a JSON object) with
a line on standard output. Seconds are taken here, around the round, so the pipe costs nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..errors import ProtofedError
from . import limit, plain
from .memory import tree_memory
from .workloads import SEED, SERVER, TRAINING, Many, Server, Training

Spec = dict[str, Any]
Reply = dict[str, Any]


class Skip(Exception):
    """This contender cannot take part; the message says why."""


class Contender(Protocol):
    about: str

    def run(self, **options: Any) -> Reply: ...

    def close(self) -> None: ...


class Simple:
    about = ""

    def close(self) -> None:
        pass


def _workload(spec: Spec) -> Training:
    workload = TRAINING[spec["workload"]]
    return workload.quick() if spec["quick"] else workload


class Plain(Simple):
    """The hand-written loop."""

    def __init__(self, spec: Spec) -> None:
        workload = _workload(spec)
        self.loop = plain.plain_loop(workload, *workload.load(spec["folder"]))

    def run(self) -> Reply:
        began = time.perf_counter()
        self.loop.round()
        return {"seconds": time.perf_counter() - began}


class Engine:
    """One of protofed's engines, by the settings a person would give."""

    def __init__(self, spec: Spec) -> None:
        workload = _workload(spec)
        self._build(workload, *workload.load(spec["folder"]), spec["settings"])

    def _build(self, workload: Training, x: torch.Tensor, y: torch.Tensor, extra: dict[str, Any]) -> None:
        from ..experiment.run import build
        from ..experiment.settings import resolve

        try:
            settings = resolve(workload.method, {**workload.settings(x, y), **extra})
            torch.set_num_threads(settings.general.threads)  # as `protofed run` does
            _, self.federation = build(settings)
        except ProtofedError as error:
            raise Skip(str(error)) from None

    @property
    def about(self) -> str:
        return str(getattr(self.federation.engine, "description", type(self.federation.engine).__name__))

    def run(self) -> Reply:
        began = time.perf_counter()
        record = self.federation.step()
        seconds = time.perf_counter() - began
        if record.dropped:
            raise RuntimeError(f"clients were dropped, so the round is not comparable: {record.dropped}")
        return {"seconds": seconds, "about": self.about}

    def close(self) -> None:
        close = getattr(self.federation.engine, "close", None)
        if close is not None:
            close()


class Crowd(Engine):
    """Few or many clients, the same number of them per round; the default engine."""

    def __init__(self, spec: Spec) -> None:
        sizes = Many().quick() if spec["quick"] else Many()
        workload = sizes.federation(spec["clients"])
        x, y = workload.load(None)
        self._build(workload, x, y, {})
        self.built = tree_memory()
        per_sample = x[0].numel() * x.element_size() + 3 * 8  # its features, and its label, group and row number
        self.data_bytes = len(x) * per_sample
        self.model_bytes = sum(v.numel() * v.element_size() for v in self.federation.engine.start.values())
        self.seen: set[int] = set()

    def run(self, memory: bool = False) -> Reply:
        if memory:
            after = tree_memory()
            return {
                "built_bytes": self.built["now"],
                "now_bytes": after["now"],
                "peak_bytes": after["peak"],
                "data_bytes": self.data_bytes,
                "saved_bytes": len(self.seen) * self.model_bytes,
                "took_part": len(self.seen),
            }
        began = time.perf_counter()
        record = self.federation.step()
        seconds = time.perf_counter() - began
        self.seen.update(record.participants)
        return {"seconds": seconds, "about": self.about}


class Limit(Simple):
    """One merged model with one choice of batch and layout."""

    def __init__(self, spec: Spec) -> None:
        workload = _workload(spec)
        x, y = workload.load(spec["folder"])
        self.merged = limit.Merged(
            workload, limit.in_layout(x, spec["layout"]), y, batch=spec["batch"], layout=spec["layout"]
        )

    def run(self) -> Reply:
        timed = self.merged.round()
        return {"seconds": timed.seconds, "training_seconds": timed.training}


class LimitSweep(Simple):
    """Tries every batch and layout for a moment each; threads and allocator are the process's."""

    def __init__(self, spec: Spec) -> None:
        self.workload = _workload(spec)
        self.x, self.y = self.workload.load(spec["folder"])
        self.cap: float = spec["cap"]

    def run(self) -> Reply:
        rows = []
        for layout in limit.layouts(self.workload):
            x = limit.in_layout(self.x, layout)
            for batch in limit.batches(self.workload):
                merged = limit.Merged(self.workload, x, self.y, batch, layout)
                merged.round(cap=0.0)  # one step to warm up
                timed = merged.round(cap=self.cap, least=2)
                rows.append(
                    {
                        "batch": batch,
                        "layout": layout,
                        "seconds": timed.seconds,
                        "training_seconds": timed.training,
                    }
                )
        return {"rows": rows}


class Bare(Simple):
    """What a round costs without an engine: forward, backward and optimiser on batches cut beforehand, and nothing else.

    `part` of `parts` of the clients; several such processes at once are the twin of the workers.
    """

    def __init__(self, spec: Spec) -> None:
        w = self.workload = _workload(spec)
        x, y = w.load(spec["folder"])
        loop = plain.PlainFedProto(w, x, y)
        own = range(spec["part"], w.clients, spec["parts"])
        layout = spec["layout"]
        self.models = [loop.models[c] for c in own]
        if x.ndim == 4:
            self.models = [m.to(memory_format=limit.LAYOUTS[layout]) for m in self.models]
        self.optimisers = [loop.optimiser(m) for m in self.models]
        generator = torch.Generator().manual_seed(SEED)
        self.batches = []
        for client in own:
            orders = torch.randperm(w.samples, generator=generator).split(w.batch)
            self.batches.append([(limit.in_layout(loop.x[client][r], layout), loop.y[client][r]) for r in orders])
        self.whole = [limit.in_layout(loop.x[c], layout) for c in own]
        self.table = torch.randn(w.classes, loop.models[0].dim)  # type: ignore[call-overload]
        self.known = torch.ones(w.classes, dtype=torch.bool)

    def run(self) -> Reply:
        began = time.perf_counter()
        for model, optimiser, batches, whole in zip(
            self.models, self.optimisers, self.batches, self.whole, strict=True
        ):
            model.train()
            for x, y in batches:
                loss = plain.fedproto_loss(model, x, y, self.table, self.known)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            model.eval()
            with torch.no_grad():
                for piece in whole.split(plain.EVAL_BATCH):
                    model(piece)
        return {"seconds": time.perf_counter() - began}


class ServerRule(Simple):
    """One aggregation rule, timed and weighed."""

    def __init__(self, spec: Spec) -> None:
        case = SERVER[spec["case"]]
        self.call = server_call(case.quick() if spec["quick"] else case)

    def run(self) -> Reply:
        before = tree_memory()
        began = time.perf_counter()
        self.call()
        return {
            "seconds": time.perf_counter() - began,
            "inputs_bytes": before["now"],
            "peak_bytes": tree_memory()["peak"],
        }


def server_call(case: Server) -> Callable[[], object]:
    """Inputs made, the rule still to be called. Every client holds every class: the dearest case."""
    from .. import aggregate
    from ..bank import PrototypeBank, unit

    generator = torch.Generator().manual_seed(SEED)
    means = torch.empty(case.clients, case.classes, case.dim)
    centres = torch.randn(case.classes, case.dim, generator=generator)
    if case.close:
        centres = centres + 2 * torch.randn(case.dim, generator=generator)
    for own in means:  # client by client, so that making the inputs takes no more memory than they do
        own.copy_(unit(centres + 0.3 * torch.randn(case.classes, case.dim, generator=generator)))
    counts = torch.randint(1, 20, (case.clients, case.classes), generator=generator).float()
    banks = PrototypeBank(means, counts)
    if case.rule == "refine":
        start = PrototypeBank(unit(centres), counts.sum(0))
        return lambda: aggregate.refine(banks, start)
    rule: Callable[[PrototypeBank], PrototypeBank] = getattr(aggregate, case.rule)
    return lambda: rule(banks)


KINDS: dict[str, Callable[[Spec], Contender]] = {
    "plain": Plain,
    "engine": Engine,
    "many": Crowd,
    "limit": Limit,
    "limit-sweep": LimitSweep,
    "bare": Bare,
    "server": ServerRule,
}


def make(spec: Spec) -> Contender:
    if spec.get("keep_pages") and not limit.keep_pages():
        raise Skip("the C library's allocator cannot be told to keep its pages")
    if spec.get("threads"):
        torch.set_num_threads(spec["threads"])
    return KINDS[spec["kind"]](spec)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not disturb the replies

    def reply(content: Reply) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    try:
        contender = make(json.loads(sys.argv[1]))
    except Skip as reason:
        reply({"skip": str(reason)})
        return
    reply({"about": contender.about})
    try:
        for line in sys.stdin:
            reply(contender.run(**json.loads(line)))
    finally:
        contender.close()


if __name__ == "__main__":
    main()
