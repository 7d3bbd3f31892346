"""FedMatch: parameters in two halves, one for labelled and one for unlabelled data, and consistency between clients.

Jeong et al., "Federated Semi-Supervised Learning with Inter-Client Consistency and Disjoint Learning", ICLR 2021; with
labels at the clients, or at the server. The model is a sum σ + ψ (`models/decomposed.py`); names of ψ begin with `psi.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from .. import losses
from ..models.base import PSI
from ..parts import (
    Batch,
    Each,
    Epochs,
    Feed,
    Head,
    Paired,
    Predict,
    Received,
    Reduce,
    Reduced,
    Unlabelled,
    weighted_average,
)
from ..schedules import Weight, weight_at
from ..wire import Bundle, Exchange, array, models, weights
from .base import Method, register
from .checks import a_share, at_least_one, not_negative
from .client import Loss, Network, Pseudo, Terms, Trained, Weights
from .server import Setup, State, Teacher, state


@state
class Helped(State):
    """The global model, and the models of one round's clients, of which the nearest help each client.

    Candidates are the clients of one round in every `refresh`, so that the server keeps no more models than those.
    """

    weights: Weights
    response: Tensor  # [N, C]: each client's last outputs for a fixed input
    answered: Tensor  # [N]: 1 for who has given one
    architectures: tuple[int, ...]
    helpers: int
    refresh: int
    candidates: Mapping[int, Weights]
    density: float = 1.0  # the mean share of weights that are not 0 in the models that came back

    def models(self, client: int, round: int) -> dict[str, Weights] | None:
        """In the round after the candidates': those of the client's architecture that answer most like it."""
        if round < 2 or (round - 2) % self.refresh:
            return None
        alike = [c for c in self.candidates if c != client and self._same_architecture(c, client)]
        if self.answered[client]:  # a client that has not answered yet takes any
            alike.sort(key=lambda c: float((self.response[c] - self.response[client]).norm()))
        return {f"helper{k}": self.candidates[c] for k, c in enumerate(alike[: self.helpers])} or None

    def _same_architecture(self, one: int, other: int) -> bool:
        return not self.architectures or self.architectures[one] == self.architectures[other]

    def heard(self, reduced: Reduced, round: int) -> Helped:
        """The state with the clients' responses, and in a round of candidates their models."""
        response, answered = self.response.clone(), self.answered.clone()
        candidates: dict[int, Weights] = {}
        for upload in reduced.uploads:
            response[upload.client] = upload.content.tensors["response"]
            answered[upload.client] = 1
            if (round - 1) % self.refresh == 0:
                candidates[upload.client] = upload.content.weights
        return replace(self, response=response, answered=answered, candidates=candidates)

    def enlarged(self, start: Helped) -> Helped:
        """A client that has not answered yet takes any helper."""
        known = len(self.answered)
        response, answered = (
            torch.cat([mine, theirs[known:].to(mine)])
            for mine, theirs in ((self.response, start.response), (self.answered, start.answered))
        )
        return replace(self, response=response, answered=answered, architectures=start.architectures)


@dataclass(frozen=True)
class HelpedModel(Method):
    """For methods in which other clients' models help: those whose outputs for a fixed input are nearest are sent along."""

    exchange: ClassVar[Exchange] = Exchange(
        down=(weights(), models(each=True, optional=True)),
        up=(weights(), array("response", "classes")),
        keeps_model=False,
    )
    reduce: ClassVar[Reduce] = Each()

    helpers: int = 2  # H

    def __post_init__(self) -> None:
        not_negative(self, "helpers")

    @property
    def refresh(self) -> int:
        """Rounds between two choices of helpers."""
        return 1

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        _, batch = trained.outputs()
        response = trained.run(fixed_input(batch.x)).logits.flatten()  # what the server would compute from the model
        prefix = next(part.prefix for part in self.exchange.up if part.kind == "weights")
        sent = {name: value for name, value in trained.weights.items() if name.startswith(prefix)}
        return Bundle(weights=sent, tensors={"response": response})

    def start(self, setup: Setup) -> Helped:
        n, c = setup.num_clients, setup.num_classes
        nobody = torch.zeros(n, c), torch.zeros(n), setup.architectures
        return Helped(setup.weights, *nobody, self.helpers, self.refresh, {})

    def update(self, state: Helped, reduced: Reduced, round: int, setup: Setup) -> Helped:
        average = weighted_average(reduced.uploads, lambda upload: upload.samples)
        return replace(state.heard(reduced, round), weights={**state.weights, **average})


