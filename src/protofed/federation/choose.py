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
from functools import cached_property
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
from ..models.convolution import has_few_outputs
from ..models.skeleton import Skeleton
from ..parts.filters import Filter, rule_of
from ..privacy.protocol import Rules
from . import scale
from .batches import Task
from .engine import ArchitectureInputs, Downloads, Engine, PlainEngine
from .mixed import MixedEngine
from .optimiser import LocalSettings
from .pages import keep_pages
from .rule import Facts, Recipe, rule
from .secure import SecureSums, sum_layout
from .stack import StackEngine
from .workers import with_workers

log = logging.getLogger("protofed")

EngineName = Literal["auto", "loop", "stack", "workers"]
Inner = Literal["auto", "loop", "stack"]
MemoryFormat = Literal["auto", "contiguous", "channels_last"]
Convolution = Literal["auto", "grouped", "unfold", "lean"]


@dataclass(frozen=True)
class EngineSettings:
    """How clients are trained. What is `auto` is decided by rule before the first round.

    `inner`, `layout` and `convolution` have one value for all clients, or one for each architecture. `workers=0` means
    as many worker processes as there are cores, and `threads=0` means one thread.
    """

    engine: Annotated[EngineName, Field(description="auto (by rule), loop, stack or workers")] = "auto"
    inner: Annotated[
        Inner | tuple[Inner, ...],
        Field(description="what a worker does: auto, loop or stack; with several models also one for each"),
    ] = "auto"
    layout: Annotated[
        MemoryFormat | tuple[MemoryFormat, ...],
        Field(description="memory layout of a loop: auto, contiguous or channels_last"),
    ] = "auto"
    convolution: Annotated[
        Convolution | tuple[Convolution, ...],
        Field(description="auto; of a loop grouped or lean, of a stack grouped or unfold"),
    ] = "auto"
    workers: Annotated[int, Field(ge=0, le=512, description="worker processes; 0: as many as cores")] = 0
    threads: Annotated[int, Field(ge=0, le=512, description="torch threads of one process; 0: one")] = 0

    def recipe(self, architecture: int) -> Recipe:
        """What the settings say of one architecture."""
        inner, layout, convolution = (
            value if isinstance(value, str) else value[architecture]
            for value in (self.inner, self.layout, self.convolution)
        )
        return Recipe(inner if self.engine in ("workers", "auto") else self.engine, layout, convolution)

    def check(self, architectures: int) -> None:
        """Raise a `ProtofedError` where settings contradict each other."""
        for key in ("inner", "layout", "convolution"):
            value = getattr(self, key)
            if not isinstance(value, str) and len(value) != architectures:
                raise ProtofedError(
                    f"{key}={list(value)}: expected one word, or one for each of {architectures} models"
                )
        for recipe in map(self.recipe, range(architectures)):
            if (recipe.engine, recipe.convolution) in (("stack", "lean"), ("loop", "unfold")):
                raise ProtofedError(
                    f"convolution={recipe.convolution}: not for a {recipe.engine}; lean is for loops, unfold for stacks"
                )
        if self.engine == "workers" and self.threads > 1:
            raise ProtofedError(
                f"threads={self.threads}: a worker process has one thread; use engine=loop, engine=stack or engine=auto"
            )


