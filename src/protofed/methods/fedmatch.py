"""FedMatch: parameters in two halves, one for labelled and one for unlabelled data, and consistency between clients.

Jeong et al., "Federated Semi-Supervised Learning with Inter-Client Consistency and Disjoint Learning", ICLR 2021; with
labels at the clients, or at the server.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
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
    paired_epochs,
    register,
    unlabelled_epochs,
)

PSI = "psi/"
HELPER = "helper"  # a helper's weights are sent as helper0/NAME


@dataclass(frozen=True)
class HelpedModel(SharedModel):
    """For methods in which other clients' models help: those whose outputs for a fixed input are nearest are sent along.

    Candidates are the clients of one round in every `refresh`, so that the server keeps no more models than those.
    """

    travels: ClassVar[tuple[str, ...]] = ("weights", "tensors.response")
    required: ClassVar[tuple[str, ...]] = ("weights", "tensors.response")
    reads_unlabelled: ClassVar[bool] = True

    helpers: int = 2  # H

    @property
    def refresh(self) -> int:
        """Rounds between two choices of helpers."""
        return 1

    def __post_init__(self) -> None:
        if self.helpers < 0 or self.refresh < 1:
            raise ValueError("helpers must be 0 or more, refresh 1 or more")

    def tensor_shapes(self, setup: Setup) -> Mapping[str, tuple[int, ...]]:
        return {"response": (setup.num_classes,)}

    # --- client ---------------------------------------------------------------------------------------------------
    def client_start(self, weights: Mapping[str, Tensor], received: Received) -> Mapping[str, Tensor]:
        return {**weights, **without_helpers(received.weights)}

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        _, batch = trained.outputs()
        response = trained.run(fixed_input(batch.x)).logits.flatten()  # what the server would compute from the model
        return Bundle(weights=trained.weights, tensors={"response": response})

    # --- server ---------------------------------------------------------------------------------------------------
    def server_start(self, setup: Setup) -> Bundle:
        """`response` holds each client's last one, `answered` who has given one, `owner` who has which architecture."""
        tensors = {
            "response": torch.zeros(setup.num_clients, setup.num_classes),
            "answered": torch.zeros(setup.num_clients),
            "owner": torch.tensor(setup.architectures),
        }
        return Bundle(weights=setup.weights, tensors=tensors)

    def candidates(self, state: Bundle, uploads: Sequence[Upload], round: int) -> dict[str, Tensor]:
        """What the server keeps of the clients: their responses, and in a round of candidates their models."""
        response, answered = state.tensors["response"].clone(), state.tensors["answered"].clone()
        tensors = {"response": response, "answered": answered, "owner": state.tensors["owner"]}
        for upload in uploads:
            response[upload.client] = upload.content.tensors["response"]
            answered[upload.client] = 1
            if (round - 1) % self.refresh == 0:
                tensors |= {f"model/{upload.client}/{n}": v for n, v in upload.content.weights.items()}
        return tensors

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        tensors = self.candidates(state, uploads, round)
        return replace(super().server_update(state, uploads, round, setup), tensors=tensors)

    def send(self, state: Bundle, client: int, round: int) -> Bundle:
        """The global model; in the round after the candidates' also the nearest of them."""
        if round < 2 or (round - 2) % self.refresh:
            return Bundle(weights=state.weights)
        return Bundle(weights={**state.weights, **self._nearest(state, client)})

    def _nearest(self, state: Bundle, client: int) -> dict[str, Tensor]:
        """The candidates of the client's architecture whose responses are nearest to its own last one."""
        kept = state.tensors
        models: dict[int, dict[str, Tensor]] = {}
        for name, value in kept.items():
            if name.startswith("model/"):
                _, candidate, weight = name.split("/", 2)
                models.setdefault(int(candidate), {})[weight] = value
        alike = [c for c in models if c != client and kept["owner"][c] == kept["owner"][client]]
        if kept["answered"][client]:  # a client that has not answered yet takes any
            alike.sort(key=lambda c: float((kept["response"][c] - kept["response"][client]).norm()))
        mark = f"{int(kept['owner'][client])}:" if len(kept["owner"].unique()) > 1 else ""
        return {
            f"{mark}{HELPER}{k}/{name.removeprefix(mark)}": value
            for k, c in enumerate(alike[: self.helpers])
            for name, value in models[c].items()
        }


