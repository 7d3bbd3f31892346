"""pFedKnow: models of the clients' own, pruned, taught by the server's model and by each other.

Wang et al., "Knowledge-Enhanced Semi-Supervised Federated Learning for Aggregating Heterogeneous Lightweight Clients in
IoT", SDM 2023.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .. import losses
from ..parts import Batch, Feed, Received, Reduced, Unlabelled
from ..schedules import Weight, weight_at
from ..wire import Bundle, Exchange
from .at_server import cross_entropy, with_trained_weights
from .base import register
from .checks import a_share, at_least_one, not_negative
from .client import Loss, Network, Pseudo, Trained, Weights
from .fedmatch import Helped, HelpedModel
from .server import Measures, Setup, Teacher


@register("pfedknow", paper="Wang et al., SDM 2023")
@dataclass(frozen=True)
class PFedKnow(HelpedModel):
    """CE with the client's own confident labels + λ · KL to the neighbours + λ · KL to the server's model.

    The server's model learns from labels alone. A client starts from it once; from then on it has its own, of which it
    prunes the smallest weights after each of its first rounds. What it remembers is that pruned model.
    """

    exchange: ClassVar[Exchange] = replace(HelpedModel.exchange, keeps_model=True)
    feed: ClassVar[Feed] = Unlabelled(views=("weak",))

    threshold: float = 0.7  # a sample takes part in CE from this confidence on
    distillation: Weight = 1.0  # λ
    temperature: float = 2.0  # T
    prune_rate: float = 0.2  # of the weights that are left, each time
    prune_times: int = 5
    epochs_at_server: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        a_share(self, "threshold")
        not_negative(self, "distillation", "prune_times")
        at_least_one(self, "epochs_at_server")
        if not 0 <= self.prune_rate < 1 or self.temperature <= 0:
            raise ValueError("prune_rate must be at least 0 and below 1, temperature above 0")

    @property
    def teacher(self) -> Teacher:
        return Teacher(self.epochs_at_server, cross_entropy, with_trained_weights)

    # --- client ---------------------------------------------------------------------------------------------------
    def begin(self, weights: Weights, received: Received) -> Weights:
        return {**weights, **(received.memory.weights or received.weights)}

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Loss:
        x, weak, weight = batch.unlabelled, batch.weak, batch.unlabelled_weight
        assert x is not None and weak is not None and weight is not None
        start = received.memory.weights or received.weights
        sure, label = net.frozen(x, start).logits.softmax(-1).max(-1)
        confident = (sure >= self.threshold).to(sure.dtype)
        accepted = torch.where((weight * confident).sum() > 0, confident, 1.0)  # all, where none is
        logits = net(weak, masked(net.params, received.memory.weights)).logits
        distillation = weight_at(self.distillation, round)
        neighbours = list(received.models.values())
        terms = {
            "pseudo": losses.cross_entropy(logits, label, weight=weight * accepted),
            "server": distillation * self._distilled(net, weak, logits, weight, [received.weights]),
            "neighbours": distillation * self._distilled(net, weak, logits, weight, neighbours),
        }
        return Loss(terms, Pseudo(label, accepted, sure))

    def _distilled(
        self, net: Network, x: Tensor, logits: Tensor, weight: Tensor, teachers: Sequence[Weights]
    ) -> Tensor:
        """KL to the mean of the teachers' predictions, all at temperature T."""
        if not teachers:
            return logits.new_zeros(())
        target = torch.stack([(net.frozen(x, t).logits / self.temperature).softmax(-1) for t in teachers]).mean(0)
        return losses.divergence(target, logits / self.temperature, torch.ones_like(weight), weight)

    def remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        times = received.memory.scalars.get("pruned", 0.0)
        weights = dict(trained.weights)
        if times >= self.prune_times:
            return Bundle(weights=weights, scalars={"pruned": times})
        return Bundle(weights=pruned(weights, self.prune_rate), scalars={"pruned": times + 1})

    # --- server ---------------------------------------------------------------------------------------------------
    def update(self, state: Helped, reduced: Reduced, round: int, setup: Setup) -> Helped:
        """Nothing is averaged: the clients' models are kept as the next round's neighbours."""
        density = sum(_density(u.content.weights) for u in reduced.uploads) / len(reduced.uploads)
        return replace(state.heard(reduced, round), density=density)

    def describe(self, state: Helped, round: int) -> Measures:
        """The mean share of weights that are left in the models that came back."""
        return Measures({"density": state.density})


def pruned(weights: Mapping[str, Tensor], rate: float) -> dict[str, Tensor]:
    """The weights with the smallest ones of every matrix and kernel set to 0: `rate` of those that are not 0 yet."""
    result = dict(weights)
    for name, value in weights.items():
        if value.ndim > 1:
            flat = value.flatten().clone()
            size = torch.where(flat != 0, flat.abs(), torch.inf)
            fewer = int(rate * int((flat != 0).sum()))
            flat[size.argsort(stable=True)[:fewer]] = 0
            result[name] = flat.reshape(value.shape)
    return result


def masked(params: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A weight that is 0 at the start of training is pruned: it gets no gradient and stays 0."""
    return {n: p * (start[n] != 0) if n in start and p.ndim > 1 else p for n, p in params.items()}


def _density(weights: Mapping[str, Tensor]) -> float:
    matrices = [v for v in weights.values() if v.ndim > 1]
    return sum(int((v != 0).sum()) for v in matrices) / max(1, sum(v.numel() for v in matrices))