@dataclass(frozen=True)
class EngineInputs:
    """Everything that an engine for all clients is made of. Client c has the architecture `models[owner[c]]`."""

    method: Method
    models: tuple[ModelSpec, ...]
    owner: tuple[int, ...]
    data: FederatedData
    local: LocalSettings
    seed: int
    initial: str
    per_round: int
    filters: tuple[Filter, ...] = ()
    secret: bool = False  # whether noise comes from the operating system and not from the seed
    secure: Rules | None = None  # of secure sums, where only sums leave a client
    views: tuple[FederatedData, ...] = ()  # the data as each architecture sees it, where it is not as it is
    networks: dict[int, nn.Module] = field(default_factory=dict)  # each architecture's network before any training

    def inputs(self, architecture: int) -> ArchitectureInputs:
        """Everything that the engine of one architecture is made of."""
        data, keeps_model = self.seen_by(architecture), self.method.exchange.keeps_model
        task = Task(
            self.method,
            self.method.name,
            self.local,
            self.seed,
            data.num_classes,
            data.augmentation,
            data.held_back,
            self.filters,
            rule_of(self.method.reduce, self.filters),
            keeps_model,
            self.secret,
            self._sums_of(architecture),
            data.client_names,
        )
        return ArchitectureInputs(
            self.method, self.models[architecture], data, task, self.initial == "own" and keeps_model
        )

    def seen_by(self, architecture: int) -> FederatedData:
        """The data as an architecture sees it: features, where its encoder is frozen."""
        return self.views[architecture] if self.views else self.data

    @cached_property
    def sums(self) -> SecureSums | None:
        """How uploads are summed without the server seeing one, where the settings ask for that."""
        if self.secure is None:
            return None
        skeletons = [Skeleton(self.network(k)) for k in range(len(self.models))]
        sizes = {"classes": self.data.num_classes, "dim": skeletons[0].dim, "clients": len(self.data.clients)}
        rule = rule_of(self.method.reduce, self.filters)
        layout = sum_layout(rule, self.method.exchange, sizes, [s.weights() for s in skeletons])
        return SecureSums(rule, layout, self.secure)

    def _sums_of(self, architecture: int) -> SecureSums | None:
        """The same for the clients of one architecture."""
        return self.sums and replace(self.sums, architecture=architecture if len(self.models) > 1 else None)

    def network(self, architecture: int) -> nn.Module:
        """A copy of an architecture's initial network. The network itself is built only once."""
        if architecture not in self.networks:
            self.networks[architecture] = replace(self, secure=None).inputs(architecture).build()
        return copy.deepcopy(self.networks[architecture])

    def part(self, architecture: int, recipe: Recipe) -> PlainEngine:
        """The engine of one process for the clients of one architecture."""
        inputs, network = self.inputs(architecture), self.network(architecture)
        if recipe.engine == "stack":
            return StackEngine(inputs, network).use_unfold(recipe.convolution == "unfold")
        return PlainEngine(inputs, network, recipe.layout == "channels_last", recipe.convolution == "lean")

    def engine(self, settings: EngineSettings) -> PlainEngine | MixedEngine:
        """The engine of one process for all clients."""
        parts = [self.part(k, settings.recipe(k)) for k in range(len(self.models))]
        return parts[0] if len(parts) == 1 else MixedEngine(parts, self.owner)

    def facts(self, architecture: int) -> Facts:
        """The sizes of one architecture that the rule decides by."""
        data = self.seen_by(architecture)
        network, feed, x = self.network(architecture), self.method.feed, data.clients[0].labelled.x
        passes = 1 + (max(1, len(feed.views)) if feed.reads_unlabelled else 0)  # labelled samples, and views of others
        sample = forward_flops(network, data.sample_shape, tokens=not x.is_floating_point())
        convolutions = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
        return Facts(
            parameter_count(network),
            sample * self.local.batch * passes,
            max((layer.in_channels for layer in convolutions), default=0),
            len(self.members(architecture)) if self.method.exchange.asks_clients else 0,
            x.device.type != "cpu",
            bool(convolutions) and has_few_outputs(network, data.sample_shape, self.local.batch),
        )

    def members(self, architecture: int) -> list[int]:
        """As many clients of one architecture as a round is expected to have."""
        members = [c for c, index in enumerate(self.owner) if index == architecture]
        return members[: max(1, round(len(members) * self.per_round / len(self.owner)))]


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_engine(inputs: EngineInputs, request: EngineSettings) -> tuple[Engine, EngineSettings]:
    """Make the engine that the settings ask for.

    Args:
        inputs: Everything that the engine is made of.
        request: The engine settings, in which `auto` leaves a choice open.

    Returns:
        The engine, and the settings that name it exactly, with nothing left open.

    Example:
        `engine, settings = make_engine(inputs, EngineSettings(engine="stack"))`
    """
    request.check(len(inputs.models))
    if inputs.local.shared_optimiser:
        request = one_after_another(inputs, request)
    settings, engine = choose(inputs, request)
    torch.set_num_threads(settings.threads)
    if settings != request:  # the settings left something open
        log.info("engine: %s", label(settings))
    if settings.workers > 1:
        engine = with_workers(engine, settings.workers)  # type: ignore[assignment]
    keep_pages()
    return (scale.ScaledEngine(engine) if scale.asked_for() else engine), settings


def one_after_another(inputs: EngineInputs, request: EngineSettings) -> EngineSettings:
    """The engine settings of a run whose clients pass one optimiser state on, which only a loop in one process can do."""
    reason = ""
    if request.engine in ("stack", "workers") or request.workers > 1:
        reason = "it needs engine=loop with one worker"
    elif len(inputs.models) > 1:
        reason = "it needs one architecture for all clients"
    elif scale.asked_for():
        reason = "it needs one process, not several ranks"
    if reason:
        raise ProtofedError(f"shared_optimiser=true: clients are trained one after another; {reason}")
    return replace(request, engine="loop", workers=1)