@register("fedmatch", paper="Jeong et al., ICLR 2021")
@dataclass(frozen=True)
class FedMatch(HelpedModel):
    """θ = σ + ψ: σ learns from labels alone, ψ from unlabelled samples alone, helped by the clients nearest in output."""

    feed: ClassVar[Feed] = Paired(views=("weak", "strong"))

    supervised_weight: Weight = 10.0  # λ_s
    consistency_weight: Weight = 0.01  # λ_ICCS, of both consistency terms
    l1: Weight = 1e-4  # λ_L1: ψ is sparse
    l2: Weight = 10.0  # λ_L2: ψ stays near σ
    threshold: float = 0.75  # a sample takes part from this confidence on
    refresh: int = 10  # rounds between two choices of helpers
    psi_start: float = 0.2  # ψ starts as so much of σ

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "refresh")
        a_share(self, "threshold")
        not_negative(self, "supervised_weight", "consistency_weight", "l1", "l2")

    @property
    def predict(self) -> Predict:
        return Head(halves=self.psi_start)

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Loss:
        supervised = self.supervised(net, batch, received, round)
        terms, pseudo = self.unsupervised(net, batch, received, round)
        return Loss({**supervised, **terms}, pseudo)

    def supervised(self, net: Network, batch: Batch, received: object, round: int) -> Terms:
        """What σ learns from."""
        sigma, psi = halves(net.params)
        logits = net(batch.x, {**sigma, **{PSI + n: p.detach() for n, p in psi.items()}}).logits
        loss = losses.cross_entropy(logits, batch.y, weight=batch.weight)
        return {"ce": weight_at(self.supervised_weight, round) * loss}

    def unsupervised(self, net: Network, batch: Batch, received: Received, round: int) -> Loss:
        """What ψ learns from."""
        sigma, psi = halves(net.params)
        sparse = torch.stack([p.abs().sum() for p in psi.values()]).sum()
        near = torch.stack([((sigma[n].detach() - psi[n]) ** 2).sum() for n in sigma]).sum()
        terms = {"l1": weight_at(self.l1, round) * sparse, "l2": weight_at(self.l2, round) * near}
        if batch.weak is None or batch.strong is None:
            return Loss(terms)
        m = len(batch.weak)
        both = torch.cat([batch.weak, batch.strong])
        whole = {**{n: p.detach() for n, p in sigma.items()}, **{PSI + n: p for n, p in psi.items()}}
        logits = net(both, whole).logits
        weak, strong = logits[:m], logits[m:]
        p = weak.detach().softmax(-1)
        accepted = (p.amax(-1) >= self.threshold).to(p.dtype)
        helped = [net.frozen(batch.weak, h).logits.softmax(-1) for h in self.helper_models(received)]
        votes = torch.stack([_one_hot(q.argmax(-1), q.shape[-1]) for q in (p, *helped)]).sum(0)
        label = votes.argmax(-1)  # the agreement-based pseudo-label
        weight, consistency = batch.unlabelled_weight, weight_at(self.consistency_weight, round)
        terms["agreement"] = consistency * losses.pseudo_cross_entropy(strong, label, accepted, weight)
        apart = [losses.divergence(q, weak, accepted, weight) for q in helped]
        zero = torch.zeros((), device=p.device)
        terms["helpers"] = consistency * (torch.stack(apart).mean() if apart else zero)
        return Loss(terms, Pseudo(label, accepted, p.amax(-1)))

    def helper_models(self, received: Received) -> list[Weights]:
        """The helpers' models: those that came this round, or else those kept from the last time they came."""
        return list((received.models or received.memory.models).values())

    def remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        return Bundle(models=received.models) if received.models else received.memory


@register("fedmatch-server", paper="Jeong et al., ICLR 2021")
@dataclass(frozen=True)
class FedMatchServer(FedMatch):
    """Labels at the server: it trains σ, the clients train ψ; of what they trained only ψ returns."""

    exchange: ClassVar[Exchange] = Exchange(
        down=(weights(), models(each=True, optional=True, prefix=PSI)),
        up=(weights(prefix=PSI), array("response", "classes")),
        keeps_model=False,
    )
    feed: ClassVar[Feed] = Unlabelled(views=("weak", "strong"))

    l1: Weight = 1e-5
    epochs_at_server: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "epochs_at_server")

    @property
    def teacher(self) -> Teacher:
        return Teacher(self.epochs_at_server, self.supervised, self.learnt, Epochs())

    def learnt(self, state: Helped, trained: Trained, round: int) -> Helped:
        """ψ has no gradient here, but may have weight decay: it stays what the clients made it."""
        sigma = {n: v for n, v in trained.weights.items() if not n.startswith(PSI)}
        return replace(state, weights={**state.weights, **sigma})

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Loss:
        return self.unsupervised(net, batch, received, round)

    def helper_models(self, received: Received) -> list[Weights]:
        """Only helpers' ψ travels: all have the same σ."""
        return [{**received.weights, **psi} for psi in super().helper_models(received)]


def halves(params: Weights) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """σ and ψ, by the model's names."""
    sigma = {n: p for n, p in params.items() if not n.startswith(PSI)}
    return sigma, {n: params[PSI + n] for n in sigma}


def fixed_input(like: Tensor) -> Tensor:
    """One sample of noise, the same for all clients; of text, nothing but padding."""
    if not like.is_floating_point():
        return like.new_zeros((1, *like.shape[1:]))
    return torch.randn((1, *like.shape[1:]), generator=torch.Generator().manual_seed(0)).to(like)


def _one_hot(label: Tensor, classes: int) -> Tensor:
    return (label[:, None] == torch.arange(classes, device=label.device)).float()
