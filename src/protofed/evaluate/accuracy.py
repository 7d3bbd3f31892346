"""What a client's predictions are worth: by classifier head and by nearest prototype, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..bank import PrototypeBank
from .confusion import PREDICTIONS, Confusion

ScoreFunction = Callable[[Tensor, PrototypeBank], Tensor]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Some of a client's test embeddings, and the prototypes they are compared with (one bank, or a stack of them)."""

    z: np.ndarray
    y: np.ndarray
    prototypes: np.ndarray
    known: np.ndarray

    @classmethod
    def of(cls, z: Tensor, y: Tensor, bank: PrototypeBank) -> Snapshot:
        arrays = (z.to(torch.float16), y, bank.means.to(torch.float32), bank.known)
        return cls(*(t.cpu().numpy() for t in arrays))


@dataclass(frozen=True)
class Scores:
    """One client's predictions. `votes` are its class probabilities on the shared test set, by head and by prototype;
    `silhouette` and `snapshot` describe its embedding space, where that was asked for."""

    by_head: Confusion
    by_prototype: Confusion | None  # none where the client neither has nor was sent a prototype
    votes: np.ndarray | None = field(default=None, compare=False)
    silhouette: float | None = None
    snapshot: Snapshot | None = field(default=None, compare=False)

    @property
    def head(self) -> int:
        return self.by_head.correct

    @property
    def prototype(self) -> int:
        return 0 if self.by_prototype is None else self.by_prototype.correct

    @property
    def samples(self) -> int:
        return self.by_head.samples

    @property
    def accuracy_head(self) -> float:
        return self.head / self.samples

    @property
    def accuracy_prototype(self) -> float:
        return self.prototype / self.samples


def score_client(z: Tensor, logits: Tensor, y: Tensor, bank: PrototypeBank, prototype_scores: ScoreFunction) -> Scores:
    """The head chooses among all classes; the bank among the classes it knows, and not at all where it knows none."""
    by_prototype = Confusion.of(y.cpu(), prototype_scores(z, bank).argmax(-1).cpu()) if bool(bank.known.any()) else None
    return Scores(Confusion.of(y.cpu(), logits.argmax(-1).cpu()), by_prototype)


def vote(z: Tensor, logits: Tensor, bank: PrototypeBank, prototype_scores: ScoreFunction) -> np.ndarray:
    """`[2, n, C]` class probabilities, by head and by prototype; a bank that knows nothing gives every class the same."""
    scores = prototype_scores(z, bank)
    scores = torch.where(bank.known.any(), scores, torch.zeros_like(scores))
    return torch.stack([logits.softmax(-1), scores.softmax(-1)]).cpu().numpy()


def summarise(
    scores: Sequence[Scores],
    values: Sequence[float] = (),
    architectures: Sequence[str] = (),
    own: str = "head",
    kinds: Sequence[str] = PREDICTIONS,
) -> dict[str, float]:
    """Means over clients, every client counting the same but in `weighted`, where every test sample does.

    `values` are the numbers classes stand for; `architectures` names each client's, for a mean over those that share it.
    `own` is the method's own way to predict, which `accuracy` is by; `kinds` the ways that mean something.
    """
    result: dict[str, float] = {"accuracy": float(np.mean([getattr(s, f"accuracy_{own}") for s in scores]))}
    shaped = [s.silhouette for s in scores if s.silhouette is not None and np.isfinite(s.silhouette)]
    if shaped:
        result["silhouette"] = float(np.mean(shaped))
    for kind in kinds:
        confusions: list[Confusion] = [getattr(s, f"by_{kind}") for s in scores]
        each = np.array([c.correct / c.samples for c in confusions])
        result[f"accuracy_{kind}"] = float(each.mean())
        result[f"accuracy_{kind}_std"] = float(each.std())
        result[f"weighted_{kind}"] = sum(c.correct for c in confusions) / sum(c.samples for c in confusions)
        result[f"f1_{kind}"] = float(np.mean([c.macro_f1() for c in confusions]))
        if values:
            result[f"mae_{kind}"] = float(np.mean([c.mean_absolute_error(values) for c in confusions]))
        if len(set(architectures)) > 1:
            for name in dict.fromkeys(architectures):
                members = [a for a, architecture in zip(each, architectures, strict=True) if architecture == name]
                result[f"accuracy_{kind}@{name}"] = float(np.mean(members))
    return result


def ensemble(scores: Sequence[Scores], y: Tensor) -> dict[str, float]:
    """Accuracy of the argmax of the clients' mean class probabilities on a shared test set (FedPAGR)."""
    total = np.zeros(())
    for score in scores:
        assert score.votes is not None
        total = total + score.votes.astype(np.float64)
    right = total.argmax(-1) == y.cpu().numpy()
    return {f"ensemble_{kind}": float(right[k].mean()) for k, kind in enumerate(PREDICTIONS)}
