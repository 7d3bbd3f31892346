"""The evaluations of a federation: after which rounds clients are scored, what is measured then, and its mean figures."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ..data.types import FederatedData
from ..evaluate import Board, ensemble, pooled_measures, pooled_silhouette, summarise, whole_set
from ..evaluate.confusion import PREDICTIONS
from ..methods.base import Method
from .engine import Downloads, Engine
from .judge import Evaluation
from .records import Record

log = logging.getLogger("protofed")
SHAPE_CLIENTS = 20  # clients whose embedding space is measured, which takes time at each evaluation
ScorePrototypes = Literal["last", "always", "never"]


@dataclass(frozen=True)
class Evaluations:
    """How the clients of a federation are scored after its rounds."""

    method: Method
    data: FederatedData
    rounds: int
    every: int
    """Every which round is evaluated."""
    last: int
    """The number of last rounds that are always evaluated, and after which also what takes longer is measured."""
    options: Evaluation
    """What is measured at every evaluation."""
    score_prototypes: ScorePrototypes
    """When clients that share a model and are sent no prototypes are scored by prototypes of their own."""
    embedding: bool
    """Whether retrieval and few-shot accuracy of the embeddings are measured after the last round."""
    snapshots: int
    """The number of evaluations whose embeddings are kept."""

    @cached_property
    def evaluated(self) -> frozenset[int]:
        """The rounds that are evaluated."""
        last = range(max(1, self.rounds - self.last + 1), self.rounds + 1)
        return frozenset({*range(self.every, self.rounds + 1, self.every), *last})

    @cached_property
    def snapshot_rounds(self) -> frozenset[int]:
        """The evaluated rounds whose embeddings are kept, at even distances, the first and the last among them."""
        evaluated, number = sorted(self.evaluated), self.snapshots
        if number < 2 or len(evaluated) <= number:
            return frozenset(evaluated[-number:] if number else ())
        return frozenset(evaluated[round(k * (len(evaluated) - 1) / (number - 1))] for k in range(number))

    def options_of(self, number: int) -> Evaluation:
        """What is measured after a round."""
        late = number > self.rounds - self.last
        by_prototype = self._prototypes_needed or self.options.votes or (late and self.score_prototypes == "last")
        snapshot = number in self.snapshot_rounds
        options = replace(self.options, prototypes=by_prototype, snapshot=snapshot, qualities=late)
        final = self.embedding and number == self.rounds
        return replace(options, embedding=True, pool=SHAPE_CLIENTS) if final else options

    @cached_property
    def _prototypes_needed(self) -> bool:
        """Whether every evaluation scores predictions by prototype: unless clients share a model and no prototypes travel.

        Clients of such a method would compute their prototypes for it alone, by a pass of all clients over their training
        samples, and by default do so after the last rounds, whose figures are the run's.
        """
        if self.score_prototypes == "always" or self.method.predict.by != "head":
            return True
        return self.method.exchange.prototypes or self.method.exchange.keeps_model

    def run(
        self,
        record: Record,
        engine: Engine,
        downloads: Downloads,
        predictions: Sequence[str],
        architectures: Sequence[str] = (),
        shared: bool = False,
    ) -> None:
        """Score clients and write what was measured into the record of their round.

        Args:
            record: The record.
            engine: The engine that has the clients' models.
            downloads: The clients, with what each will be sent in the next round.
            predictions: The predictions that are scored where every client has them.
            architectures: The name of each client's architecture, where there are several.
            shared: Whether all clients are sent the same weights.
        """
        data, by, options = self.data, self.method.predict.by, self.options_of(record.round)
        record.snapshot = options.snapshot
        board = Board.of(engine.evaluate(downloads, options))
        record.absent = sorted(set(range(len(data.clients))).difference(board.clients))
        if not board:
            log.warning("round %d: no client could be evaluated", record.round)
            return
        predictions = [prediction for prediction in predictions if board.by(prediction).present.all()]
        names = [architectures[client] for client in board] if architectures else ()
        record.metrics = summarise(board, data.class_values, names, by, predictions)
        record.metrics |= self._of_all_clients(board, predictions, shared)
        board = board.without("drawn")
        if options.embedding:
            record.metrics |= pooled_measures([s.pool for s in board.values() if s.pool is not None])
            board = board.without("pool")
        if options.votes and data.central_test is not None:
            votes = ensemble(board.values(), data.central_test.labels)
            record.metrics |= {f"ensemble_{prediction}": votes[f"ensemble_{prediction}"] for prediction in predictions}
            board = board.without("votes")
        record.board = board
        further = replace(self.options, prototypes=options.prototypes, votes=False, silhouette=0, drawn=0)
        record.metrics |= self._further(engine, downloads, further, predictions)
        if all(c.validation is not None for c in data.clients):
            record.validation = Board.of(engine.evaluate(downloads, replace(further, part="validation")))
            if record.validation:
                figures = summarise(record.validation, prediction=by, predictions=predictions)
                record.metrics |= {f"validation_{p}": figures[f"accuracy_{p}"] for p in predictions}
                record.metrics["validation"] = figures["accuracy"]

    def _of_all_clients(self, board: Board, predictions: Sequence[str], shared: bool) -> dict[str, float]:
        """The silhouette of all clients together and, where they share one model, its accuracy on the whole test set."""
        measures = pooled_silhouette([d["drawn"] for d in board.details.values() if "drawn" in d])
        predict = self.method.predict
        own = self.method.exchange.keeps_model or predict.tuning or predict.common
        if own or not shared or self.data.central_test is None:
            return measures
        return measures | whole_set(board, self.data.central_test.labels, predictions)

    @cached_property
    def _holders(self) -> dict[str, frozenset[int]]:
        """The clients that have triggered test samples, and those that are tested on a domain that no client holds."""
        members = list(enumerate(self.data.clients))
        parts = ("triggered", "unseen")
        return {part: frozenset(c for c, data in members if getattr(data, part) is not None) for part in parts}

    def _holding(self, part: str, downloads: Downloads) -> list[int]:
        """The clients that have further test samples of one kind."""
        holders = self._holders[part]
        return [client for client in downloads.clients if client in holders] if holders else []

    def _further(
        self, engine: Engine, downloads: Downloads, options: Evaluation, predictions: Sequence[str]
    ) -> dict[str, float]:
        """The share of test samples with a trigger that clients take for the class that an attacker wants, and the clients'
        mean accuracies on the domain that no client holds, as far as clients have such samples."""
        by, metrics = self.method.predict.by, dict[str, float]()
        if clients := self._holding("triggered", downloads):
            scores = Board.of(engine.evaluate(downloads.only(clients), replace(options, part="triggered")))
            metrics["attack_success"] = summarise(scores, prediction=by, predictions=())["accuracy"]
        if clients := self._holding("unseen", downloads):
            scores = Board.of(engine.evaluate(downloads.only(clients), replace(options, part="unseen")))
            figures = summarise(scores, prediction=by, predictions=predictions)
            metrics |= {f"unseen_{prediction}": figures[f"accuracy_{prediction}"] for prediction in predictions}
        return metrics


def predictions_of(method: Method, data: FederatedData) -> tuple[str, ...]:
    """The predictions that are scored: by head, unless no head is trained; by prototype, unless nobody ever has one; and by
    both, where the method mixes them."""
    prototypes_sent = method.exchange.prototypes or method.predict.by != "head"
    prototypes = prototypes_sent or any(len(c.labelled) for c in data.clients)
    mixes = method.predict.by == "mix"
    return tuple(
        prediction
        for prediction, possible in zip(PREDICTIONS, (method.predict.trains_head, prototypes, mixes), strict=True)
        if possible
    )
