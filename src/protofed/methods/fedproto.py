"""FedProto: clients align their embeddings with the global class prototypes; only prototypes travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from .. import aggregate, losses
from ..wire import Bundle
from .base import Batch, Network, Received, Setup, SharedBank, Upload, bank_of, register, uploaded_banks


@register("fedproto")
@dataclass(frozen=True)
class FedProto(SharedBank):
    """CE + λ·alignment with the mean of the clients' prototypes (Tan et al., AAAI 2022)."""

    paper: ClassVar[str] = "Tan et al., AAAI 2022"
    predicts: ClassVar[Literal["head", "prototype"]] = "prototype"

    weight: float = 1.0  # λ; the unit of distance is the mean squared difference over dimensions
    reduction: Literal["mean", "sum"] = "mean"
    aggregation: Literal["size-weighted", "mean"] = "size-weighted"  # the paper's Eq. 6; its published code: mean

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError("weight must be 0 or more (0 is Local)")

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> dict[str, Tensor]:
        z, logits = network(batch.x)
        align = losses.alignment(z, batch.y, bank_of(received), self.reduction, weight=batch.weight)
        return {
            "ce": losses.cross_entropy(logits, batch.y, weight=batch.weight),
            "align": self.weight * align,
        }

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        combine = aggregate.mean if self.aggregation == "mean" else aggregate.weighted_mean
        # a class nobody reported keeps its prototype
        return replace(state, bank=combine(uploaded_banks(uploads)).filled_from(bank_of(state)))
