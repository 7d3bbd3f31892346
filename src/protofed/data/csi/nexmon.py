"""Captures of Nexmon's extractor: pcap files of UDP packets, one for each core and spatial stream of a frame."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ...errors import ProtofedError
from .packets import LONGEST, NAN, Bandwidth, Chip, Damaged, Format, Options, Packet, Tally, address, sides

TONES: dict[int, tuple[Bandwidth, int, int]] = {64: (20, 1, 28), 128: (40, 2, 58), 256: (80, 2, 122)}
"""By length of the Fourier transform: the bandwidth in MHz, and the first and last used subcarrier on each side."""
CHIPS: dict[int, Chip] = {
    0x0001: "4339",
    0x0065: "43455c0",
    0xA6DC: "43455c0",
    0x0003: "4358",
    0xDEAD: "4358",
    0x006A: "4366c0",
    0xE834: "4366c0",
}
"""The chip by the number that its packets carry."""
_PCAP = {  # magic bytes: byte order, fractions of a second
    b"\xd4\xc3\xb2\xa1": ("<", 10**6),
    b"\xa1\xb2\xc3\xd4": (">", 10**6),
    b"\x4d\x3c\xb2\xa1": ("<", 10**9),
    b"\xa1\xb2\x3c\x4d": (">", 10**9),
}
_PCAPNG = b"\x0a\x0d\x0d\x0a"
MARK = b"\x11\x11"  # what every packet of Nexmon begins with
_TOGETHER = 0.1  # seconds within which the packets of one frame arrive


def used(tones: int, low: int, high: int) -> np.ndarray:
    """The bins of the used subcarriers in ascending frequency.

    Args:
        tones: The length of the Fourier transform, whose first bin is the centre.
        low: The first used subcarrier on each side of the centre.
        high: The last one.

    Returns:
        The bins. `used(64, 1, 28)` has 56.
    """
    return sides(low, high) % tones


class Piece(NamedTuple):
    """One UDP packet: what one core received of one spatial stream of a frame."""

    time: float
    body: bytes
    tones: int
    chip: Chip

    @property
    def frame(self) -> tuple[bytes, bytes, int]:
        """The sender and the sequence number of the frame, and the number of its tones."""
        return self.body[4:10], self.body[10:12], self.tones

    @property
    def place(self) -> tuple[int, int]:
        """The core and the spatial stream."""
        number = int.from_bytes(self.body[12:14], "little")
        return number & 7, number >> 3 & 7

    @property
    def rssi(self) -> float:
        """In dBm, of newer firmware, which has it in half of the magic bytes."""
        return NAN if self.body[2:4] == b"\x11\x11" else float(int.from_bytes(self.body[2:3], "little", signed=True))


class Frames:
    """Joins pieces to frames: the cores and spatial streams that received one frame are its antennas."""

    def __init__(self, antennas: int | None = None) -> None:
        """
        Args:
            antennas: A frame is whole with so many pieces, so that nobody waits for the next one to begin; None where
                that is not known.
        """
        self.antennas = antennas
        self._readers: dict[tuple[Chip, int, bool], Any] = {}
        self._group: list[Piece] = []
        self._whole = False

    def add(self, piece: Piece, tally: Tally) -> Iterator[Packet]:
        """Add a piece, and give the frames that are whole because of it."""
        first = self._group[0] if self._group else None
        if (
            first is None
            or piece.frame != first.frame
            or piece.place in {other.place for other in self._group}
            or abs(piece.time - first.time) > _TOGETHER
        ):
            yield from self.rest()
        elif self._whole:
            tally.leave_out(f"of an antenna beyond {self.antennas}")
            return
        self._group.append(piece)
        if len(self._group) == self.antennas:
            self._whole = True
            yield _joined(self._group, self._readers)

    def rest(self, before: float = float("inf")) -> Iterator[Packet]:
        """The frame that waits for more pieces, if it began long before that time."""
        if self._group and before - self._group[0].time > _TOGETHER:
            group, whole, self._group, self._whole = self._group, self._whole, [], False
            if not whole:
                yield _joined(group, self._readers)


def packets(stream: BinaryIO, tally: Tally, options: Options) -> Iterator[Packet]:
    """The frames of a capture."""
    frames = Frames()
    try:
        for time, body in bodies(stream, tally):
            piece = piece_of(body, time, tally, options)
            if piece is not None:
                yield from frames.add(piece, tally)
    except Damaged:
        yield from frames.rest()
        raise
    yield from frames.rest()


@lru_cache
def _places(tones: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the used subcarriers, and their bins."""
    _, low, high = TONES[tones]
    return sides(low, high), used(tones, low, high)


