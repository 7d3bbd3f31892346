"""Predictions: how a client classifies, from its own model and prototypes and from what the server sent it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import losses
from ..bank import PrototypeBank
from ..registry import Registry
from ..wire import Bundle

By = Literal["head", "prototype", "mix"]
SHARES = tuple(k / 10 for k in range(11))  # among which a client chooses by its validation samples
EVEN = 0.5  # the share where a client has no validation samples


@dataclass(frozen=True)
class Predict:
    """How a method's paper predicts. The other prediction is measured beside it, unless no head is trained."""

    registry: ClassVar[Registry[Predict]] = Registry("prediction")
    name: ClassVar[str]
    by: ClassVar[By] = "head"
    reads: ClassVar[tuple[str, ...]] = ("weights", "bank", "map")
    """The parts of the server's message that a prediction needs, where the method has them."""

    metric: Literal["squared", "euclidean", "cosine"] = "squared"
    temperature: float = 1.0  # what scores are divided by, so that their softmax votes in an ensemble
    prefers: Literal["received", "own", "alone"] = "received"
    """Whose prototype stands for a class that both know; `alone`: the client's own, and no received ones beside them."""
    trains_head: bool = True
    tuning: int = 0  # epochs a client trains what it was sent on its own data first; they change no state
    space: Literal["own", "consensus"] = "own"  # of the embedding: the model's own, or FedPAGR's projection head
    common: int = 0
    """Features of the fixed space that all clients have in common, as constellation has it; 0: none. With it a client
    predicts by the model that it would begin the next round with, and by the prototypes that this model holds."""
    common_space: Literal["auto", "samples"] = "auto"
    """Of what: of samples as they are, or (`auto`) of the pretrained encoder where all clients begin with the same one."""
    halves: float | None = None  # the model is a sum σ + ψ, as FedMatch has it, with ψ starting as so much of σ

    def bank(self, received: Bundle, own: Callable[[], PrototypeBank], classes: Tensor) -> PrototypeBank:
        """The prototypes that a client's embeddings are compared with.

        Args:
            received: the server's message, restricted to what the prediction reads.
            own: gives the client's own prototypes; it is called only where they are needed.
            classes: `[C]`, the classes of the client's training data.

        Returns:
            the prototypes received, and the client's own for classes that have none; the other way round with
            `prefers="own"`.
        """
        bank = received.bank
        if bank is None or self.prefers == "alone":
            return own()
        if self.prefers == "own":
            return own().filled_from(bank)
        return bank if bool((bank.known | ~classes).all()) else bank.filled_from(own())

    def scores(self, z: Tensor, bank: PrototypeBank) -> Tensor:
        """The scores of each class, the highest of which wins.

        Args:
            z: embeddings `[n, d]`.
            bank: the prototypes to compare with.

        Returns:
            `[n, C]`, −∞ where the bank does not know a class.

        >>> import torch
        >>> bank = PrototypeBank(torch.tensor([[0.0], [3.0]]), torch.ones(2))
        >>> Nearest().scores(torch.tensor([[1.0]]), bank)
        tensor([[-1., -4.]])
        """
        distances = self.distances(z, bank)
        return (1 - distances if self.metric == "cosine" else -distances) / self.temperature

    def distances(self, z: Tensor, bank: PrototypeBank) -> Tensor:
        """The distances `[..., n, C]` that the scores are made of, infinite where the bank does not know a class."""
        return bank.distances(z, self.metric)


@Predict.registry.register("head")
@dataclass(frozen=True)
class Head(Predict):
    """The prediction is that of the classifier head."""


@Predict.registry.register("prototype")
@dataclass(frozen=True)
class Nearest(Predict):
    """The prediction is the class of the nearest prototype."""

    by: ClassVar[By] = "prototype"


