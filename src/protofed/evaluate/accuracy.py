"""Accuracy by classifier head and by nearest prototype, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..bank import PrototypeBank

ScoreFunction = Callable[[Tensor, PrototypeBank], Tensor]


@dataclass(frozen=True)
class Scores:
    """One client's correct predictions out of `samples`."""

    head: int
    prototype: int
    samples: int

    @property
    def accuracy_head(self) -> float:
        return self.head / self.samples

    @property
    def accuracy_prototype(self) -> float:
        return self.prototype / self.samples


def score_client(z: Tensor, logits: Tensor, y: Tensor, bank: PrototypeBank, prototype_scores: ScoreFunction) -> Scores:
    """The head chooses among all classes; the bank among the classes it knows."""
    by_head = logits.argmax(-1)
    by_bank = prototype_scores(z, bank).argmax(-1)
    return Scores(int((by_head == y).sum()), int((by_bank == y).sum()), len(y))


def summarise(scores: Sequence[Scores]) -> dict[str, float]:
    """Mean and standard deviation over clients, every client counting the same."""
    result = {}
    for kind in ("accuracy_head", "accuracy_prototype"):
        values = torch.tensor([getattr(s, kind) for s in scores], dtype=torch.float64)
        result[kind] = float(values.mean())
        result[f"{kind}_std"] = float(values.std(correction=0))
    return result
