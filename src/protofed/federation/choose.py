"""Which engine, by measurement: a few steps of each way on the run's own model, data and method, then the fastest.

What is faster depends on the model: stacking helps small ones, worker processes nearly all, channels_last some
convolutional ones and hurts others. The choice is logged and written to the run's settings, so that resuming or repeating
the run uses the same and gives the same bits.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn

from .. import wire
from ..data.types import ClientData, FederatedData
from ..errors import ProtofedError
from ..methods.base import Method
from ..methods.server import Setup
from ..models.base import ModelSpec
from ..parts.filters import Filter
from . import scale
from .batches import Task, planned_steps
from .engine import Downloads, Engine, Inputs, PlainEngine
from .local import train_client, with_memory
from .mixed import MixedEngine
from .optimiser import LocalSettings
from .stack import Job, StackEngine, train_stack
from .workers import WorkerEngine, keep_pages

log = logging.getLogger("protofed")

INF = float("inf")
STEPS = 2  # timed steps of each way
UNLABELLED = 8  # unlabelled samples for each labelled one in them, at most
BUDGET = 0.6  # seconds after which no further way is tried
SLOW = 0.3  # seconds after which a way is not timed a third time
LARGE = 0.02  # seconds a step: a model this large gains nothing from stacking on a CPU


EngineName = Literal["auto", "loop", "stack", "workers"]
Inner = Literal["auto", "loop", "stack"]
Layout = Literal["auto", "contiguous", "channels_last"]
Convolution = Literal["auto", "grouped", "unfold", "lean"]


@dataclass(frozen=True)
class EngineSettings:
    """How clients are trained. `auto` parts are settled by measurement before the first round.

    `inner`, `layout` and `convolution` are one word for all clients, or one for each architecture.
    """

    engine: Annotated[EngineName, Field(description="auto (measured), loop, stack or workers")] = "auto"
    inner: Annotated[
        Inner | tuple[Inner, ...],
        Field(description="what a worker does: auto, loop or stack; with several models also one for each"),
    ] = "auto"
    layout: Annotated[
        Layout | tuple[Layout, ...], Field(description="memory layout of a loop: auto, contiguous or channels_last")
    ] = "auto"
    convolution: Annotated[
        Convolution | tuple[Convolution, ...],
        Field(description="auto; of a loop grouped or lean, of a stack grouped or unfold"),
    ] = "auto"
    workers: Annotated[int, Field(ge=0, le=512, description="worker processes; 0: as many as cores")] = 0
    threads: Annotated[
        int, Field(ge=0, le=512, description="torch threads of one process; 0: chosen by measurement")
    ] = 0

    def way(self, architecture: int) -> Way:
        """What is said of one architecture."""
        inner, layout, convolution = (
            value if isinstance(value, str) else value[architecture]
            for value in (self.inner, self.layout, self.convolution)
        )
        return Way(inner if self.engine in ("workers", "auto") else self.engine, layout, convolution)

    def settled(self, architectures: int = 1) -> bool:
        ways = [self.way(k) for k in range(architectures)]
        return self.engine != "auto" and self.workers > 0 and self.threads > 0 and all(way.settled() for way in ways)

    def check(self, architectures: int) -> None:
        for key in ("inner", "layout", "convolution"):
            value = getattr(self, key)
            if not isinstance(value, str) and len(value) != architectures:
                raise ProtofedError(
                    f"{key}={list(value)}: expected one word, or one for each of {architectures} models"
                )
        for way in map(self.way, range(architectures)):
            if (way.how, way.convolution) in (("stack", "lean"), ("loop", "unfold")):
                raise ProtofedError(
                    f"convolution={way.convolution}: not for a {way.how}; lean is for loops, unfold for stacks"
                )


@dataclass(frozen=True)
class Way:
    """How one process trains the clients of one architecture."""

    how: str
    layout: str
    convolution: str

    def settled(self) -> bool:
        return self.how != "auto" and (self.layout if self.how == "loop" else self.convolution) != "auto"

    @property
    def label(self) -> str:
        usual = ("contiguous", "grouped", "auto")
        return " ".join([self.how, *(word for word in (self.layout, self.convolution) if word not in usual)])


@dataclass(frozen=True)
class Plan:
    """What an engine is made for. Client c has the architecture `models[owner[c]]`."""

    method: Method
    models: tuple[ModelSpec, ...]
    owner: tuple[int, ...]
    data: FederatedData
    local: LocalSettings
    seed: int
    initial: str
    per_round: int
    filters: tuple[Filter, ...] = ()
    built: dict[int, nn.Module] = field(default_factory=dict)  # each architecture's network before any training

    def inputs(self, architecture: int) -> Inputs:
        """What the engines of one architecture are made for."""
        data, keeps_model = self.data, self.method.exchange.keeps_model
        task = Task(
            self.method,
            self.method.name,
            self.local,
            self.seed,
            data.num_classes,
            data.augmentation,
            data.held_back,
            self.filters,
            keeps_model,
        )
        return Inputs(self.method, self.models[architecture], data, task, self.initial == "own" and keeps_model)

    def network(self, architecture: int) -> nn.Module:
        """A network of its own for whoever asks; the model's settings are asked once."""
        if architecture not in self.built:
            self.built[architecture] = self.inputs(architecture).build()
        return copy.deepcopy(self.built[architecture])

    def part(self, architecture: int, way: Way) -> PlainEngine:
        """The engine of one process for the clients of one architecture."""
        inputs, network = self.inputs(architecture), self.network(architecture)
        if way.how == "stack":
            return StackEngine(inputs, network).use_unfold(way.convolution == "unfold")
        return PlainEngine(inputs, network, way.layout == "channels_last", way.convolution == "lean")

    def engine(self, chosen: EngineSettings) -> PlainEngine | MixedEngine:
        """The engine of one process for all clients."""
        parts = [self.part(k, chosen.way(k)) for k in range(len(self.models))]
        return parts[0] if len(parts) == 1 else MixedEngine(parts, self.owner)

    def members(self, architecture: int) -> list[int]:
        """As many clients of one architecture as a round is likely to have."""
        members = [c for c, which in enumerate(self.owner) if which == architecture]
        return members[: max(1, round(len(members) * self.per_round / len(self.owner)))]


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_engine(plan: Plan, wanted: EngineSettings) -> tuple[Engine, EngineSettings]:
    """The engine, and the settings that name it exactly."""
    architectures = len(plan.models)
    wanted.check(architectures)
    if scale.asked_for():
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        share = max(1, cores() // here)
        wanted = replace(wanted, workers=wanted.workers or share, threads=wanted.threads or share)
    chosen = scale.on_first(lambda: wanted if wanted.settled(architectures) else choose(plan, wanted))
    torch.set_num_threads(chosen.threads)
    engine: Engine = plan.engine(chosen)
    if chosen.engine == "workers":
        stacked = [chosen.way(k).how == "stack" for k in range(architectures)]
        engine = WorkerEngine(engine, chosen.workers, stacked=stacked)  # type: ignore[arg-type]
    keep_pages()
    return (scale.ScaledEngine(engine) if scale.asked_for() else engine), chosen


def choose(plan: Plan, wanted: EngineSettings) -> EngineSettings:
    began = time.perf_counter()
    on_cpu = plan.data.clients[0].labelled.x.device.type == "cpu"
    forks = on_cpu and "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()
    workers = min(wanted.workers or cores(), plan.per_round) if forks else 1
    frames = list(_frames(wanted, workers))
    options = []
    for k in range(len(plan.models)):
        convolves = any(isinstance(layer, nn.Conv2d) for layer in plan.network(k).modules())
        options.append({f: list(_ways(replace(wanted, engine=f.engine).way(k), convolves)) for f in frames})
    timed = [_timed(plan, k, by_frame, BUDGET / len(options)) for k, by_frame in enumerate(options)]
    best: dict[EngineSettings, float] = {}
    for frame in frames:
        ways, total = [], 0.0
        for k, by_frame in enumerate(options):
            known = {way: timed[k][way, frame.threads] for way in by_frame[frame] if (way, frame.threads) in timed[k]}
            way = min(known or by_frame[frame], key=lambda w: known.get(w, 0.0))
            ways.append(way)
            total += known.get(way, 0.0 if not timed[k] else INF) * len(plan.members(k)) / frame.workers
        best[_joined(frame, ways)] = total
    chosen = min(best, key=lambda option: best[option])
    if best[chosen] == INF:
        raise ProtofedError("this model or method cannot be stacked; use engine=loop or engine=auto")
    if any(timed):
        for k, times in enumerate(timed):
            if not times:  # there was one way only
                continue
            listed = sorted(times.items(), key=lambda item: item[1])
            lines = ", ".join(f"{way.label}{_threads(n)} {1e3 * seconds:.2f}" for (way, n), seconds in listed)
            log.info("engine: %s: ms per client step in one process: %s", plan.models[k].name, lines)
        log.info("engine: %s, measured in %.2f s", label(chosen), time.perf_counter() - began)
    return chosen


def _timed(
    plan: Plan, architecture: int, by_frame: Mapping[EngineSettings, Sequence[Way]], budget: float
) -> dict[tuple[Way, int], float]:
    """One process's seconds per client step, of each way and number of threads that the budget allows to try."""
    began = time.perf_counter()
    times: dict[tuple[Way, int], float] = {}
    wanted = list(dict.fromkeys((way, frame.threads) for frame, ways in by_frame.items() for way in ways))
    for way, threads in wanted if len(wanted) > 1 or len(by_frame) > 1 else []:
        if times and time.perf_counter() - began > budget:
            break
        times[way, threads] = _tried(plan, architecture, way, threads, min(times.values(), default=0.0))
    return times


def _joined(frame: EngineSettings, ways: Sequence[Way]) -> EngineSettings:
    def one_or_each(values: list[str]) -> Any:
        return values[0] if len(set(values)) == 1 else tuple(values)

    return replace(
        frame,
        inner=one_or_each([w.how for w in ways]),
        layout=one_or_each([w.layout if w.how == "loop" else "contiguous" for w in ways]),
        convolution=one_or_each([w.convolution for w in ways]),
    )


def _tried(plan: Plan, architecture: int, way: Way, threads: int, best: float) -> float:
    """A model that cannot be stacked (a branch on values, an operation vmap does not know) is trained in a loop."""
    try:
        return _seconds_per_step(plan, architecture, way, threads, best)
    except ProtofedError:
        raise
    except Exception as error:
        if way.how == "loop":
            raise
        name = plan.models[architecture].name
        reason = " ".join(str(error).split())
        log.info("engine: model %s cannot be stacked (%s: %.200s)", name, type(error).__name__, reason)
        return INF


def label(option: EngineSettings) -> str:
    each = max(1 if isinstance(v, str) else len(v) for v in (option.inner, option.layout, option.convolution))
    ways = list(dict.fromkeys(option.way(k).label for k in range(each)))
    words = [f"{option.workers} workers"] if option.engine == "workers" else []
    return " ".join([*words, " and ".join(ways)]) + _threads(option.threads)


def _threads(number: int) -> str:
    return f" {number} threads" if number > 1 else ""


def _frames(wanted: EngineSettings, workers: int) -> Iterator[EngineSettings]:
    """Every engine that is open under what was asked for; the likely ones first, as the budget may end."""
    engines: list[EngineName] = [wanted.engine]
    if wanted.engine == "auto":
        engines = [*(["workers"] if workers > 1 else []), "loop", "stack"]  # type: ignore[list-item]
    for engine in engines:
        if engine == "workers":
            yield replace(wanted, engine=engine, workers=workers, threads=1)
            continue
        for threads in sorted({1, cores()} if not wanted.threads else {wanted.threads}):
            yield replace(wanted, engine=engine, workers=1, threads=threads)


def _ways(given: Way, convolves: bool) -> Iterator[Way]:
    """Every way to train one architecture that is open under what was asked for."""
    for how in ("loop", "stack") if given.how == "auto" else (given.how,):
        if how == "loop":
            # a lean convolution is torch's own where it saves nothing, and wants its channels last
            usual = [("channels_last", "lean")] * convolves + [("contiguous", "grouped")]
            for layout, kind in usual if given.layout == "auto" else [(given.layout, "grouped")]:
                yield Way(how, layout, kind if given.convolution == "auto" else given.convolution)
        else:
            asked = "grouped" if given.convolution == "lean" else given.convolution  # of another engine
            both = ("grouped", "unfold")[: 1 + convolves] if asked == "auto" else (asked,)
            yield from (Way(how, "contiguous", convolution) for convolution in both)


def _seconds_per_step(plan: Plan, architecture: int, way: Way, threads: int, best: float) -> float:
    """Seconds one client's step takes this way; a way that cannot win is not tried on a large model."""
    members = plan.members(architecture)
    rows = torch.arange(STEPS * plan.local.batch)
    local = replace(plan.local, epochs=1)

    def short(client: int) -> ClientData:
        data = plan.data.clients[client]
        pool = data.unlabelled
        if pool is not None:
            pool = replace(pool, index=pool.index[: UNLABELLED * len(rows)])
        return replace(data, labelled=data.labelled.subset(rows[rows < len(data.labelled)]), unlabelled=pool)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if way.how == "stack" and best > LARGE and plan.data.clients[0].labelled.x.device.type == "cpu":
            return INF
        engine = plan.part(architecture, way)
        task = replace(engine.task, local=local)
        if way.how == "loop":
            client = members[0]
            received = with_memory(engine.message(_first_downloads(plan, engine, [client]), client), wire.Bundle())
            steps = len(list(planned_steps(task, short(client), client, 1)))

            def work() -> None:
                state = engine.state(client)
                train_client(task, engine.skeleton, state, short(client), received, client, 1, lambda *kept: None)

            return _best_time(work) / steps
        assert isinstance(engine, StackEngine)
        chosen = members[: max(2, min(len(members), int(0.02 / max(best, 1e-5))))]
        whole = engine.jobs(_first_downloads(plan, engine, chosen))
        jobs = [Job(j.client, j.state, short(j.client), j.received) for j in whole]
        steps = sum(len(list(planned_steps(task, j.data, j.client, 1))) for j in jobs)
        return _best_time(lambda: train_stack(task, engine.skeleton, jobs, 1)) / steps
    finally:
        torch.set_num_threads(before)


def _first_downloads(plan: Plan, engine: PlainEngine, clients: Sequence[int]) -> Downloads:
    """What clients of one architecture are sent in the first round."""
    exchange, numbers = plan.method.exchange, len(plan.data.clients)
    setup = Setup(plan.data.num_classes, engine.dim, numbers, engine.start, plan.seed, plan.owner)
    state = plan.method.start(setup)
    messages: list[bytes] = []
    number: dict[Hashable, int] = {}
    for client in clients:
        if (key := exchange.audience(state, client, 1)) not in number:
            number[key] = len(messages)
            messages.append(wire.encode(exchange.message(state, client, 1)))
    return Downloads(1, messages, {c: number[exchange.audience(state, c, 1)] for c in clients})


def _best_time(work: Callable[[], object]) -> float:
    times: list[float] = []
    while len(times) < 3 and (len(times) < 2 or sum(times) < SLOW):  # the first one warms up
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
