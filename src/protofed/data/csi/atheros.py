"""Captures of the Atheros CSI Tool: 56 or 114 subcarriers of up to three by three antennas, with the packets themselves."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from .packets import Damaged, Format, Options, Packet, Tally, address, bits_of, sides

TONES = {56: sides(1, 28), 114: sides(2, 58)}
_HEAD = "QHHBBBBBBBBBBBH"  # time, bytes of the channel, frequency, …, tones, antennas, strengths, bytes of the packet
_SIZE = struct.calcsize(f"<{_HEAD}")
_FLOOR = -95  # dBm: what the card's strengths are above


class _Layout:
    """The byte order of a file, and how many bytes stand before its first record."""

    def __init__(self, head: bytes) -> None:
        self.order, self.start = next(
            ((order, start) for start in (0, 1) for order in "<>" if _plausible(head[start:], order)), ("", 0)
        )


def _plausible(content: bytes, order: str) -> bool:
    if len(content) < 2 + _SIZE:
        return False
    length = struct.unpack(f"{order}H", content[:2])[0]
    _, size, _, _, _, _, _, tones, receive, send, *_, payload = struct.unpack(f"{order}{_HEAD}", content[2 : 2 + _SIZE])
    return _fits(length, size, tones, receive, send, payload)


def _fits(length: int, size: int, tones: int, receive: int, send: int, payload: int) -> bool:
    """Whether the numbers of a record fit each other. One without a channel has a size of 0."""
    values = tones in TONES and 0 < receive <= 3 and 0 < send <= 3 and size == 20 * tones * receive * send // 8
    return length - _SIZE - size - payload in (0, 2) and (not size or values)


def packets(stream: BinaryIO, tally: Tally, options: Options) -> Iterator[Packet]:
    """Records of length (2 bytes), numbers (25 bytes), channel and packet."""
    layout = _Layout(stream.peek(64) if hasattr(stream, "peek") else b"")
    at = layout.start
    stream.read(layout.start)
    while head := stream.read(2):
        length = int.from_bytes(head, "little" if layout.order == "<" else "big")
        body = stream.read(length)
        if len(head) < 2 or len(body) < length:
            raise Damaged(at, f"a record of {length:,} bytes is cut off after {len(body):,}")
        if length < _SIZE:
            raise Damaged(at, f"expected a record, got one of {length} bytes")
        time, size, _, error, _, _, _, tones, receive, send, rssi, _, _, _, payload = struct.unpack(
            f"{layout.order}{_HEAD}", body[:_SIZE]
        )
        if not _fits(length, size, tones, receive, send, payload):
            raise Damaged(at, f"{length:,} bytes do not fit {receive}×{send} antennas and {tones} subcarriers")
        at += 2 + length
        if error or not size:
            tally.leave_out("received with an error" if error else "without a channel")
            continue

        def decode(body: bytes = body, size: int = size, pairs: int = receive * send) -> np.ndarray:
            numbers = bits_of(body[_SIZE : _SIZE + size], 10).reshape(-1, pairs, 2)
            return (numbers[..., 1] + 1j * numbers[..., 0]).T

        sender = body[_SIZE + size + 10 : _SIZE + size + 16] if payload >= 16 else b""
        yield Packet(
            time * 1e-6, receive * send, TONES[tones], decode, rssi=rssi + float(_FLOOR), sender=address(sender)
        )


FORMAT = Format(
    "Atheros", (".dat",), lambda head: bool(_Layout(head).order), packets, "a capture of the Atheros CSI Tool"
)
