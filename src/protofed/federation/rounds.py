"""The round: choose clients, send, train, reduce what returns, update. Everything that travels goes through `wire`."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import torch

from .. import seeds, wire
from ..data.types import FederatedData
from ..errors import ProtofedError
from ..evaluate.pseudo import pooled
from ..methods.base import Method
from ..methods.client import Weights
from ..methods.server import Setup
from ..parts import Running, Upload
from ..parts.attacks import Attackers
from ..parts.filters import Arrival, Filter, check_order, restored, rule_of
from ..pieces import on_cores
from ..wire import Bundle
from . import selection
from .batches import client_size
from .engine import Downloads, Engine
from .evaluations import SHAPE_CLIENTS, Evaluations, ScorePrototypes, predictions_of
from .guard import FACTOR, Guard, Inspection, norms_of, problem_of
from .judge import Evaluation
from .mixed import for_architecture
from .records import Receipt, Record, mean_terms, mean_values
from .secure import SecureEngine, SecureSums, SimulatedParties, check_participants, check_secure, total_of_round
from .uploads import as_upload, prefixed
from .workers import WorkerEngine

log = logging.getLogger("protofed")
CHUNK, CHUNK_BYTES = 2, 2**26  # uploads are read in chunks of at least this number and these bytes
FEWER = 8  # times fewer bytes where only weights return, which are added one by one, so that chunks change no bit


class Federation:
    """Runs the rounds.

    `state`, `trusted`, `round` and the engine's client states are all that a checkpoint has to save.

    Example:
        `for record in Federation(method, engine, data, rounds=10, seed=0): print(record.loss)`
    """

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
        score_prototypes: ScorePrototypes = "always",
        embedding: bool = False,
        snapshots: int = 0,
        filters: Sequence[Filter] = (),
        secret: bool = False,
        guard: float = FACTOR,
        secure: SecureSums | None = None,
    ) -> None:
        """
        Args:
            method: The method, with its settings.
            engine: The engine that trains the clients.
            data: The data of all clients.
            rounds: The number of rounds.
            seed: The number that all random streams follow from.
            participation: The share of clients in a round.
            choice: Whether a round's clients are chosen at random or for diverse prototypes.
            evaluate_every: Every which round is evaluated.
            evaluate_last: The number of last rounds that are always evaluated, as tables show means over them.
            capability: A number per client, for `choice="diverse"`.
            architectures: The name of each client's architecture.
            candidates: Whether the nearest prototype is sought among the client's own classes or among all.
            ensemble: Whether the vote of all clients on the shared test set is scored.
            silhouette: Whether the silhouette of some clients' embeddings is measured.
            score_prototypes: Whether clients that share a model and are sent no prototypes are scored by prototypes of their
                own, for which each has to run its training samples: in the last rounds only, always or never.
            embedding: Whether retrieval and few-shot accuracy of the embeddings are measured after the last round.
            filters: What is done to every upload on its way to the server.
            snapshots: The number of evaluations whose embeddings are kept.
            secret: Whether the server's noise comes from the operating system and not from the seed.
            guard: How many times the others' norm an upload's norm may be; 0 switches the guard off.
            secure: How uploads are summed without the server seeing one; none: it is sent every upload.
        """
        self.method, self.data, self.secure = method, data, secure
        self.engine = engine = self._with_parties(engine)
        self.rounds, self.seed, self.filters, self.secret = rounds, seed, tuple(filters), secret
        self.attackers = frozenset(c for f in self.filters if isinstance(f, Attackers) for c in f.clients)
        self.participation, self.choice, self.evaluate_every = participation, choice, evaluate_every
        self.capability = torch.tensor(capability or [1.0] * len(data.clients))
        shaped = SHAPE_CLIENTS if silhouette else 0
        self.evaluations = Evaluations(
            method,
            data,
            rounds,
            every=evaluate_every,
            last=evaluate_last,
            options=Evaluation("test", candidates, ensemble, silhouette=shaped, drawn=shaped),
            score_prototypes=score_prototypes,
            embedding=embedding,
            snapshots=snapshots,
        )
        self.architectures = tuple(architectures)
        self.mixed = len(engine.starts) > 1
        starts = [prefixed(start, k) if self.mixed else start for k, start in enumerate(engine.starts)]
        initial = {name: value.cpu() for start in starts for name, value in start.items()}
        self.setup = Setup(data.num_classes, engine.dim, len(data.clients), initial, seed, tuple(engine.owner))
        self.exchange = method.exchange
        method.reduce.check(self.exchange, method.name)
        check_order(self.filters)
        for filter in self.filters:
            filter.check(self.exchange, method.name, method.reduce)
        self.rule = rule_of(method.reduce, self.filters)
        if secure is not None:
            check_secure(self.exchange, method.name, method.reduce, self.filters, choice)
            check_participants(secure.rules, selection.participants_per_round(participation, len(data.clients)))
        sizes = {"classes": data.num_classes, "dim": engine.dim, "clients": len(data.clients)}
        self.expected = [self.exchange.expected("up", sizes, start) for start in engine.starts]
        self.predictions = predictions_of(method, data)
        guard = guard if self.exchange.travels else 0  # a client by itself cannot spoil anything for others
        judged = guard > 0 and secure is None and all(filter.guarded for filter in self.filters)
        self.guarded = guard > 0
        self.guard = Guard(guard, self.exchange, self._size) if judged else None
        self.state: Any = method.start(self.setup)
        self.trusted: Any = None  # the last state that clients could train from, where it is not the present one
        self.round = 0
        if ensemble and data.central_test is None:
            raise ProtofedError("ensemble=true needs a shared test set, and this data has none")
        if choice == "diverse" and self.state.clients is None:
            raise ProtofedError(
                f"choice=diverse needs a server that keeps the clients' prototypes, as fedapa; {method.name} does not"
            )

    def _with_parties(self, engine: Engine) -> Engine:
        """The engine, with parties of its clients where only sums leave them."""
        if self.secure is None or isinstance(engine, SecureEngine):
            return engine
        return SimulatedParties(engine, self.secure)

    def change_data(self, engine: Engine, data: FederatedData) -> None:
        """Go on with other samples: the clients' states move to an engine that was made of them.

        Args:
            engine: The engine, before any training.
            data: What each of the same clients holds from now on.
        """
        states = self.engine.export()
        self.engine.close()
        self.engine, self.data = self._with_parties(engine), data
        self.evaluations = replace(self.evaluations, data=data)
        self.engine.restore(states)

    def _size(self, client: int) -> int:
        """The number of samples that a client trains on, as far as it is known here; it has no more."""
        return client_size(self.method.feed, self.data.clients[client])

    def name_of(self, client: int) -> str:
        """The name of a client: its own, where clients have names, or its number."""
        return self.data.name_of(client)

    def participants(self, round: int) -> list[int]:
        """The cohort of a round."""
        total = len(self.data.clients)
        number = selection.participants_per_round(self.participation, total)
        if self.choice == "random" or number >= total:
            return selection.random_cohort(self.seed, total, self.participation, round)
        stream = seeds.torch_stream(self.seed, "participation", round)
        return selection.diverse_choice(self.state.clients, self.capability, number, stream)

    def __iter__(self) -> Iterator[Record]:
        while self.round < self.rounds:
            yield self.step()

    def step(self) -> Record:
        """Run one round: broadcast, train, reduce, update, and evaluate where it is due.

        Returns:
            The record of the round.
        """
        start_time = time.perf_counter()
        round = self.round + 1
        notes: list[str] = []
        if round == 1:
            self._teach(0, notes)  # before the first broadcast, which sends its result
        cohort = self.participants(round) if self.exchange.asks_clients else []
        downloads, down = self.downloads(cohort, round)
        running, received = Running(self.rule, self._shared_weights()), Receipt()
        if cohort:
            self._train(downloads, running, received)
        if cohort and len(received.dropped) == len(cohort):
            log.warning("round %d: no client returned anything usable; the server keeps its state", round)
        if self.guarded:
            self._trust(running, received, notes)
        if running.clients:
            self._update(running, round, notes)
        self.round = round
        left_out = received.dropped.keys() | self.attackers
        terms = mean_terms([o for c, o in received.outcomes.items() if c not in left_out])
        loss = sum(terms.values()) if terms else math.nan
        measures = pooled([o.pseudo for o in received.outcomes.values()])
        measures |= mean_values([o.measures for o in received.outcomes.values()])
        measures |= self.method.describe(self.state, round).numbers
        for filter in self.filters:
            measures |= filter.describe(self.most_often(round), self.exchange)
        terms |= self._teach(round, notes)  # before the evaluation, because its result is what clients are sent next
        down.update(received.asked)
        if not self.exchange.travels:
            down, received.bytes = Counter(), Counter()
        record = Record(
            round, cohort, received.dropped, loss, terms, received.bytes, down, measures=measures, notes=notes
        )
        record.notes += received.notes
        record.seconds = time.perf_counter() - start_time
        if round in self.evaluations.evaluated:
            self._evaluate(record)
        return record

    def _trust(self, running: Running, received: Receipt, notes: list[str]) -> None:
        """Remember the state that clients could train from. Where nobody could train from the present one, return to it.

        A client that was not reached, or whose upload was refused, says nothing about the state.
        """
        diverged = sum(outcome.diverged for outcome in received.outcomes.values())
        if running.clients and diverged <= running.clients:
            self.trusted = self.state
        elif not running.clients and diverged and self.trusted is not None:
            self.state, self.trusted = self.trusted, None
            notes.append("no client could train from what it was sent; the server returned to its last good state")
            log.warning("round %d: %s", self.round + 1, notes[-1])

    def _update(self, running: Running, round: int, notes: list[str]) -> None:
        """Make the server's new state of what the clients sent."""
        normals = seeds.SystemNormals() if self.secret else seeds.SeededNormals(self.seed, "server noise", round)
        for filter in reversed(self.filters):
            running.total = filter.total(running.total, Arrival(round, normals))
        reduced = running.result()
        for filter in reversed(self.filters):
            reduced = filter.arrive(reduced)
        with on_cores(self.engine.count if isinstance(self.engine, WorkerEngine) else 1):  # workers are idle now
            state = self.method.update(self.state, reduced, round, self.setup)
        self._advance(state, "the update", round, notes)

    def _advance(self, state: Any, cause: str, round: int, notes: list[str]) -> None:
        """Take a new state, unless it is absurd."""
        problem = problem_of(self.state, state) if self.guarded else ""
        if problem:
            notes.append(f"the server kept its last good state: after {cause}, {problem}")
            log.warning("round %d: %s", round, notes[-1])
        else:
            self.state = state

    def most_often(self, rounds: int) -> int:
        """In how many of the first so many rounds the client that takes part most often takes part."""
        if self.choice != "random":
            return rounds  # clients are chosen by what they sent, so every round may count for everybody
        return selection.most_often(self.seed, len(self.data.clients), self.participation, rounds)

    def _teach(self, round: int, notes: list[str]) -> dict[str, float]:
        """Train the server's model, where the method has a teacher. Where this becomes NaN, the server keeps its state."""
        if self.method.teacher is None:
            return {}
        state, terms, failure = self.engine.teach(self.state, round)
        if state is None:
            notes.append(f"the server's own training failed: {failure}; it kept its state")
            log.warning("round %d: %s", round, notes[-1])
            return {}
        self._advance(state, "the server's own training", round, notes)
        return {f"server {name}": value for name, value in terms.items()}

    def downloads(
        self, clients: Sequence[int], round: int, names: Collection[str] | None = None
    ) -> tuple[Downloads, Counter[str]]:
        """The messages for some clients, each encoded once for its audience, and what all are sent encoded once.

        Args:
            clients: The clients that are sent a message.
            round: The round it is for.
            names: The parts of the message; None for all of them.

        Returns:
            The messages, and the bytes of each kind that they cost. A client's bytes are those of its whole message.
        """
        stacks = self.exchange.common_message(self.state, names)
        common = None if stacks.empty else 0
        messages: list[bytes] = [] if stacks.empty else [wire.encode(stacks)]
        number: dict[Hashable, int] = {}
        sizes: dict[int, Counter[str]] = {}
        audience: dict[int, int] = {}
        addressed, owner = self.exchange.addressed(names), self.engine.owner
        alike = bool(clients) and not addressed and not self.mixed  # whether all are sent the same
        for client in clients[:1] if alike else clients:
            architecture = owner[client]
            key = self.state.audience(client, round) if addressed else None, architecture
            if key not in number:
                content = self.exchange.own_message(self.state, client, round, names)
                content = for_architecture(content, architecture) if self.mixed else content
                number[key] = len(messages)
                messages.append(wire.encode(content))
                whole = content.with_others(stacks, client)
                sizes[number[key]] = wire.sizes(messages[-1]) if common is None else wire.encoded_sizes(whole)
            audience[client] = number[key]
        if alike:
            audience = dict.fromkeys(clients, audience[clients[0]])
        down: Counter[str] = Counter()
        for message, receivers in Counter(audience.values()).items():
            down.update({kind: receivers * size for kind, size in sizes[message].items()})
        purpose = "train" if names is None else "evaluate"
        return Downloads(round, messages, audience, purpose, common=common), down

    def _train(self, downloads: Downloads, running: Running, received: Receipt) -> None:
        """Train the cohort and reduce uploads as they arrive, a few at a time."""
        waiting: dict[int, wire.Message] = {}
        size, enough = 0, CHUNK_BYTES // FEWER if self._uploads_weights_alone else CHUNK_BYTES
        inspection = None
        if self.guard is not None:
            inspection = self.guard.inspection(self._sent_norms(downloads.round), self.engine.owner)
        for client, outcome in self.engine.train(downloads):
            received.outcomes[client] = replace(outcome, upload=None)
            if outcome.upload is None:
                self._drop(client, f"{self.name_of(client)}: {outcome.failure}", received)
                continue
            waiting[client] = outcome.upload
            size += len(outcome.upload)
            if len(waiting) >= CHUNK and size >= enough:
                self._receive(waiting, running, received, inspection)
                waiting, size = {}, 0
        if self.secure is None:
            self._receive(waiting, running, received, inspection, last=True)
        elif waiting:
            self._receive_total(waiting, running, received)

    @property
    def _uploads_weights_alone(self) -> bool:
        """Whether clients return nothing but weights, of which the server needs nothing but the sum."""
        return "weights" in self.rule.summed and {part.kind for part in self.exchange.up} == {"weights"}

    def _receive(
        self,
        messages: dict[int, wire.Message],
        running: Running,
        received: Receipt,
        inspection: Inspection | None,
        last: bool = False,
    ) -> None:
        """Decode and check some uploads and add them to the reduction. A client with an unusable upload is dropped."""
        contents: dict[int, Bundle | wire.WireError] = {}
        for architecture, expected in enumerate(self.expected):
            clients = [c for c in messages if self.engine.owner[c] == architecture]
            sources = [self.name_of(c) for c in clients]
            shapes = replace(expected, shapes_only=True) if self.filters else expected
            summed = () if self.filters else self.rule.summed
            decoded = wire.decode_each([messages[c] for c in clients], sources, shapes, summed)
            contents |= dict(zip(clients, decoded, strict=True))
        uploads = []
        for client, message in messages.items():
            content, architecture, source = contents[client], self.engine.owner[client], self.name_of(client)
            with suppress(wire.WireError):  # its bytes have travelled, even where it is unusable
                wire.add_sizes(received.bytes, message)
            try:
                if isinstance(content, wire.WireError):
                    raise content
                if self.filters:
                    sent = self.sent(client)
                    content = restored(self.filters, content, source, sent)
                    self.expected[architecture].check(content, source)
                    for filter in self.filters:
                        filter.inspect(content, source, sent, self.rule)
                upload = as_upload(client, content, architecture if self.mixed else None)
                if self.guard is not None:
                    self.guard.check_claims(upload, source)
            except wire.WireError as error:
                self._drop(client, str(error), received)
                continue
            uploads.append(upload)
        if inspection is not None:
            uploads, refused = inspection.judge(uploads, last)
            for client, reason in refused.items():
                self._drop(client, f"{self.name_of(client)}: {reason}", received)
        if uploads and self.exchange.up:
            running.add(uploads)

    def _receive_total(self, trained: Collection[int], running: Running, received: Receipt) -> None:
        """Ask the clients that have trained for the sum of what they have, of which the server sees no part."""
        assert self.secure is not None and isinstance(self.engine, SecureEngine)
        round = self.round + 1
        total = total_of_round(self.engine, self.secure, list(trained), round)
        for client, reason in total.dropped.items():
            self._drop(client, f"{self.name_of(client)}: {reason}", received)
        received.bytes.update(total.up)
        received.asked.update(total.down)
        if total.sums is None:
            received.notes.append(f"{total.failure}; the server keeps its state")
        else:
            running.total, running.contributors = total.sums, list(total.contributors)

    def _drop(self, client: int, reason: str, received: Receipt) -> None:
        received.dropped[client] = reason
        log.warning("round %d: dropped %s", self.round + 1, reason)

    def _sent_norms(self, round: int) -> Callable[[Upload], Mapping[str, float]]:
        """A function that gives, for an upload, the norms of what its client was sent of the parts that come up."""
        names = {part.name for part in self.exchange.up if part.kind in ("bank", "weights")}
        norms: dict[Hashable, Mapping[str, float]] = {}

        def sent(upload: Upload) -> Mapping[str, float]:
            audience = self.exchange.audience(self.state, upload.client, round, names)
            key = audience, self.engine.owner[upload.client]
            if key not in norms:
                content = self.exchange.message(self.state, upload.client, round, names)
                weights = {n: v for n, v in content.weights.items() if n in upload.content.weights}
                norms[key] = norms_of(replace(content, weights=weights))
            return norms[key]

        return sent

    def _shared_weights(self) -> Weights:
        """The weights that all clients are sent, where the method shares a model."""
        shared = any(part.kind == "weights" and not part.each for part in self.exchange.down)
        return self.state.weights if shared else {}

    def sent(self, client: int) -> Bundle:
        """What a client was sent at the start of this round."""
        content = self.exchange.message(self.state, client, self.round + 1)
        return for_architecture(content, self.engine.owner[client]) if self.mixed else content

    def _evaluate(self, record: Record) -> None:
        """Score every client by what it holds and what it will be sent in the next round."""
        clients = range(len(self.data.clients))
        honest = sorted(set(clients) - self.attackers) if self.attackers else clients
        downloads, _ = self.downloads(honest, record.round + 1, self.method.predict.reads)
        shared = bool(self._shared_weights()) and not self.mixed
        self.evaluations.run(record, self.engine, downloads, self.predictions, self.architectures, shared)
