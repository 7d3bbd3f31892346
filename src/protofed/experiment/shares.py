"""How long cells take, and how they are shared out: to parts of a comparison on several hosts, and to cores.

A part is written `2/8`, the second of eight. Which cells it has follows from the settings alone, so every part finds its
own without asking the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from .. import models
from ..errors import ProtofedError
from ..federation.selection import participants_per_round
from ..models.base import ModelSpec, parameter_count
from .architectures import make
from .settings import AutoModel, Settings

USUAL = 20  # clients, and samples of each, where the settings leave it to the data
IMAGE = (3, 32, 32)  # a model is measured on samples of this shape, because the data has not been loaded


@dataclass(frozen=True)
class Part:
    """One of several equal parts of a comparison."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read the text of an option.

        >>> Part.parse("2/8")
        Part(number=2, of=8)
        """
        found = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text)
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise ProtofedError(f"--part {text!r}: expected NUMBER/PARTS, such as 2/8 for the second of eight parts")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def turned(self, by: int) -> Part:
        """The part that is so many further on, in a circle: `Part(2, 3).turned(2)` is the first."""
        return Part((self.number - 1 + by) % self.of + 1, self.of)

    def of_cells(self, cells: Mapping[str, Settings]) -> list[str]:
        """The names of this part's cells, in the order of the mapping.

        The longest cell goes first to the part that has the least work so far, so parts take about equally long.
        """
        loads = [0.0] * self.of
        mine = set()
        works = {name: work(settings) for name, settings in cells.items()}
        for name in sorted(works, key=lambda name: -works[name]):  # a stable sort: equal cells go round
            part = loads.index(min(loads))
            loads[part] += works[name]
            if part == self.number - 1:
                mine.add(name)
        return [name for name in cells if name in mine]


def work(settings: Settings) -> float:
    """An estimate of the work of a run, from its settings alone: only the ratio of two estimates means something.

    It is rounds × clients in a round × samples × epochs × passes of a step × parameters of the model.

    Example: `work(resolve("fedavg", {"rounds": 20})) / work(resolve("fedavg", {"rounds": 10}))` is 2.
    """
    g, method, partition = settings.general, settings.federated, settings.partition
    clients = participants_per_round(g.participation, g.clients or USUAL)
    samples = float(getattr(partition, "way", 1)) * float(getattr(partition, "shot", USUAL))
    feed, teacher = method.feed, method.teacher
    passes = 1 + (max(1, len(feed.views)) if feed.reads_unlabelled else 0)
    trainings = clients * g.epochs * passes + (teacher.epochs if teacher is not None else 0)
    return g.rounds * trainings * samples * _parameters(settings)


def _parameters(settings: Settings) -> float:
    """The mean number of parameters of the models in the settings."""
    if settings.general.models:
        chosen = [make(text) for text in settings.general.models]
        return sum(_parameters_of(model) for model in chosen) / len(chosen)
    model = settings.model
    return _parameters_of(models.registry.make("cnn") if isinstance(model, AutoModel) else model)


_counts: dict[str, int] = {}  # parameters by the text of a model's settings


def _parameters_of(model: ModelSpec) -> int:
    """The number of a model's parameters on small images; 1 where it is for other data."""
    text = repr(model)
    if text not in _counts:
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):
                _counts[text] = max(1, parameter_count(model.build(IMAGE, 10)))
        except Exception:  # a model that needs samples of another kind, files or a device
            _counts[text] = 1
    return _counts[text]


@dataclass
class Pace:
    """How long cells take: an estimate at first, corrected by those that have finished."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Measured seconds of whole runs, by all their settings but the seed."""
    ratios: list[float] = field(default_factory=list)
    """Measured seconds by estimated work."""

    def add(self, settings: Settings, seconds: float, share: float = 1.0) -> None:
        """Note that a share of a run's rounds took so many seconds."""
        if share > 0:
            self.seconds.setdefault(_kind(settings), []).append(seconds / share)
            self.ratios.append(seconds / share / work(settings))

    def expected(self, settings: Settings) -> float:
        """The seconds that a whole run is expected to take; before any has finished, its work."""
        if measured := self.seconds.get(_kind(settings)):
            return median(measured)
        return work(settings) * (median(self.ratios) if self.ratios else 1.0)


def _kind(settings: Settings) -> str:
    """A text that is the same for runs that differ in their seed alone."""
    stored: dict[str, Any] = settings.to_dict()
    return str({key: value for key, value in stored.items() if key not in ("seed", "workers")})
