"""FedMPS: contrast with prototypes of two levels, and soft labels from a head the server trains on prototypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import aggregate, losses, seeds
from ..bank import PrototypeBank
from ..models.base import LOW
from ..parts import Batch, Each, Received, Reduce, Reduced, bank_of
from ..schedules import Weight, weight_at
from ..wire import Bundle, Exchange, array, bank, weights
from .base import Method, register
from .checks import at_least_one, not_negative
from .client import Network, Terms, Trained, Weights
from .server import Setup, State, state


@state
class TwoLevels(State):
    """Prototypes of two levels and soft labels, which are sent, and the server's head, which is not."""

    bank: PrototypeBank
    low: PrototypeBank
    weights: Weights
    soft_labels: Tensor
    head: Tensor
    head_bias: Tensor


@register("fedmps", paper="Yang et al., TNNLS 2025")
@dataclass(frozen=True)
class FedMPS(Method):
    """CE + α·contrast (high) + β·contrast (low) + γ·divergence from global soft labels."""

    reduce: ClassVar[Reduce] = Each(averages=True)

    high_weight: Weight = 1.0  # α
    low_weight: Weight = 1.0  # β
    soft_weight: Weight = 1.0  # γ
    temperature: float = 0.5  # of both contrasts
    soft_temperature: float = 5.0
    server_lr: float = 1e-3
    server_epochs: int = 6
    server_batch: int = 4
    average_weights: bool = False

    def __post_init__(self) -> None:
        not_negative(self, "high_weight", "low_weight", "soft_weight")
        at_least_one(self, "server_epochs", "server_batch")
        if self.temperature <= 0 or self.soft_temperature <= 0:
            raise ValueError("temperature and soft_temperature must be above 0; a weight of 0 switches a term off")
        if self.server_lr <= 0:
            raise ValueError("server_lr must be above 0")

    @property
    def exchange(self) -> Exchange:
        both = (bank(), bank("low", ("classes", LOW)), *((weights(),) if self.average_weights else ()))
        return Exchange((*both, array("soft_labels", "classes", "classes")), both, not self.average_weights)

    # --- client -------------------------------------------------------------------------------------------------
    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms:
        low, z, logits = net.levels(batch.x)
        y, weight = batch.y, batch.weight
        high_bank, low_bank = bank_of(received), received.banks["low"]
        targets = received.tensors["soft_labels"]
        high = losses.supervised_contrast(z, y, high_bank, self.temperature, weight=weight)
        below = losses.supervised_contrast(low, y, low_bank, self.temperature, weight=weight)
        soft = losses.soft_labels(logits, y, targets, high_bank.known, self.soft_temperature, weight=weight)
        return {
            "ce": losses.cross_entropy(logits, y, weight=weight),
            "high": weight_at(self.high_weight, round) * high,
            "low": weight_at(self.low_weight, round) * below,
            "soft": weight_at(self.soft_weight, round) * soft,
        }

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        weights = trained.weights if self.average_weights else {}
        return Bundle(bank=trained.bank(), banks={"low": trained.low_bank()}, weights=weights)

    # --- server -------------------------------------------------------------------------------------------------
    def start(self, setup: Setup) -> TwoLevels:
        stream = seeds.torch_stream(setup.seed, "server")
        c, d = setup.num_classes, setup.dim
        head, head_bias = ((2 * torch.rand(*n, generator=stream) - 1) / d**0.5 for n in ((c, d), (c,)))
        weights = setup.weights if self.average_weights else {}
        low = PrototypeBank.empty(c, LOW)
        return TwoLevels(PrototypeBank.empty(c, d), low, weights, torch.zeros(c, c), head, head_bias)

    def update(self, state: TwoLevels, reduced: Reduced, round: int, setup: Setup) -> TwoLevels:
        banks = reduced.uploaded_banks
        high = aggregate.mean(banks)
        low = aggregate.mean(PrototypeBank.stack([u.content.banks["low"] for u in reduced.uploads]))
        head, bias = self.trained_head(state, banks, seeds.torch_stream(setup.seed, "server", round))
        logits = torch.addmm(bias, high.means, head.T)  # the head is linear: of the mean, the mean of the clients'
        soft = torch.where(high.known[:, None], logits, state.soft_labels)
        weights = {**state.weights, **reduced.weights}
        return TwoLevels(high.filled_from(state.bank), low.filled_from(state.low), weights, soft, head, bias)

    def trained_head(self, state: TwoLevels, banks: PrototypeBank, stream: torch.Generator) -> tuple[Tensor, Tensor]:
        """The server's head after some epochs over all uploaded high-level prototypes and their classes."""
        z, y = banks.means[banks.known], banks.known.nonzero()[:, 1]
        weight, bias = (value.clone().requires_grad_() for value in (state.head, state.head_bias))
        optimiser = torch.optim.Adam([weight, bias], lr=self.server_lr)
        for _ in range(self.server_epochs):
            for rows in torch.randperm(len(y), generator=stream).split(self.server_batch):
                optimiser.zero_grad()
                losses.cross_entropy(torch.addmm(bias, z[rows], weight.T), y[rows]).backward()
                optimiser.step()
        return weight.detach(), bias.detach()
