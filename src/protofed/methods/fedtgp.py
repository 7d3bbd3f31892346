"""FedTGP: the server trains the global prototypes as a small network, with a margin between the classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from .. import aggregate, seeds
from ..bank import TINY, PrototypeBank
from ..parts import CE, Align, Batch, Nearest, Predict, Received, Reduced, terms_of
from ..schedules import Weight
from ..wire import Exchange
from .base import PROTOTYPES, Method, register
from .checks import at_least_one, not_negative
from .client import Network, Terms
from .server import Setup, State, state


@state
class TrainedPrototypes(State):
    """The prototypes, which are sent, and the network that gives them, which stays at the server."""

    bank: PrototypeBank
    network: Mapping[str, Tensor]


@register("fedtgp", paper="Zhang et al., AAAI 2024")
@dataclass(frozen=True)
class FedTGP(Method):
    """CE + λ·alignment with prototypes the server trains by a margin contrast."""

    exchange: ClassVar[Exchange] = PROTOTYPES
    predict: ClassVar[Predict] = Nearest()

    weight: Weight = 10.0  # λ; the unit of distance is the mean squared difference over dimensions
    server_lr: float = 0.01
    server_epochs: int = 100
    server_batch: int = 10
    max_margin: float = 100.0

    def __post_init__(self) -> None:
        not_negative(self, "weight", "max_margin")
        at_least_one(self, "server_epochs", "server_batch")
        if self.server_lr <= 0:
            raise ValueError("server_lr must be above 0")

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms:
        return terms_of((CE(), Align(self.weight)), net, net(batch.x), batch, received, round)

    def start(self, setup: Setup) -> TrainedPrototypes:
        stream = seeds.torch_stream(setup.seed, "server")
        d = setup.dim
        width: float = d**0.5

        def uniform(*shape: int) -> Tensor:
            return (2 * torch.rand(*shape, generator=stream) - 1) / width

        network = {
            "classes": torch.randn(setup.num_classes, d, generator=stream),
            "hidden.weight": uniform(d, d),
            "hidden.bias": uniform(d),
            "output.weight": uniform(d, d),
            "output.bias": uniform(d),
        }
        return TrainedPrototypes(PrototypeBank.empty(setup.num_classes, d), network)

    def update(self, state: TrainedPrototypes, reduced: Reduced, round: int, setup: Setup) -> TrainedPrototypes:
        banks = reduced.uploaded_banks
        average = aggregate.mean(banks)
        margin = aggregate.margin(average, self.max_margin)
        counts = average.filled_from(state.bank).counts  # a class once reported stays known
        z, y = banks.means[banks.known], banks.known.nonzero()[:, 1]
        member = one_hot(y, setup.num_classes).to(z.dtype)
        network = {name: value.clone() for name, value in state.network.items()}
        stream = seeds.torch_stream(setup.seed, "server", round)
        for _ in range(self.server_epochs):
            for rows in torch.randperm(len(y), generator=stream).split(self.server_batch):
                descend(network, z[rows], member[rows], counts > 0, margin, self.server_lr)
        bank = PrototypeBank(prototypes(network)[1], counts).restricted(counts > 0)
        return TrainedPrototypes(bank, network)


def prototypes(network: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The hidden layer and the prototype of every class, from the classes' embeddings."""
    hidden = torch.addmm(network["hidden.bias"], network["classes"], network["hidden.weight"].T).relu()
    return hidden, torch.addmm(network["output.bias"], hidden, network["output.weight"].T)


def descend(network: Mapping[str, Tensor], z: Tensor, member: Tensor, known: Tensor, margin: Tensor, lr: float) -> None:
    """One step of SGD, in place, on the cross-entropy over −‖z − p_c‖ with `margin` added to the own class's distance.

    `own[n, C]` is 1 at each client prototype's class. The gradient is in closed form: a round is thousands of such small
    steps, and autograd would be most of their cost. Where a distance is 0 its gradient is taken as 0.
    """
    hidden, p = prototypes(network)
    square = (z * z).sum(-1, keepdim=True) - 2 * z @ p.T + (p * p).sum(-1)
    distance = square.clamp_min(TINY).sqrt()
    share = torch.where(known, -(distance + margin * member), -float("inf")).softmax(-1)
    pull = torch.where(square > TINY, (member - share) / distance, 0.0) / len(z)
    to_p = pull.sum(0)[:, None] * p - pull.T @ z
    to_hidden = (to_p @ network["output.weight"]) * (hidden > 0)
    to_classes = to_hidden @ network["hidden.weight"]
    network["output.weight"].addmm_(to_p.T, hidden, alpha=-lr)
    network["output.bias"].sub_(to_p.sum(0), alpha=lr)
    network["hidden.weight"].addmm_(to_hidden.T, network["classes"], alpha=-lr)
    network["hidden.bias"].sub_(to_hidden.sum(0), alpha=lr)
    network["classes"].sub_(to_classes, alpha=lr)
