"""Constellation: trial."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import losses
from ..bank import PrototypeBank
from ..models.guided import CommonSpace
from ..parts import Batch, Head, Mean, Nearest, Predict, Received, Reduce, Reduced, bank_of
from ..wire import Bundle, Exchange, array, bank, weights
from .base import Method, register
from .client import Network, Terms, Trained, Weights
from .server import Setup, State, state


@state
class Sky(State):
    bank: PrototypeBank
    map: Tensor
    stars: PrototypeBank
    gram: PrototypeBank
    weights: Weights


def discriminants(stars: PrototypeBank, gram: PrototypeBank, shrinkage: float) -> tuple[PrototypeBank, Tensor]:
    """Map [C, w] and prototypes [C, C] so that nearest prototype of mapped features is the linear discriminant rule."""
    known = stars.known
    n = stars.counts.double()
    means = torch.where(known[:, None], stars.means, 0.0).double()
    centre = (n[:, None] * means).sum(0) / n.sum()
    within = gram.means.double() - (n[:, None] * means).T @ means / n.sum()
    within = 0.5 * (within + within.T)
    size = within.diagonal().mean()
    within = (1 - shrinkage) * within + shrinkage * size * torch.eye(len(within), dtype=within.dtype)
    apart = torch.where(known[:, None], means - centre, 0.0)
    directions = torch.linalg.solve(within, apart.T).T  # [C, w]
    inner = directions @ apart.T
    values, vectors = torch.linalg.eigh(0.5 * (inner + inner.T))
    keep = values > 1e-6 * values.amax().clamp_min(1e-12)
    root = vectors @ torch.diag(torch.where(keep, values.clamp_min(1e-12).rsqrt(), 0.0)) @ vectors.T
    map = root @ directions
    return PrototypeBank((means @ map.T).float() * known[:, None], stars.counts), map.float()


@register("constellation")
@dataclass(frozen=True)
class Constellation(Method):
    """Trial."""

    width: int = 128
    shrinkage: float = 0.1
    trust: float = 0.3
    masked: bool = False
    average_weights: bool = False
    reduce: Reduce = Mean("size")
    by: str = "head"

    @property
    def predict(self) -> Predict:
        kind = Head if self.by == "head" else Nearest
        return kind(common=(self.width, self.trust))

    @property
    def exchange(self) -> Exchange:
        model = (weights(),) if self.average_weights else ()
        down = (bank(), array("map", "classes", self.width), *model)
        up = (bank("stars", ("classes", self.width)), bank("gram", (self.width, self.width), most=float(self.width)), *model)
        return Exchange(down, up, not self.average_weights)

    def begin(self, weights: Weights, received: Received) -> Weights:
        b = bank_of(received)
        own = {"map": received.tensors["map"], "prototypes": b.means, "known": b.known.to(b.means.dtype)}
        return {**weights, **received.weights, **own}

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms:
        return {"ce": losses.cross_entropy(net(batch.x).logits, batch.y, weight=batch.weight)}

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        model = trained.weights if self.average_weights else {}
        classes = bank_of(received).num_classes
        if received.memory.scalars.get("sent"):
            empty = {"stars": PrototypeBank.empty(classes, self.width), "gram": PrototypeBank.empty(self.width, self.width)}
            return Bundle(banks=empty, weights=model)
        _, batch = trained.outputs()
        phi = CommonSpace(tuple(batch.x.shape[1:]), self.width)(batch.x)
        stars = PrototypeBank.from_embeddings(phi, batch.y, classes, batch.weight)
        n = batch.weight.sum()
        gram = PrototypeBank((batch.weight[:, None] * phi).T @ phi / n, n.expand(self.width).clone())
        return Bundle(banks={"stars": stars, "gram": gram}, weights=model)

    def remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        return Bundle(scalars={"sent": 1.0})

    def start(self, setup: Setup) -> Sky:
        c, w = setup.num_classes, self.width
        empty = PrototypeBank.empty(c, c)
        return Sky(empty, torch.eye(c, w), PrototypeBank.empty(c, w), PrototypeBank.empty(w, w), setup.weights if self.average_weights else {})

    def update(self, state: Sky, reduced: Reduced, round: int, setup: Setup) -> Sky:
        weights = {**state.weights, **reduced.weights}
        if not bool(reduced.banks["stars"].known.any()):
            bank, map, stars, gram = state.bank, state.map, state.stars, state.gram
        else:
            stars, gram = state.stars.combine(reduced.banks["stars"]), state.gram.combine(reduced.banks["gram"])
            bank, map = discriminants(stars, gram, self.shrinkage)
        for name in weights:
            last = name.rpartition(":")[2]
            if last in ("map", "prototypes", "known"):
                weights[name] = {"map": map, "prototypes": bank.means, "known": bank.known.float()}[last]
        return Sky(bank, map, stars, gram, weights)
