"""pFedKnow: models of the clients' own, pruned, taught by the server's model and by each other.

Wang et al., "Knowledge-Enhanced Semi-Supervised Federated Learning for Aggregating Heterogeneous Lightweight Clients in
IoT", SDM 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .. import losses
from ..wire import Bundle
from .base import (
    Batch,
    Loss,
    Network,
    Pseudo,
    Received,
    Setup,
    Step,
    Trained,
    Upload,
    View,
    register,
    unlabelled_epochs,
)
from .fedmatch import HelpedModel, helper_models, without_helpers


@register("pfedknow")
@dataclass(frozen=True)
class PFedKnow(HelpedModel):
    """CE with the client's own confident labels + λ · KL to the neighbours + λ · KL to the server's model.

    The server's model learns from labels alone. A client starts from it once; from then on it has its own, of which it
    prunes the smallest weights after each of its first rounds. What it remembers is that pruned model.
    """

    paper: ClassVar[str] = "Wang et al., SDM 2023"
    private_model: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = False
    server_view: ClassVar[View] = "weak"
    views: ClassVar[tuple[View, ...]] = ("weak",)

    threshold: float = 0.7  # a sample takes part in CE from this confidence on
    distillation: float = 1.0  # λ
    temperature: float = 2.0  # T
    prune_rate: float = 0.2  # of the weights that are left, each time
    prune_times: int = 5
    epochs_at_server: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.threshold <= 1 and 0 <= self.prune_rate < 1):
            raise ValueError("threshold is between 0 and 1, prune_rate at least 0 and below 1")
        if self.distillation < 0 or self.temperature <= 0:
            raise ValueError("distillation must be 0 or more, temperature above 0")
        if self.prune_times < 0 or self.epochs_at_server < 1:
            raise ValueError("prune_times must be 0 or more, epochs_at_server 1 or more")

    # --- client ---------------------------------------------------------------------------------------------------
    def steps(
        self, labels: Tensor, num_unlabelled: int, epochs: int, batch: int, round: int, generator: torch.Generator
    ) -> Iterator[Step]:
        return unlabelled_epochs(num_unlabelled, epochs, batch, generator)

    def client_start(self, weights: Mapping[str, Tensor], received: Received) -> Mapping[str, Tensor]:
        return {**weights, **(received.memory.weights or without_helpers(received.weights))}

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> Loss:
        x, weak, weight = batch.unlabelled, batch.weak, batch.unlabelled_weight
        assert x is not None and weak is not None and weight is not None
        server = without_helpers(received.weights)
        start = received.memory.weights or server
        sure, label = network.frozen(x, start).logits.softmax(-1).max(-1)
        confident = (sure >= self.threshold).to(sure.dtype)
        accepted = torch.where((weight * confident).sum() > 0, confident, 1.0)  # all, where none is
        params = masked(network.params, received.memory.weights)
        logits = network(weak, params).logits
        neighbours = helper_models(received.weights)
        terms = {
            "pseudo": losses.cross_entropy(logits, label, weight=weight * accepted),
            "server": self._distilled(network, weak, logits, weight, [server]),
            "neighbours": self._distilled(network, weak, logits, weight, neighbours),
        }
        return Loss(terms, Pseudo(label, accepted, sure))

    def _distilled(
        self, network: Network, x: Tensor, logits: Tensor, weight: Tensor, teachers: Sequence[Mapping[str, Tensor]]
    ) -> Tensor:
        """λ · KL to the mean of the teachers' predictions, all at temperature T."""
        if not teachers:
            return logits.new_zeros(())
        told = [(network.frozen(x, t).logits / self.temperature).softmax(-1) for t in teachers]
        target = torch.stack(told).mean(0)
        return self.distillation * losses.divergence(target, logits / self.temperature, torch.ones_like(weight), weight)

    def client_remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        times = received.memory.scalars.get("pruned", 0.0)
        own = {name: value.clone() for name, value in trained.weights.items()}
        if times >= self.prune_times:
            return Bundle(weights=own, scalars={"pruned": times})
        return Bundle(weights=pruned(own, self.prune_rate), scalars={"pruned": times + 1})

    # --- server ---------------------------------------------------------------------------------------------------
    @property
    def server_training_epochs(self) -> int:
        return self.epochs_at_server

    def server_loss(self, network: Network, batch: Batch, state: Bundle, round: int) -> dict[str, Tensor]:
        return {"ce": losses.cross_entropy(network(batch.x).logits, batch.y, weight=batch.weight)}

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        """Nothing is averaged: the clients' models are kept as the next round's neighbours."""
        density = sum(_density(u.content.weights) for u in uploads) / len(uploads)
        return replace(state, tensors=self.candidates(state, uploads, round), scalars={"density": density})

    def measures(self, state: Bundle, round: int) -> Mapping[str, float]:
        """The mean share of weights that are left in the models that came back."""
        return state.scalars


def pruned(weights: Mapping[str, Tensor], rate: float) -> dict[str, Tensor]:
    """Of every matrix and kernel, that share of the weights that are left set to 0: the smallest."""
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
    """What is 0 at the start has no part in the model, and so no gradient."""
    return {n: p * (start[n] != 0) if n in start and p.ndim > 1 else p for n, p in params.items()}


def _density(weights: Mapping[str, Tensor]) -> float:
    matrices = [v for v in weights.values() if v.ndim > 1]
    return sum(int((v != 0).sum()) for v in matrices) / max(1, sum(v.numel() for v in matrices))
