"""The scores of many clients: columns in place of objects, and the means over them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .accuracy import QUALITIES, SHARE, Scores
from .confusion import SINGLE, Confusion, Confusions
from .embedding import EMBEDDING

DECILE = 0.1  # of the clients, those with the lowest accuracies
DETAILS = tuple(f.name for f in fields(Scores) if not f.name.startswith("by_"))


@dataclass(frozen=True, eq=False, repr=False)
class Board(Mapping[int, Scores]):
    """The scores of clients by client, kept in columns, because an object for each of ten thousand clients takes time.

    `details` has what is measured beside the predictions, of the clients that have it, by the names of `Scores`.
    """

    clients: Sequence[int]
    by_head: Confusions
    by_prototype: Confusions
    details: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    by_mix: Confusions | None = None  # None where the method does not mix head and prototypes

    @classmethod
    def of(cls, scores: Mapping[int, Scores]) -> Board:
        """The board of scores by client."""
        if isinstance(scores, Board):
            return scores
        by_head, by_prototype = (Confusions.listed([getattr(s, f"by_{k}") for s in scores.values()]) for k in SINGLE)
        details = {client: found for client, s in scores.items() if (found := _details(s))}
        mixed = [s.by_mix for s in scores.values()]
        by_mix = Confusions.listed(mixed) if any(m is not None for m in mixed) else None
        return cls(list(scores), by_head, by_prototype, details, by_mix)

    @classmethod
    def joined(cls, boards: Sequence[Mapping[int, Scores]], clients: Sequence[int]) -> Board:
        """One board of several, in the order of `clients`."""
        parts = [cls.of(board) for board in boards] or [cls.of({})]
        if len(parts) == 1 and list(parts[0].clients) == list(clients):
            return parts[0]
        listed = np.concatenate([np.asarray(part.clients, dtype=np.int64) for part in parts])
        place = np.empty(listed.max(initial=-1) + 1, dtype=np.int64)
        place[listed] = np.arange(len(listed))
        order = place[np.asarray(clients, dtype=np.int64)]
        by_head, by_prototype = (Confusions.joined([p.by(name) for p in parts]).taken(order) for name in SINGLE)
        mixed = [p.by_mix for p in parts if p.by_mix is not None]
        by_mix = Confusions.joined(mixed).taken(order) if mixed else None
        details = {c: value for part in parts for c, value in part.details.items()}
        ordered = {c: details[c] for c in clients if c in details} if details else {}
        return cls(list(clients), by_head, by_prototype, ordered, by_mix)

    def __getitem__(self, client: int) -> Scores:
        return self._at(self._places[client], client)

    def __iter__(self) -> Iterator[int]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)

    def __repr__(self) -> str:
        """The scores themselves: how rows are shared in the columns depends on who has counted them."""
        return f"Board({dict(self)!r})"

    @property
    def _places(self) -> dict[int, int]:
        places = self.__dict__.get("places")
        if places is None:
            places = {client: k for k, client in enumerate(self.clients)}
            object.__setattr__(self, "places", places)
        return places

    def _at(self, place: int, client: int) -> Scores:
        head = self.by_head[place]
        if head is None:
            raise ValueError(f"client {client} has no test samples")
        by_mix = None if self.by_mix is None else self.by_mix[place]
        return Scores(head, self.by_prototype[place], by_mix=by_mix, **self.details.get(client, {}))

    def by(self, prediction: str) -> Confusions:
        """The confusions of all clients by one of the predictions."""
        confusions: Confusions = getattr(self, f"by_{prediction}")
        return confusions

    def accuracies(self, prediction: str) -> np.ndarray:
        """Each client's accuracy by one of the predictions; 0 where it has none."""
        return self.by(prediction).correct / self.by_head.samples

    def column(self, name: str) -> list[float | None]:
        """An accuracy or another measure of each client by its name; None where a client does not have it."""
        if name.startswith("accuracy_"):
            return list(self.accuracies(name.removeprefix("accuracy_")).tolist())
        return [self.details.get(c, {}).get("measures", {}).get(name) for c in self.clients]

    def without(self, detail: str) -> Board:
        """The same board without one of the details."""
        kept = {c: {k: v for k, v in details.items() if k != detail} for c, details in self.details.items()}
        return replace(self, details={c: d for c, d in kept.items() if d})


def _details(scores: Scores) -> dict[str, Any]:
    """What is measured of a client beside its predictions."""
    found = {name: getattr(scores, name) for name in DETAILS}
    return {name: value for name, value in found.items() if value is not None and (name != "measures" or value)}


def summarise(
    scores: Board | Sequence[Scores],
    values: Sequence[float] = (),
    architectures: Sequence[str] = (),
    prediction: str = "head",
    predictions: Sequence[str] = SINGLE,
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
    board = scores if isinstance(scores, Board) else Board.of(dict(enumerate(scores)))
    result: dict[str, float] = {"accuracy": float(board.accuracies(prediction).mean())}
    details = board.details.values()
    silhouettes = [s for d in details if (s := d.get("silhouette")) is not None and np.isfinite(s)]
    if silhouettes:
        result["silhouette"] = float(np.mean(silhouettes))
    measures: list[Mapping[str, float]] = [d["measures"] for d in details if "measures" in d]

    def add_mean(measure: str) -> None:
        if values_of_clients := [m[measure] for m in measures if measure in m]:
            result[measure] = float(np.mean(values_of_clients))

    for measure in (*EMBEDDING, SHARE):
        add_mean(measure)
    for name in predictions:
        confusions = board.by(name)
        correct, samples = confusions.correct, confusions.samples
        accuracies = correct / samples
        result[f"accuracy_{name}"] = float(accuracies.mean())
        result[f"accuracy_{name}_std"] = float(accuracies.std())
        result[f"weighted_{name}"] = int(correct.sum()) / int(samples.sum())
        result[f"worst_{name}"] = float(accuracies.min())
        result[f"decile_{name}"] = float(np.sort(accuracies)[: math.ceil(DECILE * len(accuracies))].mean())
        result[f"f1_{name}"] = float(np.mean(confusions.macro_f1()))
        for measure in QUALITIES:
            add_mean(f"{measure}_{name}")
        if values:
            result[f"mae_{name}"] = float(np.mean(confusions.mean_absolute_error(values)))
        if len(set(architectures)) > 1:
            of_client = np.array(architectures)
            for architecture in dict.fromkeys(architectures):
                result[f"accuracy_{name}@{architecture}"] = float(np.mean(accuracies[of_client == architecture]))
    return result


def whole_set(scores: Board | Sequence[Scores], y: Tensor, predictions: Sequence[str] = SINGLE) -> dict[str, float]:
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
    board = scores if isinstance(scores, Board) else Board.of(dict(enumerate(scores)))
    result, in_truth = {}, torch.bincount(y.cpu()).numpy()
    for name in predictions:
        confusions = board.by(name)
        segments = sorted(set(zip(confusions.begin.tolist(), confusions.end.tolist(), strict=True)))
        rows = np.concatenate([confusions.rows[begin:end] for begin, end in segments])
        whole = Confusion(np.unique(rows, axis=0))  # what all agree in, once
        true, _, count = whole.rows.T
        if np.array_equal(np.bincount(true, count, len(in_truth)), in_truth):  # where two disagree there is more
            result[f"whole_{name}"] = whole.correct / whole.samples
    return result
