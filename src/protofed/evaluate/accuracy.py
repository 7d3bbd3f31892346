"""Scores of a client's predictions by classifier head and by nearest prototype."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..bank import PrototypeBank
from .confusion import PREDICTIONS, Confusion
from .embedding import EMBEDDING, Drawn, Pool
from .probabilities import auroc, calibration_error, log_odds, probabilities

ScoreFunction = Callable[[Tensor, PrototypeBank], Tensor]
QUALITIES = ("balanced", "auroc", "ece")
"""Measures of a client's predictions beside accuracy: balanced accuracy, AUROC and calibration error."""
DECILE = 0.1  # of the clients, those with the lowest accuracies


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

    `votes` are its class probabilities on the shared test set, by head and by prototype. `silhouette` and `snapshot`
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

    def value(self, name: str) -> float | None:
        """An accuracy or another measure by its name; None where the client does not have it."""
        return float(getattr(self, name)) if name.startswith("accuracy_") else self.measures.get(name)


def score_client(
    z: Tensor,
    logits: Tensor,
    y: Tensor,
    bank: PrototypeBank,
    prototype_scores: ScoreFunction,
    qualities: bool = False,
) -> Scores:
    """Score one client.

    Args:
        z: The embeddings `[n, d]` of its test samples.
        logits: The logits `[n, C]` of the head, which chooses among all classes.
        y: The labels `[n]`.
        bank: The prototypes, which choose among the classes that the bank knows.
        prototype_scores: The scores of embeddings by a bank; the largest score wins.
        qualities: Whether the measures of `QUALITIES` are taken too.

    Returns:
        The confusions by head and by prototype; none by prototype where the bank knows no class.
    """
    labels = y.cpu()
    scores = {"head": logits, **({"prototype": prototype_scores(z, bank)} if bool(bank.known.any()) else {})}
    confusions = {name: Confusion.of(labels, value.argmax(-1).cpu()) for name, value in scores.items()}
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
    return Scores(confusions["head"], confusions.get("prototype"), measures=measures)


def vote(z: Tensor, logits: Tensor, bank: PrototypeBank, prototype_scores: ScoreFunction) -> np.ndarray:
    """A client's class probabilities on the shared test set. A bank without prototypes gives all classes the same.

    Args:
        z: The embeddings `[n, d]`.
        logits: The logits `[n, C]` of the head.
        bank: The prototypes.
        prototype_scores: The scores of embeddings by a bank.

    Returns:
        The probabilities `[2, n, C]`, by head and by prototype.
    """
    scores = prototype_scores(z, bank)
    scores = torch.where(bank.known.any(), scores, torch.zeros_like(scores))
    return torch.stack([logits.softmax(-1), scores.softmax(-1)]).cpu().numpy()


def summarise(
    scores: Sequence[Scores],
    values: Sequence[float] = (),
    architectures: Sequence[str] = (),
    prediction: str = "head",
    predictions: Sequence[str] = PREDICTIONS,
) -> dict[str, float]:
    """The means of scores over clients.

    Every client has the same weight, except in `weighted_…`, where every test sample has. `worst_…` is the lowest
    accuracy of a client, and `decile_…` the mean of the lowest tenth.

    Args:
        scores: The scores of all clients.
        values: The number that each class stands for, for the mean absolute error.
        architectures: Each client's architecture, for means over the clients that share one.
        prediction: The method's own prediction, by which `accuracy` is measured.
        predictions: The predictions that are meaningful for the method.

    Returns:
        The measures by name.
    """
    result: dict[str, float] = {"accuracy": float(np.mean([getattr(s, f"accuracy_{prediction}") for s in scores]))}
    silhouettes = [s.silhouette for s in scores if s.silhouette is not None and np.isfinite(s.silhouette)]
    if silhouettes:
        result["silhouette"] = float(np.mean(silhouettes))
    for measure in EMBEDDING:
        if measured := [s.measures[measure] for s in scores if measure in s.measures]:
            result[measure] = float(np.mean(measured))
    for name in predictions:
        confusions: list[Confusion] = [getattr(s, f"by_{name}") for s in scores]
        accuracies = np.array([c.correct / c.samples for c in confusions])
        result[f"accuracy_{name}"] = float(accuracies.mean())
        result[f"accuracy_{name}_std"] = float(accuracies.std())
        result[f"weighted_{name}"] = sum(c.correct for c in confusions) / sum(c.samples for c in confusions)
        result[f"worst_{name}"] = float(accuracies.min())
        result[f"decile_{name}"] = float(np.sort(accuracies)[: math.ceil(DECILE * len(accuracies))].mean())
        result[f"f1_{name}"] = float(np.mean([c.macro_f1() for c in confusions]))
        for measure in QUALITIES:
            values_of_clients = [s.measures[key] for s in scores if (key := f"{measure}_{name}") in s.measures]
            if values_of_clients:
                result[f"{measure}_{name}"] = float(np.mean(values_of_clients))
        if values:
            result[f"mae_{name}"] = float(np.mean([c.mean_absolute_error(values) for c in confusions]))
        if len(set(architectures)) > 1:
            for architecture in dict.fromkeys(architectures):
                members = [
                    a
                    for a, client_architecture in zip(accuracies, architectures, strict=True)
                    if client_architecture == architecture
                ]
                result[f"accuracy_{name}@{architecture}"] = float(np.mean(members))
    return result


def whole_set(scores: Sequence[Scores], y: Tensor, predictions: Sequence[str] = PREDICTIONS) -> dict[str, float]:
    """The accuracy of one model on the whole test set, from what clients that share it did on their own classes.

    A client that is tested on the classes it holds sees all test samples of these, so the clients together see every class;
    those that see the same class have the same predictions of it.

    Args:
        scores: The scores of all clients.
        y: The labels of the whole test set.
        predictions: The predictions that are meaningful for the method.

    Returns:
        `whole_head` and `whole_prototype`. One is left out where two clients disagree about a class, as they do where each
        seeks the nearest prototype among classes of its own, and where no client holds some class.
    """
    result, in_truth = {}, torch.bincount(y.cpu()).numpy()
    for name in predictions:
        confusions: list[Confusion] = [getattr(s, f"by_{name}") for s in scores]
        whole = Confusion(np.unique(np.concatenate([c.rows for c in confusions]), axis=0))  # what all agree in, once
        true, _, count = whole.rows.T
        if np.array_equal(np.bincount(true, count, len(in_truth)), in_truth):  # where two disagree there is more
            result[f"whole_{name}"] = whole.correct / whole.samples
    return result


def ensemble(scores: Sequence[Scores], y: Tensor) -> dict[str, float]:
    """The accuracy of the argmax of the clients' mean class probabilities on a shared test set (FedPAGR).

    Args:
        scores: The scores of all clients, with their votes.
        y: The labels of the shared test set.

    Returns:
        The accuracy by head and by prototype, by name.
    """
    total = np.zeros(())
    for score in scores:
        assert score.votes is not None
        total = total + score.votes.astype(np.float64)
    right = total.argmax(-1) == y.cpu().numpy()
    return {f"ensemble_{name}": float(right[k].mean()) for k, name in enumerate(PREDICTIONS)}
