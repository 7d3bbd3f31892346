"""FedSAP: scheduled alignment and proxy separation on the global prototype bank, and a phase with unlabelled data.

"Closing the Alignment-Maturity Gap in Federated Prototype Learning" (Casado-Diez et al., 2026).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..parts import CE, Align, Batch, Feed, Mean, NearestLabels, Proxy, Received, Reduce, terms_of
from ..schedules import Ramp, Weight, ramp, weight_at
from ..wire import Bundle, Exchange, bank
from .base import Method, register
from .checks import a_share, at_least_one, not_negative
from .client import Loss, Network, Trained, with_pseudo_labels


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
    def unlabelled(self) -> NearestLabels:  # Eq. 10 to 14
        """The phase with unlabelled samples."""
        return NearestLabels(
            self.supervised_rounds,
            self.consistency,
            self.mix,
            self.margin_quantile,
            self.distance_quantile,
            self.pseudo_labels,
            self.returned_classes,
            self.normalise,
        )

    @property
    def exchange(self) -> Exchange:
        """A pseudo-labelled sample counts `mix` times in a prototype."""
        return Exchange((bank(),), (bank(most=self.unlabelled.most),))

    @property
    def feed(self) -> Feed:
        return self.unlabelled.feed

    def alignment_weight(self, round: int) -> float:  # Eq. 7
        if isinstance(self.alignment, Ramp) and not self.curriculum:
            return self.alignment.maximum
        return weight_at(self.alignment, round)

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Loss:  # Eq. 3 and 13
        align = Align(self.alignment_weight(round), self.reduction)  # Eq. 5
        parts = (CE(), align, Proxy(scale=self.scale)) if self.proxy else (CE(), align)  # Eq. 4, 8 and 9
        supervised = terms_of(parts, net, net(batch.x), batch, received, round)
        return with_pseudo_labels(supervised, self.unlabelled.step(net, batch, received, round))

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        return Bundle(bank=self.unlabelled.returned(trained, received, round))  # Eq. 1 and 14

    def remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        return self.unlabelled.remember(trained, received, round)
