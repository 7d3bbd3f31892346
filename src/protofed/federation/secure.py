"""Federations in which only sums leave a client: the server learns what all uploads of a round add up to.

A client lifts its own upload to what the rule sums (n·w, count·mean, counts) and packs that into one vector of 64-bit
words. The server gets the total of the vectors by the protocol of `privacy/secure.py`, through `ask` of an engine whose
clients answer it. In a simulation `SimulatedParties` stands between any engine and the server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from ..errors import ProtofedError
from ..parts import Reduce
from ..parts.filters import Filter
from ..parts.reduce import Sums
from ..privacy.fixed import Layout, Words
from ..privacy.protocol import STEPS, Rules, SecureFailure
from ..wire import Bundle, Exchange
from .uploads import as_upload

if TYPE_CHECKING:
    from ..evaluate import Scores
    from ..privacy.party import Party
    from ..privacy.secure import LocalParties
    from .engine import Downloads, Engine, Taught
    from .judge import Evaluation
    from .local import ClientState, Outcome

BYTES = "secure"  # the kind that bytes of secure sums are counted as


def sum_layout(
    rule: Reduce, exchange: Exchange, sizes: Mapping[str, int | None], templates: Sequence[Mapping[str, Tensor]]
) -> Layout:
    """Which number stands where in the clients' vectors. It follows from the settings alone, so both sides have the same.

    Args:
        rule: How uploads that went through the filters are reduced.
        exchange: What the method exchanges.
        sizes: The numbers that the words in shapes stand for.
        templates: A model of each architecture.

    Returns:
        The layout of all architectures together. A client packs zeros for what its own does not have.
    """
    sums = Sums()
    for architecture, template in enumerate(templates):
        several = architecture if len(templates) > 1 else None
        rule.lift([as_upload(0, exchange.zeros(sizes, template), several)], sums)
    return Layout.of(sums)


@dataclass(frozen=True)
class SecureSums:
    """How uploads become vectors at the clients, and their total becomes sums at the server.

    `architecture` is that of the client at hand, where there are several.
    """

    rule: Reduce
    layout: Layout
    rules: Rules
    architecture: int | None = None

    def vector(self, client: int, upload: Bundle) -> bytes:
        """A client's vector, before any mask is on it.

        Args:
            client: The client's number.
            upload: What leaves its filters.

        Returns:
            The words of the vector, as bytes.

        Raises:
            ProtofedError: a number is not finite or out of range; the error names the tensor.
        """
        sums = Sums()
        self.rule.lift([as_upload(client, upload.to("cpu"), self.architecture)], sums)
        return self.layout.pack(sums).tobytes()

    def context(self, run: str, round: int) -> bytes:
        """What both sides must agree on: the run, the round and the layout."""
        return f"{run}\0{round}\0".encode() + self.layout.fingerprint()

    def party(self, client: int, run: str, round: int, vector: bytes) -> Party:
        """A client's side of the sum of one round, with its vector."""
        from ..privacy.party import Party

        words = np.frombuffer(vector, dtype=np.uint64)
        return Party(client, self.context(run, round), self.layout.length, lambda: words, self.rules)


@runtime_checkable
class SecureEngine(Protocol):
    """An engine whose clients take part in secure sums: what `train` gives has no uploads, and clients answer `ask`."""

    run: str

    def ask(self, round: int, step: str, messages: Mapping[int, bytes]) -> Iterable[tuple[int, bytes | str]]:
        """Send each client its request of one step, and give the answers as they arrive.

        Args:
            round: The round whose uploads are summed.
            step: The step of the protocol.
            messages: A request for each client.

        Returns:
            The answer of each client that gives one, or the reason why it gives none.
        """
        ...


@dataclass
class RoundTotal:
    """What came of the secure sum of one round."""

    sums: Sums | None
    """The sums over the contributors; none where too few were left."""
    contributors: tuple[int, ...]
    dropped: dict[int, str]
    up: Counter[str]
    down: Counter[str]
    failure: str = ""


def total_of_round(engine: SecureEngine, secure: SecureSums, clients: Sequence[int], round: int) -> RoundTotal:
    """Sum what clients have trained, without seeing any of it.

    Args:
        engine: The engine whose clients answer.
        secure: How vectors are made and read.
        clients: Those that have trained in this round.
        round: The round.

    Returns:
        The sums, who dropped out and why, and the bytes of all steps.
    """
    from ..privacy.secure import secure_total

    def ask(step: str, messages: Mapping[int, bytes]) -> Iterable[tuple[int, bytes | str]]:
        return engine.ask(round, step, messages)

    context = secure.context(engine.run, round)
    try:
        total = secure_total(ask, clients, secure.layout.length, context, secure.rules)
    except SecureFailure as failure:
        dropped = {client: failure.dropped.get(client, str(failure)) for client in clients}
        return RoundTotal(None, (), dropped, _bytes(failure.up), _bytes(failure.down), str(failure))
    left = {
        c: f"{reason}; its numbers are in the sum" for c, reason in total.dropped.items() if c in total.contributors
    }
    sums, dropped = secure.layout.unpack(total.values), {**total.dropped, **left}
    return RoundTotal(sums, total.contributors, dropped, _bytes(total.up), _bytes(total.down))