def _joined(group: list[Piece], readers: dict[tuple[Chip, int, bool], Any]) -> Packet:
    first = group[0]
    tones, bins = _places(first.tones)
    pieces = sorted(group, key=lambda piece: piece.place)

    def decode() -> np.ndarray:
        return np.stack([_channel(piece, readers)[bins] for piece in pieces])

    return Packet(first.time, len(pieces), tones, decode, rssi=first.rssi, sender=address(first.body[4:10]))


def _channel(piece: Piece, readers: dict[tuple[Chip, int, bool], Any]) -> np.ndarray:
    """All bins of a packet. Some chips write floating numbers of their own, which csiread unpacks."""
    if piece.chip in ("4339", "43455c0"):
        numbers = np.frombuffer(piece.body, "<i2", 2 * piece.tones, 18).astype(np.float64)
        return numbers[::2] + 1j * numbers[1::2]
    plain = piece.body[:4] == b"\x11" * 4
    key = (piece.chip, piece.tones, plain)
    if key not in readers:
        try:
            import csiread
        except ImportError:
            raise ProtofedError(
                f"captures of the chip {piece.chip} need csiread: pip install 'protofed[csi]'"
            ) from None
        reader = csiread.Nexmon if plain else csiread.NexmonPull46
        readers[key] = reader(None, chip=piece.chip, bw=TONES[piece.tones][0], if_report=False)
    readers[key].pmsg(piece.body)
    return readers[key].csi[0].copy()


def bodies(stream: BinaryIO, tally: Tally) -> Iterator[tuple[float, bytes]]:
    """The time and the content of each packet of Nexmon in a pcap file, cut by the length that UDP gives."""
    head = stream.read(24)
    if head[:4] == _PCAPNG:
        raise ProtofedError("a pcapng file; expected pcap (editcap -F pcap makes one of it)")
    if len(head) < 24:
        raise ProtofedError(f"not a pcap file: it begins {head[:4].hex()!r}")
    order, fractions = _PCAP[head[:4]]
    (link,) = struct.unpack(f"{order}I", head[20:])
    if link != 1:
        raise ProtofedError(f"link type {link}; expected Ethernet (1), as Nexmon's packets are")
    at = 24
    while header := stream.read(16):
        if len(header) < 16:
            raise Damaged(at, "cut off within a packet's header")
        seconds, fraction, length, original = struct.unpack(f"{order}4I", header)
        if fraction >= fractions or length > min(original, LONGEST):
            raise Damaged(at, "expected a packet's header")
        frame = stream.read(length)
        if len(frame) < length:
            raise Damaged(at, f"a packet of {length:,} bytes is cut off after {len(frame):,}")
        at += 16 + length
        if frame[6:12] != b"NEXMON":
            tally.leave_out("of other traffic")
            continue
        size = int.from_bytes(frame[38:40], "big") - 8
        body = frame[42 : 42 + max(size, 0)]
        if len(body) != size:
            tally.leave_out("garbled or cut short")
            continue
        yield seconds + fraction / fractions, body


def piece_of(body: bytes, time: float, tally: Tally, options: Options) -> Piece | None:
    """The content of a UDP packet as a piece of a frame.

    Args:
        body: The content.
        time: When it arrived.
        tally: Counts it where it is left out.
        options: What a person says of the format.

    Returns:
        The piece; None where it is left out.
    """
    tones, remainder = divmod(len(body) - 18, 4)
    if remainder or tones not in TONES or body[:2] != MARK:
        tally.leave_out("garbled or cut short")
        return None
    if options.bandwidth not in (None, TONES[tones][0]):
        tally.leave_out("of another bandwidth")
        return None
    chip = options.chip or CHIPS.get(int.from_bytes(body[16:18], "little"))
    if chip is None:
        tally.leave_out(f"of an unknown chip ({body[16:18].hex()}); chip= names it")
        return None
    return Piece(time, body, tones, chip)


FORMAT = Format("Nexmon", (".pcap",), lambda head: head[:4] in (*_PCAP, _PCAPNG), packets, "a pcap file")
