"""A client's side of one secure sum: it answers four requests of the server and refuses what would open a vector."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..errors import ProtofedError
from .fixed import Words
from .masks import (
    PUBLIC,
    SEALED,
    SECRET,
    X25519PrivateKey,
    add_masks,
    agree,
    commitment,
    mask_key,
    pair_key,
    public_bytes,
    seal,
    self_key,
    split,
    unseal,
)
from .protocol import (
    ANSWER,
    HEADER,
    LONGEST_REFUSAL,
    REFUSAL,
    REQUEST,
    STEPS,
    Rules,
    check_clients,
    digest,
    frame,
    header,
    numbers,
    sized,
    unframe,
)


@dataclass
class _Secrets:
    """What a party must not give away, beyond the one share of each owner that the last step asks for."""

    self_seed: bytes
    mask_seed: bytes
    seal_key: X25519PrivateKey
    mask_key: X25519PrivateKey
    agreed: dict[int, bytes] = field(default_factory=dict)  # by neighbour, from the two seal keys
    shares: dict[int, bytes] = field(
        default_factory=dict
    )  # by owner: a share of its self-mask's seed, one of its mask key's


class Party:
    """A client in one secure sum. It is made afresh for every round, with fresh keys.

    It refuses what the protocol does not foresee: steps out of order, two different requests for one step, messages of
    another run, round or client, fewer clients than its rules ask for, a list of neighbours that is not one. Having refused,
    it has dropped out: `refusal` says why, its secrets are forgotten, and every later answer is that refusal.

    Args:
        client: the client's number.
        context: bytes that name the run and the round, and whatever else both sides must agree on, such as the
            fingerprint of the layout.
        length: words of the vector.
        vector: gives the vector; it is called once, when the vector is sent.
        rules: what the party holds the server to.
    """

    def __init__(
        self, client: int, context: bytes, length: int, vector: Callable[[], Words], rules: Rules | None = None
    ) -> None:
        self.client, self.length, self.rules = client, length, rules or Rules()
        self.refusal: str | None = None
        self._context, self._vector = digest(context), vector
        self._done = 0  # steps
        self._last: tuple[str, bytes, bytes] | None = None  # step, hash of the request, answer
        self._clients = 0  # that took part in the step before
        self._threshold = 0
        self._public: dict[int, tuple[bytes, bytes]] = {}  # seal key and mask key of each holder, itself among them
        self._secrets: _Secrets | None = None

    def answer(self, step: str, message: bytes) -> bytes:
        """Answer a request of the server.

        Args:
            step: which of the four steps it is for.
            message: the request.

        Returns:
            the answer, or the refusal. The same request once more has the same answer, for a network that sends twice.
        """
        if self.refusal is None:
            try:
                return self._checked_answer(step, message)
            except (ProtofedError, ValueError) as error:
                self.refusal, self._last, self._secrets = str(error), None, None
        text = str(self.refusal).encode()[:LONGEST_REFUSAL]
        return frame(step if step in STEPS else STEPS[0], REFUSAL, self.client, self._context, len(text), text)

    def _checked_answer(self, step: str, message: bytes) -> bytes:
        request = hashlib.sha256(message).digest()
        if self._last is not None and self._last[:2] == (step, request):
            return self._last[2]
        due = STEPS[self._done] if self._done < len(STEPS) else "nothing"
        if step != due:
            raise ValueError(f"the server asked for {step!r} where {due!r} comes next")
        count, body = unframe(message, step, REQUEST, self.client, self._context)
        steps = {"keys": self._keys, "shares": self._shares, "masked": self._masked, "unmask": self._unmask}
        answer = steps[step](count, body)
        self._done += 1
        self._last = (step, request, answer)
        return answer

    def _framed(self, step: str, count: int, body: bytes) -> bytes:
        return frame(step, ANSWER, self.client, self._context, count, body)

    def _take_part(self, clients: int, holders: int) -> None:
        """Refuse to go on with too few clients, or with too few that hold this client's shares."""
        if clients < self.rules.least:
            raise ValueError(f"{clients} clients take part where this client requires {self.rules.least}")
        if holders < self._threshold:
            raise ValueError(f"{holders} holders of this client's shares take part; the threshold is {self._threshold}")
        self._clients = clients

    def _keys(self, count: int, body: memoryview) -> bytes:
        """Two public keys, fresh for the round."""
        sized(count, body, count, 0)
        if count != self.length:
            raise ValueError(f"the server expects a vector of {count} words where this client has {self.length}")
        seed = os.urandom(SECRET)
        secrets = _Secrets(os.urandom(SECRET), seed, X25519PrivateKey.generate(), mask_key(seed, self._context))
        self._secrets = secrets
        self._public[self.client] = (public_bytes(secrets.seal_key), public_bytes(secrets.mask_key))
        return self._framed("keys", 2, b"".join(self._public[self.client]))

    def _shares(self, clients: int, body: memoryview) -> bytes:
        """A commitment to the self-mask's seed, and for each neighbour its two shares, encrypted."""
        secrets = self._secrets
        assert secrets is not None
        check_clients(clients)
        self._threshold = self.rules.threshold(clients)
        holders = self.rules.neighbours(clients) + 1
        self._take_part(clients, holders)
        width = 4 + 2 * PUBLIC
        sized(holders, body, holders, width)
        listed = numbers(body, width)
        keys = [
            (bytes(body[at + 4 : at + 4 + PUBLIC]), bytes(body[at + 4 + PUBLIC : at + width]))
            for at in range(0, len(body), width)
        ]
        public = dict(zip(listed, keys, strict=True))
        if public.get(self.client) != self._public[self.client]:
            raise ValueError("the list of neighbours does not hold this client with its own keys")
        if len({key for pair in keys for key in pair}) != 2 * holders:
            raise ValueError("the list of neighbours holds a key twice")
        self._public = public
        own = split(secrets.self_seed, self._threshold, holders)
        other = split(secrets.mask_seed, self._threshold, holders)
        sealed = [commitment(secrets.self_seed, self._context)]
        for holder, *pair in zip(listed, own, other, strict=True):
            shares = b"".join(pair)
            if holder == self.client:
                secrets.shares[holder] = shares
            else:
                secrets.agreed[holder] = agree(secrets.seal_key, public[holder][0])
                sealed.append(seal(secrets.agreed[holder], shares, self._context, self.client, holder))
        return self._framed("shares", holders - 1, b"".join(sealed))

    def _masked(self, clients: int, body: memoryview) -> bytes:
        """The vector, with this client's self-mask and the masks that it has in common with its neighbours."""
        secrets = self._secrets
        assert secrets is not None
        width = 4 + SEALED
        owners = numbers(body, width)
        if not set(owners) <= self._public.keys() - {self.client} or clients > self._clients:
            raise ValueError("shares of a client that is no neighbour")
        self._take_part(clients, len(owners) + 1)
        keys = [(self_key(secrets.self_seed, self._context), False)]
        for place, owner in enumerate(owners):
            sealed = bytes(body[place * width + 4 : (place + 1) * width])
            secrets.shares[owner] = unseal(secrets.agreed[owner], sealed, self._context, owner, self.client)
            agreed = agree(secrets.mask_key, self._public[owner][1])
            keys.append((pair_key(agreed, self._context, self.client, owner), self.client > owner))
        vector = self._vector()
        if vector.shape != (self.length,) or vector.dtype != np.uint64:
            raise ValueError(
                f"a vector of {vector.size} words of {vector.dtype}; {self.length} of uint64 were promised"
            )
        message = bytearray(HEADER.size + 8 * self.length)
        message[: HEADER.size] = header("masked", ANSWER, self.client, self._context, self.length)
        words = np.frombuffer(message, dtype="<u8", offset=HEADER.size)
        words[:] = vector
        add_masks(words, keys)
        return bytes(message)

    def _unmask(self, clients: int, body: memoryview) -> bytes:
        """One share for each owner: of the self-mask's seed where its vector has arrived, of the mask key's where not."""
        secrets = self._secrets
        assert secrets is not None
        survivors = set(numbers(body, 4))
        if self.client not in survivors:
            raise ValueError("the server lists this client as dropped, though it has sent its vector")
        if not survivors <= secrets.shares.keys() or clients > self._clients:
            raise ValueError("the list of survivors holds a client that sent no shares")
        self._take_part(clients, len(survivors))
        owners = sorted(secrets.shares)
        parts = [secrets.shares[o][:SECRET] if o in survivors else secrets.shares[o][SECRET:] for o in owners]
        self._secrets = None
        return self._framed("unmask", len(owners), b"".join(parts))
