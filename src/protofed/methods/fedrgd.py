"""FedRGD: FixMatch at the clients, whose models are averaged in groups before they are averaged together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from .. import seeds
from ..wire import Bundle
from .base import Setup, Upload, register, weighted_average
from .fixmatch import FixMatchFedAvg


@register("fedrgd")
@dataclass(frozen=True)
class FedRGD(FixMatchFedAvg):
    """FixMatch; clients are dealt to groups anew each round, each group has a model, and the models are joined regularly.

    The method's other parts are settings of the run: group norm (`norm=group`) and frequent synchronisation (`epochs=1`).
    """

    paper: ClassVar[str] = "Zhang et al., IEEE BigData 2021"

    groups: int = 2
    together: int = 2  # every so many rounds the groups' models are averaged

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups < 1 or self.together < 1:
            raise ValueError("groups and together must be 1 or more")

    def group(self, seed: int, client: int, round: int) -> int:
        return seeds.derive(seed, "group", client, round) % self.groups

    def server_start(self, setup: Setup) -> Bundle:
        return replace(super().server_start(setup), scalars={"seed": setup.seed})

    def send(self, state: Bundle, client: int, round: int) -> Bundle:
        mark = f"{self.group(int(state.scalars['seed']), client, round)}/"
        own = {name.removeprefix(mark): value for name, value in state.tensors.items() if name.startswith(mark)}
        return Bundle(weights=own or state.weights)

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        models = []
        for k in range(self.groups):
            own = [u for u in uploads if self.group(setup.seed, u.client, round) == k]
            before = {n.removeprefix(f"{k}/"): v for n, v in state.tensors.items() if n.startswith(f"{k}/")}
            models.append({**state.weights, **before, **(weighted_average(own) if own else {})})
        weights = {name: torch.stack([m[name] for m in models]).mean(0) for name in models[0]}
        apart = {f"{k}/{name}": value for k, model in enumerate(models) for name, value in model.items()}
        return replace(state, weights=weights, tensors=apart if round % self.together else {})
