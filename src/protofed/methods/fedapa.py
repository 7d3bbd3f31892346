"""FedAPA: prototypes of each client's own, weighted by how alike its peers are, and the peers' prototypes beside them.

"Federated Learning with Adaptive Prototype Aggregation Toward Heterogeneous Wi-Fi CSI-based Crowd Counting" (Guo et al.,
2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch

from .. import aggregate
from ..bank import PrototypeBank
from ..parts import CE, Batch, Contrast, Head, Peers, Personal, Predict, Received, Reduced, terms_of
from ..schedules import Weight, ramp
from ..wire import Bundle, Exchange, bank
from .base import Method, register
from .checks import not_negative
from .client import Network, Terms, Trained
from .server import Measures, Setup, State, state


@state
class PersonalBanks(State):
    """Every client's last prototypes, and what each is sent because of them, made once a round."""

    reported: PrototypeBank  # [N, C, d]
    average: PrototypeBank  # the padding of Eq. 8, and the global bank of Table IV
    padded: PrototypeBank | None = None  # [N, C, d], Eq. 8
    personal: PrototypeBank | None = None  # [N, C, d], Eq. 5–8
    movement: Mapping[str, float] = field(default_factory=dict)  # of prototypes in the last round, as Lemma 2 bounds it

    @property
    def clients(self) -> PrototypeBank:
        return self.reported

    def bank(self, client: int, round: int) -> PrototypeBank:
        """Q_i, or the average in its place."""
        return self.average if self.personal is None else self.personal[client]

    @property
    def peers(self) -> PrototypeBank | None:
        """All P_j, of which a client is sent the others': with Q_i and what it returns, the N + 1 banks of Table V."""
        return self.padded

    def enlarged(self, start: PersonalBanks) -> PersonalBanks:
        """A client that has reported nothing is sent what pads its classes, and counts for nobody else."""
        known, padded, personal = len(self.reported.means), self.padded, self.personal
        if padded is not None and start.padded is not None:
            padded = padded.joined(start.padded[known:])
        if personal is not None:
            counts = self.average.counts / self.reported.known.sum(0).clamp_min(1)  # as in `aggregate.pad`
            padding = PrototypeBank(self.average.means, counts.to(personal.counts.dtype))
            personal = personal.joined(PrototypeBank.stack([padding] * (len(start.reported.means) - known)))
        return PersonalBanks(self.reported.joined(start.reported[known:]), self.average, padded, personal)


def moved(before: PrototypeBank, after: PrototypeBank) -> float | None:
    """The mean Euclidean distance by which prototypes moved.

    Args:
        before: Banks `[N, C, d]`.
        after: The same banks later.

    Returns:
        The mean over the prototypes that both know, or None where there is none.
    """
    both = before.known & after.known
    distances = (after.means - before.means).norm(dim=-1)[both]
    return float(distances.mean()) if len(distances) else None


@register("fedapa", paper="Guo et al., 2025")
@dataclass(frozen=True)
class FedAPA(Method):
    """CE + λ_t·(contrast with the client's personalised prototypes + with every client's prototypes)."""

    predict: ClassVar[Predict] = Head(prefers="own")

    temperature: float = 0.5  # τ of Eq. 6, 9 and 10
    warm_up: Weight = ramp("cosine", start=0, end=50, maximum=1.0)  # λ_t of Eq. 11
    padding: Literal["mean", "size-weighted"] = "mean"  # Eq. 8 as printed; the text about it says sample-weighted
    variant: Literal["fedapa", "global", "global+clients"] = "fedapa"  # the others are the ablation of Table IV

    def __post_init__(self) -> None:
        not_negative(self, "warm_up")
        if self.temperature <= 0:
            raise ValueError("temperature must be above 0")

    @property
    def reduce(self) -> Personal:
        shown = {"similar": self.variant == "fedapa", "peers": self.variant != "global"}
        return Personal(temperature=self.temperature, padding=self.padding, **shown)

    @property
    def exchange(self) -> Exchange:
        return personal_exchange(self.reduce)

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms:  # Eq. 12
        contrast, peers = Contrast(self.warm_up, self.temperature), Peers(self.warm_up, self.temperature)  # Eq. 9, 10
        parts = (CE(), contrast) if self.variant == "global" else (CE(), contrast, peers)
        return terms_of(parts, net, net(batch.x), batch, received, round)

    def remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        """P_i, which Eq. 10 needs next time; what is sent leaves it out."""
        return received.memory if self.variant == "global" else Bundle(bank=trained.bank())  # Eq. 4

    def start(self, setup: Setup) -> PersonalBanks:
        return no_reports(self.reduce, setup)

    def update(self, state: PersonalBanks, reduced: Reduced, round: int, setup: Setup) -> PersonalBanks:
        return with_reports(self.reduce, state, reduced)

    def describe(self, state: PersonalBanks, round: int) -> Measures:
        """How far prototypes moved: those of the clients, and the personalised ones (Lemma 2)."""
        return Measures(dict(state.movement))


def personal_exchange(rule: Personal) -> Exchange:
    """A bank for each client and, where the rule says so, the other clients' banks go down; a bank comes up."""
    peers = bank("peers", ("clients", "classes", "dim"), others=True)
    return Exchange((bank(each=True), *((peers,) if rule.peers else ())), (bank(),))


def no_reports(rule: Personal, setup: Setup) -> PersonalBanks:
    """The state before anybody has reported."""
    n, c, d = setup.num_clients, setup.num_classes, setup.dim
    return personal_banks(rule, PrototypeBank(torch.zeros(n, c, d), torch.zeros(n, c)))


def with_reports(rule: Personal, state: PersonalBanks, reduced: Reduced) -> PersonalBanks:
    """The state after some uploads. A client that did not take part keeps what it reported last."""
    old, new = state.reported, reduced.uploaded_banks
    rows = torch.tensor([u.client for u in reduced.uploads])
    means = old.means.index_copy(0, rows, new.means.to(old.means.dtype))
    after = personal_banks(rule, PrototypeBank(means, old.counts.index_copy(0, rows, new.counts.to(old.counts.dtype))))
    movement = {"client_movement": moved(old, after.reported)}
    if state.personal is not None and after.personal is not None:
        movement["personal_movement"] = moved(state.personal, after.personal)
    return replace(after, movement={name: value for name, value in movement.items() if value is not None})


def personal_banks(rule: Personal, reported: PrototypeBank) -> PersonalBanks:
    """What each client is sent because of what all have reported."""
    weighted = rule.padding == "size-weighted"
    padded = personal = None
    if rule.peers:
        anyone = reported.known.any(-1, keepdim=True)  # the others have nothing to contrast with
        padded = aggregate.pad(reported, weighted).restricted(anyone)  # Eq. 8
    if rule.similar:
        personal = aggregate.personalised(reported, rule.temperature, weighted=weighted)  # Eq. 5–8
    average = (aggregate.weighted_mean if weighted else aggregate.mean)(reported)
    return PersonalBanks(reported, average, padded, personal)
