"""What both sides of a secure sum know: its steps, the rules for who shares secrets with whom, and the frame of a message.

A message is a header of 32 bytes, little-endian, and a body whose length follows from the header: four letters, version,
step, direction, a zero, the client's number, a count, and sixteen bytes that stand for the run and the round.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from itertools import pairwise

from ..errors import ProtofedError
from ..registry import Registry
from .fixed import MOST_CLIENTS

STEPS = ("keys", "shares", "masked", "unmask")
REQUEST, ANSWER, REFUSAL = 1, 2, 3
HEADER = struct.Struct("<4sBBBBII16s")
MAGIC, VERSION = b"PFSS", 1
NUMBER = struct.Struct("<I")
LONGEST_REFUSAL = 400  # bytes


class SecureFailure(ProtofedError):
    """A secure sum has no result, since too few clients are left or their shares do not fit together.

    `dropped` says, by client, why it is not there; `up` and `down` are the bytes from and to each client.
    """

    def __init__(
        self,
        message: str,
        dropped: dict[int, str] | None = None,
        up: dict[int, int] | None = None,
        down: dict[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.dropped, self.up, self.down = dropped or {}, up or {}, down or {}


secure: Registry[Rules] = Registry("secure")


@secure.register("sums")
@dataclass(frozen=True)
class Rules:
    """How many clients a sum needs, and how many share secrets with each other; every party holds the server to them.

    The clients that sent keys stand in a ring, in random order, and each shares its secrets with `neighbours` of them and
    with itself: these are the holders of its shares. `threshold` of the holders reconstruct one of its secrets.

    - neighbours = min(clients − 1, 4·⌈log₂ clients⌉ + 2): up to 23 clients, every client is a neighbour of every other.
    - threshold = ⌊holders / 2⌋ + 1 where all are neighbours, ⌊holders / 4⌋ + 1 in a larger ring.

    >>> Rules().neighbours(100), Rules().threshold(100)
    (30, 8)
    """

    least: int = 3  # clients, below which neither a party nor the server goes on
    degree: int | None = None  # neighbours of a client, in place of the formula
    share: float | None = None  # of the holders, which the threshold exceeds, in place of 1/2 and 1/4

    def __post_init__(self) -> None:
        if self.least < 2:
            raise ProtofedError(f"least={self.least}: a sum over fewer than 2 clients is an upload")
        if self.degree is not None and self.degree < 2:
            raise ProtofedError(f"degree={self.degree}: a client needs at least 2 neighbours")
        if self.share is not None and not 0 < self.share < 1:
            raise ProtofedError(f"share={self.share}: must lie between 0 and 1")

    def neighbours(self, clients: int) -> int:
        """How many neighbours each of so many clients has; even, unless it is all the others."""
        wanted = 4 * (clients - 1).bit_length() + 2 if self.degree is None else self.degree
        return min(clients - 1, wanted + wanted % 2)

    def threshold(self, clients: int) -> int:
        """How many holders reconstruct a secret."""
        holders = self.neighbours(clients) + 1
        share = (0.5 if holders == clients else 0.25) if self.share is None else self.share
        return max(2, int(share * holders) + 1)


def digest(context: bytes) -> bytes:
    """The sixteen bytes that stand for a run and a round in every message."""
    return hashlib.sha256(b"protofed secure sum" + context).digest()[:16]


def frame(step: str, direction: int, client: int, context: bytes, count: int, body: bytes = b"") -> bytes:
    """Make a message.

    Args:
        step: one of `STEPS`.
        direction: `REQUEST`, `ANSWER` or `REFUSAL`.
        client: who receives the request or sends the answer.
        context: the sixteen bytes of the round.
        count: what the step counts.
        body: what follows the header.

    Returns:
        the message.
    """
    return header(step, direction, client, context, count) + body


def header(step: str, direction: int, client: int, context: bytes, count: int) -> bytes:
    """The header of a message, as in `frame`."""
    return HEADER.pack(MAGIC, VERSION, STEPS.index(step) + 1, direction, 0, client, count, context)


def size(message: bytes) -> int:
    """The bytes of a message; a ValueError says that it is none."""
    if not isinstance(message, bytes):
        raise ValueError(f"a message of type {type(message).__name__}")
    return len(message)


def unframe(message: bytes, step: str, direction: int, client: int, context: bytes) -> tuple[int, memoryview]:
    """Read a message.

    Args:
        message: the bytes.
        step: one of `STEPS`, which it must be for.
        direction: which it must have; an answer may be a refusal instead.
        client: who must be named in it.
        context: the sixteen bytes of the round, which it must have.

    Returns:
        the count and the body.

    Raises:
        ValueError: it is not such a message, or it is a refusal; the error says what it is.
    """
    if size(message) < HEADER.size:
        raise ValueError(f"a message of {size(message)} bytes")
    data = memoryview(message)
    magic, version, number, way, zero, named, count, where = HEADER.unpack(data[: HEADER.size])
    if magic != MAGIC or version != VERSION or zero:
        raise ValueError("not a message of a secure sum of this version")
    if where != context:
        raise ValueError("a message of another run or round")
    if number != STEPS.index(step) + 1 or named != client:
        raise ValueError(f"a message of another step or client than {step} and {client}")
    if way == REFUSAL and direction == ANSWER:
        raise ValueError(f"refused: {_line(data[HEADER.size :])}")
    if way != direction:
        raise ValueError("a message of the wrong direction")
    return count, data[HEADER.size :]


def _line(body: memoryview) -> str:
    """What a client says of its refusal, in one printable line."""
    text = bytes(body[:LONGEST_REFUSAL]).decode("utf-8", "replace")
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def sized(count: int, body: memoryview, entries: int, width: int, before: int = 0) -> memoryview:
    """Check how long a body is.

    Args:
        count: the count in the header.
        body: what follows the header.
        entries: how many entries there must be.
        width: bytes of an entry.
        before: bytes before the first entry.

    Returns:
        the body.

    Raises:
        ValueError: the count or the length of the body is another one.
    """
    if count != entries or len(body) != before + entries * width:
        raise ValueError(
            f"{count} entries in {len(body)} bytes where {entries} in {before + entries * width} were expected"
        )
    return body


def numbers(body: memoryview, width: int) -> list[int]:
    """The clients' numbers that begin each entry of a list.

    Args:
        body: the entries.
        width: bytes of an entry.

    Returns:
        the numbers.

    Raises:
        ValueError: the last entry is cut short, or the numbers are not in ascending order, each once.
    """
    if len(body) % width:
        raise ValueError(f"{len(body)} bytes where entries have {width}")
    listed = [NUMBER.unpack_from(body, start)[0] for start in range(0, len(body), width)]
    if any(one >= other for one, other in pairwise(listed)):
        raise ValueError("a list of clients that is not in ascending order, or holds one twice")
    return listed


def check_clients(clients: int) -> None:
    """Refuse more clients than a sum can have without wrapping round."""
    if clients > MOST_CLIENTS:
        raise ProtofedError(f"a secure sum over {clients} clients; its numbers hold sums over up to {MOST_CLIENTS}")
