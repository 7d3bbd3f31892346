"""Server steps: what a server does with the reduced prototypes before it sends them to the clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import aggregate
from ..bank import PrototypeBank
from ..errors import ProtofedError
from ..registry import Registry
from .reduce import Reduced

MANY_CLASSES = 100  # from so many on, FedPAGR's paper takes a smaller margin and fewer steps


class ServerRound(NamedTuple):
    """What a server step may look at beside the prototypes that it changes."""

    before: PrototypeBank
    """The prototypes of the round before."""
    reduced: Reduced
    """The uploads of this round, as the reduce gives them."""
    age: Tensor | None = None
    """`[C]`, for how many rounds nobody has reported a class; 0 where somebody did in this round. None: it is not kept."""


@dataclass(frozen=True)
class ServerStep:
    """One step of the server after the reduce: prototypes in, prototypes out."""

    registry: ClassVar[Registry[ServerStep]] = Registry("server step")
    name: ClassVar[str]

    def __call__(self, bank: PrototypeBank, now: ServerRound) -> PrototypeBank:
        """The prototypes after the step.

        Args:
            bank: The prototypes before it, in which a class that nobody reported has its last prototype.
            now: What else the server knows in this round.
        """
        raise NotImplementedError


@ServerStep.registry.register("sphere")
@dataclass(frozen=True)
class Sphere(ServerStep):
    """Prototypes are given length 1."""

    def __call__(self, bank: PrototypeBank, now: ServerRound) -> PrototypeBank:
        return bank.normalised()


@ServerStep.registry.register("momentum")
@dataclass(frozen=True)
class Momentum(ServerStep):
    """Prototypes move slowly: `share · those before + (1 − share) · the new ones` (Fed-ARPL, Eq. 8)."""

    share: float = 0.7

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError("share must be from 0 to below 1")

    def __call__(self, bank: PrototypeBank, now: ServerRound) -> PrototypeBank:
        return aggregate.momentum_blend(now.before, bank, self.share)


@ServerStep.registry.register("refine")
@dataclass(frozen=True)
class Refine(ServerStep):
    """Prototypes are moved apart on the sphere while they keep agreeing with the clients' (FedPAGR, Eq. 4–6)."""

    separation: float = 0.5  # λ_S of Eq. 4
    margin: float | None = None  # m of Eq. 6; none: 0.3, from 100 classes on 0.1
    steps: int | None = None  # T; none: 5, from 100 classes on 3; 0 is the plain mean
    lr: float = 0.01

    def __post_init__(self) -> None:
        if self.separation < 0 or (self.steps is not None and self.steps < 0):
            raise ValueError("separation and steps must be 0 or more")
        if self.margin is not None and not -1 <= self.margin <= 1:
            raise ValueError("margin is a cosine: it must be from -1 to 1")
        if self.lr <= 0:
            raise ValueError("lr must be above 0")

    def chosen(self, num_classes: int) -> tuple[float, int]:
        """Margin and steps for so many classes: the paper's, where they are not set."""
        margin, steps = (0.1, 3) if num_classes >= MANY_CLASSES else (0.3, 5)
        return margin if self.margin is None else self.margin, steps if self.steps is None else self.steps

    def __call__(self, bank: PrototypeBank, now: ServerRound) -> PrototypeBank:
        if "" not in now.reduced.sums:
            raise ProtofedError("refine needs the sum of the clients' prototypes, which this reduce does not give")
        margin, steps = self.chosen(bank.num_classes)
        agreement = PrototypeBank.stack([now.reduced.sums[""]])  # all that Eq. 5 needs of the clients
        return aggregate.refine(agreement, bank, steps, self.lr, margin, self.separation)


@ServerStep.registry.register("forget")
@dataclass(frozen=True)
class Forget(ServerStep):
    """A class that nobody has reported for more than so many rounds is taken out of the bank."""

    after: int = 20

    def __post_init__(self) -> None:
        if self.after < 1:
            raise ValueError("after must be 1 or more")

    def __call__(self, bank: PrototypeBank, now: ServerRound) -> PrototypeBank:
        return bank if now.age is None else bank.restricted(now.age <= self.after)


def ages(age: Tensor, reduced: PrototypeBank | None) -> Tensor:
    """For how many rounds nobody has reported each class, one round later.

    Args:
        age: `[C]`, the numbers before.
        reduced: The prototypes of this round's uploads, if any came.

    >>> ages(torch.tensor([3.0, 3.0]), PrototypeBank(torch.zeros(2, 1), torch.tensor([1.0, 0.0])))
    tensor([0., 4.])
    """
    return age + 1 if reduced is None else torch.where(reduced.known, 0.0, age + 1)
