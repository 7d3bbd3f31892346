"""FedTGP: the server trains the global prototypes as a small network, with a margin between the classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from .. import aggregate, losses, seeds
from ..bank import TINY, PrototypeBank
from ..wire import Bundle
from .base import Batch, Network, Received, Setup, SharedBank, Upload, bank_of, register, uploaded_banks


@register("fedtgp")
@dataclass(frozen=True)
class FedTGP(SharedBank):
    """CE + λ·alignment with prototypes the server trains by a margin contrast (Zhang et al., AAAI 2024)."""

    paper: ClassVar[str] = "Zhang et al., AAAI 2024"

    weight: float = 10.0  # λ; the unit of distance is the mean squared difference over dimensions
    server_lr: float = 0.01
    server_epochs: int = 100
    server_batch: int = 10
    max_margin: float = 100.0

    def __post_init__(self) -> None:
        if self.weight < 0 or self.max_margin < 0:
            raise ValueError("weight and max_margin must be 0 or more")
        if self.server_lr <= 0 or self.server_epochs < 1 or self.server_batch < 1:
            raise ValueError("server_lr must be above 0, server_epochs and server_batch 1 or more")

    def server_start(self, setup: Setup) -> Bundle:
        stream = seeds.torch_stream(setup.seed, "server")
        d = setup.dim

        def uniform(*shape: int) -> Tensor:
            return (2 * torch.rand(*shape, generator=stream) - 1) / d**0.5

        network = {
            "classes": torch.randn(setup.num_classes, d, generator=stream),
            "hidden.weight": uniform(d, d),
            "hidden.bias": uniform(d),
            "output.weight": uniform(d, d),
            "output.bias": uniform(d),
        }
        return Bundle(bank=PrototypeBank.empty(setup.num_classes, d), tensors=network)

    def send(self, state: Bundle, client: int, round: int) -> Bundle:
        return Bundle(bank=state.bank)  # the network stays at the server

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> dict[str, Tensor]:
        z, logits = network(batch.x)
        align = losses.alignment(z, batch.y, bank_of(received), weight=batch.weight)
        return {"ce": losses.cross_entropy(logits, batch.y, weight=batch.weight), "align": self.weight * align}

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        banks = uploaded_banks(uploads)
        average = aggregate.mean(banks)
        margin = aggregate.margin(average, self.max_margin)
        counts = average.filled_from(bank_of(state)).counts  # a class once reported stays known
        z, y = banks.means[banks.known], banks.known.nonzero()[:, 1]
        own = one_hot(y, setup.num_classes).to(z.dtype)
        network = {name: value.clone() for name, value in state.tensors.items()}
        stream = seeds.torch_stream(setup.seed, "server", round)
        for _ in range(self.server_epochs):
            for rows in torch.randperm(len(y), generator=stream).split(self.server_batch):
                descend(network, z[rows], own[rows], counts > 0, margin, self.server_lr)
        bank = PrototypeBank(prototypes(network)[1], counts).restricted(counts > 0)
        return Bundle(bank=bank, tensors=network)


def prototypes(network: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The hidden layer and the prototype of every class, from the classes' embeddings."""
    hidden = torch.addmm(network["hidden.bias"], network["classes"], network["hidden.weight"].T).relu()
    return hidden, torch.addmm(network["output.bias"], hidden, network["output.weight"].T)


def descend(network: Mapping[str, Tensor], z: Tensor, own: Tensor, known: Tensor, margin: Tensor, lr: float) -> None:
    """One step of SGD, in place, on the cross-entropy over −‖z − p_c‖ with `margin` added to the own class's distance.

    `own[n, C]` is 1 at each client prototype's class. The gradient is in closed form: a round is thousands of such small
    steps, and autograd would be most of their cost. Where a distance is 0 its gradient is taken as 0.
    """
    hidden, p = prototypes(network)
    square = (z * z).sum(-1, keepdim=True) - 2 * z @ p.T + (p * p).sum(-1)
    distance = square.clamp_min(TINY).sqrt()
    share = torch.where(known, -(distance + margin * own), -float("inf")).softmax(-1)
    pull = torch.where(square > TINY, (own - share) / distance, 0.0) / len(z)
    to_p = pull.sum(0)[:, None] * p - pull.T @ z
    to_hidden = (to_p @ network["output.weight"]) * (hidden > 0)
    to_classes = to_hidden @ network["hidden.weight"]
    network["output.weight"].addmm_(to_p.T, hidden, alpha=-lr)
    network["output.bias"].sub_(to_p.sum(0), alpha=lr)
    network["hidden.weight"].addmm_(to_hidden.T, network["classes"], alpha=-lr)
    network["hidden.bias"].sub_(to_hidden.sum(0), alpha=lr)
    network["classes"].sub_(to_classes, alpha=lr)
