"""FedSAP: scheduled alignment and proxy separation on the global prototype bank.

The supervised phase of "Closing the Alignment-Maturity Gap in Federated Prototype Learning" (Casado-Diez et al., 2026).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from .. import aggregate, losses
from ..schedules import Ramp, ramp
from ..wire import Bundle
from .base import Batch, Network, Received, Setup, SharedBank, Trained, Upload, bank_of, register, uploaded_banks


@register("fedsap")
@dataclass(frozen=True)
class FedSAP(SharedBank):
    """CE + λ_t·alignment + proxy separation; λ_t grows by a curriculum (Casado-Diez et al., 2026)."""

    paper: ClassVar[str] = "Casado-Diez et al., 2026"

    alignment: Ramp = ramp("linear", start=20, end=100, maximum=0.7)  # Eq. 7 and the paper's appendix
    scale: float = 32.0  # s of Eq. 9
    curriculum: bool = True  # off: alignment has its full weight from the first round, as in FedProto
    proxy: bool = True  # off: no separation term
    reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ValueError("scale must be above 0; proxy=false switches the term off")

    def alignment_weight(self, round: int) -> float:  # Eq. 7
        return self.alignment(round) if self.curriculum else self.alignment.maximum

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> dict[str, Tensor]:  # Eq. 3
        bank = bank_of(received)
        z, logits = network(batch.x)
        terms = {"ce": losses.cross_entropy(logits, batch.y, weight=batch.weight)}  # Eq. 4
        align = losses.alignment(z, batch.y, bank, self.reduction, weight=batch.weight)  # Eq. 5
        terms["align"] = self.alignment_weight(round) * align
        if self.proxy:
            terms["proxy"] = losses.proxy(z, batch.y, bank, self.scale, weight=batch.weight)  # Eq. 8–9
        return terms

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        return Bundle(bank=trained.bank())  # Eq. 1

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        return replace(state, bank=aggregate.mean(uploaded_banks(uploads)).filled_from(bank_of(state)))  # Eq. 2
