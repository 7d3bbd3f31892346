"""(FL)²: each client has its own thresholds, consistency holds at the sharpest change of the weights, and clients that are
certain count less in the average.

Lee et al., "(FL)²: Overcoming Few Labels in Federated Semi-Supervised Learning", NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import losses
from ..parts import Batch, Feed, Mean, Received, Reduce, Upload
from ..schedules import Weight, weight_at
from ..wire import Bundle, Exchange, number, weights
from .at_server import VIEWS, LabelsAtServer, judged
from .base import register
from .checks import not_negative
from .client import Loss, Network, Pseudo, Trained

CERTAIN = 1e-12  # the share of a client that is certain of everything, so that all count alike where all are


@dataclass(frozen=True)
class UncertainMean(Mean):
    """Clients count by 1 − τ_g; where all are certain, the same."""

    def share(self, upload: Upload) -> float:
        return max(CERTAIN, 1 - upload.content.scalars["status"])


@register("fl2", paper="Lee et al., NeurIPS 2024")
@dataclass(frozen=True)
class FL2(LabelsAtServer):
    """CE of strong views with labels above the client's class thresholds, and KL to the model at its sharpest point."""

    exchange: ClassVar[Exchange] = Exchange((weights(),), (weights(), number("status", most=1.0)), keeps_model=False)
    reduce: ClassVar[Reduce] = UncertainMean()

    radius: float = 0.1  # ρ
    eta: float = 0.01  # η
    sharpness_weight: Weight = 1.0
    thresholds: Literal["round", "batch"] = "round"  # over which samples they are means: all once a round, or a step's

    @property
    def feed(self) -> Feed:
        return replace(VIEWS, prepare=self.prepared)

    def prepared(self, p: Tensor) -> Mapping[str, Tensor]:
        """Of each sample the received model's probabilities and, where thresholds are of the round, that of its label."""
        if self.thresholds == "batch":
            return {"p": p}
        return {"p": p, "limit": thresholds(p)[1][p.argmax(-1)]}

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "radius", "eta", "sharpness_weight")

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Loss:
        x, strong, weight = batch.unlabelled, batch.strong, batch.unlabelled_weight
        assert x is not None and strong is not None and weight is not None
        p = judged(net, x, batch, received)
        sure, label = p.max(-1)
        limit = (batch.prepared or {}).get("limit")
        accepted = (sure >= (thresholds(p, weight)[1][label] if limit is None else limit)).to(p.dtype)
        logits = net(strong).logits
        surest = (sure >= self.threshold).to(p.dtype)
        sharpness = self._sharpness(net, batch, received, logits, label, surest)
        terms = {
            "unlabelled": losses.pseudo_cross_entropy(logits, label, accepted, weight),
            "sharpness": weight_at(self.sharpness_weight, round) * sharpness,
        }
        return Loss(terms, Pseudo(label, accepted, sure))

    def _sharpness(
        self, net: Network, batch: Batch, received: Received, logits: Tensor, label: Tensor, surest: Tensor
    ) -> Tensor:
        """KL from the model's prediction to that of the model moved up the loss of its surest samples.

        No gradient goes through the direction. Both passes write statistics of batch norm into copies.
        """
        strong, weight = batch.strong, batch.unlabelled_weight
        assert strong is not None and weight is not None
        buffers = {n: v for n, v in received.weights.items() if n not in net.params}
        zero = torch.zeros_like(weight[0])  # added, it makes a copy for each client of a stack

        def run(params: Mapping[str, Tensor]) -> Tensor:
            return net(strong, {**{n: v + zero for n, v in buffers.items()}, **params}).logits

        def loss(params: Mapping[str, Tensor]) -> Tensor:
            return losses.cross_entropy(run(params), label, weight=weight * surest)

        point = {n: p.detach() for n, p in net.params.items()}
        uphill = losses.ascent(point, torch.func.grad(loss)(point), self.radius, self.eta)
        perturbed = run({n: p + uphill[n].detach() for n, p in net.params.items()})
        return losses.divergence(logits.detach().softmax(-1), perturbed, surest, weight)

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        """`status` is τ_g, of the received model."""
        p = trained.unlabelled(weights=received.weights).logits.softmax(-1)
        return Bundle(weights=trained.weights, scalars={"status": float(thresholds(p)[0])})


def thresholds(p: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """τ_g, the mean of the largest probabilities, and for each class τ_g · p_c / max p, p_c its mean probability."""
    weight = p.new_ones(len(p)) if weight is None else weight
    share = weight / weight.sum().clamp_min(1)
    mean = share @ p
    top = mean.amax()
    overall = share @ p.amax(-1)
    return overall, overall * mean / torch.where(top > 0, top, 1.0)
