"""Compose: a method made of parts by settings, any with any other that makes sense."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..bank import PrototypeBank
from ..parts import (
    CE,
    Align,
    Batch,
    Feed,
    Head,
    Ignored,
    Mean,
    Personal,
    Predict,
    Received,
    Reduce,
    Reduced,
    ServerRound,
    ServerStep,
    Term,
    UnlabelledSamples,
    ages,
    bank_of,
    terms_of,
)
from ..wire import Bundle, Exchange, bank, weights
from .base import MODEL_AND_PROTOTYPES, PROTOTYPES, Method, register
from .client import Loss, Network, Trained, Weights, with_pseudo_labels
from .fedapa import PersonalBanks, no_reports, personal_exchange, with_reports
from .fedpagr import anchored, random_directions
from .server import Measures, Setup, State, state


@state
class Composed(State):
    """One bank, the weights where they are averaged, and for how many rounds nobody has reported a class."""

    bank: PrototypeBank
    weights: Weights
    age: Tensor


@register("compose")
@dataclass(frozen=True)
class Compose(Method):
    """A method made of parts: loss terms, what is returned, the reduce, what follows it, and the prediction."""

    loss: tuple[Term, ...] = (CE(), Align())  # the terms of a client's loss, each with its weight
    anchor: bool = False  # before training, the classifier's rows become the received prototypes (FedPAGR)
    returned_prototypes: Literal["means", "directions"] = "means"  # as they are, or with length 1
    returned_counts: bool = True  # off: each class counts once, and nobody learns how many samples it has
    average_weights: bool = False  # on: clients of one architecture share a model, and prototypes go across all
    initial_bank: Literal["empty", "random"] = "empty"  # before anybody has reported: none, or random directions
    reduce: Reduce = Mean("size")
    after: tuple[ServerStep, ...] = ()  # what the server does with the reduced prototypes, in this order
    predict: Predict = Head()
    unlabelled_samples: UnlabelledSamples = Ignored()  # what clients do with unlabelled samples, where they have any

    def __post_init__(self) -> None:
        if not self.loss:
            raise ValueError("loss has no terms; a client would learn nothing")
        for key, times in Counter(term.key or term.name for term in self.loss).items():
            if times > 1:
                raise ValueError(f"loss has {times} terms called {key!r}; give one of them the whole weight")
        if self.personal is not None:
            self._check_personal()
        for term in self.loss:
            self._check_term(term)

    def _check_personal(self) -> None:
        """Refuse what has no meaning where each client is sent prototypes of its own."""
        for name, is_set in {
            "average_weights": self.average_weights,
            "after": bool(self.after),
            "initial_bank": self.initial_bank != "empty",
            "unlabelled_samples": not isinstance(self.unlabelled_samples, Ignored),
        }.items():
            if is_set:
                raise ValueError(f"{name} is for one bank that all share; with reduce=personal each client has its own")

    def _check_term(self, term: Term) -> None:
        """Refuse a term that needs what the clients are not sent."""
        missing = set(term.reads) - {part.name for part in self.exchange.down}
        if "peers" in missing:
            raise ValueError(f"loss: {term.name} needs the other clients' prototypes; reduce=personal sends them")
        if "weights" in missing:
            raise ValueError(f"loss: {term.name} needs the model of all clients; set average_weights=true")

    @property
    def personal(self) -> Personal | None:
        """The rule by which each client has prototypes of its own, where the composition has one."""
        return self.reduce if isinstance(self.reduce, Personal) else None

    @property
    def exchange(self) -> Exchange:
        if self.personal is not None:
            return personal_exchange(self.personal)
        if self.unlabelled_samples.most > 1:
            travels = (weights(),) if self.average_weights else ()
            up = bank(most=self.unlabelled_samples.most)
            return Exchange((*travels, bank()), (*travels, up), not self.average_weights)
        return MODEL_AND_PROTOTYPES if self.average_weights else PROTOTYPES

    @property
    def feed(self) -> Feed:
        return self.unlabelled_samples.feed

    # --- client -------------------------------------------------------------------------------------------------
    def begin(self, weights: Weights, received: Received) -> Weights:
        weights = {**weights, **received.weights}
        return anchored(weights, bank_of(received), self.name) if self.anchor else weights

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Loss:
        supervised = terms_of(self.loss, net, net(batch.x), batch, received, round)
        return with_pseudo_labels(supervised, self.unlabelled_samples.step(net, batch, received, round))

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        bank = self.unlabelled_samples.returned(trained, received, round)
        if self.returned_prototypes == "directions":
            bank = bank.normalised()
        if not self.returned_counts:
            bank = PrototypeBank(bank.means, bank.known.to(bank.counts.dtype))
        return Bundle(bank=bank, weights=trained.weights if self.average_weights else {})

    def remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        """The client's own prototypes, where its loss contrasts with everybody's; else what its unlabelled samples need."""
        if self.personal is not None and self.personal.peers:
            return Bundle(bank=trained.bank())
        return self.unlabelled_samples.remember(trained, received, round)

    # --- server -------------------------------------------------------------------------------------------------
    def start(self, setup: Setup) -> Composed | PersonalBanks:
        if self.personal is not None:
            return no_reports(self.personal, setup)
        empty = self.initial_bank == "empty"
        bank = PrototypeBank.empty(setup.num_classes, setup.dim) if empty else random_directions(setup)
        weights = setup.weights if self.average_weights else {}
        return Composed(bank, weights, torch.zeros(setup.num_classes))

    def update(self, state: Any, reduced: Reduced, round: int, setup: Setup) -> Composed | PersonalBanks:
        if self.personal is not None:
            return with_reports(self.personal, state, reduced)
        age = ages(state.age, reduced.bank)
        now = ServerRound(state.bank, reduced, age)
        bank: PrototypeBank = state.bank if reduced.bank is None else reduced.bank.filled_from(state.bank)
        for step in self.after:
            bank = step(bank, now)
        return Composed(bank, {**state.weights, **reduced.weights}, age)

    def describe(self, state: Any, round: int) -> Measures:
        """How far prototypes moved, where each client has its own."""
        return Measures(dict(state.movement)) if self.personal is not None else Measures()
