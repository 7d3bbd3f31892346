"""SemiFL: the server learns from labels and the clients from what it makes of their samples, in turns.

Diao et al., "SemiFL: Semi-Supervised Federated Learning for Unlabeled Clients with Alternate Training", NeurIPS 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .. import losses
from ..parts import Batch, Feed, Mean, Received, Reduce, Reduced, Upload
from ..schedules import Weight, weight_at
from ..wire import Bundle, Exchange, number, weights
from .at_server import VIEWS, LabelsAtServer, MovingModel, judged, probabilities
from .base import register
from .checks import not_negative
from .client import Loss, Network, Pseudo, Trained
from .server import Measures, Setup, state

QUANTILES = 4097  # points in the table of a Beta distribution


@state
class ActiveModel(MovingModel):
    """Beside the model, how many clients did not sit out."""

    active: float = 0.0


@dataclass(frozen=True)
class ActiveMean(Mean):
    """The plain mean of the active clients; one without a confident sample sits out."""

    def share(self, upload: Upload) -> float:
        return float(upload.content.scalars["confident"] > 0)


@register("semifl", paper="Diao et al., NeurIPS 2022")
@dataclass(frozen=True)
class SemiFL(LabelsAtServer):
    """CE of strong views with the received model's confident labels, and mixup of confident samples with any others."""

    exchange: ClassVar[Exchange] = Exchange((weights(),), (weights(), number("confident")), keeps_model=False)
    reduce: ClassVar[Reduce] = ActiveMean()

    mixup: float = 0.75  # a of Beta(a, a)
    mix_weight: Weight = 1.0  # λ

    @property
    def feed(self) -> Feed:
        """Two draws say whom a sample is mixed with, and how; labels are made once a round."""
        return replace(VIEWS, draws=2, prepare=probabilities)

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "mix_weight")
        if self.mixup <= 0:
            raise ValueError("mixup must be above 0")

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Loss:
        """A sample's label is that of the received model, which labels all samples at the beginning of the round.

        Both terms are sums over confident samples divided by the size of the batch, so that an epoch weighs these as one
        over batches of confident samples alone would.
        """
        x, weak, strong, weight, draws = _unlabelled(batch)
        sure, label = judged(net, x, batch, received).max(-1)
        accepted = (sure >= self.threshold).to(sure.dtype)
        other = partners(draws[:, 0], weight)
        share = beta(draws[:1, 1], self.mixup)[0]  # one for the step
        mixed = share * weak + (1 - share) * weak[other]
        logits = net(torch.cat([strong, mixed])).logits  # one pass, as batch norm wants it
        fix, mix = logits[: len(x)], logits[len(x) :]
        first, second = (losses.pseudo_cross_entropy(mix, y, accepted, weight) for y in (label, label[other]))
        terms = {
            "fix": losses.pseudo_cross_entropy(fix, label, accepted, weight),
            "mix": weight_at(self.mix_weight, round) * (share * first + (1 - share) * second),
        }
        return Loss(terms, Pseudo(label, accepted, sure))

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        """`confident` counts the samples that the received model is sure of."""
        sure = trained.unlabelled(weights=received.weights).logits.softmax(-1).amax(-1)
        confident = float((sure >= self.threshold).sum())
        return Bundle(weights=trained.weights, scalars={"confident": confident})

    def start(self, setup: Setup) -> ActiveModel:
        return ActiveModel(setup.weights, {})

    def update(self, state: ActiveModel, reduced: Reduced, round: int, setup: Setup) -> ActiveModel:
        stepped = state.moved(reduced.weights, self.server_momentum) if reduced.weights else state
        return replace(stepped, active=reduced.share)

    def describe(self, state: ActiveModel, round: int) -> Measures:
        """How many clients did not sit out."""
        return Measures({"active": state.active})


def _unlabelled(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The parts of a step over unlabelled samples, which are all there in such a step."""
    x, weak, strong, weight, draws = batch.unlabelled, batch.weak, batch.strong, batch.unlabelled_weight, batch.draws
    assert x is not None and weak is not None and strong is not None and weight is not None and draws is not None
    return x, weak, strong, weight, draws


def partners(u: Tensor, weight: Tensor) -> Tensor:
    """Row numbers drawn with replacement by uniform numbers, among the rows before the padding."""
    number = weight.sum()
    return torch.minimum(u * number, (number - 1).clamp_min(0)).long()


def beta(u: Tensor, a: float) -> Tensor:
    """The quantile function of Beta(a, a) at `u[n]`, linear between the points of a table."""
    table = torch.from_numpy(_quantiles(a)).to(u)
    position = u * (QUANTILES - 1)
    below = position.long().clamp(0, QUANTILES - 2)
    return torch.lerp(table[below], table[below + 1], position - below)


@lru_cache(maxsize=8)
def _quantiles(a: float) -> np.ndarray:
    from scipy.special import betaincinv

    return np.asarray(betaincinv(a, a, np.linspace(0, 1, QUANTILES)))
