"""Fed-ARPL: labels at the server, unlabelled samples at the clients, prototypes that first teach and then learn.

"Fed-ARPL: Adaptive and Reciprocal Prototype Learning for Semi-Supervised Federated Learning" (under review, 2026).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import aggregate, losses
from ..bank import PrototypeBank
from ..evaluate.geometry import feature_space_separation
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
    bank_of,
    moved,
    register,
    unlabelled_epochs,
    weighted_average,
)

log = logging.getLogger("protofed")


@register("server-only")
@dataclass(frozen=True)
class ServerOnly(SharedModel):
    """The server trains on its own labels and asks no client: what labels at the server are worth by themselves."""

    asks_clients: ClassVar[bool] = False
    needs_labels: ClassVar[bool] = False
    server_view: ClassVar[View] = "weak"

    epochs_at_server: int = 5

    def __post_init__(self) -> None:
        if self.epochs_at_server < 1:
            raise ValueError("epochs_at_server must be 1 or more")

    @property
    def server_training_epochs(self) -> int:
        return self.epochs_at_server

    def server_loss(self, network: Network, batch: Batch, state: Bundle, round: int) -> dict[str, Tensor]:
        return {"ce": losses.cross_entropy(network(batch.x).logits, batch.y, weight=batch.weight)}  # Eq. 9

    def server_trained(self, state: Bundle, trained: Trained, round: int) -> Bundle:
        return replace(state, weights={**state.weights, **trained.weights}, bank=trained.bank())


@register("fedarpl")
@dataclass(frozen=True)
class FedARPL(SharedModel):
    """Adaptive threshold, then the server's prototypes as teacher, then the clients' as feedback (Fed-ARPL, 2026).

    The server's state: `weights`; `bank` the global prototypes; `banks.teacher` the server's own, in phase 3; scalars
    `phase`, `threshold`, `fss`, `gcplca` and `began` (the first round of phase 3); tensors `history` (the last scores
    that the next phase waits for) and the velocity of each parameter.
    """

    paper: ClassVar[str] = "Fed-ARPL, under review, 2026"
    travels: ClassVar[tuple[str, ...]] = ("weights", "bank", "scalars.threshold", "scalars.phase", "scalars.confidence")
    required: ClassVar[tuple[str, ...]] = ("weights", "scalars.confidence")
    reads_unlabelled: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = False
    views: ClassVar[tuple[View, ...]] = ("weak", "strong")
    server_view: ClassVar[View] = "weak"

    epochs_at_server: int = 5  # E at the server; at the clients it is `epochs`
    server_momentum: float = 0.5
    threshold: Literal["adaptive"] | float = "adaptive"  # τ: Eq. 2, or a fixed one
    consistency: bool = True  # off: the loss on pseudo-labels takes the weak view that they were made from
    phases: Literal[1, 2, 3] = 3  # the highest phase that may begin
    client_weight: float = 1.0  # λ_plc of Eq. 4; 10 for CIFAR-100
    server_weight: float = 1.0  # λ_pls
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

    def __post_init__(self) -> None:
        shares = ("server_momentum", "stricter", "teacher_share", "teacher_decay", "prototype_momentum")
        for name in (*shares, *(["threshold"] if self.threshold != "adaptive" else [])):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1")
        for name in ("client_weight", "server_weight", "fss_deviation", "gcplca_deviation", "rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more")
        for name in ("epochs_at_server", "fss_window", "gcplca_window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more")
        if self.transition == "adaptive" and min(self.fss_window, self.gcplca_window) < 2:
            raise ValueError("transition=adaptive needs windows of 2 or more: one score has no rate of change")

    # --- server: its own training ---------------------------------------------------------------------------------
    @property
    def server_training_epochs(self) -> int:
        return self.epochs_at_server

    def server_start(self, setup: Setup) -> Bundle:
        """Until the server has trained, nothing is sure enough: no probability is above 1."""
        bank = PrototypeBank.empty(setup.num_classes, setup.dim)
        return Bundle(bank=bank, weights=setup.weights, scalars={"phase": 1.0, "threshold": 1.0})

    def server_loss(self, network: Network, batch: Batch, state: Bundle, round: int) -> dict[str, Tensor]:
        z, logits = network(batch.x)
        terms = {"ce": losses.cross_entropy(logits, batch.y, weight=batch.weight)}  # Eq. 9
        if state.scalars["phase"] == 3:
            align = losses.alignment(z, batch.y, bank_of(state), self.reduction, weight=batch.weight)  # Eq. 11
            terms["align"] = self.server_weight * align
        return terms

    def server_trained(self, state: Bundle, trained: Trained, round: int) -> Bundle:
        """The threshold, the teacher's prototypes, and whether phase 2 begins with the next round."""
        output, batch = trained.outputs()
        teacher = trained.bank()
        fss = float(feature_space_separation(output.embedding, batch.y, teacher))  # Eq. 3
        sure = float(output.logits.softmax(-1).amax(-1).mean())  # Eq. 2
        scalars = {**state.scalars, "fss": fss, "threshold": sure if self.threshold == "adaptive" else self.threshold}
        state = replace(state, weights={**state.weights, **trained.weights}, scalars=scalars)
        if scalars["phase"] == 3:
            return replace(state, banks={"teacher": teacher})
        return self._next_phase(replace(state, bank=teacher), 1, fss, round)  # P_g ← P_s

    # --- client ---------------------------------------------------------------------------------------------------
    def send(self, state: Bundle, client: int, round: int) -> Bundle:
        """The model, τ and the phase; from phase 2 on the prototypes."""
        scalars = {name: state.scalars[name] for name in ("phase", "threshold")}
        return Bundle(bank=state.bank if scalars["phase"] > 1 else None, weights=state.weights, scalars=scalars)

    def steps(
        self, labels: Tensor, num_unlabelled: int, epochs: int, batch: int, round: int, generator: torch.Generator
    ) -> Iterator[Step]:
        return unlabelled_epochs(num_unlabelled, epochs, batch, generator)

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> Loss:
        assert batch.weak is not None and batch.strong is not None and batch.unlabelled_weight is not None
        sure, label = network.frozen(batch.weak, received.weights).logits.softmax(-1).max(-1)
        accepted = (sure > received.scalars["threshold"]).to(sure.dtype)
        z, logits = network(batch.strong if self.consistency else batch.weak)
        there = batch.unlabelled_weight
        terms = {"unlabelled": losses.pseudo_cross_entropy(logits, label, accepted, weight=there)}  # Eq. 1
        if received.bank is not None:
            align = losses.alignment(z, label, received.bank, self.reduction, weight=there * accepted)  # Eq. 5
            terms["align"] = self.client_weight * align  # Eq. 4
        return Loss(terms, Pseudo(label, accepted, sure))

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        """The model and how sure the received one is; in phase 3 also prototypes of the samples that one is surest of."""
        sure, label = trained.unlabelled(weights=received.weights).logits.softmax(-1).max(-1)
        content = Bundle(weights=trained.weights, scalars={"confidence": float(sure.mean())})
        if received.scalars["phase"] < 3:
            return content
        kept = sure > self.strict(received.scalars["threshold"])
        z, classes = trained.unlabelled().embedding, bank_of(received).num_classes
        return replace(content, bank=PrototypeBank.from_embeddings(z, label, classes, kept))

    def strict(self, threshold: float) -> float:
        """τ': above τ by `stricter`, but at most half way to 1, so that τ < τ' < 1 whatever τ is."""
        return min(threshold + self.stricter, (1 + threshold) / 2)

    # --- server: what comes back ----------------------------------------------------------------------------------
    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        gcplca = sum(u.content.scalars["confidence"] for u in uploads) / len(uploads)
        scalars = {**state.scalars, "gcplca": gcplca}
        state = replace(moved(state, weighted_average(uploads), self.server_momentum), scalars=scalars)  # Eq. 10
        if scalars["phase"] < 3:
            return self._next_phase(state, 2, gcplca, round)
        return replace(state, bank=self.prototypes(state, uploads, round))

    def prototypes(self, state: Bundle, uploads: Sequence[Upload], round: int) -> PrototypeBank:
        """The global prototypes after a round of phase 3. A class that no student reported keeps the teacher's."""
        banks = [u.content.bank for u in uploads if u.content.bank is not None]
        teacher = state.banks["teacher"]
        if banks:
            students = aggregate.weighted_mean(PrototypeBank.stack(banks))  # Eq. 6
            teacher = aggregate.blend(teacher, students, self.teacher_share_at(state, round))  # Eq. 7
        return aggregate.momentum_blend(bank_of(state), teacher, self.prototype_momentum)  # Eq. 8

    def teacher_share_at(self, state: Bundle, round: int) -> float:
        """α_t = α_0 · decay^(rounds since phase 3 began)."""
        return self.teacher_share * self.teacher_decay ** (round - state.scalars["began"])

    # --- phases ---------------------------------------------------------------------------------------------------
    def _next_phase(self, state: Bundle, phase: Literal[1, 2], score: float, round: int) -> Bundle:
        """The state with one more score of the phase it is in, and in the next phase where that is due."""
        if state.scalars["phase"] != phase:
            return state
        name = "FSS" if phase == 1 else "GCPLCA"
        before = state.tensors.get("history", torch.zeros(0))
        history = torch.cat([before, before.new_tensor([score])])[-self._span(phase) :]
        due = self.due(history, phase) if phase < self.phases else ""
        if not due:
            return replace(state, tensors={**state.tensors, "history": history})
        log.info("round %d: phase %d begins: %s has %s", round + 1, phase + 1, name, due)
        scalars = {**state.scalars, "phase": phase + 1.0, **({"began": round + 1.0} if phase == 2 else {})}
        return replace(state, tensors={**state.tensors, "history": history[:0]}, scalars=scalars)

    def _span(self, phase: int) -> int:
        """How many scores the rule looks at."""
        window = self.fss_window if phase == 1 else self.gcplca_window
        return window if self.transition == "windowed" else 2 * window - 1

    def due(self, history: Tensor, phase: int) -> str:
        """Why the phase after this one begins; empty where it does not."""
        if len(history) < self._span(phase):
            return ""
        scores = history.double()
        if self.transition == "windowed":
            mean, deviation = float(scores.mean()), float(scores.std(unbiased=False))
            low, wide = self._limits(phase)
            met = mean >= low and deviation <= wide
            return f"mean {mean:.4g} and deviation {deviation:.4g} over {len(scores)} rounds" if met else ""
        most = float(rates(scores, (len(scores) + 1) // 2).max())
        return f"changed by at most {most:.2%} a round over {len(scores)} rounds" if most <= self.rate else ""

    def _limits(self, phase: int) -> tuple[float, float]:
        return (self.fss_mean, self.fss_deviation) if phase == 1 else (self.gcplca_mean, self.gcplca_deviation)

    def measures(self, state: Bundle, round: int) -> Mapping[str, float]:
        """The phase is the one this round was in."""
        there = {name: state.scalars[name] for name in ("threshold", "fss", "gcplca") if name in state.scalars}
        return {**there, "phase": 2.0 if state.scalars.get("began", round) > round else state.scalars["phase"]}

    def closing_note(self, state: Bundle, rounds: int) -> str:
        phase = int(state.scalars["phase"])
        if phase >= self.phases:
            return ""
        name, window = ("fss", self.fss_window) if phase == 1 else ("gcplca", self.gcplca_window)
        low, wide = self._limits(phase)
        rule = f"mean of at least {low:g} and a deviation of at most {wide:g}"
        if self.transition == "adaptive":
            rule = f"rate of change of at most {self.rate:g}"
        last = f"; its last value is {state.scalars[name]:.4g}" if name in state.scalars else ""
        return (
            f"fedarpl was in phase {phase} of {self.phases} when its {rounds} rounds ended: "
            f"{name.upper()} never had a {rule} over a window of {window} rounds{last}"
        )


def rates(scores: Tensor, window: int) -> Tensor:
    """Of each run of `window` scores the slope of the line through them by least squares, a round, over their mean."""
    runs = scores.unfold(0, window, 1)
    t = torch.arange(window, dtype=scores.dtype, device=scores.device)
    t = t - t.mean()
    return ((runs @ t) / (t @ t)).abs() / runs.mean(-1).abs().clamp_min(1e-12)
