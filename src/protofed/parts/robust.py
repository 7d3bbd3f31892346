"""Robust reduces: rules that some clients cannot spoil by what they send.

Prototypes are reduced class by class over the clients that hold the class, and the weights of a model as one vector of
change, over the clients of one architecture. Every client counts the same, because a number of samples is what a client
says of itself. No rule can tell which of two clients lies; where there are only two, the shorter vector is taken.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import aggregate
from ..bank import PrototypeBank
from .reduce import Reduce, Reduced, Sums, Upload
from .vectors import change_of, changed


@dataclass(frozen=True)
class Robust(Reduce):
    """A rule for vectors: the prototypes of a class, or the changes of a model's weights."""

    def of_banks(self, banks: PrototypeBank) -> PrototypeBank:
        """The rule, applied to a stack of banks `[N, C, d]`, class by class."""
        raise NotImplementedError

    def _of(self, banks: PrototypeBank) -> PrototypeBank:
        return aggregate.shorter_of_two(banks, self.of_banks(banks))

    def finish(self, total: Sums, uploads: Sequence[Upload], sent: Mapping[str, Tensor]) -> Reduced:
        banks: dict[str, PrototypeBank] = {}
        sums: dict[str, PrototypeBank] = {}
        for name in dict.fromkeys(name for u in uploads for name in u.content.all_banks()):
            stack = PrototypeBank.stack([b[name] for u in uploads if name in (b := u.content.all_banks())])
            banks[name] = self._of(stack)
            holders = stack.known.sum(0)[:, None]
            sums[name] = PrototypeBank(holders * banks[name].means, banks[name].counts)
        scalars: dict[str, list[float]] = {}
        for upload in uploads:
            for name, value in upload.content.scalars.items():
                scalars.setdefault(name, []).append(value)
        medians = {name: float(statistics.median(values)) for name, values in scalars.items()}
        return Reduced(banks.pop("", None), banks, self._weights(uploads, sent), medians, sums)

    def _weights(self, uploads: Sequence[Upload], sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of each architecture, which is known by the names of its weights."""
        architectures: dict[tuple[str, ...], list[Mapping[str, Tensor]]] = {}
        for upload in uploads:
            if upload.content.weights:
                architectures.setdefault(tuple(sorted(upload.content.weights)), []).append(upload.content.weights)
        weights: dict[str, Tensor] = {}
        for names, models in architectures.items():
            changes = torch.stack([change_of({n: model[n] for n in names}, sent) for model in models])
            one_class = PrototypeBank(changes[:, None], changes.new_ones(len(changes), 1))
            weights |= changed({n: models[0][n] for n in names}, sent, self._of(one_class).means[0])
        return weights


@Reduce.registry.register("median")
@dataclass(frozen=True)
class Median(Robust):
    """The median of each coordinate, which holds as long as fewer than half of the clients send nonsense."""

    def of_banks(self, banks: PrototypeBank) -> PrototypeBank:
        return aggregate.median(banks)


@Reduce.registry.register("trimmed")
@dataclass(frozen=True)
class Trimmed(Robust):
    """The mean of each coordinate without as many smallest and largest values as `share` of all clients."""

    share: float = 0.1

    def __post_init__(self) -> None:
        _below_half("share", self.share)

    def of_banks(self, banks: PrototypeBank) -> PrototypeBank:
        return aggregate.trimmed_mean(banks, self.share)


@Reduce.registry.register("geometric-median", paper="Pillutla et al., IEEE TSP 2022")
@dataclass(frozen=True)
class GeometricMedian(Robust):
    """The point with the least sum of distances to the clients', by Weiszfeld's steps."""

    steps: int = 32

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("steps must be at least 1")

    def of_banks(self, banks: PrototypeBank) -> PrototypeBank:
        return aggregate.geometric_median(banks, self.steps)


@Reduce.registry.register("krum", paper="Blanchard et al., NeurIPS 2017")
@dataclass(frozen=True)
class Krum(Robust):
    """The one client's vector that is nearest to its neighbours, if a share of `attackers` is assumed."""

    attackers: float = 0.2

    def __post_init__(self) -> None:
        _below_half("attackers", self.attackers)

    def of_banks(self, banks: PrototypeBank) -> PrototypeBank:
        return aggregate.krum(banks, self.attackers)


@Reduce.registry.register("multi-krum", paper="Blanchard et al., NeurIPS 2017")
@dataclass(frozen=True)
class MultiKrum(Robust):
    """The mean of the vectors that are nearest to their neighbours, all but a share of assumed `attackers`."""

    attackers: float = 0.2

    def __post_init__(self) -> None:
        _below_half("attackers", self.attackers)

    def of_banks(self, banks: PrototypeBank) -> PrototypeBank:
        return aggregate.multi_krum(banks, self.attackers)


@Reduce.registry.register("bounded")
@dataclass(frozen=True)
class Bounded(Robust):
    """The mean of vectors that are scaled down to at most `factor` median norms."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError("factor must be above 0")

    def of_banks(self, banks: PrototypeBank) -> PrototypeBank:
        return aggregate.bounded_mean(banks, self.factor)


def _below_half(name: str, share: float) -> None:
    if not 0 <= share < 0.5:
        raise ValueError(f"{name} must be at least 0 and below 0.5")