def _bytes(by_client: Mapping[int, int]) -> Counter[str]:
    return Counter({BYTES: sum(by_client.values())})


class SimulatedParties:
    """Any engine of a simulation as one whose clients take part in secure sums.

    The clients' vectors stay here; the server's side has nothing but `ask`. `absent` has, by step, clients that leave
    before they answer it, for tests; it may be changed between rounds.
    """

    run = "simulation"

    def __init__(self, engine: Engine, secure: SecureSums) -> None:
        """
        Args:
            engine: The engine that trains; its task makes vectors of uploads.
            secure: How vectors are made.
        """
        self.inner, self.secure = engine, secure
        self.starts, self.owner, self.dim, self.parameters = engine.starts, engine.owner, engine.dim, engine.parameters
        self.absent: Mapping[str, Collection[int]] = {}
        self._vectors: dict[int, Words] = {}
        self._parties: LocalParties | None = None

    def train(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        """Train the clients, and keep what they would send."""
        self._vectors, self._parties = {}, None
        for client, outcome in self.inner.train(downloads):
            if outcome.upload is not None:
                self._vectors[client] = np.frombuffer(outcome.upload, dtype=np.uint64)
                outcome = replace(outcome, upload=b"")
            yield client, outcome

    def ask(self, round: int, step: str, messages: Mapping[int, bytes]) -> Iterable[tuple[int, bytes | str]]:
        """Answer the requests of one step for all clients, one after the other."""
        from ..privacy.secure import LocalParties

        if step == STEPS[0] or self._parties is None:
            context, length = self.secure.context(self.run, round), self.secure.layout.length
            self._parties = LocalParties(self._vectors, length, context, self.secure.rules, self.absent)
        return self._parties.ask(step, messages)

    def teach(self, state: Any, round: int) -> Taught:
        """Train the server's own model."""
        return self.inner.teach(state, round)

    def evaluate(self, downloads: Downloads, options: Evaluation) -> Mapping[int, Scores]:
        """Score each client."""
        return self.inner.evaluate(downloads, options)

    def export(self) -> Mapping[int, ClientState]:
        """The states that a checkpoint needs."""
        return self.inner.export()

    def restore(self, states: Mapping[int, ClientState]) -> None:
        """Replace the clients' states by those of a checkpoint."""
        self.inner.restore(states)

    def close(self) -> None:
        """Release what the engine holds."""
        self.inner.close()


def check_secure(
    exchange: Exchange, owner: str, rule: Reduce, filters: Iterable[Filter], choice: str = "random"
) -> None:
    """Refuse a method or a setting with which secure sums make no sense.

    Args:
        exchange: What the method exchanges.
        owner: The method's name.
        rule: How the method reduces uploads.
        filters: What is done to every upload.
        choice: How the clients of a round are chosen.

    Raises:
        ProtofedError: one line that says why.
    """
    if not exchange.up:
        raise ProtofedError(f"secure=sums: clients of {owner} send nothing")
    if not rule.additive:
        needs = f"reduce={rule.name} of {owner}" if hasattr(rule, "name") else owner  # a rule that a person can choose
        raise ProtofedError(f"secure=sums: {needs} needs each upload by itself, and a secure sum has none")
    for part in exchange.up:
        if part.kind in ("tensor", "models"):
            raise ProtofedError(f"secure=sums: {owner} sends {part.name}, which its rule does not sum")
        if None in part.shape:
            raise ProtofedError(f"secure=sums: {owner} sends {part.name}, whose size nobody knows beforehand")
    for filter in filters:
        if filter.stage > 0:
            raise ProtofedError(
                f"secure=sums: {filter.setting}={filter.name} changes the form of an upload, and masked numbers can only "
                "be added"
            )
    if choice == "diverse":
        raise ProtofedError(
            "secure=sums: choice=diverse chooses clients by their uploads, which the server does not see"
        )


def check_participants(rules: Rules, participants: int) -> None:
    """Refuse rounds of fewer clients than a sum needs.

    Args:
        rules: How many clients a sum needs.
        participants: How many take part in a round.

    Raises:
        ProtofedError: there are too few.
    """
    if participants < rules.least:
        raise ProtofedError(
            f"secure=sums: {participants} clients take part in a round, and a sum needs at least {rules.least} (least)"
        )
