"""FedSAP: scheduled alignment and proxy separation on the global prototype bank, and a phase with unlabelled data.

"Closing the Alignment-Maturity Gap in Federated Prototype Learning" (Casado-Diez et al., 2026).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .. import losses
from ..bank import PrototypeBank
from ..parts import CE, Align, Batch, Feed, Mean, Paired, Proxy, Received, Reduce, bank_of, terms_of
from ..schedules import Ramp, Weight, ramp, weight_at
from ..wire import Bundle, Exchange, bank
from .base import Method, register
from .checks import a_share, at_least_one, not_negative
from .client import Loss, Network, Pseudo, Trained


class Nearest(NamedTuple):
    """Of each embedding the nearest prototype by cosine distance, how far it is, and how much farther the second is."""

    label: Tensor
    distance: Tensor
    margin: Tensor


def nearest(z: Tensor, bank: PrototypeBank) -> Nearest:  # Eq. 10
    distances = bank.distances(z, "cosine")
    two, classes = distances.topk(min(2, bank.num_classes), dim=-1, largest=False)
    return Nearest(classes[..., 0], two[..., 0], two[..., -1] - two[..., 0])


@register("fedsap", paper="Casado-Diez et al., 2026")
@dataclass(frozen=True)
class FedSAP(Method):
    """CE + λ_t·alignment + proxy separation; λ_t grows by a curriculum; then unlabelled data."""

    alignment: Weight = ramp("linear", start=20, end=100, maximum=0.7)  # Eq. 7 and the paper's appendix
    scale: float = 32.0  # s of Eq. 9
    curriculum: bool = True  # off: alignment has its full weight from the first round, as in FedProto
    proxy: bool = True  # off: no separation term
    reduction: Literal["mean", "sum"] = "mean"
    supervised_rounds: int = 100  # T_sup: rounds before unlabelled data is used, where there is any
    consistency: Weight = 1.0  # λ_cons of Eq. 13
    mix: float = 0.5  # α of Eq. 14
    margin_quantile: float = 0.25  # M of Eq. 11: this quantile of the labelled samples' margins
    distance_quantile: float = 0.9  # D_max of Eq. 11: this quantile of their distances to their class
    pseudo_labels: Literal["all", "own"] = "all"  # c of Eq. 10: the whole bank, or the client's labelled classes
    returned_classes: Literal["own", "all"] = (
        "own"  # of Eq. 14: those with labels (𝒬_c of Eq. 2), or pseudo-labelled too
    )
    normalise: bool = True  # whether prototypes of Eq. 14 have length 1, as printed
    reduce: Reduce = Mean("holders")  # Eq. 2

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ValueError("scale must be above 0; proxy=false switches the term off")
        at_least_one(self, "supervised_rounds")  # pseudo-labels need prototypes
        a_share(self, "margin_quantile", "distance_quantile")
        not_negative(self, "alignment", "mix", "consistency")

    @property
    def exchange(self) -> Exchange:
        """A pseudo-labelled sample counts `mix` times in a prototype."""
        return Exchange((bank(),), (bank(most=max(1.0, self.mix)),))

    @property
    def feed(self) -> Feed:
        return Paired(views=("weak", "strong"), after=self.supervised_rounds)

    def alignment_weight(self, round: int) -> float:  # Eq. 7
        if isinstance(self.alignment, Ramp) and not self.curriculum:
            return self.alignment.maximum
        return weight_at(self.alignment, round)

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Loss:  # Eq. 3 and 13
        align = Align(self.alignment_weight(round), self.reduction)  # Eq. 5
        parts = (CE(), align, Proxy(scale=self.scale)) if self.proxy else (CE(), align)  # Eq. 4, 8 and 9
        supervised = terms_of(parts, net, net(batch.x), batch, received, round)
        if batch.weak is None or batch.strong is None or batch.unlabelled_weight is None:
            return Loss(supervised)
        bank = bank_of(received)
        guess = nearest(net(batch.weak).embedding.detach(), self.candidates(bank, received))
        accepted, score = self.acceptance(guess, received)
        strong = net(batch.strong).embedding
        used = batch.unlabelled_weight * accepted
        consistency = losses.consistency(strong, guess.label, bank, weight=used)  # Eq. 12
        unsupervised = {"consistency": weight_at(self.consistency, round) * consistency}
        return Loss({**supervised, **unsupervised}, Pseudo(guess.label, accepted, score))

    def candidates(self, bank: PrototypeBank, received: Received) -> PrototypeBank:
        """The prototypes a pseudo-label may come from."""
        limits = received.memory.tensors
        return bank.restricted(limits["classes"]) if self.pseudo_labels == "own" and "classes" in limits else bank

    def acceptance(self, guess: Nearest, received: Received) -> tuple[Tensor, Tensor]:  # Eq. 11
        """1 for a pseudo-label that is used, and a score that is above 0 for these. Without thresholds none is."""
        limits = received.memory.tensors
        if "margin" not in limits:
            return torch.zeros_like(guess.distance), -guess.distance
        score = torch.minimum(guess.margin - limits["margin"], limits["distance"] - guess.distance)
        return (score > 0).to(guess.distance.dtype), score

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        if round <= self.supervised_rounds or not trained.num_unlabelled:
            return Bundle(bank=trained.bank())  # Eq. 1
        output, batch = trained.outputs()
        guess = nearest(trained.unlabelled("weak").embedding, self.candidates(bank_of(received), received))
        accepted, _ = self.acceptance(guess, received)
        z = torch.cat([output.embedding, trained.unlabelled("strong").embedding])
        weight = torch.cat([batch.weight, self.mix * accepted])
        y = torch.cat([batch.y, guess.label])
        bank = PrototypeBank.from_embeddings(z, y, bank_of(received).num_classes, weight)  # Eq. 14
        if self.returned_classes == "own":
            bank = bank.restricted(trained.bank().known)
        return Bundle(bank=bank.normalised() if self.normalise else bank)

    def remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        """The thresholds M and D_max of Eq. 11 and the client's classes, from its labels after the supervised phase."""
        if not trained.num_unlabelled or (round > self.supervised_rounds and received.memory.tensors):
            return received.memory
        output, batch = trained.outputs()
        bank = bank_of(received)
        known = bank.known[batch.y]
        if not bool(known.any()):
            return received.memory
        classes = torch.zeros(bank.num_classes, device=batch.y.device)
        classes[batch.y] = 1.0
        among = bank.restricted(classes) if self.pseudo_labels == "own" else bank
        margins = nearest(output.embedding[known], among).margin
        distances = bank.distances(output.embedding[known], "cosine").gather(1, batch.y[known, None])
        finite = margins[torch.isfinite(margins)]
        limits = {
            "margin": torch.quantile(finite, self.margin_quantile) if len(finite) else torch.zeros(()),
            "distance": torch.quantile(distances, self.distance_quantile),
            "classes": classes,
        }
        return Bundle(tensors=limits)
