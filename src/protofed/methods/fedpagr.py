"""FedPAGR: prototypes on a sphere, refined by the server, anchor the classifiers of clients with any architecture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from .. import seeds
from ..bank import PrototypeBank, unit
from ..errors import ProtofedError
from ..parts import (
    CE,
    Batch,
    Contrast,
    Mean,
    Nearest,
    Predict,
    Received,
    Reduce,
    Reduced,
    Refine,
    ServerRound,
    Spread,
    bank_of,
    terms_of,
)
from ..schedules import Weight
from ..wire import Bundle, Exchange
from .base import PROTOTYPES, Method, register
from .checks import not_negative
from .client import Network, Terms, Trained, Weights
from .server import Setup, Shared


@register("fedpagr", paper="Prasad and Khan, FedPAGR")
@dataclass(frozen=True)
class FedPAGR(Method):
    """CE + alignment + entropy on unit embeddings; the server refines the prototypes."""

    exchange: ClassVar[Exchange] = PROTOTYPES

    separation: float = 0.5  # λ_S of Eq. 4
    margin: float | None = None  # m of Eq. 6; none: 0.3, from 100 classes on 0.1
    refine_steps: int | None = None  # T; none: 5, from 100 classes on 3; 0 is the plain mean
    refine_lr: float = 0.01
    temperature: float = 0.1  # β; 0 switches both alignment terms off
    entropy: Weight = 0.1  # λ_E of Eq. 7
    anchor: bool = True  # the classifier's rows become the prototypes at the start of each round
    train_classifier: bool = True  # off: Algorithm 1, line 14 to the letter, which updates encoder and projection head
    reduce: Reduce = Mean("directions")  # Eq. 3

    def __post_init__(self) -> None:
        not_negative(self, "separation", "entropy", "refine_steps", "temperature")
        if self.refine_lr <= 0:
            raise ValueError("refine_lr must be above 0")
        _ = self.refinement  # refuses a margin that is no cosine

    @property
    def predict(self) -> Predict:
        """By `ẑ·p̃_c / β` (Eq. 8), so that the softmax is the probability of L_global; Eq. 1 gives the space."""
        return Nearest("cosine", self.temperature or 1.0, space="consensus")

    @property
    def refinement(self) -> Refine:  # Eq. 4–6
        return Refine(self.separation, self.margin, self.refine_steps, self.refine_lr)

    def start(self, setup: Setup) -> Shared:  # Algorithm 1, line 1
        return Shared(random_directions(setup))

    def begin(self, weights: Weights, received: Received) -> Weights:
        return anchored(weights, bank_of(received), "fedpagr") if self.anchor else weights

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms:  # Eq. 7
        align = (Contrast(temperature=self.temperature), Spread(self.entropy, self.temperature))
        parts = (CE(), *align) if self.temperature > 0 else (CE(),)
        output = net(batch.x) if self.train_classifier else net(batch.x, without_gradient(net.params, "head."))
        return terms_of(parts, net, output, batch, received, round)

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        return Bundle(bank=trained.bank().normalised())  # Eq. 2

    def update(self, state: Shared, reduced: Reduced, round: int, setup: Setup) -> Shared:
        assert reduced.bank is not None and state.bank is not None
        mean = reduced.bank if self.reduce == Mean("directions") else reduced.bank.normalised()
        start = mean.filled_from(state.bank)
        return replace(state, bank=self.refinement(start, ServerRound(state.bank, reduced)))


def random_directions(setup: Setup) -> PrototypeBank:
    """Random prototypes of length 1 for every class, before anybody has reported any."""
    stream = seeds.torch_stream(setup.seed, "prototypes")
    directions = unit(torch.randn(setup.num_classes, setup.dim, generator=stream))
    return PrototypeBank(directions, torch.ones(setup.num_classes))


def anchored(weights: Weights, bank: PrototypeBank, owner: str) -> Weights:
    """The classifier's rows become the prototypes, its biases 0.

    Args:
        weights: A model's.
        bank: The prototypes.
        owner: The method's name, for the message of an error.
    """
    anchors = unit(bank.means)
    head = weights.get("head.weight")
    if head is None or head.shape != anchors.shape:
        shape = "none" if head is None else str(list(head.shape))
        raise ProtofedError(
            f"{owner} anchors the classifier: expected a model with a weight 'head.weight' {list(anchors.shape)}, "
            f"got {shape}; use projection=consensus"
        )
    bias = {"head.bias": torch.zeros_like(weights["head.bias"])} if "head.bias" in weights else {}
    return {**weights, "head.weight": anchors, **bias}


def without_gradient(params: Weights, prefix: str) -> Weights:
    """The parameters, of which those whose names begin with the prefix have no gradient."""
    return {name: value.detach() if name.startswith(prefix) else value for name, value in params.items()}
