"""The server's side of secure sums: it learns the total of the clients' vectors, and no vector.

The protocol is that of Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017,
with the sparse graph of neighbours of Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS
2020. The server is honest but curious; clients may drop out at every step. `docs/secure-sums.md` says what is protected.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import numpy as np

from ..errors import ProtofedError
from .fixed import Words
from .masks import (
    COMMITMENT,
    PUBLIC,
    SEALED,
    SECRET,
    X25519PrivateKey,
    add_masks,
    agree,
    combine,
    commitment,
    mask_key,
    pair_key,
    public_bytes,
    self_key,
)
from .party import Party
from .protocol import (
    ANSWER,
    NUMBER,
    REQUEST,
    STEPS,
    Rules,
    SecureFailure,
    check_clients,
    digest,
    frame,
    size,
    sized,
    unframe,
)

Ask = Callable[[str, Mapping[int, bytes]], Iterable[tuple[int, bytes | str]]]
"""Sends requests of one step to clients, and gives answers as they arrive. Who has left does not answer; where it is known
why, a text says so in place of the answer."""
T = TypeVar("T")


@dataclass(frozen=True)
class Total:
    """The result of a secure sum."""

    values: Words
    contributors: tuple[int, ...]
    """The clients whose vectors are in the total, in ascending order."""
    dropped: Mapping[int, str]
    """Why a client did not answer all steps. One that left after its vector had arrived is a contributor all the same."""
    order: tuple[int, ...]
    """The ring in which the clients stood."""
    up: Mapping[int, int]
    """Bytes from each client."""
    down: Mapping[int, int]
    """Bytes to each client."""


def secure_total(ask: Ask, clients: Sequence[int], length: int, context: bytes, rules: Rules | None = None) -> Total:
    """Sum the clients' vectors modulo 2⁶⁴ without seeing one of them.

    Args:
        ask: sends the requests of a step, by client, and gives the clients' answers as they arrive.
        clients: the numbers of those who are asked to take part.
        length: words of a vector.
        context: bytes that name the run and the round, and whatever else both sides must agree on.
        rules: the same as the parties have.

    Returns:
        the total over the clients whose vectors have arrived.

    Raises:
        SecureFailure: too few clients were left at some step; there is no total.

    >>> parties = LocalParties({c: np.full(2, c, np.uint64) for c in (1, 2, 3, 4)}, 2, b"run 7, round 1")
    >>> secure_total(parties.ask, [1, 2, 3, 4], 2, b"run 7, round 1").values.tolist()
    [10, 10]
    """
    if len(set(clients)) != len(clients) or not all(0 <= client < 2**32 for client in clients):
        raise ProtofedError("the clients of a secure sum need different numbers from 0 to 2³² − 1")
    check_clients(len(clients))
    return _Sum(ask, tuple(clients), length, digest(context), rules or Rules()).run()


def ring(order: Sequence[int], neighbours: int) -> dict[int, tuple[int, ...]]:
    """The holders of each client's shares: itself, and those next to it in a ring.

    Args:
        order: the clients, in the order in which they stand.
        neighbours: of each client; half of them on either side, or all the others.

    Returns:
        by client, the holders in ascending order.

    >>> ring([3, 1, 2, 0, 4], 2)[1]
    (1, 2, 3)
    """
    if neighbours == len(order) - 1:
        return dict.fromkeys(order, tuple(sorted(order)))
    reach = range(-(neighbours // 2), neighbours // 2 + 1)
    return {c: tuple(sorted(order[(at + step) % len(order)] for step in reach)) for at, c in enumerate(order)}


@dataclass
class _Sum:
    """One secure sum in progress."""

    ask: Ask
    clients: tuple[int, ...]
    length: int
    context: bytes
    rules: Rules
    dropped: dict[int, str] = field(default_factory=dict)
    up: dict[int, int] = field(default_factory=dict)
    down: dict[int, int] = field(default_factory=dict)

    def run(self) -> Total:
        """All steps, one after the other."""
        public = self.collect_keys()
        order = list(public)
        random.SystemRandom().shuffle(order)
        self.threshold = self.rules.threshold(len(order))
        self.holders = ring(order, self.rules.neighbours(len(order)))
        commitments, sealed = self.collect_shares(public)
        values, survivors = self.collect_vectors(sealed)
        self.check_holders(sealed, survivors, survivors)
        shares = self.collect_unmasking(sealed, survivors)
        self.check_holders(sealed, survivors, shares.keys())
        keys = self.self_masks(survivors, shares, commitments)
        keys += self.pair_masks(sealed.keys() - survivors, survivors, shares, public)
        add_masks(values, keys)
        return Total(values, tuple(sorted(survivors)), self.dropped, tuple(order), self.up, self.down)

    # --- the steps ----------------------------------------------------------------------------------------------------
    def collect_keys(self) -> dict[int, tuple[bytes, bytes]]:
        """The two public keys of each client that answers."""
        probe, seen = X25519PrivateKey.generate(), set[bytes]()

        def read(client: int, count: int, body: memoryview) -> tuple[bytes, bytes]:
            data = bytes(sized(count, body, 2, PUBLIC))
            pair = data[:PUBLIC], data[PUBLIC:]
            for key in pair:
                agree(probe, key)
                if key in seen:
                    raise ValueError("a public key that has been sent already")
                seen.add(key)
            return pair

        return self.gather("keys", dict.fromkeys(self.clients, (self.length, b"")), read)

    def collect_shares(
        self, public: Mapping[int, tuple[bytes, bytes]]
    ) -> tuple[dict[int, bytes], dict[int, dict[int, bytes]]]:
        """By client, the commitment to its self-mask's seed, and its encrypted shares by neighbour."""

        def read(client: int, count: int, body: memoryview) -> tuple[bytes, dict[int, bytes]]:
            receivers = [holder for holder in self.holders[client] if holder != client]
            data = bytes(sized(count, body, len(receivers), SEALED, before=COMMITMENT))
            pieces = (data[start : start + SEALED] for start in range(COMMITMENT, len(data), SEALED))
            return data[:COMMITMENT], dict(zip(receivers, pieces, strict=True))

        entries = {client: NUMBER.pack(client) + b"".join(keys) for client, keys in public.items()}
        lists = {client: b"".join(entries[holder] for holder in self.holders[client]) for client in public}
        answers = self.gather("shares", {client: (len(public), body) for client, body in lists.items()}, read)
        return {client: first for client, (first, _) in answers.items()}, {
            c: shares for c, (_, shares) in answers.items()
        }

    def collect_vectors(self, sealed: Mapping[int, Mapping[int, bytes]]) -> tuple[Words, set[int]]:
        """The sum of the masked vectors, and whose they are."""
        values = np.zeros(self.length, dtype=np.uint64)

        def read(client: int, count: int, body: memoryview) -> None:
            np.add(values, np.frombuffer(sized(count, body, self.length, 8), dtype="<u8"), out=values)

        requests = {}
        for client in sealed:
            owners = [owner for owner in self.holders[client] if owner != client and owner in sealed]
            entries = (NUMBER.pack(owner) + sealed[owner][client] for owner in owners)
            requests[client] = (len(sealed), b"".join(entries))
        return values, set(self.gather("masked", requests, read))

    def collect_unmasking(self, sealed: Collection[int], survivors: Collection[int]) -> dict[int, dict[int, bytes]]:
        """By holder, the one share that it gives of each owner."""

        def read(client: int, count: int, body: memoryview) -> dict[int, bytes]:
            owners = [owner for owner in self.holders[client] if owner in sealed]
            data = bytes(sized(count, body, len(owners), SECRET))
            return {owner: data[SECRET * at : SECRET * (at + 1)] for at, owner in enumerate(owners)}

        requests = {}
        for client in sorted(survivors):
            present = (NUMBER.pack(holder) for holder in self.holders[client] if holder in survivors)
            requests[client] = (len(survivors), b"".join(present))
        return self.gather("unmask", requests, read)

    def gather(
        self, step: str, requests: Mapping[int, tuple[int, bytes]], read: Callable[[int, int, memoryview], T]
    ) -> dict[int, T]:
        """Ask clients, and read answers as they arrive; who sends none, or no proper one, is dropped with the reason."""
        messages = {c: frame(step, REQUEST, c, self.context, count, body) for c, (count, body) in requests.items()}
        for client, message in messages.items():
            self.down[client] = self.down.get(client, 0) + len(message)
        answers: dict[int, T] = {}
        for client, answer in self.ask(step, messages):
            if client not in messages or client in answers or client in self.dropped:
                continue
            try:
                if isinstance(answer, str):
                    raise ValueError(answer)
                self.up[client] = self.up.get(client, 0) + size(answer)
                count, body = unframe(answer, step, ANSWER, client, self.context)
                answers[client] = read(client, count, body)
            except ValueError as error:
                self.dropped[client] = f"{step}: {error}"
        for client in messages.keys() - answers.keys():
            self.dropped.setdefault(client, f"{step}: no answer")
        if len(answers) < self.rules.least and step != "unmask":
            self.fail(f"{len(answers)} clients are left after {step!r}; at least {self.rules.least} are needed")
        return dict(sorted(answers.items()))

    # --- what the shares are for --------------------------------------------------------------------------------------
    def check_holders(self, owners: Collection[int], survivors: Collection[int], present: Collection[int]) -> None:
        """Fail where too few holders are present of a secret that is needed."""
        for owner in owners:
            holders = self.holders[owner]
            needed = owner in survivors or any(holder in survivors for holder in holders)
            there = sum(holder in present for holder in holders)
            if needed and there < self.threshold:
                left = f"{there} of {len(holders)} clients that hold shares of client {owner} are left"
                self.fail(f"{left}; {self.threshold} are needed")

    def secret(self, owner: int, shares: Mapping[int, Mapping[int, bytes]]) -> bytes:
        """One secret of a client, from as many shares as the threshold asks for."""
        given = [(at, shares[holder][owner]) for at, holder in enumerate(self.holders[owner], 1) if holder in shares]
        return combine(given[: self.threshold])

    def self_masks(
        self, survivors: Iterable[int], shares: Mapping[int, Mapping[int, bytes]], commitments: Mapping[int, bytes]
    ) -> list[tuple[bytes, bool]]:
        """The keys of the self-masks that are in the sum, to be subtracted."""
        keys = []
        for owner in survivors:
            seed = self.secret(owner, shares)
            if commitment(seed, self.context) != commitments[owner]:
                self.fail(f"the shares of client {owner}'s self-mask do not fit together")
            keys.append((self_key(seed, self.context), True))
        return keys

    def pair_masks(
        self,
        missing: Iterable[int],
        survivors: Collection[int],
        shares: Mapping[int, Mapping[int, bytes]],
        public: Mapping[int, tuple[bytes, bytes]],
    ) -> list[tuple[bytes, bool]]:
        """The keys of the masks that survivors had in common with missing clients, with the sign that takes them away."""
        keys = []
        for owner in missing:
            neighbours = [holder for holder in self.holders[owner] if holder in survivors]
            if not neighbours:
                continue
            private = mask_key(self.secret(owner, shares), self.context)
            if public_bytes(private) != public[owner][1]:
                self.fail(f"the shares of client {owner}'s mask key do not fit together")
            for neighbour in neighbours:
                key = pair_key(agree(private, public[neighbour][1]), self.context, owner, neighbour)
                keys.append((key, neighbour < owner))
        return keys

    def fail(self, reason: str) -> NoReturn:
        """End without a total."""
        raise SecureFailure(f"no secure sum in this round: {reason}", self.dropped, self.up, self.down)


class LocalParties:
    """Parties in this process, for simulations.

    Args:
        vectors: by client, its vector; it is looked up when the vector is sent.
        length: words of a vector.
        context: bytes that name the run and the round.
        rules: what the parties hold the server to.
        absent: by step, the clients that leave before they answer it.
    """

    def __init__(
        self,
        vectors: Mapping[int, Words],
        length: int,
        context: bytes,
        rules: Rules | None = None,
        absent: Mapping[str, Collection[int]] | None = None,
    ) -> None:
        def lookup(client: int) -> Callable[[], Words]:
            return lambda: vectors[client]

        self.parties = {client: Party(client, context, length, lookup(client), rules) for client in vectors}
        self.absent = absent or {}
        if unknown := self.absent.keys() - set(STEPS):
            raise ProtofedError(f"a secure sum has no step {min(unknown)!r}. Known: {', '.join(STEPS)}")

    def ask(self, step: str, messages: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """Answer the requests of one step, one client after the other; who has left does not answer."""
        for client, message in messages.items():
            if client in self.parties and client not in self.absent.get(step, ()):
                yield client, self.parties[client].answer(step, message)
