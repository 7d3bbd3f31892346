"""(FL)²: thresholds of each client's own, consistency under the sharpest change of the weights, less of those who know it.

Lee et al., "(FL)²: Overcoming Few Labels in Federated Semi-Supervised Learning", NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import losses
from ..wire import Bundle
from .base import Batch, Loss, Network, Pseudo, Received, Setup, Trained, Upload, moved, register, weighted_average
from .semifl import LabelsAtServer


@register("fl2")
@dataclass(frozen=True)
class FL2(LabelsAtServer):
    """CE of strong views with labels above the client's class thresholds, and KL to the model at its sharpest point."""

    paper: ClassVar[str] = "Lee et al., NeurIPS 2024"
    travels: ClassVar[tuple[str, ...]] = ("weights", "scalars.status")
    required: ClassVar[tuple[str, ...]] = ("weights", "scalars.status")

    radius: float = 0.1  # ρ
    eta: float = 0.01  # η
    sharpness_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.radius < 0 or self.eta < 0 or self.sharpness_weight < 0:
            raise ValueError("radius, eta and sharpness_weight must be 0 or more")

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> Loss:
        x, strong, weight = batch.unlabelled, batch.strong, batch.unlabelled_weight
        assert x is not None and strong is not None and weight is not None
        p = network.frozen(x, received.weights).logits.softmax(-1)
        sure, label = p.max(-1)
        _, by_class = thresholds(p, weight)
        accepted = (sure >= by_class[label]).to(p.dtype)
        logits = network(strong).logits
        surest = (sure >= self.threshold).to(p.dtype)
        terms = {
            "unlabelled": losses.pseudo_cross_entropy(logits, label, accepted, weight),
            "sharpness": self.sharpness_weight * self._sharpness(network, batch, received, logits, label, surest),
        }
        return Loss(terms, Pseudo(label, accepted, sure))

    def _sharpness(
        self, network: Network, batch: Batch, received: Received, logits: Tensor, label: Tensor, surest: Tensor
    ) -> Tensor:
        """KL from the model's prediction to that of the model moved up the loss of its surest samples.

        No gradient goes through the direction. Both passes write statistics of batch norm into copies.
        """
        strong, weight = batch.strong, batch.unlabelled_weight
        assert strong is not None and weight is not None
        buffers = {n: v for n, v in received.weights.items() if n not in network.params}
        zero = torch.zeros_like(weight[0])  # added, it makes a copy for each client of a stack

        def run(params: Mapping[str, Tensor]) -> Tensor:
            return network(strong, {**{n: v + zero for n, v in buffers.items()}, **params}).logits

        def loss(params: Mapping[str, Tensor]) -> Tensor:
            return losses.cross_entropy(run(params), label, weight=weight * surest)

        here = {n: p.detach() for n, p in network.params.items()}
        uphill = losses.ascent(here, torch.func.grad(loss)(here), self.radius, self.eta)
        moved = run({n: p + uphill[n].detach() for n, p in network.params.items()})
        return losses.divergence(logits.detach().softmax(-1), moved, surest, weight)

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        """`status` is τ_g, of the received model."""
        p = trained.unlabelled(weights=received.weights).logits.softmax(-1)
        return Bundle(weights=trained.weights, scalars={"status": float(thresholds(p)[0])})

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        """Clients count by 1 − τ_g; where all are certain, the same."""
        shares = [max(0.0, 1 - u.content.scalars["status"]) for u in uploads]
        average = weighted_average(uploads, shares if sum(shares) > 0 else [1.0] * len(uploads))
        return moved(state, average, self.server_momentum)


def thresholds(p: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """τ_g, the mean of the largest probabilities, and for each class τ_g · p_c / max p, p_c its mean probability."""
    weight = p.new_ones(len(p)) if weight is None else weight
    share = weight / weight.sum().clamp_min(1)
    mean = share @ p
    top = mean.amax()
    overall = share @ p.amax(-1)
    return overall, overall * mean / torch.where(top > 0, top, 1.0)
