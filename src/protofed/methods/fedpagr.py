"""FedPAGR: prototypes on a sphere, refined by the server, anchor the classifiers of clients with any architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import aggregate, losses, seeds
from ..bank import PrototypeBank, unit
from ..errors import ProtofedError
from ..wire import Bundle
from .base import Batch, Network, Received, Setup, SharedBank, Trained, Upload, bank_of, register, uploaded_banks

MANY = 100  # classes from which the paper takes a smaller margin and fewer steps


@register("fedpagr")
@dataclass(frozen=True)
class FedPAGR(SharedBank):
    """CE + alignment + entropy on unit embeddings; the server refines the prototypes (Prasad and Khan)."""

    paper: ClassVar[str] = "Prasad and Khan, FedPAGR"
    projection: ClassVar[Literal["none", "consensus"]] = "consensus"  # Eq. 1
    predicts: ClassVar[Literal["head", "prototype"]] = "prototype"

    separation: float = 0.5  # λ_S of Eq. 4
    margin: float | None = None  # m of Eq. 6; none: 0.3, from 100 classes on 0.1
    refine_steps: int | None = None  # T; none: 5, from 100 classes on 3
    refine_lr: float = 0.01
    temperature: float = 0.1  # β; 0 switches both alignment terms off
    entropy: float = 0.1  # λ_E of Eq. 7

    def __post_init__(self) -> None:
        if self.separation < 0 or self.entropy < 0:
            raise ValueError("separation and entropy must be 0 or more")
        if self.margin is not None and not -1 <= self.margin <= 1:
            raise ValueError("margin is a cosine: it must be from -1 to 1")
        if self.refine_steps is not None and self.refine_steps < 0:
            raise ValueError("refine_steps must be 0 or more (0 is the plain mean)")
        if self.refine_lr <= 0:
            raise ValueError("refine_lr must be above 0")
        if self.temperature < 0:
            raise ValueError("temperature must be 0 or more (0 switches the alignment terms off)")

    def refinement(self, num_classes: int) -> tuple[float, int]:
        """Margin and steps for so many classes: the paper's, where they are not set."""
        margin, steps = (0.1, 3) if num_classes >= MANY else (0.3, 5)
        return (
            margin if self.margin is None else self.margin,
            steps if self.refine_steps is None else self.refine_steps,
        )

    def server_start(self, setup: Setup) -> Bundle:  # Algorithm 1, line 1
        stream = seeds.torch_stream(setup.seed, "prototypes")
        directions = unit(torch.randn(setup.num_classes, setup.dim, generator=stream))
        return Bundle(bank=PrototypeBank(directions, torch.ones(setup.num_classes)))

    def client_start(self, weights: Mapping[str, Tensor], received: Received) -> Mapping[str, Tensor]:
        """Anchoring: the classifier's rows become the prototypes, its biases 0."""
        anchors = unit(bank_of(received).means)
        head = weights.get("head.weight")
        if head is None or head.shape != anchors.shape:
            came = "none" if head is None else str(list(head.shape))
            raise ProtofedError(
                f"fedpagr anchors the classifier: expected a model with a weight 'head.weight' {list(anchors.shape)}, "
                f"got {came}; use projection=consensus"
            )
        bias = {"head.bias": torch.zeros_like(weights["head.bias"])} if "head.bias" in weights else {}
        return {**weights, "head.weight": anchors, **bias}

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> dict[str, Tensor]:  # Eq. 7
        z, logits = network(batch.x)
        terms = {"ce": losses.cross_entropy(logits, batch.y, weight=batch.weight)}
        if self.temperature > 0:
            bank = bank_of(received)
            align = losses.prototype_cross_entropy(z, batch.y, bank, self.temperature, weight=batch.weight)
            spread = losses.uniformity(z, bank, self.temperature, weight=batch.weight)
            terms |= {"global": align, "entropy": self.entropy * spread}
        return terms

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        return Bundle(bank=trained.bank().normalised())  # Eq. 2

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        banks = uploaded_banks(uploads).normalised()  # as sent; whoever leaves the sphere weighs no more for it
        start = aggregate.normalised_mean(banks).filled_from(bank_of(state))  # Eq. 3
        margin, steps = self.refinement(setup.num_classes)
        refined = aggregate.refine(banks, start, steps, self.refine_lr, margin, self.separation)  # Eq. 4–6
        return replace(state, bank=refined)

    def prototype_scores(self, z: Tensor, bank: PrototypeBank) -> Tensor:
        """`ẑ·p̃_c / β` (Eq. 8), so that the softmax is the probability of L_global; without β the plain cosine."""
        return (1 - bank.distances(z, "cosine")) / (self.temperature or 1.0)
