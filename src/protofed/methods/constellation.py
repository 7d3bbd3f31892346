"""Constellation: prototypes in a fixed space that all clients have in common, and networks that correct them.

No paper's. Prototypes of trained embeddings are means in spaces that differ, since every client trains an encoder of its
own. Those of a fixed space are exact: the class means and the common covariance of all clients' samples are sums, and
the linear discriminant rule made of them is that of the pooled data. Each client's network learns what the rule gets
wrong.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import aggregate, losses
from ..bank import PrototypeBank
from ..common import NETWORK, guide
from ..errors import ProtofedError
from ..parts import Batch, Mean, Mix, Predict, Received, Reduce, Reduced, bank_of
from ..wire import Bundle, Exchange, array, bank, number, weights
from .base import Method, register
from .checks import at_least_one
from .client import Network, Terms, Trained, Weights
from .server import Setup, State, state

LEAST, MOST = 0.1, 0.5  # the network's share in a prediction: of a client like all others, and of one that differs
DOUBT = 3.0  # how much more new samples vary along the map's directions than those that it was made of


@state
class Sky(State):
    """The prototypes and the map that are sent, the statistics that they are made of, and who has them."""

    prototypes: PrototypeBank
    """`[C, C]`, as the map shows them."""
    discriminants: Tensor
    """`[C, width]`, the map from the common space to where the nearest prototype is the linear discriminant rule."""
    stars: PrototypeBank
    """`[C, width]`, the class means of all samples so far in the common space."""
    scatter: PrototypeBank
    """`[width // 2 + 1, width]`, one half of the covariance of features within the classes of a client."""
    weights: Weights
    heard: Tensor
    """`[N]`, 1 for clients whose statistics have arrived."""
    told: Tensor
    """`[N]`, 1 for clients that have the present map and prototypes, and are not sent them again."""

    def bank(self, client: int, round: int) -> PrototypeBank | None:
        """The prototypes, for a client that does not have them."""
        return None if bool(self.told[client]) else self.prototypes

    def map(self, client: int, round: int) -> Tensor | None:
        """The map, for a client that does not have it."""
        return None if bool(self.told[client]) else self.discriminants

    def arrived(self, client: int, round: int) -> float:
        """1 where the client's statistics have arrived, else 0, which asks for them."""
        return float(self.heard[client])

    def audience(self, client: int, round: int) -> Hashable:
        return bool(self.heard[client]), bool(self.told[client])

    def enlarged(self, start: Sky) -> Sky:
        """New clients have sent nothing and were told nothing."""
        heard, told = (torch.cat([old, old.new_zeros(len(start.heard) - len(old))]) for old in (self.heard, self.told))
        return replace(self, heard=heard, told=told)