@Predict.registry.register("mix")
@dataclass(frozen=True)
class Mix(Predict):
    """The prediction mixes head and prototypes: `share · softmax(logits) + (1 − share) · softmax(scores)`.

    Where one of the two does not know a class, it has the probability that the other gives it: the head does not know
    classes of which a private model saw no sample, and prototypes do not know classes without one. Where the nearest
    prototype is chosen among the client's own classes, so is the mix.
    """

    by: ClassVar[By] = "mix"

    metric: Literal["squared", "euclidean", "cosine"] = "cosine"
    temperature: float = 0.1
    share: float | Literal["validated", "held"] = "validated"
    """The head's; `validated`: what is best on the client's own validation samples, 0.5 where it has none; `held`: what the
    client's model holds, as constellation has it."""

    def __post_init__(self) -> None:
        if not isinstance(self.share, str) and not 0 <= self.share <= 1:
            raise ValueError("share must be from 0 to 1, or validated")
        if self.share == "held" and not self.common:
            raise ValueError("share=held is constellation's, whose models hold one")
        if not self.temperature > 0:
            raise ValueError("temperature must be above 0")
        if not self.trains_head:
            raise ValueError("trains_head must be true: a mix needs the head")

    def mixed(self, logits: Tensor, scores: Tensor, trained: Tensor, share: float | Tensor) -> Tensor:
        """The logarithms of the mixed probabilities.

        Args:
            logits: `[n, C]`, the head's.
            scores: `[n, C]`, the prototypes', −∞ for a class without one.
            trained: `[C]`, the classes of which the head is asked.
            share: The head's share.

        Returns:
            `[n, C]`.

        >>> mixed = Mix().mixed(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([True, True]), 0.5)
        >>> mixed.exp()
        tensor([[0.5000, 0.5000]])
        """
        known = scores > float("-inf")
        head, prototype = _restricted_softmax(logits, trained), _restricted_softmax(scores, known)
        filled_head = _filled(head, prototype, trained)
        return (share * filled_head + (1 - share) * _filled(prototype, head, known)).log()

    def chosen(self, logits: Tensor, scores: Tensor, trained: Tensor, labels: Tensor) -> float:
        """The head's share with the most right predictions of validation samples; of equal ones the most even."""
        right = [(self.mixed(logits, scores, trained, share).argmax(-1) == labels).sum() for share in SHARES]
        return max(zip(right, SHARES, strict=True), key=lambda found: (int(found[0]), -abs(found[1] - EVEN)))[1]


def _restricted_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """The softmax over the classes of a mask, 0 for all others."""
    return torch.where(mask, scores, torch.finfo(scores.dtype).min).softmax(-1) * mask


def _filled(p: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """Probabilities over the classes of a mask, with the other's for the classes beside it."""
    beside = torch.where(mask, 0.0, other)
    return p * (1 - beside.sum(-1, keepdim=True)) + beside


@dataclass(frozen=True)
class Helpers(Predict):
    """The prediction is the mean over several clients' banks of softmax(−distance); the server sends them as `helpers`.

    Before there are any, it is made from the client's own prototypes.
    """

    by: ClassVar[By] = "prototype"
    reads: ClassVar[tuple[str, ...]] = ("weights", "helpers")

    trains_head: bool = False
    distance: Literal["mean", "squared", "euclidean"] = "mean"

    def bank(self, received: Bundle, own: Callable[[], PrototypeBank], classes: Tensor) -> PrototypeBank:
        helpers = received.banks["helpers"]
        return helpers if self.prefers != "alone" and bool(helpers.known.any()) else own()

    def scores(self, z: Tensor, bank: PrototypeBank) -> Tensor:
        p = losses.distance_softmax(z, bank, self.distance)
        return (p.mean(0) if p.ndim > 2 else p).log()

    def distances(self, z: Tensor, bank: PrototypeBank) -> Tensor:
        """The distances to each helper's prototypes; `mean` is the squared distance divided by the dimension."""
        if self.distance == "mean":
            return bank.distances(z) / bank.dim
        return bank.distances(z, self.distance)