@register("fedmatch")
@dataclass(frozen=True)
class FedMatch(HelpedModel):
    """θ = σ + ψ: σ learns from labels alone, ψ from unlabelled samples alone, helped by the clients nearest in output."""

    paper: ClassVar[str] = "Jeong et al., ICLR 2021"
    views: ClassVar[tuple[View, ...]] = ("weak", "strong")

    supervised_weight: float = 10.0  # λ_s
    consistency_weight: float = 0.01  # λ_ICCS, of both consistency terms
    l1: float = 1e-4  # λ_L1: ψ is sparse
    l2: float = 10.0  # λ_L2: ψ stays near σ
    threshold: float = 0.75  # a sample takes part from this confidence on
    refresh: int = 10  # rounds between two choices of helpers
    psi_start: float = 0.2  # ψ starts as so much of σ

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threshold <= 1:
            raise ValueError("threshold is a probability, between 0 and 1")

    # --- two halves -----------------------------------------------------------------------------------------------
    def expand(self, weights: Mapping[str, Tensor], parameters: Collection[str]) -> Mapping[str, Tensor]:
        return {**weights, **{PSI + name: self.psi_start * weights[name] for name in parameters}}

    def collapse(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """θ = σ + ψ."""
        psi = {name.removeprefix(PSI): value for name, value in weights.items() if name.startswith(PSI)}
        return {n: v + psi[n] if n in psi else v for n, v in weights.items() if not n.startswith(PSI)}

    # --- client ---------------------------------------------------------------------------------------------------
    def steps(
        self, labels: Tensor, num_unlabelled: int, epochs: int, batch: int, round: int, generator: torch.Generator
    ) -> Iterator[Step]:
        return paired_epochs(len(labels), num_unlabelled, epochs, batch, generator)

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> Loss:
        supervised = self.supervised(network, batch)
        terms, pseudo = self.unsupervised(network, batch, received)
        return Loss({**supervised, **terms}, pseudo)

    def supervised(self, network: Network, batch: Batch) -> dict[str, Tensor]:
        """What σ learns from."""
        sigma, psi = halves(network.params)
        logits = network(batch.x, {n: sigma[n] + psi[n].detach() for n in sigma}).logits
        return {"ce": self.supervised_weight * losses.cross_entropy(logits, batch.y, weight=batch.weight)}

    def unsupervised(self, network: Network, batch: Batch, received: Received) -> Loss:
        """What ψ learns from."""
        sigma, psi = halves(network.params)
        terms = {"l1": self.l1 * torch.stack([p.abs().sum() for p in psi.values()]).sum()}
        terms["l2"] = self.l2 * torch.stack([((sigma[n].detach() - psi[n]) ** 2).sum() for n in sigma]).sum()
        if batch.weak is None or batch.strong is None:
            return Loss(terms)
        m = len(batch.weak)
        both = torch.cat([batch.weak, batch.strong])
        logits = network(both, {n: sigma[n].detach() + psi[n] for n in sigma}).logits
        weak, strong = logits[:m], logits[m:]
        p = weak.detach().softmax(-1)
        accepted = (p.amax(-1) >= self.threshold).to(p.dtype)
        helped = [network.frozen(batch.weak, self.collapse(h)).logits.softmax(-1) for h in self._helpers(received)]
        votes = torch.stack([_one_hot(q.argmax(-1), q.shape[-1]) for q in (p, *helped)]).sum(0)
        label = votes.argmax(-1)  # the agreement-based pseudo-label
        weight = batch.unlabelled_weight
        terms["agreement"] = self.consistency_weight * losses.pseudo_cross_entropy(strong, label, accepted, weight)
        apart = [losses.divergence(q, weak, accepted, weight) for q in helped]
        zero = torch.zeros((), device=p.device)
        terms["helpers"] = self.consistency_weight * (torch.stack(apart).mean() if apart else zero)
        return Loss(terms, Pseudo(label, accepted, p.amax(-1)))

    def _helpers(self, received: Received) -> list[dict[str, Tensor]]:
        """The helpers' models: those that came this round, or else those kept from the last time they came."""
        return helper_models(helpers_in(received.weights) or received.memory.weights)

    def client_remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        came = helpers_in(received.weights)
        return Bundle(weights=came) if came else received.memory


@register("fedmatch-server")
@dataclass(frozen=True)
class FedMatchServer(FedMatch):
    """Labels at the server: it trains σ, the clients train ψ; of what they trained only ψ returns."""

    travels: ClassVar[tuple[str, ...]] = ("tensors.psi", "tensors.response")
    required: ClassVar[tuple[str, ...]] = ("tensors.psi", "tensors.response")
    needs_labels: ClassVar[bool] = False

    l1: float = 1e-5
    epochs_at_server: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs_at_server < 1:
            raise ValueError("epochs_at_server must be 1 or more")

    # --- server: σ ------------------------------------------------------------------------------------------------
    @property
    def server_training_epochs(self) -> int:
        return self.epochs_at_server

    def server_loss(self, network: Network, batch: Batch, state: Bundle, round: int) -> dict[str, Tensor]:
        return self.supervised(network, batch)

    def server_trained(self, state: Bundle, trained: Trained, round: int) -> Bundle:
        """ψ has no gradient here, but may have weight decay: it stays what the clients made it."""
        own = {n: v for n, v in trained.weights.items() if not n.startswith(PSI)}
        return replace(state, weights={**state.weights, **own})

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        told = [u._replace(content=replace(u.content, weights=self._unpacked(u, state))) for u in uploads]
        return super().server_update(state, told, round, setup)

    def tensor_shapes(self, setup: Setup) -> Mapping[str, tuple[int, ...]]:
        psi = sum(value.numel() for name, value in setup.weights.items() if name.startswith(PSI))
        return {**super().tensor_shapes(setup), "psi": (psi,)}

    def _unpacked(self, upload: Upload, state: Bundle) -> dict[str, Tensor]:
        like = {n: state.weights[n] for n in sorted(state.weights) if n.startswith(PSI)}
        parts = upload.content.tensors["psi"].split([v.numel() for v in like.values()])
        return {n: part.reshape(v.shape) for (n, v), part in zip(like.items(), parts, strict=True)}

    # --- client: ψ ------------------------------------------------------------------------------------------------
    def steps(
        self, labels: Tensor, num_unlabelled: int, epochs: int, batch: int, round: int, generator: torch.Generator
    ) -> Iterator[Step]:
        return unlabelled_epochs(num_unlabelled, epochs, batch, generator)

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> Loss:
        return self.unsupervised(network, batch, received)

    def _helpers(self, received: Received) -> list[dict[str, Tensor]]:
        """Only helpers' ψ travels: all have the same σ."""
        shared = without_helpers(received.weights)
        return [{**shared, **psi} for psi in super()._helpers(received)]

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        """ψ as one vector, in the order of its names."""
        response = super().client_return(trained, received, round).tensors["response"]
        psi = [trained.weights[n].flatten() for n in sorted(trained.weights) if n.startswith(PSI)]
        return Bundle(tensors={"psi": torch.cat(psi), "response": response})


def helpers_in(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if name.startswith(HELPER)}


def helper_models(weights: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The weights of each helper, by the model's names."""
    models: dict[str, dict[str, Tensor]] = {}
    for name, value in helpers_in(weights).items():
        helper, weight = name.split("/", 1)
        models.setdefault(helper, {})[weight] = value
    return list(models.values())


def without_helpers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if not name.startswith(HELPER)}


def halves(params: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
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
