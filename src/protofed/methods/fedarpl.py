"""Fed-ARPL: labels at the server, unlabelled samples at the clients, prototypes that first teach and then learn.

"Fed-ARPL: Adaptive and Reciprocal Prototype Learning for Semi-Supervised Federated Learning" (under review, 2026).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from .. import aggregate, losses
from ..bank import PrototypeBank
from ..geometry import feature_space_separation
from ..parts import Batch, Feed, Mean, Received, Reduce, Reduced, bank_of
from ..schedules import Weight, weight_at
from ..wire import Bundle, Exchange, bank, number, weights
from .at_server import VIEWS, TrainsAtServer, judged, probabilities
from .base import register
from .checks import a_share, at_least_one, not_negative
from .client import Loss, Network, Pseudo, Terms, Trained
from .phases import Phases, Transition
from .server import Measures, Setup, Teacher

log = logging.getLogger("protofed")


@register("fedarpl", paper="Fed-ARPL, under review, 2026")
@dataclass(frozen=True)
class FedARPL(TrainsAtServer):
    """Adaptive threshold, then the server's prototypes as teacher, then the clients' as feedback."""

    exchange: ClassVar[Exchange] = Exchange(
        down=(weights(), bank(optional=True), number("phase"), number("threshold")),
        up=(weights(), bank(optional=True), number("confidence", most=1.0)),
        keeps_model=False,
    )

    server_momentum: float = 0.5
    threshold: Literal["adaptive"] | float = "adaptive"  # τ: Eq. 2, or a fixed one
    threshold_view: Literal["none", "weak"] = "none"  # the view of the server's samples that Eq. 2 is measured on
    labelled_each: Literal["step", "round"] = "step"  # how often a weak view is drawn to make a sample's pseudo-label
    consistency: bool = True  # off: the loss on pseudo-labels takes the weak view that they were made from
    phases: Literal[1, 2, 3] = 3  # the highest phase that may begin
    client_weight: Weight = 1.0  # λ_plc of Eq. 4; 10 for CIFAR-100
    server_weight: Weight = 1.0  # λ_pls
    reduction: Literal["mean", "sum"] = "mean"  # over dimensions, in Eq. 5
    stricter: float = 0.05  # τ' − τ, while there is room below 1
    teacher_share: float = 0.7  # α_0 of Eq. 7
    teacher_decay: float = 0.99  # of α_t, a round
    prototype_momentum: float = 0.7  # β of Eq. 8
    transition: Literal["windowed", "adaptive"] = "windowed"
    fss_window: int = 5
    fss_mean: float = 3.0
    fss_deviation: float = 0.3
    gcplca_window: int = 5
    gcplca_mean: float = 0.95
    gcplca_deviation: float = 0.05
    rate: float = 0.01  # with transition=adaptive: the largest change of a score a round, as a share of the score
    reduce: Reduce = Mean("size")  # Eq. 6 and 10

    def __post_init__(self) -> None:
        super().__post_init__()
        a_share(self, "server_momentum", "stricter", "teacher_share", "teacher_decay", "prototype_momentum")
        if self.threshold != "adaptive":
            a_share(self, "threshold")
        not_negative(self, "client_weight", "server_weight", "fss_deviation", "gcplca_deviation", "rate")
        at_least_one(self, "fss_window", "gcplca_window")
        if self.transition == "adaptive" and min(self.fss_window, self.gcplca_window) < 2:
            raise ValueError("transition=adaptive needs windows of 2 or more: one score has no rate of change")

    @property
    def feed(self) -> Feed:
        draw: Literal["round", "steps"] = "steps" if self.labelled_each == "step" else "round"
        return replace(VIEWS, prepare=probabilities, prepared_view="weak", prepared_for=draw)

    # --- server: its own training ---------------------------------------------------------------------------------
    def start(self, setup: Setup) -> Phases:
        return Phases(setup.weights, {}, PrototypeBank.empty(setup.num_classes, setup.dim))

    @property
    def teacher(self) -> Teacher:
        return self.teaching(self.teacher_terms, self.learnt)

    def teacher_terms(self, net: Network, batch: Batch, state: Phases, round: int) -> Terms:
        z, logits = net(batch.x)
        terms = {"ce": losses.cross_entropy(logits, batch.y, weight=batch.weight)}  # Eq. 9
        if state.phase == 3:
            align = losses.alignment(z, batch.y, state.prototypes, self.reduction, weight=batch.weight)  # Eq. 11
            terms["align"] = weight_at(self.server_weight, round) * align
        return terms

    def learnt(self, state: Phases, trained: Trained, round: int) -> Phases:
        """The threshold, the server's own prototypes, and whether phase 2 begins with the next round."""
        output, batch = trained.outputs()
        own = trained.bank()
        fss = float(feature_space_separation(output.embedding, batch.y, own))  # Eq. 3
        seen = output if self.threshold_view == "none" else trained.labelled(self.threshold_view)
        sure = float(seen.logits.softmax(-1).amax(-1).mean())  # Eq. 2
        threshold = sure if self.threshold == "adaptive" else self.threshold
        state = replace(state, weights={**state.weights, **trained.weights}, threshold=threshold, fss=fss)
        if state.phase == 3:
            return replace(state, own=own)
        return self._with_score(replace(state, prototypes=own), 1, fss, round)  # P_g ← P_s

    # --- client ---------------------------------------------------------------------------------------------------
    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Loss:
        assert batch.weak is not None and batch.strong is not None and batch.unlabelled_weight is not None
        sure, label = judged(net, batch.weak, batch, received).max(-1)
        accepted = (sure > received.scalars["threshold"]).to(sure.dtype)
        z, logits = net(batch.strong if self.consistency else batch.weak)
        weight = batch.unlabelled_weight
        terms = {"unlabelled": losses.pseudo_cross_entropy(logits, label, accepted, weight=weight)}  # Eq. 1
        if received.bank is not None:
            align = losses.alignment(z, label, received.bank, self.reduction, weight=weight * accepted)  # Eq. 5
            terms["align"] = weight_at(self.client_weight, round) * align  # Eq. 4
        return Loss(terms, Pseudo(label, accepted, sure))

    def returned(self, trained: Trained, received: Received, round: int) -> Bundle:
        """The model and how sure the received one is; in phase 3 also prototypes of the samples that one is surest of."""
        sure, label = trained.unlabelled(weights=received.weights).logits.softmax(-1).max(-1)
        content = Bundle(weights=trained.weights, scalars={"confidence": float(sure.mean())})
        if received.scalars["phase"] < 3:
            return content
        surest = sure > self.strict(received.scalars["threshold"])
        z, classes = trained.unlabelled().embedding, bank_of(received).num_classes
        return replace(content, bank=PrototypeBank.from_embeddings(z, label, classes, surest))

    def strict(self, threshold: float) -> float:
        """τ': above τ by `stricter`, but at most half way to 1, so that τ < τ' < 1 whatever τ is."""
        return min(threshold + self.stricter, (1 + threshold) / 2)

    # --- server: what comes back ----------------------------------------------------------------------------------
    def update(self, state: Phases, reduced: Reduced, round: int, setup: Setup) -> Phases:
        gcplca = reduced.scalars["confidence"]
        state = replace(state.moved(reduced.weights, self.server_momentum), gcplca=gcplca)  # Eq. 10
        if state.phase < 3:
            return self._with_score(state, 2, gcplca, round)
        return replace(state, prototypes=self.blended(state, reduced.bank, round))

    def blended(self, state: Phases, students: PrototypeBank | None, round: int) -> PrototypeBank:
        """The global prototypes after a round of phase 3. A class that no student reported keeps the server's own."""
        assert state.own is not None
        teacher = state.own
        if students is not None:  # Eq. 6
            teacher = aggregate.blend(teacher, students, self.teacher_share_at(state, round))  # Eq. 7
        return aggregate.momentum_blend(state.prototypes, teacher, self.prototype_momentum)  # Eq. 8

    def teacher_share_at(self, state: Phases, round: int) -> float:
        """α_t = α_0 · decay^(rounds since phase 3 began)."""
        assert state.began is not None
        return self.teacher_share * self.teacher_decay ** (round - state.began)

    # --- phases ---------------------------------------------------------------------------------------------------
    def next_phase_after(self, phase: int) -> Transition:
        """The rule by which the phase after this one begins."""
        rate = self.rate if self.transition == "adaptive" else None
        if phase == 1:
            return Transition("FSS", self.fss_window, self.fss_mean, self.fss_deviation, rate)
        return Transition("GCPLCA", self.gcplca_window, self.gcplca_mean, self.gcplca_deviation, rate)

    def _with_score(self, state: Phases, phase: Literal[1, 2], score: float, round: int) -> Phases:
        """The state with one more score of the phase it is in, and in the next phase where that is due."""
        if state.phase != phase:
            return state
        rule = self.next_phase_after(phase)
        history = torch.cat([state.history, state.history.new_tensor([score])])[-rule.span :]
        due = rule.due(history) if phase < self.phases else ""
        if not due:
            return replace(state, history=history)
        log.info("round %d: phase %d begins: %s has %s", round + 1, phase + 1, rule.score, due)
        began = round + 1 if phase == 2 else state.began
        return replace(state, history=history[:0], phase=phase + 1, began=began)

    def describe(self, state: Phases, round: int) -> Measures:
        """The phase is the one this round was in; the note says what a phase that never began was waiting for."""
        scores = {"threshold": state.threshold, "fss": state.fss, "gcplca": state.gcplca}
        numbers = {name: value for name, value in scores.items() if value is not None}
        phase = 2 if state.began is not None and state.began > round else state.phase
        note = ""
        if state.phase < self.phases:
            waiting = self.next_phase_after(state.phase).waiting(state.fss if state.phase == 1 else state.gcplca)
            note = f"fedarpl was in phase {state.phase} of {self.phases} when its {round} rounds ended: {waiting}"
        return Measures({**numbers, "phase": float(phase)}, note)
