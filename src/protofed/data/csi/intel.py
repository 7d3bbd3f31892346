"""Captures of the Linux 802.11n CSI Tool, which has an Intel 5300: 30 subcarriers of up to three by three antennas."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from .packets import NAN, Clock, Damaged, Format, Options, Packet, Tally, signed

TWENTY = np.array([*range(-28, -1, 2), -1, *range(1, 28, 2), 28])
FORTY = np.arange(-58, 59, 4)
CODES = (0xBB, 0xC1)  # a measured channel; the packet that it belongs to


def received_power(strengths: tuple[int, int, int], agc: int) -> float:
    """The received power in dBm: the sum over the antennas, less the gain that the receiver had.

    Args:
        strengths: The signal strength at each antenna in dB above an internal reference; 0 is none.
        agc: The gain in dB.

    Returns:
        The power. `received_power((40, 0, 0), 30)` is −34.
    """
    total = sum(10 ** (strength / 10) for strength in strengths if strength)
    return 10 * float(np.log10(total)) - 44 - agc if total else NAN


def channel(body: bytes, receive: int, send: int) -> np.ndarray:
    """The channel `[receive, send, 30]` of 8-bit numbers; 3 bits stand before each subcarrier."""
    bits = np.unpackbits(np.frombuffer(body, np.uint8), bitorder="little")
    each = 3 + 16 * receive * send
    numbers = signed(bits[: 30 * each].reshape(30, each)[:, 3:].reshape(30, receive, send, 2, 8))
    return (numbers[..., 0] + 1j * numbers[..., 1]).transpose(1, 2, 0)


def packets(stream: BinaryIO, tally: Tally, options: Options) -> Iterator[Packet]:
    """Records of length (2 bytes), code (1 byte) and body. An antenna is a pair of a receive and a transmit antenna."""
    clock, at = Clock(32, 1e-6), 0
    while head := stream.read(3):
        if len(head) < 3:
            raise Damaged(at, "cut off within a record's header")
        length, code = struct.unpack(">HB", head)
        if code not in CODES or not length:
            raise Damaged(at, f"expected a record, got code {code:#x}")
        body = stream.read(length - 1)
        if len(body) < length - 1:
            raise Damaged(at, f"a record of {length:,} bytes is cut off after {len(body) + 1:,}")
        at += 2 + length
        if code != CODES[0]:
            continue
        packet = _packet(body, clock)
        if packet is None:
            tally.leave_out("garbled or cut short")
        else:
            yield packet


def _packet(body: bytes, clock: Clock) -> Packet | None:
    if len(body) < 20:
        return None
    time, _, _, receive, send, a, b, c, noise, agc, order, size, rate = struct.unpack("<IHHBBBBBbBBHH", body[:20])
    expected = (30 * (16 * receive * send + 3) + 7) // 8
    if not (0 < receive <= 3 and 0 < send <= 3) or len(body) != 20 + size or size < expected:
        return None
    places = [order >> 2 * antenna & 3 for antenna in range(receive)]
    if len(set(places)) < receive or max(places) > 2:
        return None

    def decode() -> np.ndarray:
        return channel(body[20:], receive, send)[np.argsort(places)].reshape(receive * send, 30)

    tones = FORTY if rate & 0x800 else TWENTY
    return Packet(clock(time), receive * send, tones, decode, received_power((a, b, c), agc), agc, noise)


FORMAT = Format(
    "Intel 5300", (".dat",), lambda head: head[2:3] in (b"\xbb", b"\xc1"), packets, "a capture of the Intel 5300"
)