def choose(inputs: EngineInputs, request: EngineSettings) -> tuple[EngineSettings, PlainEngine | MixedEngine]:
    """The settings with nothing left open, and the engine of one process that they name."""
    recipes = [_recipe(inputs, k, request.recipe(k)) for k in range(len(inputs.models))]
    columns = zip(*((recipe.engine, recipe.layout, recipe.convolution) for recipe in recipes), strict=True)
    inner, layout, convolution = (_one_or_each(words) for words in columns)
    settings = replace(request, inner=inner, layout=layout, convolution=convolution, threads=request.threads or 1)
    engine = inputs.engine(settings)
    workers = 1
    if request.engine in ("auto", "workers") and settings.threads == 1 and engine.device.type == "cpu":
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if scale.asked_for() else 1
        workers = max(1, min(request.workers or cores() // local_ranks, _groups(inputs, engine)))
    name = request.engine
    if name == "auto":
        name = inner if workers == 1 and isinstance(inner, str) else "workers"  # type: ignore[assignment]
    return replace(settings, engine=name, workers=workers), engine


def _groups(inputs: EngineInputs, engine: PlainEngine | MixedEngine) -> int:
    """The number of groups that workers share: of a round's clients, or of all where each has a model of its own."""
    if not inputs.method.exchange.asks_clients:
        return 1
    clients = [c for k in range(len(inputs.models)) for c in inputs.members(k)]
    return len(engine.groups(range(len(inputs.owner)) if engine.model_for_each else clients))


def _recipe(inputs: EngineInputs, architecture: int, request: Recipe) -> Recipe:
    """How clients of one architecture are trained. A model that cannot be stacked is trained in a loop."""
    facts = inputs.facts(architecture)
    recipe = rule(facts, request)
    name = inputs.models[architecture].name
    if recipe != request:
        log.info("engine: %s: %s: %s", name, facts, recipe.label)
    if recipe.engine == "stack" and facts.clients and (reason := _not_stackable(inputs, architecture, recipe)):
        if request.engine == "stack":
            raise ProtofedError(f"model {name} cannot be stacked ({reason}); use engine=loop or engine=auto")
        log.info("engine: model %s cannot be stacked (%s)", name, reason)
        return rule(facts, replace(request, engine="loop"))
    return recipe


def _not_stackable(inputs: EngineInputs, architecture: int, recipe: Recipe) -> str:
    """Why two clients cannot be stacked (a branch on values, an operation unknown to vmap); empty where they can."""
    engine = inputs.part(architecture, recipe)
    assert isinstance(engine, StackEngine)
    try:
        engine.rehearse(_first_downloads(inputs, engine, inputs.members(architecture)[:2]))
    except ProtofedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split()):.200s}"
    return ""


def _one_or_each(words: Sequence[str]) -> Any:
    """One value where all architectures have the same, otherwise one for each."""
    return words[0] if len(set(words)) == 1 else tuple(words)


def label(option: EngineSettings) -> str:
    """The engine that settings name, in a few words."""
    architectures = max(1 if isinstance(v, str) else len(v) for v in (option.inner, option.layout, option.convolution))
    recipes = list(dict.fromkeys(option.recipe(k).label for k in range(architectures)))
    words = [f"{option.workers} workers"] if option.workers > 1 else []
    return " ".join([*words, " and ".join(recipes)]) + (f" {option.threads} threads" if option.threads > 1 else "")


def _first_downloads(inputs: EngineInputs, engine: PlainEngine, clients: Sequence[int]) -> Downloads:
    """What clients of one architecture are sent in the first round."""
    exchange, clients_total = inputs.method.exchange, len(inputs.data.clients)
    setup = Setup(inputs.data.num_classes, engine.dim, clients_total, engine.start, inputs.seed, inputs.owner)
    state = inputs.method.start(setup)
    messages: list[bytes] = []
    number: dict[Hashable, int] = {}
    for client in clients:
        if (key := exchange.audience(state, client, 1)) not in number:
            number[key] = len(messages)
            messages.append(wire.encode(exchange.message(state, client, 1)))
    return Downloads(1, messages, {c: number[exchange.audience(state, c, 1)] for c in clients})


@contextmanager
def threads_kept() -> Iterator[None]:
    """A context that restores the number of torch threads at its end."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
