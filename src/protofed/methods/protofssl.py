"""ProtoFSSL: prototypical episodes at the clients, with pseudo-labels from other clients' prototypes.

Kim et al., "ProtoFSSL: Federated Semi-Supervised Learning with Prototype-based Consistency Regularization", 2022.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import aggregate, losses, seeds
from ..bank import PrototypeBank
from ..parts import Batch, Each, Episodes, Feed, Helpers, Predict, Received, Reduce, Reduced
from ..schedules import Weight, weight_at
from ..wire import Bundle, Exchange, bank, weights
from .base import Method, register
from .checks import at_least_one, not_negative
from .client import Loss, Network, Pseudo, Trained, Weights
from .server import Setup, State, state


@state
class ModelAndHelpers(State):
    """The global model, and the banks of the clients that help."""

    weights: Weights
    helpers: PrototypeBank  # [|H|, C, d]


@register("protofssl", paper="Kim et al., 2022")
@dataclass(frozen=True)
class ProtoFSSL(Method):
    """Episodes on the client's own prototypes; unlabelled samples are labelled by helpers' prototypes."""

    exchange: ClassVar[Exchange] = Exchange(
        down=(weights(), bank("helpers", (None, "classes", "dim"))), up=(weights(), bank()), keeps_model=False
    )
    reduce: ClassVar[Reduce] = Each(averages=True)

    shots: int = 1  # |S_k|: support samples of a class in an episode
    queries: int = 2  # |Q_k|: labelled query samples of a class
    unlabelled_queries: int = 100  # |Q^U|: unlabelled query samples
    unlabelled_weight: Weight = 0.3  # λ of Eq. 8
    temperature: float = 0.5  # T of Eq. 5
    metric: Literal["mean", "squared", "euclidean"] = "mean"  # d of Eq. 6, as in the published code
    target_gradient: bool = False  # whether the pseudo-label is differentiated too, as in the published code
    support: Literal["local", "global"] = "local"  # global: helpers' mean prototypes in place of a support set (Alg. 2)
    mu: Weight = 0.0  # of FedProx's term
    helpers: int = 5  # |H|
    refresh: int = 1  # R_H: helpers change every so many rounds
    noise: float = 0.0  # σ of the Gaussian noise on the prototypes sent
    min_samples: int = 1  # prototypes of fewer samples are not sent

    def __post_init__(self) -> None:
        at_least_one(self, "shots", "queries", "helpers", "refresh", "min_samples")
        not_negative(self, "unlabelled_queries", "unlabelled_weight", "mu", "noise")
        if self.temperature <= 0:
            raise ValueError("temperature must be above 0")

    @property
    def feed(self) -> Feed:
        return Episodes(shots=self.shots, queries=self.queries, unlabelled_queries=self.unlabelled_queries)

    @property
    def predict(self) -> Predict:  # Eq. 7
        return Helpers(distance=self.metric)

    # --- client ---------------------------------------------------------------------------------------------------
    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Loss:  # Eq. 8
        helpers = received.banks["helpers"]
        n, pool = len(batch.x), batch.unlabelled
        z = net(batch.x if pool is None else torch.cat([batch.x, pool])).embedding
        support_bank, query = self._episode(z[:n], batch, helpers)
        terms = {"query": losses.distance_cross_entropy(z[:n], batch.y, support_bank, self.metric, weight=query)}
        if self.mu:
            terms["prox"] = weight_at(self.mu, round) * losses.proximal(net.params, received.weights)
        if pool is None:
            return Loss(terms)
        u = z[n:]
        by_helper = losses.distance_softmax(u if self.target_gradient else u.detach(), helpers, self.metric)  # Eq. 6
        target = losses.sharpen(by_helper.mean(0), self.temperature)  # Eq. 7 and 5
        unlabelled = losses.distance_cross_entropy(u, target, support_bank, self.metric, weight=batch.unlabelled_weight)
        terms["unlabelled"] = weight_at(self.unlabelled_weight, round) * unlabelled
        sure, label = target.detach().max(-1)
        return Loss(terms, Pseudo(label, (sure > 0).to(z.dtype), sure))

    def _episode(self, z: Tensor, batch: Batch, helpers: PrototypeBank) -> tuple[PrototypeBank, Tensor]:
        """The prototypes that samples are compared with, and which labelled samples are."""
        assert batch.support is not None
        if self.support == "global":  # Algorithm 2: all labelled samples are queries
            return aggregate.mean(helpers), batch.weight
        support = batch.weight * batch.support
        return PrototypeBank.from_embeddings(z, batch.y, helpers.num_classes, support), batch.weight - support  # Eq. 2

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        bank = trained.bank()  # §4.4: over all labelled data
        bank = bank.restricted(bank.counts >= self.min_samples)
        if self.noise:
            noise = torch.randn(bank.means.shape, generator=trained.generator).to(bank.means)
            bank = replace(bank, means=torch.where(bank.known[:, None], bank.means + self.noise * noise, bank.means))
        return Bundle(bank=bank, weights=trained.weights)

    # --- server ---------------------------------------------------------------------------------------------------
    def start(self, setup: Setup) -> ModelAndHelpers:
        nobody = PrototypeBank.stack([PrototypeBank.empty(setup.num_classes, setup.dim)] * self.helpers)
        return ModelAndHelpers(setup.weights, nobody)

    def update(self, state: ModelAndHelpers, reduced: Reduced, round: int, setup: Setup) -> ModelAndHelpers:
        state = replace(state, weights={**state.weights, **reduced.weights})  # Eq. 1
        if (round - 1) % self.refresh:
            return state
        order = torch.randperm(reduced.clients, generator=seeds.torch_stream(setup.seed, "helpers", round))
        return replace(state, helpers=reduced.uploaded_banks[order[: self.helpers]])
