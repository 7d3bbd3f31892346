"""Which engine, by measurement: a few steps of each way on the run's own model, data and method, then the fastest.

What is faster depends on the model: stacking helps small ones, worker processes nearly all, channels_last some
convolutional ones and hurts others. The choice is logged and written to the run's settings, so that resuming or repeating
the run uses the same and gives the same bits.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from .. import wire
from ..data.types import ClientData, FederatedData
from ..errors import ProtofedError
from ..methods.base import Method, Setup
from ..models.base import ModelSpec
from ..wire import Bundle
from . import scale
from .engine import Engine, PlainEngine
from .local import train_client
from .optimiser import LocalSettings
from .stack import Job, StackEngine, holds, train_stack
from .workers import WorkerEngine, keep_pages

log = logging.getLogger("protofed")

STEPS = 2  # timed steps of each way, after one that warms up
BUDGET = 0.6  # seconds after which no further way is tried
LARGE = 0.02  # seconds a step: a model this large gains nothing from stacking on a CPU


@dataclass(frozen=True)
class EngineSettings:
    """How clients are trained. `auto` parts are settled by measurement before the first round."""

    engine: Literal["auto", "loop", "stack", "workers"] = "auto"
    inner: Literal["auto", "loop", "stack"] = "auto"
    layout: Literal["auto", "contiguous", "channels_last"] = "auto"
    convolution: Literal["auto", "grouped", "unfold"] = "auto"
    workers: int = 0
    threads: int = 0

    def settled(self) -> bool:
        how = self.inner if self.engine == "workers" else self.engine
        part = self.layout if how == "loop" else self.convolution
        return self.engine != "auto" and how != "auto" and part != "auto" and self.workers > 0 and self.threads > 0


@dataclass(frozen=True)
class Plan:
    """What an engine is made for."""

    method: Method
    model: ModelSpec
    data: FederatedData
    local: LocalSettings
    seed: int
    initial: str
    per_round: int

    def loop(self, layout: str) -> PlainEngine:
        return PlainEngine(
            self.method,
            self.model,
            self.data,
            self.local,
            seed=self.seed,
            initial=self.initial,
            channels_last=layout == "channels_last",
        )

    def stack(self, convolution: str) -> StackEngine:
        engine = StackEngine(self.method, self.model, self.data, self.local, seed=self.seed, initial=self.initial)
        return engine.use_unfold(convolution == "unfold")


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_engine(plan: Plan, wanted: EngineSettings) -> tuple[Engine, EngineSettings]:
    """The engine, and the settings that name it exactly."""
    if scale.asked_for():
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        share = max(1, cores() // here)
        wanted = replace(wanted, workers=wanted.workers or share, threads=wanted.threads or share)
    chosen = scale.on_first(lambda: wanted if wanted.settled() else choose(plan, wanted))
    torch.set_num_threads(chosen.threads)
    inner = chosen.inner if chosen.engine == "workers" else chosen.engine
    engine: Engine = plan.stack(chosen.convolution) if inner == "stack" else plan.loop(chosen.layout)
    if chosen.engine == "workers":
        engine = WorkerEngine(engine, chosen.workers, group=0 if inner == "stack" else 1)  # type: ignore[arg-type]
    keep_pages()
    return (scale.ScaledEngine(engine) if scale.asked_for() else engine), chosen


def choose(plan: Plan, wanted: EngineSettings) -> EngineSettings:
    began = time.perf_counter()
    on_cpu = plan.data.clients[0].labelled.x.device.type == "cpu"
    forks = on_cpu and "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()
    workers = min(wanted.workers or cores(), plan.per_round) if forks else 1
    candidates = list(_options(plan, wanted, workers))
    alone: dict[EngineSettings, float] = {}  # one process's seconds; workers share the clients between them
    timed: dict[EngineSettings, float] = {}
    for option in candidates if len(candidates) > 1 else []:
        single = replace(option, engine=option.inner, workers=1)
        if single not in alone:
            if alone and time.perf_counter() - began > BUDGET:
                continue
            alone[single] = _tried(plan, single, min(alone.values(), default=0.0))
        timed[option] = alone[single] / option.workers
    candidates = [o for o in candidates if o in timed] or candidates
    best = min(candidates, key=lambda o: timed.get(o, 0.0))
    if not timed:
        return best
    if timed[best] == float("inf"):
        raise ProtofedError("this model or method cannot be stacked; use engine=loop or engine=auto")
    lines = ", ".join(f"{label(o)} {1e3 * timed[o]:.2f}" for o in sorted(candidates, key=lambda o: timed[o]))
    log.info("engine: %s (ms per client step: %s; measured in %.2f s)", label(best), lines, time.perf_counter() - began)
    return best


def _tried(plan: Plan, option: EngineSettings, best: float) -> float:
    """A model that cannot be stacked (a branch on values, an operation vmap does not know) is trained in a loop."""
    try:
        return _seconds_per_step(plan, option, best)
    except ProtofedError:
        raise
    except Exception as error:
        if option.engine == "loop":
            raise
        log.info(
            "engine: this model cannot be stacked (%s: %.200s)", type(error).__name__, " ".join(str(error).split())
        )
        return float("inf")


def label(option: EngineSettings) -> str:
    how = option.inner if option.engine == "workers" else option.engine
    detail = option.layout if how == "loop" else option.convolution
    words = [f"{option.workers} workers"] if option.engine == "workers" else []
    words += [how] + ([detail] if detail not in ("contiguous", "grouped") else [])
    return " ".join(words + ([f"{option.threads} threads"] if option.threads > 1 else []))


def _options(plan: Plan, wanted: EngineSettings, workers: int) -> Iterator[EngineSettings]:
    """Every way that is open under what was asked for."""
    convolves = any(isinstance(m, nn.Conv2d) for m in plan.loop("contiguous").skeleton.module.modules())
    layouts = [wanted.layout] if wanted.layout != "auto" else ["contiguous", "channels_last"][: 1 + convolves]
    convolutions = [wanted.convolution] if wanted.convolution != "auto" else ["grouped", "unfold"][: 1 + convolves]
    all_threads = wanted.threads or cores()
    if wanted.engine != "auto":
        engines: list[str] = [wanted.engine]
    else:
        engines = (["workers"] if workers > 1 else []) + ["loop", "stack"]  # the likely ones first: the budget may end
    for engine in engines:
        if engine == "workers":
            inners = ["loop", "stack"] if wanted.inner == "auto" else [wanted.inner]
            threads = [1]
        else:
            inners, threads = [engine], sorted({1, all_threads} if not wanted.threads else {wanted.threads})
        for inner in inners:
            for detail in layouts if inner == "loop" else convolutions:
                for count in threads:
                    yield EngineSettings(
                        engine,  # type: ignore[arg-type]
                        inner,  # type: ignore[arg-type]
                        detail if inner == "loop" else "contiguous",  # type: ignore[arg-type]
                        detail if inner == "stack" else "grouped",  # type: ignore[arg-type]
                        workers if engine == "workers" else 1,
                        count,
                    )


def _seconds_per_step(plan: Plan, option: EngineSettings, best: float) -> float:
    """Seconds one client's step takes this way; a way that cannot win is not tried on a large model."""
    clients = range(min(plan.per_round, len(plan.data.clients)))
    rows = torch.arange(min(len(plan.data.clients[0].labelled), STEPS * plan.local.batch))
    local = replace(plan.local, epochs=1)

    def short(client: int) -> ClientData:
        data = plan.data.clients[client]
        return replace(data, labelled=data.labelled.subset(rows[: len(data.labelled)]))

    before = torch.get_num_threads()
    torch.set_num_threads(option.threads)
    try:
        if option.engine == "loop":
            engine = plan.loop(option.layout)
            task = replace(engine.task, local=local)
            received = _first_message(plan, engine)
            steps = -(-len(rows) // local.batch)

            def work() -> None:
                train_client(task, engine.skeleton, engine.state(0), short(0), received, 0, 1)

            return _best_time(work) / steps
        if best > LARGE and plan.data.clients[0].labelled.x.device.type == "cpu":
            return float("inf")
        stack = plan.stack(option.convolution)
        task = replace(stack.task, local=local)
        received = _first_message(plan, stack)
        chosen = list(clients)[: max(2, min(len(clients), int(0.02 / max(best, 1e-5))))]
        has = holds(received, stack.state(chosen[0]))
        jobs = [Job(c, stack.state(c), short(c), has) for c in chosen]
        steps = sum(-(-len(j.data.labelled) // local.batch) for j in jobs)
        return _best_time(lambda: train_stack(task, stack.skeleton, jobs, 1)) / steps
    finally:
        torch.set_num_threads(before)


def _first_message(plan: Plan, engine: PlainEngine) -> Bundle:
    sizes = tuple(len(c.labelled) for c in plan.data.clients)
    setup = Setup(plan.data.num_classes, engine.skeleton.dim, sizes, engine.start, plan.seed)
    sent = plan.method.send(plan.method.server_start(setup), 0, 1)
    return wire.decode(wire.encode(sent), "first message").to(engine.device)


def _best_time(work: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


@contextmanager
def threads_kept() -> Iterator[None]:
    """Put the number of torch threads back afterwards."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
