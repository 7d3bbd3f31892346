"""Which engine trains the clients. What the settings leave open is decided by rule (`rule.py`), never by timing.

The choice is logged and written to the run's settings. The number of cores decides only how many worker processes share
out the groups of clients, which has no influence on a result.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn

from .. import wire
from ..data.types import FederatedData
from ..errors import ProtofedError
from ..evaluate.cost import forward_flops
from ..methods.base import Method
from ..methods.server import Setup
from ..models.base import ModelSpec, parameter_count
from ..parts.filters import Filter
from . import scale
from .batches import Task
from .engine import Downloads, Engine, Inputs, PlainEngine
from .mixed import MixedEngine
from .optimiser import LocalSettings
from .rule import Facts, Way, rule
from .stack import StackEngine
from .workers import keep_pages, with_workers

log = logging.getLogger("protofed")

EngineName = Literal["auto", "loop", "stack", "workers"]
Inner = Literal["auto", "loop", "stack"]
Layout = Literal["auto", "contiguous", "channels_last"]
Convolution = Literal["auto", "grouped", "unfold", "lean"]


@dataclass(frozen=True)
class EngineSettings:
    """How clients are trained. What is `auto` is decided by rule before the first round.

    `inner`, `layout` and `convolution` are one word for all clients, or one for each architecture. `workers=0` stands for
    as many as there are cores, `threads=0` for one.
    """

    engine: Annotated[EngineName, Field(description="auto (by rule), loop, stack or workers")] = "auto"
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
    threads: Annotated[int, Field(ge=0, le=512, description="torch threads of one process; 0: one")] = 0

    def way(self, architecture: int) -> Way:
        """What is said of one architecture."""
        inner, layout, convolution = (
            value if isinstance(value, str) else value[architecture]
            for value in (self.inner, self.layout, self.convolution)
        )
        return Way(inner if self.engine in ("workers", "auto") else self.engine, layout, convolution)

    def check(self, architectures: int) -> None:
        """Refuse what contradicts itself."""
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
        if self.engine == "workers" and self.threads > 1:
            raise ProtofedError(
                f"threads={self.threads}: a worker process has one thread; use engine=loop, engine=stack or engine=auto"
            )


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

    def facts(self, architecture: int) -> Facts:
        """What the rule knows of one architecture."""
        network, feed, first = self.network(architecture), self.method.feed, self.data.clients[0].labelled.x
        passes = 1 + (max(1, len(feed.views)) if feed.reads_unlabelled else 0)  # labelled samples, and views of others
        sample = forward_flops(network, self.data.sample_shape, tokens=not first.is_floating_point())
        convolutions = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
        return Facts(
            parameter_count(network),
            sample * self.local.batch * passes,
            max((layer.in_channels for layer in convolutions), default=0),
            len(self.members(architecture)) if self.method.exchange.asks_clients else 0,
            first.device.type != "cpu",
        )

    def members(self, architecture: int) -> list[int]:
        """As many clients of one architecture as a round is likely to have."""
        members = [c for c, which in enumerate(self.owner) if which == architecture]
        return members[: max(1, round(len(members) * self.per_round / len(self.owner)))]


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_engine(plan: Plan, wanted: EngineSettings) -> tuple[Engine, EngineSettings]:
    """The engine, and the settings that name it exactly."""
    wanted.check(len(plan.models))
    chosen, engine = choose(plan, wanted)
    torch.set_num_threads(chosen.threads)
    if chosen != wanted:  # the settings left something open
        log.info("engine: %s", label(chosen))
    if chosen.workers > 1:
        engine = with_workers(engine, chosen.workers)  # type: ignore[assignment]
    keep_pages()
    return (scale.ScaledEngine(engine) if scale.asked_for() else engine), chosen


def choose(plan: Plan, wanted: EngineSettings) -> tuple[EngineSettings, PlainEngine | MixedEngine]:
    """The settings with nothing left open, and the engine of one process that they name."""
    ways = [_way(plan, k, wanted.way(k)) for k in range(len(plan.models))]
    columns = zip(*((way.how, way.layout, way.convolution) for way in ways), strict=True)
    inner, layout, convolution = (_one_or_each(words) for words in columns)
    chosen = replace(wanted, inner=inner, layout=layout, convolution=convolution, threads=wanted.threads or 1)
    engine = plan.engine(chosen)
    workers = 1
    if wanted.engine in ("auto", "workers") and chosen.threads == 1 and engine.device.type == "cpu":
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if scale.asked_for() else 1
        workers = max(1, min(wanted.workers or cores() // here, _groups(plan, engine)))
    name = wanted.engine
    if name == "auto":
        name = inner if workers == 1 and isinstance(inner, str) else "workers"  # type: ignore[assignment]
    return replace(chosen, engine=name, workers=workers), engine


def _groups(plan: Plan, engine: PlainEngine | MixedEngine) -> int:
    """How many groups there are to share out: of a round's clients, or of all where each is evaluated by its own model."""
    if not plan.method.exchange.asks_clients:
        return 1
    clients = [c for k in range(len(plan.models)) for c in plan.members(k)]
    return len(engine.groups(range(len(plan.owner)) if engine.model_for_each else clients))


def _way(plan: Plan, architecture: int, given: Way) -> Way:
    """How clients of one architecture are trained; in a loop where the rule would stack what cannot be stacked."""
    facts = plan.facts(architecture)
    way = rule(facts, given)
    name = plan.models[architecture].name
    if way != given:
        log.info("engine: %s: %s: %s", name, facts, way.label)
    if way.how == "stack" and facts.clients and (reason := _not_stackable(plan, architecture, way)):
        if given.how == "stack":
            raise ProtofedError(f"model {name} cannot be stacked ({reason}); use engine=loop or engine=auto")
        log.info("engine: model %s cannot be stacked (%s)", name, reason)
        return rule(facts, replace(given, how="loop"))
    return way


def _not_stackable(plan: Plan, architecture: int, way: Way) -> str:
    """Why two clients cannot be stacked (a branch on values, an operation vmap does not know); empty where they can."""
    engine = plan.part(architecture, way)
    assert isinstance(engine, StackEngine)
    try:
        engine.rehearse(_first_downloads(plan, engine, plan.members(architecture)[:2]))
    except ProtofedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split()):.200s}"
    return ""


def _one_or_each(words: Sequence[str]) -> Any:
    return words[0] if len(set(words)) == 1 else tuple(words)


def label(option: EngineSettings) -> str:
    """An engine in a few words."""
    each = max(1 if isinstance(v, str) else len(v) for v in (option.inner, option.layout, option.convolution))
    ways = list(dict.fromkeys(option.way(k).label for k in range(each)))
    words = [f"{option.workers} workers"] if option.workers > 1 else []
    return " ".join([*words, " and ".join(ways)]) + (f" {option.threads} threads" if option.threads > 1 else "")


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


@contextmanager
def threads_kept() -> Iterator[None]:
    """Put the number of torch threads back afterwards."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
