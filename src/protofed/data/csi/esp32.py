"""Captures of the ESP32 CSI tools: lines of text, a packet each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from .packets import LONGEST, Clock, Format, Options, Packet, Tally

FIELDS = 26
MARK = b"CSI_DATA,"
TONES = np.array([*range(-26, 0), *range(2, 27)])
"""The legacy training field, with which every packet begins, without +1: the board writes the first word too late."""


def packets(stream: BinaryIO, tally: Tally, options: Options) -> Iterator[Packet]:
    """The lines that begin with `CSI_DATA`; the board's messages between them do not count.

    A line may say another number of values than it has, because some tools write 128 of 384. What a serial line has
    garbled is left out, and the next line is read.
    """
    clock = Clock(32, 1e-6)
    while line := stream.readline(LONGEST):
        packet = packet_of(line, clock, tally)
        if packet is not None:
            yield packet


def packet_of(line: bytes, clock: Clock, tally: Tally) -> Packet | None:
    """The packet of a line.

    Args:
        line: The line, as the board wrote it.
        clock: The board's clock.
        tally: Counts the line where it is garbled.

    Returns:
        The packet; None where the line is garbled, or a message of the board.
    """
    if MARK not in line:
        return None
    packet = _packet(line[line.rindex(MARK) :], clock)
    if packet is None:
        tally.leave_out("garbled or cut short")
    return packet


def _packet(line: bytes, clock: Clock) -> Packet | None:
    text = line.decode("ascii", "replace").strip()
    fields = text.removesuffix("]").split(",", FIELDS - 1)
    if len(fields) != FIELDS or not text.endswith("]"):
        return None
    try:
        values = np.array(fields[-1].strip().removeprefix("[").replace(",", " ").split(), np.int64)
        rssi, noise, second, time = int(fields[3]), int(fields[14]), int(fields[17]), int(fields[18])
    except (ValueError, OverflowError):
        return None
    if len(values) < 128 or len(values) % 2 or np.abs(values).max() > 128 or time < 0:
        return None

    def decode() -> np.ndarray:
        # With a second channel the centre is in the middle, otherwise it is the first value.
        bins = TONES + 32 if second else TONES % 64
        return (values[1:128:2] + 1j * values[0:128:2])[None, bins]

    return Packet(clock(time), 1, TONES, decode, rssi=rssi, noise=noise, sender=fields[2].strip().lower())


FORMAT = Format("ESP32", (".csv",), lambda head: b"\0" not in head, packets, "text of an ESP32 CSI tool")
