"""FedSAP: scheduled alignment and proxy separation on the global prototype bank, and a phase with unlabelled data.

"Closing the Alignment-Maturity Gap in Federated Prototype Learning" (Casado-Diez et al., 2026).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from .. import aggregate, losses
from ..bank import PrototypeBank
from ..schedules import Ramp, ramp
from ..wire import Bundle
from .base import (
    Batch,
    Loss,
    Network,
    Pseudo,
    Received,
    Setup,
    SharedBank,
    Step,
    Trained,
    Upload,
    View,
    bank_of,
    paired_epochs,
    register,
    uploaded_banks,
)


class Nearest(NamedTuple):
    """Of each embedding the nearest prototype by cosine distance, how far it is, and how much farther the second is."""

    label: Tensor
    distance: Tensor
    margin: Tensor


def nearest(z: Tensor, bank: PrototypeBank) -> Nearest:  # Eq. 10
    distances = bank.distances(z, "cosine")
    two, classes = distances.topk(min(2, bank.num_classes), dim=-1, largest=False)
    return Nearest(classes[..., 0], two[..., 0], two[..., -1] - two[..., 0])


@register("fedsap")
@dataclass(frozen=True)
class FedSAP(SharedBank):
    """CE + λ_t·alignment + proxy separation; λ_t grows by a curriculum; then unlabelled data (Casado-Diez et al., 2026)."""

    paper: ClassVar[str] = "Casado-Diez et al., 2026"
    views: ClassVar[tuple[View, ...]] = ("weak", "strong")

    alignment: Ramp = ramp("linear", start=20, end=100, maximum=0.7)  # Eq. 7 and the paper's appendix
    scale: float = 32.0  # s of Eq. 9
    curriculum: bool = True  # off: alignment has its full weight from the first round, as in FedProto
    proxy: bool = True  # off: no separation term
    reduction: Literal["mean", "sum"] = "mean"
    supervised_rounds: int = 100  # T_sup: rounds before unlabelled data is used, where there is any
    consistency: float = 1.0  # λ_cons of Eq. 13
    mix: float = 0.5  # α of Eq. 14
    margin_quantile: float = 0.25  # M of Eq. 11: this quantile of the labelled samples' margins
    distance_quantile: float = 0.9  # D_max of Eq. 11: this quantile of their distances to their class
    pseudo_labels: Literal["all", "own"] = (
        "all"  # c of Eq. 10: over the whole bank, or over the client's labelled classes
    )

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ValueError("scale must be above 0; proxy=false switches the term off")
        if self.supervised_rounds < 1:
            raise ValueError("supervised_rounds must be 1 or more: pseudo-labels need prototypes")
        if not (0 <= self.margin_quantile <= 1 and 0 <= self.distance_quantile <= 1):
            raise ValueError("margin_quantile and distance_quantile are shares, between 0 and 1")
        if self.mix < 0 or self.consistency < 0:
            raise ValueError("mix and consistency must be 0 or more")

    def alignment_weight(self, round: int) -> float:  # Eq. 7
        return self.alignment(round) if self.curriculum else self.alignment.maximum

    # --- client ---------------------------------------------------------------------------------------------------
    def steps(
        self, labels: Tensor, num_unlabelled: int, epochs: int, batch: int, round: int, generator: torch.Generator
    ) -> Iterator[Step]:
        unlabelled = num_unlabelled if round > self.supervised_rounds else 0
        return paired_epochs(len(labels), unlabelled, epochs, batch, generator)

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> Loss:  # Eq. 3 and 13
        bank = bank_of(received)
        z, logits = network(batch.x)
        terms = {"ce": losses.cross_entropy(logits, batch.y, weight=batch.weight)}  # Eq. 4
        align = losses.alignment(z, batch.y, bank, self.reduction, weight=batch.weight)  # Eq. 5
        terms["align"] = self.alignment_weight(round) * align
        if self.proxy:
            terms["proxy"] = losses.proxy(z, batch.y, bank, self.scale, weight=batch.weight)  # Eq. 8–9
        if batch.weak is None or batch.strong is None or batch.unlabelled_weight is None:
            return Loss(terms)
        found = nearest(network(batch.weak).embedding.detach(), self.candidates(bank, received))
        accepted, score = self.acceptance(found, received)
        strong = network(batch.strong).embedding
        used = batch.unlabelled_weight * accepted
        terms["consistency"] = self.consistency * losses.consistency(strong, found.label, bank, weight=used)  # Eq. 12
        return Loss(terms, Pseudo(found.label, accepted, score))

    def candidates(self, bank: PrototypeBank, received: Received) -> PrototypeBank:
        """The prototypes a pseudo-label may come from."""
        limits = received.memory.tensors
        return bank.restricted(limits["classes"]) if self.pseudo_labels == "own" and "classes" in limits else bank

    def acceptance(self, found: Nearest, received: Received) -> tuple[Tensor, Tensor]:  # Eq. 11
        """1 for a pseudo-label that is used, and a score that is above 0 for these. Without thresholds none is."""
        limits = received.memory.tensors
        if "margin" not in limits:
            return torch.zeros_like(found.distance), -found.distance
        score = torch.minimum(found.margin - limits["margin"], limits["distance"] - found.distance)
        return (score > 0).to(found.distance.dtype), score

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        if round <= self.supervised_rounds or not trained.num_unlabelled:
            return Bundle(bank=trained.bank())  # Eq. 1
        output, batch = trained.outputs()
        found = nearest(trained.unlabelled("weak").embedding, self.candidates(bank_of(received), received))
        accepted, _ = self.acceptance(found, received)
        z = torch.cat([output.embedding, trained.unlabelled("strong").embedding])
        weight = torch.cat([batch.weight, self.mix * accepted])
        y = torch.cat([batch.y, found.label])
        bank = PrototypeBank.from_embeddings(z, y, bank_of(received).num_classes, weight)
        return Bundle(bank=bank.normalised())  # Eq. 14

    def client_remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        """M and D_max of Eq. 11, from the labelled samples as they lie at the end of the supervised phase; their classes."""
        if not trained.num_unlabelled or (round > self.supervised_rounds and received.memory.tensors):
            return received.memory
        output, batch = trained.outputs()
        bank = bank_of(received)
        there = bank.known[batch.y]
        if not bool(there.any()):
            return received.memory
        classes = torch.zeros(bank.num_classes, device=batch.y.device)
        classes[batch.y] = 1.0
        among = bank.restricted(classes) if self.pseudo_labels == "own" else bank
        margins = nearest(output.embedding[there], among).margin
        own = bank.distances(output.embedding[there], "cosine").gather(1, batch.y[there, None])
        finite = margins[torch.isfinite(margins)]
        limits = {
            "margin": torch.quantile(finite, self.margin_quantile) if len(finite) else torch.zeros(()),
            "distance": torch.quantile(own, self.distance_quantile),
            "classes": classes,
        }
        return Bundle(tensors=limits)

    # --- server ---------------------------------------------------------------------------------------------------
    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        return replace(state, bank=aggregate.mean(uploaded_banks(uploads)).filled_from(bank_of(state)))  # Eq. 2
