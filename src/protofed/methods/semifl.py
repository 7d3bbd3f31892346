"""SemiFL: the server learns from labels and the clients from what it makes of their samples, in turns.

Diao et al., "SemiFL: Semi-Supervised Federated Learning for Unlabeled Clients with Alternate Training", NeurIPS 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from scipy.special import betaincinv
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
    SharedModel,
    Step,
    Trained,
    Upload,
    View,
    moved,
    register,
    unlabelled_epochs,
    weighted_average,
)

QUANTILES = 4097  # points in the table of a Beta distribution


@dataclass(frozen=True)
class LabelsAtServer(SharedModel):
    """For methods whose server trains one model on its labels, and moves it by the clients' average with momentum."""

    reads_unlabelled: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = False
    server_view: ClassVar[View] = "weak"
    views: ClassVar[tuple[View, ...]] = ("weak", "strong")

    threshold: float = 0.95  # τ: confident from this probability on
    epochs_at_server: int = 5
    server_momentum: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError("threshold is a probability, between 0 and 1")
        if self.epochs_at_server < 1 or not 0 <= self.server_momentum < 1:
            raise ValueError("epochs_at_server must be 1 or more, server_momentum at least 0 and below 1")

    def steps(
        self, labels: Tensor, num_unlabelled: int, epochs: int, batch: int, round: int, generator: torch.Generator
    ) -> Iterator[Step]:
        return unlabelled_epochs(num_unlabelled, epochs, batch, generator)

    def send(self, state: Bundle, client: int, round: int) -> Bundle:
        return Bundle(weights=state.weights)

    @property
    def server_training_epochs(self) -> int:
        return self.epochs_at_server

    def server_loss(self, network: Network, batch: Batch, state: Bundle, round: int) -> dict[str, Tensor]:
        return {"ce": losses.cross_entropy(network(batch.x).logits, batch.y, weight=batch.weight)}


@register("semifl")
@dataclass(frozen=True)
class SemiFL(LabelsAtServer):
    """CE of strong views with the received model's confident labels, and mixup of confident samples with any others."""

    paper: ClassVar[str] = "Diao et al., NeurIPS 2022"
    travels: ClassVar[tuple[str, ...]] = ("weights", "scalars.confident")
    required: ClassVar[tuple[str, ...]] = ("weights", "scalars.confident")
    random_numbers: ClassVar[int] = 2  # whom a sample is mixed with, and how

    mixup: float = 0.75  # a of Beta(a, a)
    mix_weight: float = 1.0  # λ

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixup <= 0 or self.mix_weight < 0:
            raise ValueError("mixup must be above 0, mix_weight 0 or more")

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> Loss:
        """The received model does not change in a round, so a sample's label is that of the beginning of it.

        Both terms are sums over confident samples divided by the size of the batch, so that an epoch weighs these as one
        over batches of confident samples alone would.
        """
        x, weak, strong, weight, numbers = _unlabelled(batch)
        sure, label = network.frozen(x, received.weights).logits.softmax(-1).max(-1)
        accepted = (sure >= self.threshold).to(sure.dtype)
        other = partners(numbers[:, 0], weight)
        share = beta(numbers[:1, 1], self.mixup)[0]  # one for the step
        mixed = share * weak + (1 - share) * weak[other]
        logits = network(torch.cat([strong, mixed])).logits  # one pass, as batch norm wants it
        fix, mix = logits[: len(x)], logits[len(x) :]
        own, its = (losses.pseudo_cross_entropy(mix, y, accepted, weight) for y in (label, label[other]))
        terms = {
            "fix": losses.pseudo_cross_entropy(fix, label, accepted, weight),
            "mix": self.mix_weight * (share * own + (1 - share) * its),
        }
        return Loss(terms, Pseudo(label, accepted, sure))

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        """`confident` counts the samples that the received model is sure of."""
        sure = trained.unlabelled(weights=received.weights).logits.softmax(-1).amax(-1)
        confident = float((sure >= self.threshold).sum())
        return Bundle(weights=trained.weights, scalars={"confident": confident})

    def server_start(self, setup: Setup) -> Bundle:
        return Bundle(weights=setup.weights, scalars={"active": 0.0})

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        """The plain mean of the active clients; a client without a confident sample sits out."""
        active = [u for u in uploads if u.content.scalars["confident"] > 0]
        state = replace(state, scalars={"active": float(len(active))})
        return moved(state, weighted_average(active, [1.0] * len(active)), self.server_momentum) if active else state

    def measures(self, state: Bundle, round: int) -> dict[str, float]:
        """How many clients did not sit out."""
        return dict(state.scalars)


def _unlabelled(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The parts of a step over unlabelled samples, which are all there in such a step."""
    parts = (batch.unlabelled, batch.weak, batch.strong, batch.unlabelled_weight, batch.numbers)
    x, weak, strong, weight, numbers = parts
    assert x is not None and weak is not None and strong is not None and weight is not None and numbers is not None
    return x, weak, strong, weight, numbers


def partners(u: Tensor, weight: Tensor) -> Tensor:
    """Row numbers drawn with replacement by uniform numbers, among the rows before the padding."""
    there = weight.sum()
    return torch.minimum(u * there, (there - 1).clamp_min(0)).long()


def beta(u: Tensor, a: float) -> Tensor:
    """The quantile function of Beta(a, a) at `u[n]`, linear between the points of a table."""
    table = torch.from_numpy(_quantiles(a)).to(u)
    place = u * (QUANTILES - 1)
    below = place.long().clamp(0, QUANTILES - 2)
    return torch.lerp(table[below], table[below + 1], place - below)


@lru_cache(maxsize=8)
def _quantiles(a: float) -> np.ndarray:
    return np.asarray(betaincinv(a, a, np.linspace(0, 1, QUANTILES)))
