"""The round: choose clients, send, train, reduce what returns, update. Everything that travels goes through `wire`."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from .. import seeds, wire
from ..data.types import FederatedData
from ..errors import ProtofedError
from ..evaluate import Scores, ensemble, summarise
from ..evaluate.confusion import PREDICTIONS
from ..evaluate.pseudo import pooled
from ..methods.base import Method
from ..methods.server import Setup
from ..parts import Running, Upload
from ..parts.filters import Filter, restored
from ..wire import Bundle
from ..wire.exchange import SAMPLES
from . import selection
from .engine import Downloads, Engine
from .judge import Evaluation
from .local import Outcome
from .mixed import for_architecture, marked

log = logging.getLogger("protofed")
SHAPE_CLIENTS = 20  # clients whose embedding space is described: it costs time at each evaluation
CHUNK, CHUNK_BYTES = 2, 2**26  # uploads that are read together: so many, and as many more as have so many bytes


@dataclass
class Record:
    """What happened in one round."""

    round: int
    participants: list[int]
    dropped: dict[int, str]
    loss: float
    terms: dict[str, float]
    up: Counter[str]
    down: Counter[str]
    seconds: float = 0.0
    scores: list[Scores] | None = None
    validation: list[Scores] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    snapshot: bool = False


class Federation:
    """Runs the rounds. `state` and `round`, with the engine's client states, are all there is to save."""

    def __init__(
        self,
        method: Method,
        engine: Engine,
        data: FederatedData,
        *,
        rounds: int,
        seed: int,
        participation: float = 1.0,
        choice: Literal["random", "diverse"] = "random",
        capability: Sequence[float] = (),
        evaluate_every: int = 1,
        evaluate_last: int = 5,
        candidates: Literal["own", "all"] = "own",
        ensemble: bool = False,
        architectures: Sequence[str] = (),
        silhouette: bool = False,
        snapshots: int = 0,
        filters: Sequence[Filter] = (),
    ) -> None:
        """
        Args:
            evaluate_last: How many rounds at the end are always evaluated, as the figures of tables are means over them.
            capability: A number per client, for `choice="diverse"`.
            architectures: What each client's architecture is called.
            snapshots: Of how many evaluations embeddings are kept.
        """
        self.method, self.engine, self.data = method, engine, data
        self.rounds, self.seed, self.filters = rounds, seed, tuple(filters)
        self.participation, self.choice, self.evaluate_every = participation, choice, evaluate_every
        self.capability = torch.tensor(capability or [1.0] * len(data.clients))
        self.evaluation = Evaluation("test", candidates, ensemble, SHAPE_CLIENTS if silhouette else 0)
        self.evaluated = frozenset(evaluated_rounds(rounds, evaluate_every, evaluate_last))
        self.pictured = _spread(sorted(self.evaluated), snapshots)
        self.architectures = tuple(architectures)
        self.mixed = len(engine.starts) > 1
        starts = [marked(start, k) if self.mixed else start for k, start in enumerate(engine.starts)]
        initial = {name: value.cpu() for start in starts for name, value in start.items()}
        self.setup = Setup(data.num_classes, engine.dim, len(data.clients), initial, seed, tuple(engine.owner))
        self.exchange = method.exchange
        method.reduce.check(self.exchange, method.name)
        for one in self.filters:
            one.check(self.exchange, method.name)
        sizes = {"classes": data.num_classes, "dim": engine.dim, "others": len(data.clients) - 1}
        self.expected = [self.exchange.expected("up", sizes, start) for start in engine.starts]
        self.kinds = _predictions(method, data)
        self.state: Any = method.start(self.setup)
        self.round = 0
        if ensemble and data.central_test is None:
            raise ProtofedError("ensemble=true needs a shared test set, and this data has none")
        if choice == "diverse" and self.state.clients is None:
            raise ProtofedError(
                f"choice=diverse needs a server that keeps the clients' prototypes, as fedapa; {method.name} does not"
            )

    def participants(self, round: int) -> list[int]:
        """Who takes part in a round."""
        total = len(self.data.clients)
        chosen = participants_per_round(self.participation, total)
        if chosen >= total:
            return list(range(total))
        stream = seeds.torch_stream(self.seed, "participation", round)
        if self.choice == "diverse":
            return selection.diverse_choice(self.state.clients, self.capability, chosen, stream)
        return selection.random_choice(total, chosen, stream)

    def __iter__(self) -> Iterator[Record]:
        while self.round < self.rounds:
            yield self.step()

    def step(self) -> Record:
        """One round."""
        began = time.perf_counter()
        round = self.round + 1
        if round == 1:
            self._teach(0)  # so that there is something to send
        chosen = self.participants(round) if self.exchange.asks_clients else []
        downloads, down = self.downloads(chosen, round)
        running, received = Running(self.method.reduce), Receipt()
        if chosen:
            self._train(downloads, running, received)
        if running.clients:
            reduced = running.result()
            for one in reversed(self.filters):
                reduced = one.arrive(reduced)
            self.state = self.method.update(self.state, reduced, round, self.setup)
        elif chosen and len(received.dropped) == len(chosen):
            log.warning("round %d: no client returned anything usable; the server keeps its state", round)
        self.round = round
        terms = _mean_terms([o for c, o in received.outcomes.items() if c not in received.dropped])
        loss = sum(terms.values()) if terms else math.nan
        measures = pooled([o.pseudo for o in received.outcomes.values()])
        measures |= self.method.describe(self.state, round).numbers
        terms |= self._teach(round)  # what is sent next is what is tested and saved
        record = Record(round, chosen, received.dropped, loss, terms, received.bytes, down, measures=measures)
        record.seconds = time.perf_counter() - began
        if round in self.evaluated:
            self._evaluate(record)
        return record

    def _teach(self, round: int) -> dict[str, float]:
        """The server's own training, where the method has one. Where it goes to NaN, the server keeps its state."""
        if self.method.teacher is None:
            return {}
        state, terms, failure = self.engine.teach(self.state, round)
        if state is None:
            log.warning("round %d: the server's own training failed: %s; it keeps its state", round, failure)
            return {}
        self.state = state
        return {f"server {name}": value for name, value in terms.items()}

    def downloads(
        self, clients: Sequence[int], round: int, names: Collection[str] | None = None
    ) -> tuple[Downloads, Counter[str]]:
        """What each client is sent, or the named parts of it, encoded once for each audience; and its bytes."""
        messages: list[bytes] = []
        number: dict[Hashable, int] = {}
        audience: dict[int, int] = {}
        for client in clients:
            which = self.engine.owner[client]
            key = self.exchange.audience(self.state, client, round, names), which
            if key not in number:
                content = self.exchange.message(self.state, client, round, names)
                number[key] = len(messages)
                messages.append(wire.encode(for_architecture(content, which) if self.mixed else content))
            audience[client] = number[key]
        down: Counter[str] = Counter()
        for which, times in Counter(audience.values()).items():
            for kind, size in wire.sizes(messages[which]).items():
                down[kind] += times * size
        return Downloads(round, messages, audience, "train" if names is None else "evaluate"), down

    def _train(self, downloads: Downloads, running: Running, received: Receipt) -> None:
        """Train the clients and reduce what they return as it comes, a few uploads at a time."""
        waiting: dict[int, wire.Message] = {}
        size = 0
        for client, outcome in self.engine.train(downloads):
            received.outcomes[client] = Outcome(None, outcome.terms, outcome.failure, outcome.pseudo)
            if outcome.upload is None:
                received.dropped[client] = f"client {client}: {outcome.failure}"
                log.warning("round %d: dropped %s", downloads.round, received.dropped[client])
                continue
            waiting[client] = outcome.upload
            size += len(outcome.upload)
            if len(waiting) >= CHUNK and size >= CHUNK_BYTES:
                self._receive(waiting, running, received)
                waiting, size = {}, 0
        if waiting:
            self._receive(waiting, running, received)

    def _receive(self, messages: dict[int, wire.Message], running: Running, received: Receipt) -> None:
        """Read and check some uploads and add them to the reduction; whoever sent something unusable is dropped."""
        contents: dict[int, Bundle | wire.WireError] = {}
        for which, expected in enumerate(self.expected):
            clients = [c for c in messages if self.engine.owner[c] == which]
            sources = [f"client {c}" for c in clients]
            rough = replace(expected, shapes_only=True) if self.filters else expected
            decoded = wire.decode_each([messages[c] for c in clients], sources, rough)
            contents |= dict(zip(clients, decoded, strict=True))
        uploads = []
        for client, message in messages.items():
            content, which, source = contents[client], self.engine.owner[client], f"client {client}"
            with suppress(wire.WireError):  # it has travelled, whatever it is
                wire.add_sizes(received.bytes, message)
            try:
                if isinstance(content, wire.WireError):
                    raise content
                if self.filters:
                    content = restored(self.filters, content, source)
                    self.expected[which].check(content, source)
            except wire.WireError as error:
                received.dropped[client] = str(error)
                log.warning("round %d: dropped %s", self.round + 1, error)
                continue
            samples = content.scalars.get(SAMPLES, 0.0)
            scalars = {name: value for name, value in content.scalars.items() if name != SAMPLES}
            weights = marked(content.weights, which) if self.mixed else content.weights
            content = Bundle(content.bank, content.banks, weights, content.tensors, scalars, content.models)
            uploads.append(Upload(client, samples, content))
        if uploads and self.exchange.up:
            running.add(uploads)

    def _evaluate(self, record: Record) -> None:
        """Score every client by what it holds and what it is sent next."""
        clients = range(len(self.data.clients))
        downloads, _ = self.downloads(clients, record.round + 1, self.method.predict.reads)
        by = self.method.predict.by
        record.snapshot = record.round in self.pictured
        how = replace(self.evaluation, snapshot=record.snapshot)
        record.scores = list(self.engine.evaluate(downloads, how).values())
        kinds = [kind for kind in self.kinds if all(getattr(s, f"by_{kind}") is not None for s in record.scores)]
        record.metrics = summarise(record.scores, self.data.class_values, self.architectures, by, kinds)
        if how.votes and self.data.central_test is not None:
            votes = ensemble(record.scores, self.data.central_test.labels)
            record.metrics |= {f"ensemble_{kind}": votes[f"ensemble_{kind}"] for kind in kinds}
            record.scores = [replace(s, votes=None) for s in record.scores]
        if all(c.validation is not None for c in self.data.clients):
            how = replace(self.evaluation, part="validation", votes=False, silhouette=0)
            record.validation = list(self.engine.evaluate(downloads, how).values())
            best = summarise(record.validation, own=by, kinds=kinds)
            record.metrics |= {f"validation_{kind}": best[f"accuracy_{kind}"] for kind in kinds}
            record.metrics["validation"] = best["accuracy"]


