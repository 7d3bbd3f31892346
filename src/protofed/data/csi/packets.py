"""What a reader of captures gives: packets, one after another, and a tally of what it left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Literal, NamedTuple

import numpy as np

Bandwidth = Literal[20, 40, 80]
Chip = Literal["43455c0", "4339", "4358", "4366c0"]
NAN = float("nan")
LONGEST = 262_144  # bytes: the longest packet that capture tools write


class Damaged(Exception):
    """A capture cannot be read beyond this byte."""

    def __init__(self, offset: int, problem: str) -> None:
        super().__init__(f"damaged at byte {offset:,}: {problem}")


@dataclass(frozen=True)
class Packet:
    """One packet of a capture. Its channel is decoded on request, so that packets that are left out cost little.

    Attributes:
        time: When it arrived, in seconds; only differences have a meaning.
        antennas: The number of pairs of a receive and a transmit antenna.
        tones: The numbers of its subcarriers, counted from the centre frequency, in ascending order.
        decode: Gives the channel, complex `[antennas, subcarriers]`.
        rssi: The received power in dBm, where the format has it.
        agc: The gain of the receiver in dB, likewise.
        noise: The noise in dBm, likewise.
        sender: The transmitter's address, `aa:bb:cc:dd:ee:ff`; empty where the format has none.
    """

    time: float
    antennas: int
    tones: np.ndarray
    decode: Callable[[], np.ndarray]
    rssi: float = NAN
    agc: float = NAN
    noise: float = NAN
    sender: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of antennas and of subcarriers."""
        return self.antennas, len(self.tones)


@dataclass
class Tally:
    """How many packets a capture gave, and how many were left out, by the reason.

    Example: `Tally(given=566).text()` is `566 packets`.
    """

    given: int = 0
    left_out: Counter[str] = field(default_factory=Counter)

    def leave_out(self, reason: str) -> None:
        """Count a packet that is not used."""
        self.left_out[reason] += 1

    def text(self) -> str:
        """The tally in one line: `566 packets, 3 left out: 2 cut off, 1 of another shape`."""
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in self.left_out.most_common())
        return f"{self.given:,} packets" + (f", {self.left_out.total():,} left out: {reasons}" if reasons else "")


class Options(NamedTuple):
    """What a person may say of a format: the chip and the bandwidth of Nexmon captures."""

    chip: Chip | None = None
    bandwidth: Bandwidth | None = None


Reader = Callable[[BinaryIO, Tally, Options], Iterator[Packet]]


class Format(NamedTuple):
    """A format of captures: the endings of its files, whether a file's first bytes fit it, and its reader."""

    name: str
    endings: tuple[str, ...]
    fits: Callable[[bytes], bool]
    read: Reader
    clue: str
    """What the file must be, for the message about one that is not."""


class Clock:
    """Seconds of a counter of `bits` bits that begins again at 0 when it is full.

    Example: `clock = Clock(32, 1e-6)`, then `clock(4_294_967_295)` and `clock(4)` are 5 µs apart.
    """

    def __init__(self, bits: int, unit: float) -> None:
        self.size, self.unit = 1 << bits, unit
        self.last: int | None = None
        self.turns = 0

    def __call__(self, count: int) -> float:
        if self.last is not None and self.last - count > self.size // 2:
            self.turns += 1
        self.last = count
        return (count + self.turns * self.size) * self.unit


def address(octets: bytes) -> str:
    """Six bytes as an address: `address(bytes(6))` is `00:00:00:00:00:00`."""
    return octets.hex(":") if len(octets) == 6 else ""


def sides(low: int, high: int) -> np.ndarray:
    """Subcarriers from `low` to `high` on both sides of the centre, ascending: `sides(1, 2)` is −2, −1, 1, 2."""
    side = np.arange(low, high + 1)
    return np.concatenate([-side[::-1], side])


def bits_of(content: bytes, width: int) -> np.ndarray:
    """Signed numbers of `width` bits, packed with the lowest bit first, as wireless cards write them.

    Args:
        content: The bytes; bits that do not fill a number are dropped.
        width: The number of bits of a number.

    Returns:
        The numbers. `bits_of(b"\\xff\\x01", 8)` is −1, 1.
    """
    bits = np.unpackbits(np.frombuffer(content, np.uint8), bitorder="little")
    return signed(bits[: len(bits) // width * width].reshape(-1, width))


def signed(bits: np.ndarray) -> np.ndarray:
    """Signed numbers of bits `[..., width]`, the lowest first."""
    width = bits.shape[-1]
    weights = (1 << np.arange(width)).astype(np.int64)
    weights[-1] = -weights[-1]
    return bits @ weights
