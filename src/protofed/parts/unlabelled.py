"""What a client does with its unlabelled samples: nothing, or FedSAP's phase with pseudo-labels of the nearest prototype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import losses
from ..bank import PrototypeBank
from ..models.base import Output
from ..registry import Registry
from ..schedules import Weight, weight_at
from ..wire import Bundle
from .feed import Batch, Epochs, Feed, Paired, View
from .received import Received, bank_of


class Embeds(Protocol):
    """A network in training, as far as unlabelled samples need it."""

    def __call__(self, x: Tensor) -> Output: ...


class TrainedClient(Protocol):
    """A client after training, as far as unlabelled samples need it."""

    @property
    def num_unlabelled(self) -> int: ...

    def bank(self) -> PrototypeBank: ...

    def outputs(self) -> tuple[Output, Batch]: ...

    def unlabelled(self, view: View = "none") -> Output: ...


class Nearest(NamedTuple):
    """Of each embedding the nearest prototype by cosine distance, how far it is, and how much farther the second is."""

    label: Tensor
    distance: Tensor
    margin: Tensor


class Unsupervised(NamedTuple):
    """What unlabelled samples add to a step: terms of the loss, and the pseudo-labels with those used and a score."""

    terms: Mapping[str, Tensor]
    label: Tensor
    accepted: Tensor
    score: Tensor


def nearest(z: Tensor, bank: PrototypeBank) -> Nearest:
    """FedSAP, Eq. 10."""
    distances = bank.distances(z, "cosine")
    two, classes = distances.topk(min(2, bank.num_classes), dim=-1, largest=False)
    return Nearest(classes[..., 0], two[..., 0], two[..., -1] - two[..., 0])


@dataclass(frozen=True)
class UnlabelledSamples:
    """What clients do with unlabelled samples. The default is nothing."""

    registry: ClassVar[Registry[UnlabelledSamples]] = Registry("use of unlabelled samples")
    name: ClassVar[str]

    @property
    def feed(self) -> Feed:
        """Which samples a step sees."""
        return Epochs()

    @property
    def most(self) -> float:
        """How often a sample counts in a returned prototype at most."""
        return 1.0

    def step(self, net: Embeds, batch: Batch, received: Received, round: int) -> Unsupervised | None:
        """What a step's unlabelled samples add to the loss; None where it has none."""
        return None

    def returned(self, trained: TrainedClient, received: Received, round: int) -> PrototypeBank:
        """The prototypes that a client returns."""
        return trained.bank()

    def remember(self, trained: TrainedClient, received: Received, round: int) -> Bundle:
        """What a client keeps for its next round."""
        return received.memory


@UnlabelledSamples.registry.register("ignored")
@dataclass(frozen=True)
class Ignored(UnlabelledSamples):
    """Unlabelled samples are not used."""


@UnlabelledSamples.registry.register("nearest")
@dataclass(frozen=True)
class NearestLabels(UnlabelledSamples):
    """After some rounds, consistency with the nearest prototype of samples near enough to it (FedSAP, Eq. 10–14)."""

    after: int = 100  # T_sup: rounds before unlabelled samples are used
    weight: Weight = 1.0  # λ_cons of Eq. 13
    mix: float = 0.5  # α of Eq. 14: how often a pseudo-labelled sample counts in a prototype
    margin_quantile: float = 0.25  # M of Eq. 11: this quantile of the labelled samples' margins
    distance_quantile: float = 0.9  # D_max of Eq. 11: this quantile of their distances to their class
    pseudo_labels: Literal["all", "own"] = "all"  # c of Eq. 10: the whole bank, or the client's labelled classes
    returned_classes: Literal["own", "all"] = "own"  # of Eq. 14: those with labels, or pseudo-labelled too
    normalise: bool = True  # whether prototypes of Eq. 14 have length 1, as printed

    def __post_init__(self) -> None:
        if self.after < 1:
            raise ValueError("after must be 1 or more: pseudo-labels need prototypes")
        if self.mix < 0:
            raise ValueError("mix must be 0 or more")
        for name in ("margin_quantile", "distance_quantile"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1")

    @property
    def feed(self) -> Feed:
        return Paired(views=("weak", "strong"), after=self.after)

    @property
    def most(self) -> float:
        return max(1.0, self.mix)

    def step(self, net: Embeds, batch: Batch, received: Received, round: int) -> Unsupervised | None:
        if batch.weak is None or batch.strong is None or batch.unlabelled_weight is None:
            return None
        bank = bank_of(received)
        guess = nearest(net(batch.weak).embedding.detach(), self.candidates(bank, received))
        accepted, score = self.acceptance(guess, received)
        strong = net(batch.strong).embedding
        used = batch.unlabelled_weight * accepted
        consistency = losses.consistency(strong, guess.label, bank, weight=used)  # Eq. 12
        terms = {"consistency": weight_at(self.weight, round) * consistency}
        return Unsupervised(terms, guess.label, accepted, score)

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

    def returned(self, trained: TrainedClient, received: Received, round: int) -> PrototypeBank:
        if round <= self.after or not trained.num_unlabelled:
            return trained.bank()  # Eq. 1
        output, batch = trained.outputs()
        guess = nearest(trained.unlabelled("weak").embedding, self.candidates(bank_of(received), received))
        accepted, _ = self.acceptance(guess, received)
        z = torch.cat([output.embedding, trained.unlabelled("strong").embedding])
        weight = torch.cat([batch.weight, self.mix * accepted])
        y = torch.cat([batch.y, guess.label])
        bank = PrototypeBank.from_embeddings(z, y, bank_of(received).num_classes, weight)  # Eq. 14
        if self.returned_classes == "own":
            bank = bank.restricted(trained.bank().known)
        return bank.normalised() if self.normalise else bank

    def remember(self, trained: TrainedClient, received: Received, round: int) -> Bundle:
        """The thresholds M and D_max of Eq. 11 and the client's classes, from its labels after the supervised phase."""
        if not trained.num_unlabelled or (round > self.after and received.memory.tensors):
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
