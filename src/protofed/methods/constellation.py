"""Constellation: prototypes in a fixed space that all clients have in common, and networks that correct them.

No paper's. Prototypes of trained embeddings are means in spaces that differ, since every client trains an encoder of its
own. Those of a fixed space are exact: the class means and the common covariance of all clients' samples are sums, and
the linear discriminant rule made of them is that of the pooled data. Each client's network learns what the rule gets
wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import aggregate, losses
from ..bank import PrototypeBank
from ..common import CommonSpace
from ..parts import Batch, Mean, Mix, Predict, Received, Reduce, Reduced, bank_of
from ..wire import Bundle, Exchange, array, bank, weights
from .base import Method, register
from .checks import at_least_one
from .client import Network, Terms, Trained, Weights
from .server import Setup, State, state

DOUBT = 3.0  # how much more new samples vary along the map's directions than those that it was made of


@state
class Sky(State):
    """The prototypes and the map that are sent, and the statistics that they are made of."""

    bank: PrototypeBank
    """`[C, C]`, prototypes as the map shows them."""
    map: Tensor
    """`[C, width]`, from the common space to where the nearest prototype is the linear discriminant rule."""
    stars: PrototypeBank
    """`[C, width]`, the class means of all samples so far in the common space."""
    scatter: PrototypeBank
    """`[width // 2 + 1, width]`, one half of the covariance of features within the classes of a client."""
    weights: Weights


@register("constellation")
@dataclass(frozen=True)
class Constellation(Method):
    """Prototypes and one covariance in a fixed common space make a classifier for all; each client's network corrects it."""

    reduce: ClassVar[Reduce] = Mean("size")

    width: int = 128  # the number of features of the common space
    shrinkage: float = 0.1  # of the covariance, towards one with equal variances
    trust: float = 0.1  # how much the prototypes' scores count beside the network's logits
    average_weights: bool = False  # on: the shared edition, in which clients of one architecture also share a network

    def __post_init__(self) -> None:
        at_least_one(self, "width")
        if not 0 < self.shrinkage <= 1:
            raise ValueError("shrinkage must be above 0 and at most 1")
        if self.trust <= 0:
            raise ValueError("trust must be above 0")

    @property
    def exchange(self) -> Exchange:
        """Down: the map and the prototypes. Up: statistics of the client's samples, the first time; later they are empty."""
        model = (weights(),) if self.average_weights else ()
        stars = bank("stars", ("classes", self.width))
        rows = len(half_of(torch.zeros(self.width, self.width)))
        scatter = bank("scatter", (rows, self.width), most=float(rows))  # each row counts all samples
        return Exchange(
            (bank(), array("map", "classes", self.width), *model), (stars, scatter, *model), not self.average_weights
        )

    @property
    def predict(self) -> Predict:
        """The mean of what the head and the prototypes say, whose scores are log-likelihoods: −½·distance²."""
        return Mix("squared", 2.0, prefers="shrunk", variance=DOUBT * self.trust, common=self.width, share=0.5)

    # --- client -------------------------------------------------------------------------------------------------
    def begin(self, weights: Weights, received: Received) -> Weights:
        bank, map = bank_of(received), received.tensors["map"]
        if "stars" in received.memory.banks:
            stars = received.memory.banks["stars"]
            bank = aggregate.shrunk(PrototypeBank(stars.means @ map.T, stars.counts), bank, DOUBT * self.trust)
        return {**weights, **received.weights, **guide(bank, map)}

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms:
        return {"ce": losses.cross_entropy(net(batch.x).logits, batch.y, weight=batch.weight)}

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        classes, width = bank_of(received).num_classes, self.width
        banks = {"stars": PrototypeBank.empty(classes, width), "scatter": no_scatter(width)}
        if not received.memory.banks:
            banks["stars"], banks["scatter"] = self.statistics(trained, classes)
        return Bundle(banks=banks, weights=trained.weights if self.average_weights else {})

    def remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        """The client's own class means in the common space, which are sent once."""
        if received.memory.banks:
            return received.memory
        return Bundle(banks={"stars": self.statistics(trained, bank_of(received).num_classes)[0]})

    def statistics(self, trained: Trained, classes: int) -> tuple[PrototypeBank, PrototypeBank]:
        """Class means of the client's samples in the common space, and the covariance of what they differ from them by."""
        _, batch = trained.outputs()
        features = CommonSpace(tuple(batch.x.shape[1:]), self.width)(batch.x)
        stars = PrototypeBank.from_embeddings(features, batch.y, classes, batch.weight)
        rest = batch.weight[:, None] * (features - stars.means[batch.y])
        number = (batch.weight.sum() - stars.known.sum()).clamp_min(0)  # the degrees of freedom
        scatter = half_of(rest.T @ rest / number.clamp_min(1))
        return stars, PrototypeBank(scatter, number.expand(len(scatter)).clone())

    # --- server -------------------------------------------------------------------------------------------------
    def start(self, setup: Setup) -> Sky:
        classes, width = setup.num_classes, self.width
        stars, scatter = PrototypeBank.empty(classes, width), no_scatter(width)
        weights = setup.weights if self.average_weights else {}
        return Sky(PrototypeBank.empty(classes, classes), torch.eye(classes, width), stars, scatter, weights)

    def update(self, state: Sky, reduced: Reduced, round: int, setup: Setup) -> Sky:
        bank, map, stars, scatter = state.bank, state.map, state.stars, state.scatter
        if bool(reduced.banks["stars"].known.any()):
            stars, scatter = stars.combine(reduced.banks["stars"]), scatter.combine(reduced.banks["scatter"])
            bank, map = aggregate.discriminants(stars, whole_of(scatter.means), self.shrinkage, self.trust)
        weights = {**state.weights, **reduced.weights}
        new = guide(bank, map)  # a shared model has it too; names begin with the architecture's number
        weights |= {name: new[name.rpartition(":")[2]] for name in weights if name.rpartition(":")[2] in new}
        return Sky(bank, map, stars, scatter, weights)


def guide(bank: PrototypeBank, map: Tensor) -> Weights:
    """The buffers of a guided model that show it the prototypes."""
    return {"map": map, "prototypes": bank.means, "known": bank.known.to(bank.means.dtype)}


def half_of(symmetric: Tensor) -> Tensor:
    """The numbers on and above the diagonal of a symmetric matrix, in rows of its width; the last row ends with zeros.

    >>> half_of(torch.tensor([[1.0, 2.0], [2.0, 3.0]])).tolist()
    [[1.0, 2.0], [3.0, 0.0]]
    """
    width = len(symmetric)
    half = symmetric.new_zeros((width // 2 + 1) * width)
    row, column = torch.triu_indices(width, width, device=symmetric.device)
    half[: len(row)] = symmetric[row, column]
    return half.view(-1, width)


def whole_of(half: Tensor) -> Tensor:
    """The symmetric matrix of which `half_of` gives one half."""
    width = half.shape[1]
    row, column = torch.triu_indices(width, width, device=half.device)
    whole = half.new_zeros(width, width)
    whole[row, column] = half.flatten()[: len(row)]
    whole[column, row] = whole[row, column]
    return whole


def no_scatter(width: int) -> PrototypeBank:
    """One half of a covariance of which nothing is known."""
    return PrototypeBank.empty(*half_of(torch.zeros(width, width)).shape)
