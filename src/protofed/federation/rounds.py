"""The round: choose clients, send, train, return, update. Everything that travels goes through `wire`."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch.utils import _pytree as pytree

from .. import seeds, wire
from ..data.types import FederatedData
from ..errors import ProtofedError
from ..evaluate import Scores, ensemble, summarise
from ..evaluate.accuracy import KINDS
from ..evaluate.pseudo import pooled
from ..methods.base import Method, Setup, Upload
from ..wire import Bundle
from . import selection
from .engine import Engine, Judging
from .local import Outcome, client_size
from .mixed import for_architecture, marked

log = logging.getLogger("protofed")
SHAPE_CLIENTS = 20  # clients whose embedding space is described: it costs time at each evaluation


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
        candidates: Literal["own", "all"] = "own",
        ensemble: bool = False,
        architectures: Sequence[str] = (),
        silhouette: bool = False,
        snapshots: int = 0,
    ) -> None:
        """`capability`: a number per client, for `choice="diverse"`; `architectures`: what each client's is called;
        `snapshots`: of how many evaluations embeddings are kept."""
        self.method, self.engine, self.data = method, engine, data
        self.rounds, self.seed = rounds, seed
        self.participation, self.choice, self.evaluate_every = participation, choice, evaluate_every
        self.capability = torch.tensor(capability or [1.0] * len(data.clients))
        self.judging = Judging("test", candidates, ensemble, SHAPE_CLIENTS if silhouette else 0)
        self.pictured = _spread(rounds, evaluate_every, snapshots)
        self.architectures = tuple(architectures)
        self.mixed = len(engine.starts) > 1
        starts = [marked(start, k) if self.mixed else start for k, start in enumerate(engine.starts)]
        self.setup = Setup(
            data.num_classes,
            engine.dim,
            tuple(client_size(method, c) for c in data.clients),
            {name: value.cpu() for start in starts for name, value in start.items()},
            seed,
            tuple(engine.owner),
        )
        self.expected = [
            wire.Expected(
                data.num_classes,
                engine.dim,
                method.travels,
                start,
                {name: torch.empty(shape, device="meta") for name, shape in method.tensor_shapes(self.setup).items()},
                banks=method.bank_shapes(self.setup),
                required=method.required,
            )
            for start in engine.starts
        ]
        self.kinds = _ways_to_predict(method, data)
        self.state = method.server_start(self.setup)
        self.round = 0
        if ensemble and data.central_test is None:
            raise ProtofedError("ensemble=true needs a shared test set, and this data has none")

    def participants(self, round: int) -> list[int]:
        total = len(self.data.clients)
        chosen = participants_per_round(self.participation, total)
        if chosen >= total:
            return list(range(total))
        stream = seeds.torch_stream(self.seed, "participation", round)
        banks = self.method.client_banks(self.state) if self.choice == "diverse" else None
        if banks is None:
            return selection.random_choice(total, chosen, stream)
        return selection.diverse_choice(banks, self.capability, chosen, stream)

    def __iter__(self) -> Iterator[Record]:
        while self.round < self.rounds:
            yield self.step()

    def step(self) -> Record:
        began = time.perf_counter()
        round = self.round + 1
        if round == 1:
            self._train_server(0)  # so that there is something to send
        chosen = self.participants(round) if self.method.asks_clients else []
        downloads, down = self._send(chosen, round)
        outcomes = self.engine.train(round, downloads) if chosen else {}
        uploads, dropped, up = self._receive(outcomes)
        if uploads:
            self.state = self.method.server_update(self.state, uploads, round, self.setup)
        elif chosen:
            log.warning("round %d: no client returned anything usable; the server keeps its state", round)
        self.round = round
        terms = _mean_terms([o for c, o in outcomes.items() if c not in dropped])
        loss = sum(terms.values()) if terms else math.nan
        measures = pooled([o.pseudo for o in outcomes.values()]) | dict(self.method.measures(self.state, round))
        terms |= self._train_server(round)  # what is sent next is what is tested and saved
        record = Record(round, chosen, dropped, loss, terms, up, down, measures=measures)
        record.seconds = time.perf_counter() - began
        if round % self.evaluate_every == 0 or round == self.rounds:
            self._evaluate(record)
        return record

    def _train_server(self, round: int) -> dict[str, float]:
        """The server's own training, where the method has one. One that goes to NaN is as if it had not been."""
        if not self.method.server_training_epochs:
            return {}
        state, terms, failure = self.engine.train_server(self.state, round)
        if state is None:
            log.warning("round %d: the server's own training failed: %s; it keeps its state", round, failure)
            return {}
        self.state = state
        return {f"server {name}": value for name, value in terms.items()}

    def _send(self, chosen: Sequence[int], round: int) -> tuple[dict[int, bytes], Counter[str]]:
        """What each client is sent, encoded. A message that is the same for all is encoded once."""
        downloads: dict[int, bytes] = {}
        down: Counter[str] = Counter()
        # by what is in it; holds the bundle too, as an id lives as long as what it names
        encoded: dict[Hashable, tuple[Bundle, bytes, Counter[str]]] = {}
        leaves: tuple[Bundle | None, tuple[int, ...]] = (None, ())  # of the last one: most often all get the same
        for client in chosen:
            content = self.method.send(self.state, client, round)
            which = self.engine.owner[client]
            if content is not leaves[0]:
                leaves = (content, tuple(map(id, pytree.tree_leaves(content))))
            key = (*leaves[1], which)
            if key not in encoded:
                message = wire.encode(for_architecture(content, which) if self.mixed else content)
                encoded[key] = (content, message, wire.sizes(message))
            _, downloads[client], size = encoded[key]
            down.update(size)
        return downloads, down

    def _receive(self, outcomes: Mapping[int, Outcome]) -> tuple[list[Upload], dict[int, str], Counter[str]]:
        """The uploads that can be used; who was dropped, and why."""
        uploads: list[Upload] = []
        dropped: dict[int, str] = {}
        up: Counter[str] = Counter()
        returned: dict[int, list[int]] = {}  # by architecture
        for client, outcome in outcomes.items():
            if outcome.upload is None:
                dropped[client] = f"client {client}: {outcome.failure}"
                continue
            returned.setdefault(self.engine.owner[client], []).append(client)
            with suppress(wire.WireError):  # said below
                up.update(wire.sizes(outcome.upload))
        contents: dict[int, Bundle | wire.WireError] = {}
        for which, clients in returned.items():
            messages = [outcomes[c].upload or b"" for c in clients]
            sources = [f"client {c}" for c in clients]
            contents |= dict(zip(clients, wire.decode_each(messages, sources, self.expected[which]), strict=True))
        for client in (c for c in outcomes if c in contents):
            content, which = contents[client], self.engine.owner[client]
            if isinstance(content, wire.WireError):
                dropped[client] = str(content)
                continue
            if self.mixed:
                content = replace(content, weights=marked(content.weights, which))
            uploads.append(Upload(client, outcomes[client].num_samples, content))
        for reason in dropped.values():
            log.warning("round %d: dropped %s", self.round + 1, reason)
        return uploads, dropped, up

    def _evaluate(self, record: Record) -> None:
        everyone = range(len(self.data.clients))
        kinds = self.kinds
        about = (self.data.class_values, self.architectures, self.method.predicts, kinds)
        record.snapshot = record.round in self.pictured
        how = replace(self.judging, snapshot=record.snapshot)
        record.scores = self.engine.evaluate(self.state, everyone, how)
        record.metrics = summarise(record.scores, *about)
        if self.judging.votes and self.data.central_test is not None:
            votes = ensemble(record.scores, self.data.central_test.labels)
            record.metrics |= {f"ensemble_{kind}": votes[f"ensemble_{kind}"] for kind in kinds}
            record.scores = [replace(s, votes=None) for s in record.scores]
        if all(c.validation is not None for c in self.data.clients):
            how = replace(self.judging, part="validation", votes=False, silhouette=0)
            record.validation = self.engine.evaluate(self.state, everyone, how)
            best = summarise(record.validation, own=self.method.predicts, kinds=kinds)
            record.metrics |= {f"validation_{kind}": best[f"accuracy_{kind}"] for kind in kinds}
            record.metrics["validation"] = best["accuracy"]


def _ways_to_predict(method: Method, data: FederatedData) -> tuple[str, ...]:
    """By head, unless none is trained; by prototype, unless neither the server nor a client ever has one."""
    exchanged = any(part.partition(".")[0] in ("bank", "banks") for part in method.travels)
    prototypes = exchanged or method.predicts == "prototype" or any(len(c.labelled) for c in data.clients)
    return tuple(kind for kind, there in zip(KINDS, (method.trains_head, prototypes), strict=True) if there)


def _spread(rounds: int, every: int, number: int) -> frozenset[int]:
    """So many evaluated rounds, spread evenly, the first and the last among them."""
    evaluated = sorted({*range(every, rounds + 1, every), rounds})
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
