"""FedMPS: contrast with prototypes of two levels, and soft labels from a head the server trains on prototypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .. import aggregate, losses, seeds
from ..bank import PrototypeBank
from ..models.base import LOW
from ..wire import Bundle
from .base import (
    Batch,
    Network,
    Received,
    Setup,
    SharedBank,
    Trained,
    Upload,
    bank_of,
    register,
    uploaded_banks,
    weighted_average,
)


@register("fedmps")
@dataclass(frozen=True)
class FedMPS(SharedBank):
    """CE + α·contrast (high) + β·contrast (low) + γ·divergence from global soft labels (Yang et al., TNNLS 2025)."""

    paper: ClassVar[str] = "Yang et al., TNNLS 2025"

    high_weight: float = 1.0  # α
    low_weight: float = 1.0  # β
    soft_weight: float = 1.0  # γ
    temperature: float = 0.5  # of both contrasts
    soft_temperature: float = 5.0
    server_lr: float = 1e-3
    server_epochs: int = 6
    server_batch: int = 4
    average_weights: bool = False

    def __post_init__(self) -> None:
        if min(self.high_weight, self.low_weight, self.soft_weight) < 0:
            raise ValueError("high_weight, low_weight and soft_weight must be 0 or more")
        if self.temperature <= 0 or self.soft_temperature <= 0:
            raise ValueError("temperature and soft_temperature must be above 0; a weight of 0 switches a term off")
        if self.server_lr <= 0 or self.server_epochs < 1 or self.server_batch < 1:
            raise ValueError("server_lr must be above 0, server_epochs and server_batch 1 or more")

    @property
    def travels(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.required, "tensors.soft_labels")

    @property
    def required(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("bank", "banks.low", *(["weights"] if self.average_weights else []))

    @property
    def private_model(self) -> bool:  # type: ignore[override]
        return not self.average_weights

    def bank_shapes(self, setup: Setup) -> Mapping[str, tuple[int | None, ...]]:
        return {"low": (setup.num_classes, LOW)}

    # --- server -------------------------------------------------------------------------------------------------
    def server_start(self, setup: Setup) -> Bundle:
        stream = seeds.torch_stream(setup.seed, "server")
        c, d = setup.num_classes, setup.dim
        return Bundle(
            bank=PrototypeBank.empty(c, d),
            banks={"low": PrototypeBank.empty(c, LOW)},
            weights=setup.weights if self.average_weights else {},
            tensors={
                "soft_labels": torch.zeros(c, c),
                "head.weight": (2 * torch.rand(c, d, generator=stream) - 1) / d**0.5,
                "head.bias": (2 * torch.rand(c, generator=stream) - 1) / d**0.5,
            },
        )

    def send(self, state: Bundle, client: int, round: int) -> Bundle:
        return replace(state, tensors={"soft_labels": state.tensors["soft_labels"]})  # the head stays at the server

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        banks = uploaded_banks(uploads)
        high = aggregate.mean(banks)
        low = aggregate.mean(PrototypeBank.stack([u.content.banks["low"] for u in uploads]))
        weight, bias = self.trained_head(state, banks, seeds.torch_stream(setup.seed, "server", round))
        logits = torch.addmm(bias, high.means, weight.T)  # the head is linear: of the mean, the mean of the clients'
        soft = torch.where(high.known[:, None], logits, state.tensors["soft_labels"])
        return Bundle(
            bank=high.filled_from(bank_of(state)),
            banks={"low": low.filled_from(state.banks["low"])},
            weights={**state.weights, **weighted_average(uploads)},
            tensors={"soft_labels": soft, "head.weight": weight, "head.bias": bias},
        )

    def trained_head(self, state: Bundle, banks: PrototypeBank, stream: torch.Generator) -> tuple[Tensor, Tensor]:
        """The server's head after some epochs over all uploaded high-level prototypes and their classes."""
        z, y = banks.means[banks.known], banks.known.nonzero()[:, 1]
        weight, bias = (state.tensors[f"head.{name}"].clone().requires_grad_() for name in ("weight", "bias"))
        optimiser = torch.optim.Adam([weight, bias], lr=self.server_lr)
        for _ in range(self.server_epochs):
            for rows in torch.randperm(len(y), generator=stream).split(self.server_batch):
                optimiser.zero_grad()
                losses.cross_entropy(torch.addmm(bias, z[rows], weight.T), y[rows]).backward()
                optimiser.step()
        return weight.detach(), bias.detach()

    # --- client -------------------------------------------------------------------------------------------------
    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> dict[str, Tensor]:
        low, z, logits = network.levels(batch.x)
        high_bank, low_bank = bank_of(received), received.banks["low"]
        high = losses.supervised_contrast(z, batch.y, high_bank, self.temperature, weight=batch.weight)
        below = losses.supervised_contrast(low, batch.y, low_bank, self.temperature, weight=batch.weight)
        soft = losses.soft_labels(
            logits,
            batch.y,
            received.tensors["soft_labels"],
            high_bank.known,
            self.soft_temperature,
            weight=batch.weight,
        )
        return {
            "ce": losses.cross_entropy(logits, batch.y, weight=batch.weight),
            "high": self.high_weight * high,
            "low": self.low_weight * below,
            "soft": self.soft_weight * soft,
        }

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        return Bundle(
            bank=trained.bank(),
            banks={"low": trained.low_bank()},
            weights=trained.weights if self.average_weights else {},
        )
