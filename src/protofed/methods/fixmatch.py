"""FixMatch at every client, then FedAvg or FedProx: semi-supervised learning without anything exchanged but weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import losses
from .base import Batch, Loss, Network, Pseudo, Received, SharedModel, Step, View, paired_epochs, register


@register("fixmatch-fedavg")
@dataclass(frozen=True)
class FixMatchFedAvg(SharedModel):
    """CE + λ_u · CE of the strong view with the label that the weak view is sure of (Sohn et al., 2020), then FedAvg."""

    paper: ClassVar[str] = "Sohn et al., NeurIPS 2020"
    reads_unlabelled: ClassVar[bool] = True
    views: ClassVar[tuple[View, ...]] = ("weak", "strong")
    labelled_view: ClassVar[View] = "weak"

    threshold: float = 0.95  # τ: a pseudo-label counts from this probability on
    unlabelled_weight: float = 1.0  # λ_u
    mu: float = 0.0  # of FedProx's term

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError("threshold is a probability, between 0 and 1")
        if self.mu < 0 or self.unlabelled_weight < 0:
            raise ValueError("mu and unlabelled_weight must be 0 or more")

    def steps(
        self, labels: Tensor, num_unlabelled: int, epochs: int, batch: int, round: int, generator: torch.Generator
    ) -> Iterator[Step]:
        return paired_epochs(len(labels), num_unlabelled, epochs, batch, generator)

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> Loss:
        proximal = {"prox": self.mu * losses.proximal(network.params, received.weights)} if self.mu else {}
        if batch.weak is None or batch.strong is None:
            return Loss({"ce": losses.cross_entropy(network(batch.x).logits, batch.y, weight=batch.weight), **proximal})
        n, m = len(batch.x), len(batch.weak)
        logits = network(torch.cat([batch.x, batch.weak, batch.strong])).logits  # one pass, as batch norm wants it
        sure, label = logits[n : n + m].detach().softmax(-1).max(-1)
        accepted = (sure >= self.threshold).to(logits.dtype)
        strong = losses.pseudo_cross_entropy(logits[n + m :], label, accepted, weight=batch.unlabelled_weight)
        terms = {
            "ce": losses.cross_entropy(logits[:n], batch.y, weight=batch.weight),
            "unlabelled": self.unlabelled_weight * strong,
        }
        return Loss({**terms, **proximal}, Pseudo(label, accepted, sure))


@register("fixmatch-fedprox")
@dataclass(frozen=True)
class FixMatchFedProx(FixMatchFedAvg):
    """The same with FedProx's term, which keeps a client near the global model."""

    mu: float = 0.01
