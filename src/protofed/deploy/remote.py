"""An engine whose sites are elsewhere. The federation and its method cannot tell it from one that simulates them."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ProtofedError
from ..evaluate import Scores
from ..federation.engine import Downloads, PlainEngine, Taught
from ..federation.judge import Evaluation
from ..federation.local import ClientState, Outcome
from ..federation.mixed import MixedEngine
from ..federation.site import opened, outcome_of_reply, scores_of, sealed
from ..wire import WireError, decode
from .transport import Failure, Transport

log = logging.getLogger("protofed")
UNKNOWN_RUN = "unknown run"


@dataclass(frozen=True)
class Limits:
    """How long the server waits, and for how many."""

    seconds: float = 600.0
    """The time limit of a round: a site that has not answered by then is left out of it."""
    quorum: int = 1
    """The fewest sites whose uploads make a round; with fewer, the server keeps its state."""
    patience: float = 3600.0
    """How many seconds the server waits for as many sites as the quorum to be connected, before it gives up."""


class RemoteEngine:
    """Sends each site its message and takes the reply. A site that is late, lost or refuses is left out and named."""

    def __init__(
        self,
        transport: Transport,
        names: Sequence[str],
        server: PlainEngine | MixedEngine,
        run: str,
        begin: Callable[[int], bytes],
        limits: Limits,
    ) -> None:
        """
        Args:
            transport: What reaches the sites.
            names: The sites' names; a site's place among them is its number as a client.
            server: An engine of the same architectures, for a server that trains and for the shapes of weights.
            run: The name of this run, which every message carries.
            begin: Gives the message with which the run begins at a client.
            limits: Time limit and quorum.
        """
        self.transport, self.names, self.server = transport, tuple(names), server
        self.run, self.begin, self.limits = run, begin, limits
        self.starts, self.owner = server.starts, server.owner
        self.dim, self.parameters = server.dim, server.parameters
        self.oldest_checkpoint: Callable[[], int] = lambda: 0
        self._session, self._number = secrets.token_hex(8), 0
        self.connected: list[str] = []
        self.refusals: dict[str, str] = {}  # sites at which the run could not begin, and why

    def teach(self, state: Any, round: int) -> Taught:
        """The server trains here, on its own samples."""
        return self.server.teach(state, round)

    def train(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        """Train the sites all at once; the outcomes are in the order of the clients."""
        self.wait_for_quorum()
        oldest = self.oldest_checkpoint()
        header = self._header(downloads.round)
        messages = {c: sealed({**header, "oldest": oldest}, downloads[c]) for c in downloads.clients}
        outcomes = {}
        for client, reply in self._call("train", messages).items():
            outcomes[client] = _outcome(reply, downloads.round)
        usable = sum(outcome.upload is not None for outcome in outcomes.values())
        if usable < self.limits.quorum:
            reason = f"{usable} of the {self.limits.quorum} sites that make a round answered"
            outcomes = {
                c: Outcome(None, o.terms if o.diverged else {}, o.failure or reason) for c, o in outcomes.items()
            }
        return iter([(client, outcomes[client]) for client in downloads.clients])

    def ask(self, round: int, step: str, messages: Mapping[int, bytes]) -> Iterator[tuple[int, bytes | str]]:
        """Send each site its request of one step of a secure sum, all at once; who gives no answer says why."""
        header = {**self._header(round), "step": step}
        replies = self._call_once("secure", {c: sealed(header, message) for c, message in messages.items()})
        return ((c, str(reply) if isinstance(reply, Failure) else bytes(reply)) for c, reply in replies.items())

    def evaluate(self, downloads: Downloads, options: Evaluation) -> dict[int, Scores]:
        """Score the sites that can be reached and let their scores leave."""
        header = {**self._header(downloads.round), "how": dataclasses.asdict(options)}
        messages = {c: sealed(header, downloads[c]) for c in downloads.clients}
        scores: dict[int, Scores] = {}
        for client, reply in self._call("evaluate", messages).items():
            source = self.names[client]
            if isinstance(reply, Failure):
                log.warning("round %d: %s is not evaluated: %s", downloads.round - 1, source, reply)
                continue
            try:
                _, payload = opened(reply, source)
                scores[client] = scores_of(decode(payload, source), source)
            except WireError as error:
                log.warning("round %d: %s is not evaluated: %s", downloads.round - 1, source, error)
        return scores

    def _header(self, round: int) -> dict[str, Any]:
        """What every message says: its run and round, and its number in the order in which this server has sent them."""
        self._number += 1
        return {"run": self.run, "round": round, "session": self._session, "number": self._number}

    def wait_for_quorum(self) -> None:
        """Wait until as many sites are connected as make a round."""
        deadline = time.monotonic() + self.limits.patience
        said = False
        while True:
            self.connected = [name for name in self.transport.sites() if name in self.names]
            self.connected = [name for name in self.connected if name not in self.refusals]
            willing = len(self.names) - len(self.refusals)
            if willing < self.limits.quorum:
                reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refusals.items())
                raise ProtofedError(
                    f"{willing} sites would take part, and {self.limits.quorum} make a round ({reasons})"
                )
            if len(self.connected) >= self.limits.quorum:
                return
            if not said:
                log.warning("waiting for sites: %d of %d are connected", len(self.connected), self.limits.quorum)
                said = True
            if time.monotonic() > deadline:
                raise ProtofedError(
                    f"after {self.limits.patience:g} s, {len(self.connected)} of the {self.limits.quorum} sites that make a "
                    "round are connected"
                )
            time.sleep(0.2)

    def _call(self, function: str, messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        """Call sites by client; one to which the run is new is told how it began, and called again."""
        replies = self._call_once(function, messages)
        new = [c for c, reply in replies.items() if isinstance(reply, Failure) and UNKNOWN_RUN in reply.reason]
        if new:
            begun = self._call_once("begin", {client: self.begin(client) for client in new})
            ready = [client for client in new if not isinstance(begun[client], Failure)]
            for client in new:
                reply, name = begun[client], self.names[client]
                self.refusals.pop(name, None)
                if isinstance(reply, Failure) and reply.kind == "refused":
                    self.refusals[name] = reply.reason
            replies |= {client: begun[client] for client in new if client not in ready}
            replies |= self._call_once(function, {client: messages[client] for client in ready})
        return replies

    def _call_once(self, function: str, messages: Mapping[int, bytes]) -> dict[int, bytes | Failure]:
        if not messages:
            return {}
        by_name = {self.names[client]: message for client, message in messages.items()}
        replies = self.transport.call(function, by_name, self.limits.seconds)
        return {client: replies[self.names[client]] for client in messages}

    def export(self) -> Mapping[int, ClientState]:
        """Nothing: the sites keep their states."""
        return {}

    def restore(self, states: Mapping[int, ClientState]) -> None:
        """Nothing: the sites keep their states."""

    def close(self) -> None:
        """Nothing to release: the transport is its owner's to close."""


def _outcome(reply: bytes | Failure, round: int) -> Outcome:
    if isinstance(reply, Failure):
        return Outcome(None, {}, reply.reason)
    try:
        return outcome_of_reply(reply, round, "its reply")
    except WireError as error:
        return Outcome(None, {}, str(error))
