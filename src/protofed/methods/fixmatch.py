"""FixMatch at every client, then FedAvg or FedProx: semi-supervised learning without anything exchanged but weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from .. import losses
from ..parts import Batch, Feed, Mean, Paired, Received, Reduce
from ..schedules import Weight, weight_at
from ..wire import Exchange
from .base import MODEL, Method, register
from .checks import a_share, not_negative
from .client import Loss, Network, Pseudo


@dataclass(frozen=True)
class FixMatch(Method):
    """CE + λ_u · CE of the strong view with the label that the weak view is sure of."""

    exchange: ClassVar[Exchange] = MODEL

    threshold: float = 0.95  # τ: a pseudo-label counts from this probability on
    unlabelled_weight: Weight = 1.0  # λ_u
    mu: Weight = 0.0  # of FedProx's term
    labelled_view: Literal["weak", "none"] = "weak"  # of labelled samples; none in ProtoFSSL's published baseline

    def __post_init__(self) -> None:
        a_share(self, "threshold")
        not_negative(self, "mu", "unlabelled_weight")

    @property
    def feed(self) -> Feed:
        return Paired(self.labelled_view, ("weak", "strong"))

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Loss:
        mu = weight_at(self.mu, round)
        proximal = {"prox": mu * losses.proximal(net.params, received.weights)} if self.mu else {}
        if batch.weak is None or batch.strong is None:
            return Loss({"ce": losses.cross_entropy(net(batch.x).logits, batch.y, weight=batch.weight), **proximal})
        n, m = len(batch.x), len(batch.weak)
        logits = net(torch.cat([batch.x, batch.weak, batch.strong])).logits  # one pass, as batch norm wants it
        sure, label = logits[n : n + m].detach().softmax(-1).max(-1)
        accepted = (sure >= self.threshold).to(logits.dtype)
        strong = losses.pseudo_cross_entropy(logits[n + m :], label, accepted, weight=batch.unlabelled_weight)
        terms = {
            "ce": losses.cross_entropy(logits[:n], batch.y, weight=batch.weight),
            "unlabelled": weight_at(self.unlabelled_weight, round) * strong,
        }
        return Loss({**terms, **proximal}, Pseudo(label, accepted, sure))


@register("fixmatch-fedavg", paper="Sohn et al., NeurIPS 2020")
@dataclass(frozen=True)
class FixMatchFedAvg(FixMatch):
    """CE + λ_u · CE of the strong view with the label that the weak view is sure of (Sohn et al., 2020), then FedAvg."""

    reduce: Reduce = Mean("size")


@register("fixmatch-fedprox", paper="Sohn et al., NeurIPS 2020")
@dataclass(frozen=True)
class FixMatchFedProx(FixMatchFedAvg):
    """The same with FedProx's term, which keeps a client near the global model."""

    mu: Weight = 0.01
