"""FedProc: averaged weights, and a contrast with the global class centres that yields to cross-entropy over time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import losses
from ..bank import PrototypeBank, unit
from ..parts import Batch, Head, Mean, Predict, Received, Reduce, bank_of
from ..wire import Bundle, Exchange
from .base import MODEL_AND_PROTOTYPES, PROTOTYPES, Method, register
from .checks import at_least_one
from .client import Network, Terms, Trained


@register("fedproc", paper="Mu et al., FGCS 2023")
@dataclass(frozen=True)
class FedProc(Method):
    """α·CE + (1−α)·contrast with the class centres, α growing from 0 to 1; weights are averaged."""

    rounds_to_ce: int = 100  # after so many rounds cross-entropy is all there is
    average_weights: bool = True  # off: private models and only centres travel, as FedPAGR compares with it
    reduce: Reduce = Mean("size")

    def __post_init__(self) -> None:
        at_least_one(self, "rounds_to_ce")

    @property
    def exchange(self) -> Exchange:
        return MODEL_AND_PROTOTYPES if self.average_weights else PROTOTYPES

    @property
    def predict(self) -> Predict:
        """The cosine, by which the contrast is made too, measured beside the head."""
        return Head("cosine")

    def ce_share(self, round: int) -> float:
        """α."""
        return min(round / self.rounds_to_ce, 1.0)

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms:
        bank = bank_of(received)
        z, logits = net(batch.x)
        share = torch.where(bank.known.any(), self.ce_share(round), 1.0)  # no centres yet: cross-entropy alone
        contrast = losses.prototype_cross_entropy(z, batch.y, bank, temperature=1.0, weight=batch.weight)
        return {
            "ce": share * losses.cross_entropy(logits, batch.y, weight=batch.weight),
            "contrast": (1 - share) * contrast,
        }

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        (z, logits), batch = trained.outputs()
        centres = PrototypeBank.from_embeddings(unit(z), batch.y, logits.shape[-1], batch.weight)
        return Bundle(bank=centres, weights=trained.weights if self.average_weights else {})
