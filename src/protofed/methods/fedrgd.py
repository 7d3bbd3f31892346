"""FedRGD: FixMatch at the clients, whose models are averaged in groups before they are averaged together."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch

from .. import seeds
from ..parts import Each, Reduce, Reduced, weighted_average
from ..wire import Exchange, weights
from .base import register
from .checks import at_least_one
from .client import Weights
from .fixmatch import FixMatch
from .server import Setup, State, state


@state
class GroupModels(State):
    """The groups' models, where they are apart, and their average."""

    average: Weights
    apart: tuple[Weights, ...]
    groups: int
    seed: int

    def group(self, client: int, round: int) -> int:
        """Which group a client is dealt to."""
        return seeds.derive(self.seed, "group", client, round) % self.groups

    def audience(self, client: int, round: int) -> Hashable:
        return self.group(client, round) if self.apart else None

    def weights(self, client: int, round: int) -> Weights:
        """The model of the client's group."""
        return self.apart[self.group(client, round)] if self.apart else self.average


@register("fedrgd", paper="Zhang et al., IEEE BigData 2021")
@dataclass(frozen=True)
class FedRGD(FixMatch):
    """FixMatch; clients are dealt to groups anew each round, each group has a model, and the models are joined regularly.

    The method's other parts are settings of the run: group norm (`norm=group`) and frequent synchronisation (`epochs=1`).
    """

    exchange: ClassVar[Exchange] = Exchange((weights(each=True),), (weights(),), keeps_model=False)
    reduce: ClassVar[Reduce] = Each()

    groups: int = 2
    together: int = 2  # every so many rounds the groups' models are averaged

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "groups", "together")

    def start(self, setup: Setup) -> GroupModels:
        return GroupModels(setup.weights, (), self.groups, setup.seed)

    def update(self, state: GroupModels, reduced: Reduced, round: int, setup: Setup) -> GroupModels:
        models = []
        for k in range(self.groups):
            members = [u for u in reduced.uploads if state.group(u.client, round) == k]
            before = state.apart[k] if state.apart else state.average
            models.append({**before, **weighted_average(members, lambda upload: upload.samples)})
        average = {name: torch.stack([m[name] for m in models]).mean(0) for name in models[0]}
        return GroupModels(average, tuple(models) if round % self.together else (), self.groups, setup.seed)