@dataclass
class Receipt:
    """What came back in a round: every client's outcome (its upload is read and gone), who was dropped and why, bytes."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    bytes: Counter[str] = field(default_factory=Counter)


def _predictions(method: Method, data: FederatedData) -> tuple[str, ...]:
    """By head, unless none is trained; by prototype, unless neither the server nor a client ever has one."""
    sent = method.exchange.prototypes or method.predict.by == "prototype"
    prototypes = sent or any(len(c.labelled) for c in data.clients)
    return tuple(
        kind for kind, there in zip(PREDICTIONS, (method.predict.trains_head, prototypes), strict=True) if there
    )


def evaluated_rounds(rounds: int, every: int, last: int) -> set[int]:
    """The rounds that are evaluated: the multiples of `every`, and the `last` ones."""
    return {*range(every, rounds + 1, every), *range(max(1, rounds - last + 1), rounds + 1)}


def _spread(evaluated: Sequence[int], number: int) -> frozenset[int]:
    """So many evaluated rounds, spread evenly, the first and the last among them."""
    if number < 2 or len(evaluated) <= number:
        return frozenset(evaluated[-number:] if number else ())
    return frozenset(evaluated[round(k * (len(evaluated) - 1) / (number - 1))] for k in range(number))


def participants_per_round(participation: float, clients: int) -> int:
    """⌊ρN⌋, at least one."""
    return max(1, math.floor(participation * clients + 1e-9))


def _mean_terms(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Loss terms averaged over clients, every client counting the same."""
    names = list(dict.fromkeys(name for o in outcomes for name in o.terms))
    return {name: sum(o.terms.get(name, 0.0) for o in outcomes) / len(outcomes) for name in names}
