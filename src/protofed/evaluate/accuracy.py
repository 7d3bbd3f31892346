"""Scores of a client's predictions by classifier head and by nearest prototype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..bank import PrototypeBank
from .confusion import PREDICTIONS, Confusion
from .embedding import Drawn, Pool
from .probabilities import auroc, calibration_error, log_odds, probabilities

ScoreFunction = Callable[[Tensor, PrototypeBank], Tensor]
MixFunction = Callable[[Tensor, Tensor], Tensor]
QUALITIES = ("balanced", "auroc", "ece")
"""Measures of a client's predictions beside accuracy: balanced accuracy, AUROC and calibration error."""
SHARE = "mix_share"
"""The measure that says how much the head counts in a client's prediction by head and prototypes together."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Some of a client's test embeddings, and the prototypes they are compared with (one bank, or a stack of them)."""

    z: np.ndarray
    y: np.ndarray
    prototypes: np.ndarray
    known: np.ndarray

    @classmethod
    def of(cls, z: Tensor, y: Tensor, bank: PrototypeBank) -> Snapshot:
        """A snapshot of embeddings `z`, labels `y` and the prototypes of a bank."""
        arrays = (z.to(torch.float16), y, bank.means.to(torch.float32), bank.known)
        return cls(*(t.cpu().numpy() for t in arrays))


@dataclass(frozen=True)
class Scores:
    """One client's predictions.

    `votes` are its class probabilities on the shared test set, by each of its predictions. `silhouette` and `snapshot`
    describe its embedding space, `pool` and `drawn` have embeddings for measures of all clients together: `pool` for
    retrieval, `drawn` for the silhouette, to which each client gives another part of its samples. `measures` has further
    numbers by name (`auroc_head`), where an evaluation asks for them.
    """

    by_head: Confusion
    by_prototype: Confusion | None  # None where the client has no prototype and was sent none
    votes: np.ndarray | None = field(default=None, compare=False)
    silhouette: float | None = None
    snapshot: Snapshot | None = field(default=None, compare=False)
    measures: Mapping[str, float] = field(default_factory=dict, compare=False)
    pool: Pool | None = field(default=None, compare=False)
    drawn: Drawn | None = field(default=None, compare=False)
    by_mix: Confusion | None = None  # None where the method does not mix head and prototypes

    @property
    def head(self) -> int:
        """The number of right predictions by head."""
        return self.by_head.correct

    @property
    def prototype(self) -> int:
        """The number of right predictions by prototype."""
        return 0 if self.by_prototype is None else self.by_prototype.correct

    @property
    def samples(self) -> int:
        """The number of test samples."""
        return self.by_head.samples

    @property
    def accuracy_head(self) -> float:
        """The share of right predictions by head."""
        return self.head / self.samples

    @property
    def accuracy_prototype(self) -> float:
        """The share of right predictions by prototype."""
        return self.prototype / self.samples

    @property
    def accuracy_mix(self) -> float:
        """The share of right predictions by head and prototypes together."""
        return 0.0 if self.by_mix is None else self.by_mix.correct / self.samples

    def value(self, name: str) -> float | None:
        """An accuracy or another measure by its name; None where the client does not have it."""
        return float(getattr(self, name)) if name.startswith("accuracy_") else self.measures.get(name)


def predicted(scores: Tensor) -> np.ndarray:
    """The class of the largest score `[...]` of scores `[..., C]`, the first one where several are equal.

    >>> predicted(torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, 0.0]])).tolist()
    [1, 0]
    """
    if scores.device.type != "cpu" or scores.dtype == torch.bfloat16:
        return np.asarray(scores.argmax(-1).cpu().numpy())
    return np.asarray(scores.detach().numpy().argmax(-1))  # with many classes several times as fast as torch's


def score_client(
    z: Tensor,
    logits: Tensor,
    y: Tensor,
    bank: PrototypeBank | None,
    prototype_scores: ScoreFunction,
    qualities: bool = False,
    mixed: MixFunction | None = None,
) -> Scores:
    """Score one client.

    Args:
        z: The embeddings `[n, d]` of its test samples.
        logits: The logits `[n, C]` of the head, which chooses among all classes.
        y: The labels `[n]`.
        bank: The prototypes, which choose among the classes that the bank knows; none where only the head is scored.
        prototype_scores: The scores of embeddings by a bank; the largest score wins.
        qualities: Whether the measures of `QUALITIES` are taken too.
        mixed: The scores by head and prototypes together, of embeddings and logits, where the method mixes them.

    Returns:
        The confusions by each prediction; none by prototype where the bank knows no class.
    """
    labels = y.cpu()
    scores = {"head": logits}
    if bank is not None and bool(bank.known.any()):
        scores["prototype"] = prototype_scores(z, bank)
    if mixed is not None:
        scores["mix"] = mixed(z, logits)
    confusions = {name: Confusion.of(labels, predicted(value)) for name, value in scores.items()}
    measures: dict[str, float] = {}
    if qualities:
        for name, value in scores.items():
            p, true = probabilities(value), labels.numpy()
            if np.isnan(p).any():  # of a model that diverged
                continue
            area = auroc(log_odds(value), true)
            measures[f"balanced_{name}"] = confusions[name].balanced_accuracy()
            measures |= {} if area is None else {f"auroc_{name}": area}
            measures[f"ece_{name}"] = calibration_error(p, true)
    return Scores(confusions["head"], confusions.get("prototype"), measures=measures, by_mix=confusions.get("mix"))


def vote(
    z: Tensor,
    logits: Tensor,
    bank: PrototypeBank,
    prototype_scores: ScoreFunction,
    mixed: MixFunction | None = None,
) -> np.ndarray:
    """A client's class probabilities on the shared test set. A bank without prototypes gives all classes the same.

    Args:
        z: The embeddings `[n, d]`.
        logits: The logits `[n, C]` of the head.
        bank: The prototypes.
        prototype_scores: The scores of embeddings by a bank.
        mixed: As for `score_client`.

    Returns:
        The probabilities `[2, n, C]`, by head and by prototype; `[3, n, C]` with those by both where the method mixes them.
    """
    scores = prototype_scores(z, bank)
    scores = torch.where(bank.known.any(), scores, torch.zeros_like(scores))
    single = [logits.softmax(-1), scores.softmax(-1)]
    return torch.stack([*single, *([] if mixed is None else [mixed(z, logits).exp()])]).cpu().numpy()


def ensemble(scores: Iterable[Scores], y: Tensor) -> dict[str, float]:
    """The accuracy of the argmax of the clients' mean class probabilities on a shared test set (FedPAGR).

    Args:
        scores: The scores of all clients, with their votes.
        y: The labels of the shared test set.

    Returns:
        The accuracy by each prediction, by name.
    """
    total = np.zeros(())
    for score in scores:
        assert score.votes is not None
        total = total + score.votes.astype(np.float64)
    right = total.argmax(-1) == y.cpu().numpy()
    return {f"ensemble_{name}": float(of_all.mean()) for name, of_all in zip(PREDICTIONS, right, strict=False)}