@register("constellation")
@dataclass(frozen=True)
class Constellation(Method):
    """Prototypes and one covariance in a fixed common space make a classifier for all; each client's network corrects it."""

    reduce: ClassVar[Reduce] = Mean("size")

    width: int = 128  # the number of features of the common space
    shrinkage: float = 0.1  # of the covariance, towards one with equal variances
    trust: float = 0.1  # how much the prototypes' scores count beside the network's logits
    share: float | Literal["auto", "validated"] = "auto"
    """Of the network in a prediction; the prototypes have the rest. `auto`: 0.1 where a client is like all others, up to
    0.5 where its prototypes are as far from theirs as classes are from each other."""
    space: Literal["auto", "samples"] = "auto"  # common to all: of samples, or of the encoder that all begin with
    average_weights: bool = False  # on: the shared edition, in which clients of one architecture also share a network

    def __post_init__(self) -> None:
        at_least_one(self, "width")
        if not 0 < self.shrinkage <= 1:
            raise ValueError("shrinkage must be above 0 and at most 1")
        if self.trust <= 0:
            raise ValueError("trust must be above 0")
        if not isinstance(self.share, str) and not 0 <= self.share <= 1:
            raise ValueError("share must be from 0 to 1, auto or validated")

    @property
    def exchange(self) -> Exchange:
        """Down: map and prototypes, to clients that lack them. Up: statistics of the client's samples, until they arrive."""
        model = (weights(prefix=NETWORK),) if self.average_weights else ()
        sky = (bank(each=True, optional=True), array("map", "classes", self.width, each=True, optional=True))
        stars = bank("stars", ("classes", self.width))
        rows = len(half_of(torch.zeros(self.width, self.width)))
        scatter = bank("scatter", (rows, self.width), most=float(rows))  # each row counts all samples
        down = (*sky, number("arrived", each=True), *model)
        return Exchange(down, (stars, scatter, *model), not self.average_weights)

    @property
    def predict(self) -> Predict:
        """A mean of what the head and the prototypes say, whose scores are log-likelihoods: −½·distance²."""
        return Mix(
            "squared",
            2.0,
            common=self.width,
            common_space=self.space,
            share="held" if self.share == "auto" else self.share,
        )

    # --- client -------------------------------------------------------------------------------------------------
    def begin(self, weights: Weights, received: Received) -> Weights:
        sky = sky_of(received)
        prototypes, map = bank_of(sky), sky.tensors["map"]
        share = map.new_tensor(LEAST)
        if "stars" in received.memory.banks:
            stars = received.memory.banks["stars"]
            own = PrototypeBank(stars.means @ map.T, stars.counts)
            differs = aggregate.difference(own, prototypes, DOUBT * self.trust)
            share = LEAST + (MOST - LEAST) * differs.clamp_max(1)
            prototypes = aggregate.shrunk(own, prototypes, DOUBT * self.trust)
        return {**weights, **received.weights, **guide(prototypes, map, share)}

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms:
        return {"ce": losses.cross_entropy(net(batch.x).logits, batch.y, weight=batch.weight)}

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        classes, width = bank_of(sky_of(received)).num_classes, self.width
        banks = {"stars": PrototypeBank.empty(classes, width), "scatter": no_scatter(width)}
        if not received.scalars["arrived"]:
            banks["stars"], banks["scatter"] = self.statistics(trained, classes)
        network = {name: value for name, value in trained.weights.items() if name.startswith(NETWORK)}
        return Bundle(banks=banks, weights=network if self.average_weights else {})

    def remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        """The client's own class means in the common space, and the map and prototypes that it was sent last."""
        sky = sky_of(received)
        stars = received.memory.banks.get("stars")
        if stars is None:
            stars, _ = self.statistics(trained, bank_of(sky).num_classes)
        return Bundle(sky.bank, {"stars": stars}, tensors={"map": sky.tensors["map"]})

    def statistics(self, trained: Trained, classes: int) -> tuple[PrototypeBank, PrototypeBank]:
        """Class means of the client's samples in the common space, and the covariance of what they differ from them by."""
        _, batch = trained.outputs()
        features = trained.common(batch.x)
        stars = PrototypeBank.from_embeddings(features, batch.y, classes, batch.weight)
        rest = batch.weight[:, None] * (features - stars.means[batch.y])
        number = (batch.weight.sum() - stars.known.sum()).clamp_min(0)  # the degrees of freedom
        scatter = half_of(rest.T @ rest / number.clamp_min(1))
        return stars, PrototypeBank(scatter, number.expand(len(scatter)).clone())

    # --- server -------------------------------------------------------------------------------------------------
    def start(self, setup: Setup) -> Sky:
        classes, width = setup.num_classes, self.width
        nobody = torch.zeros(setup.num_clients)
        # names begin with the number of the architecture, if there are several
        shared = {n: v for n, v in setup.weights.items() if n.rpartition(":")[2].startswith(NETWORK)}
        model = shared if self.average_weights else {}
        prototypes, stars = PrototypeBank.empty(classes, classes), PrototypeBank.empty(classes, width)
        return Sky(prototypes, torch.eye(classes, width), stars, no_scatter(width), model, nobody, nobody)

    def update(self, state: Sky, reduced: Reduced, round: int, setup: Setup) -> Sky:
        present = torch.zeros_like(state.heard)
        present[list(reduced.contributors)] = 1.0
        heard, told = torch.maximum(state.heard, present), torch.maximum(state.told, present)
        news = bool((heard > state.heard).any())  # later uploads are empty, but for noise that privacy adds
        state = replace(state, weights={**state.weights, **reduced.weights}, heard=heard, told=told)
        if not news or not bool(reduced.banks["stars"].known.any()):
            return state
        stars = state.stars.combine(reduced.banks["stars"])
        scatter = state.scatter.combine(reduced.banks["scatter"])
        bank, map = aggregate.discriminants(stars, whole_of(scatter.means), self.shrinkage, self.trust)
        told = torch.zeros_like(told)
        return replace(state, prototypes=bank, discriminants=map, stars=stars, scatter=scatter, told=told)


def sky_of(received: Received) -> Bundle:
    """The map and the prototypes that a client has: those that it was sent, or those that it was sent before."""
    sky = received.memory if received.bank is None else received
    if sky.bank is None:
        raise ProtofedError(
            "constellation: the server sent no prototypes, as it has done so before, and this client has not kept them"
        )
    return sky


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
