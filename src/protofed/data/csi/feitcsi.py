"""Captures of FeitCSI, which has an Intel AX200 or AX210: a header of 272 bytes, then 16-bit numbers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from .packets import NAN, Clock, Damaged, Format, Options, Packet, Tally, address
from .pilots import data_tones

HEADER = 272
_EFFICIENT = 4  # the format 802.11ax in the bits 8 to 10 of the rate


def _sizes(head: bytes) -> tuple[int, int, int, int]:
    """The bytes of the values, the numbers of receive and transmit antennas, and of tones."""
    return *struct.unpack("<I", head[:4]), head[46], head[47], *struct.unpack("<I", head[52:56])


def _fits(head: bytes) -> bool:
    if len(head) < 64:
        return False
    size, receive, send, tones = _sizes(head)
    return 0 < receive <= 4 and 0 < send <= 4 and 0 < tones <= 4096 and size == 4 * receive * send * tones


def _power(strengths: tuple[int, int]) -> float:
    """The received power in dBm; the card gives it for each antenna without its sign."""
    total = sum(10 ** (-strength / 10) for strength in strengths if 0 < strength < 128)
    return 10 * float(np.log10(total)) if total else NAN


def packets(stream: BinaryIO, tally: Tally, options: Options) -> Iterator[Packet]:
    """Headers and values, one after another. An antenna is a pair of a receive and a transmit antenna."""
    clock, at = Clock(32, 1e-6), 0
    while head := stream.read(HEADER):
        if len(head) < HEADER:
            raise Damaged(at, "cut off within a header")
        if not _fits(head):
            raise Damaged(at, "expected a header of FeitCSI")
        size, receive, send, tones = _sizes(head)
        body = stream.read(size)
        if len(body) < size:
            raise Damaged(at, f"a packet of {size:,} bytes is cut off after {len(body):,}")
        at += HEADER + size
        clock_us, rate = struct.unpack("<II", head[88:96])
        found = data_tones((rate >> 8 & 7) >= _EFFICIENT, tones)
        if found is None:
            tally.leave_out(f"of an unknown kind ({tones} tones)")
            continue
        places, numbers = found

        def decode(body: bytes = body, pairs: int = receive * send, places: np.ndarray = places) -> np.ndarray:
            values = np.frombuffer(body, "<i2").astype(np.float64).reshape(pairs, -1, 2)
            return (values[..., 0] + 1j * values[..., 1])[:, places]

        rssi = _power(struct.unpack("<II", head[60:68]))
        yield Packet(clock(clock_us), receive * send, numbers, decode, rssi=rssi, sender=address(head[68:74]))


FORMAT = Format("FeitCSI", (".csi", ".dat"), _fits, packets, "a capture of FeitCSI")
