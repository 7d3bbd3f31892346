"""FedProc: averaged weights, and a contrast with the global class centres that yields to cross-entropy over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .. import aggregate, losses
from ..bank import PrototypeBank, unit
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


@register("fedproc")
@dataclass(frozen=True)
class FedProc(SharedBank):
    """α·CE + (1−α)·contrast with the class centres, α growing from 0 to 1; weights are averaged (Mu et al., FGCS 2023)."""

    paper: ClassVar[str] = "Mu et al., FGCS 2023"

    rounds_to_ce: int = 100  # after so many rounds cross-entropy is all there is
    average_weights: bool = True  # off: private models and only centres travel, as FedPAGR compares with it

    def __post_init__(self) -> None:
        if self.rounds_to_ce < 1:
            raise ValueError("rounds_to_ce must be 1 or more")

    @property
    def travels(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("bank", "weights") if self.average_weights else ("bank",)

    @property
    def required(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.travels

    @property
    def private_model(self) -> bool:  # type: ignore[override]
        return not self.average_weights

    def server_start(self, setup: Setup) -> Bundle:
        return replace(super().server_start(setup), weights=setup.weights if self.average_weights else {})

    def ce_share(self, round: int) -> float:
        """α."""
        return min(round / self.rounds_to_ce, 1.0)

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> dict[str, Tensor]:
        bank = bank_of(received)
        z, logits = network(batch.x)
        share = torch.where(bank.known.any(), self.ce_share(round), 1.0)  # no centres yet: cross-entropy alone
        contrast = losses.prototype_cross_entropy(z, batch.y, bank, temperature=1.0, weight=batch.weight)
        return {
            "ce": share * losses.cross_entropy(logits, batch.y, weight=batch.weight),
            "contrast": (1 - share) * contrast,
        }

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        (z, logits), batch = trained.outputs()
        centres = PrototypeBank.from_embeddings(unit(z), batch.y, logits.shape[-1], batch.weight)
        return Bundle(bank=centres, weights=trained.weights if self.average_weights else {})

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        bank = aggregate.weighted_mean(uploaded_banks(uploads)).filled_from(bank_of(state))
        return replace(state, bank=bank, weights={**state.weights, **weighted_average(uploads)})

    def prototype_scores(self, z: Tensor, bank: PrototypeBank) -> Tensor:
        """The cosine, by which the contrast is made too."""
        return 1 - bank.distances(z, "cosine")
