"""ProtoFSSL: prototypical episodes at the clients, with pseudo-labels from other clients' prototypes.

Kim et al., "ProtoFSSL: Federated Semi-Supervised Learning with Prototype-based Consistency Regularization", 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import aggregate, losses, seeds
from ..bank import PrototypeBank
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
    register,
    uploaded_banks,
    weighted_average,
)


@register("protofssl")
@dataclass(frozen=True)
class ProtoFSSL(SharedModel):
    """Episodes on the client's own prototypes; unlabelled samples are labelled by helpers' prototypes (Kim et al., 2022)."""

    paper: ClassVar[str] = "Kim et al., 2022"
    travels: ClassVar[tuple[str, ...]] = ("weights", "bank", "banks.helpers")
    required: ClassVar[tuple[str, ...]] = ("weights", "bank")
    predicts: ClassVar[Literal["head", "prototype"]] = "prototype"
    trains_head: ClassVar[bool] = False
    reads_unlabelled: ClassVar[bool] = True

    shots: int = 1  # |S_k|: support samples of a class in an episode
    queries: int = 2  # |Q_k|: labelled query samples of a class
    unlabelled_queries: int = 100  # |Q^U|: unlabelled query samples
    unlabelled_weight: float = 0.3  # λ of Eq. 8
    temperature: float = 0.5  # T of Eq. 5
    metric: Literal["mean", "squared", "euclidean"] = "mean"  # d of Eq. 6
    target_gradient: bool = False  # whether the pseudo-label is differentiated too, as in the published code
    support: Literal["local", "global"] = "local"  # global: helpers' mean prototypes in place of a support set (Alg. 2)
    mu: float = 0.0  # of FedProx's term
    helpers: int = 5  # |H|
    refresh: int = 1  # R_H: helpers change every so many rounds
    noise: float = 0.0  # σ of the Gaussian noise on the prototypes sent
    min_samples: int = 1  # prototypes of fewer samples are not sent

    def __post_init__(self) -> None:
        for name in ("shots", "queries", "helpers", "refresh", "min_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more")
        for name in ("unlabelled_queries", "unlabelled_weight", "mu", "noise"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more")
        if self.temperature <= 0:
            raise ValueError("temperature must be above 0")

    # --- client ---------------------------------------------------------------------------------------------------
    def steps(
        self, labels: Tensor, num_unlabelled: int, epochs: int, batch: int, round: int, generator: torch.Generator
    ) -> Iterator[Step]:
        """A local epoch is one episode. A class with too few samples gives what it has, support first."""
        classes = [torch.nonzero(labels == k).squeeze(1).cpu() for k in labels.unique().tolist()]
        for _ in range(epochs):
            drawn = [rows[torch.randperm(len(rows), generator=generator)] for rows in classes]
            chosen = torch.cat([rows[: self.shots + self.queries] for rows in drawn])
            support = torch.cat([torch.arange(min(len(r), self.shots + self.queries)) < self.shots for r in drawn])
            pool = (
                torch.randperm(num_unlabelled, generator=generator)[: self.unlabelled_queries]
                if num_unlabelled
                else None
            )
            yield Step(chosen, pool if pool is not None and len(pool) else None, support)

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> Loss:  # Eq. 8
        helpers = received.banks["helpers"]
        n, pool = len(batch.x), batch.unlabelled
        assert batch.support is not None
        z = network(batch.x if pool is None else torch.cat([batch.x, pool])).embedding
        own, query = self._episode(z[:n], batch, helpers)
        terms = {"query": losses.distance_cross_entropy(z[:n], batch.y, own, self.metric, weight=query)}
        if self.mu:
            terms["prox"] = self.mu * losses.proximal(network.params, received.weights)
        if pool is None:
            return Loss(terms)
        u = z[n:]
        by_helper = losses.distance_softmax(u if self.target_gradient else u.detach(), helpers, self.metric)  # Eq. 6
        target = losses.sharpen(by_helper.mean(0), self.temperature)  # Eq. 7 and 5
        unlabelled = losses.distance_cross_entropy(u, target, own, self.metric, weight=batch.unlabelled_weight)
        terms["unlabelled"] = self.unlabelled_weight * unlabelled
        sure, label = target.detach().max(-1)
        return Loss(terms, Pseudo(label, (sure > 0).to(z.dtype), sure))

    def _episode(self, z: Tensor, batch: Batch, helpers: PrototypeBank) -> tuple[PrototypeBank, Tensor]:
        """The prototypes that samples are compared with, and which labelled samples are."""
        assert batch.support is not None
        if self.support == "global":  # Algorithm 2: all labelled samples are queries
            return aggregate.mean(helpers), batch.weight
        support = batch.weight * batch.support
        return PrototypeBank.from_embeddings(z, batch.y, helpers.num_classes, support), batch.weight - support  # Eq. 2

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        bank = trained.bank()  # §4.4: over all labelled data
        bank = bank.restricted(bank.counts >= self.min_samples)
        if self.noise:
            noise = torch.randn(bank.means.shape, generator=trained.generator).to(bank.means)
            bank = replace(bank, means=torch.where(bank.known[:, None], bank.means + self.noise * noise, bank.means))
        return Bundle(bank=bank, weights=trained.weights)

    # --- server ---------------------------------------------------------------------------------------------------
    def server_start(self, setup: Setup) -> Bundle:
        nobody = PrototypeBank.stack([PrototypeBank.empty(setup.num_classes, setup.dim)] * self.helpers)
        return Bundle(weights=setup.weights, banks={"helpers": nobody})

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        state = replace(state, weights={**state.weights, **weighted_average(uploads)})  # Eq. 1
        if (round - 1) % self.refresh:
            return state
        order = torch.randperm(len(uploads), generator=seeds.torch_stream(setup.seed, "helpers", round))
        chosen = uploaded_banks([uploads[k] for k in order[: self.helpers].tolist()])
        return replace(state, banks={"helpers": chosen})

    # --- prediction -----------------------------------------------------------------------------------------------
    def evaluation_bank(self, state: Bundle, own: PrototypeBank) -> PrototypeBank:
        """The latest helpers' banks; the client's own before there are any."""
        helpers = state.banks["helpers"]
        return helpers if bool(helpers.known.any()) else own

    def prototype_scores(self, z: Tensor, bank: PrototypeBank) -> Tensor:
        """Log of the mean over helpers of softmax(−d): Eq. 7."""
        p = losses.distance_softmax(z, bank, self.metric)
        return (p.mean(0) if p.ndim > 2 else p).log()
