"""SemiFL: the server learns from labels and the clients from what it makes of their samples, in turns.

Diao et al., "SemiFL: Semi-Supervised Federated Learning for Unlabeled Clients with Alternate Training", NeurIPS 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from .. import aggregate, losses
from ..parts import Batch, Feed, Mean, Received, Reduce, Reduced, Unlabelled, Upload
from ..schedules import Weight, weight_at
from ..wire import Bundle, Exchange, number, weights
from .base import Method, register
from .checks import a_share, at_least_one, not_negative
from .client import Loss, Network, Pseudo, Terms, Trained, Weights
from .server import Measures, Setup, State, Teacher, state

QUANTILES = 4097  # points in the table of a Beta distribution


@state
class MovingModel(State):
    """A model that is moved by the clients' average with momentum."""

    weights: Weights
    velocity: Weights

    def moved(self, average: Weights, momentum: float) -> Self:
        """The state after a step of SGD (learning rate 1) from its weights to the clients' average."""
        weights, velocity = aggregate.with_momentum(self.weights, average, self.velocity, momentum)
        return replace(self, weights={**self.weights, **weights}, velocity={**self.velocity, **velocity})


@state
class ActiveModel(MovingModel):
    """Beside the model, how many clients did not sit out."""

    active: float = 0.0


@dataclass(frozen=True)
class LabelsAtServer(Method):
    """For methods whose server trains one model on its labels, and moves it by the clients' average with momentum."""

    feed: ClassVar[Feed] = Unlabelled(views=("weak", "strong"))

    threshold: float = 0.95  # τ: confident from this probability on
    epochs_at_server: int = 5
    server_momentum: float = 0.5

    def __post_init__(self) -> None:
        a_share(self, "threshold")
        at_least_one(self, "epochs_at_server")
        if not 0 <= self.server_momentum < 1:
            raise ValueError("server_momentum must be at least 0 and below 1")

    @property
    def teacher(self) -> Teacher:
        return Teacher(self.epochs_at_server, cross_entropy, with_trained_weights)

    def start(self, setup: Setup) -> MovingModel:
        return MovingModel(setup.weights, {})

    def update(self, state: Any, reduced: Reduced, round: int, setup: Setup) -> Any:
        return state.moved(reduced.weights, self.server_momentum)


def cross_entropy(net: Network, batch: Batch, state: State, round: int) -> Terms:
    """What a server with labels learns from."""
    return {"ce": losses.cross_entropy(net(batch.x).logits, batch.y, weight=batch.weight)}


def with_trained_weights(state: MovingModel, trained: Trained, round: int) -> MovingModel:
    """The state with the model that the server trained."""
    return replace(state, weights={**state.weights, **trained.weights})


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
    feed: ClassVar[Feed] = Unlabelled(views=("weak", "strong"), draws=2)  # whom a sample is mixed with, and how
    reduce: ClassVar[Reduce] = ActiveMean()

    mixup: float = 0.75  # a of Beta(a, a)
    mix_weight: Weight = 1.0  # λ

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "mix_weight")
        if self.mixup <= 0:
            raise ValueError("mixup must be above 0")

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Loss:
        """The received model does not change in a round, so a sample's label is that of the beginning of it.

        Both terms are sums over confident samples divided by the size of the batch, so that an epoch weighs these as one
        over batches of confident samples alone would.
        """
        x, weak, strong, weight, draws = _unlabelled(batch)
        sure, label = net.frozen(x, received.weights).logits.softmax(-1).max(-1)
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
