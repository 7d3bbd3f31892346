"""Predictions: how a client classifies, from its own model and prototypes and from what the server sent it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from .. import losses
from ..bank import PrototypeBank
from ..registry import Registry
from ..wire import Bundle

By = Literal["head", "prototype"]


@dataclass(frozen=True)
class Predict:
    """How a method's paper predicts. The other prediction is measured beside it, unless no head is trained."""

    registry: ClassVar[Registry[Predict]] = Registry("prediction")
    name: ClassVar[str]
    by: ClassVar[By] = "head"
    reads: ClassVar[tuple[str, ...]] = ("weights", "bank")
    """The parts of the server's message that a prediction needs."""

    metric: Literal["squared", "euclidean", "cosine"] = "squared"
    temperature: float = 1.0  # what scores are divided by, so that their softmax votes in an ensemble
    prefers: Literal["received", "own", "alone"] = "received"
    """Whose prototype stands for a class that both know; `alone`: the client's own, and no received ones beside them."""
    trains_head: bool = True
    tuning: int = 0  # epochs a client trains what it was sent on its own data first; they change no state
    space: Literal["own", "consensus"] = "own"  # of the embedding: the model's own, or FedPAGR's projection head
    common: tuple[int, float] | None = None
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
