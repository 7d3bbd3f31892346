"""Captures of any format: which format a file has, the packets that are asked for, and whole captures in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from ...errors import ProtofedError
from ..sources import first_line, listed
from . import atheros, esp32, feitcsi, intel, nexmon, picoscenes
from .packets import Bandwidth, Chip, Damaged, Format, Options, Packet, Tally

FORMATS = (nexmon.FORMAT, intel.FORMAT, atheros.FORMAT, esp32.FORMAT, picoscenes.FORMAT, feitcsi.FORMAT)
ENDINGS = tuple(dict.fromkeys(ending for form in FORMATS for ending in form.endings))
Shapes = Literal["majority", "first"]


@dataclass(frozen=True)
class Wanted:
    """Which packets of a capture are wanted.

    Attributes:
        chip: The chip of Nexmon captures, where the packets' own number is not to be trusted.
        bandwidth: The bandwidth of Nexmon captures in MHz; packets of another are left out.
        sender: The transmitter's address; packets of others are left out.
        shapes: Packets must have one number of antennas and subcarriers: that of most packets, or of the first.
    """

    chip: Chip | None = None
    bandwidth: Bandwidth | None = None
    sender: str | None = None
    shapes: Shapes = "majority"

    @property
    def options(self) -> Options:
        """What a reader is told."""
        return Options(self.chip, self.bandwidth)


def format_of(file: Path, stream: BinaryIO) -> Format:
    """The format of an opened file, by its ending and its first bytes."""
    candidates = [form for form in FORMATS if file.suffix.lower() in form.endings]
    if not candidates:
        raise ProtofedError(f"{file}: a capture ends in {listed(ENDINGS)}")
    head = stream.peek(512)[:512]  # type: ignore[attr-defined]
    if not head:
        raise ProtofedError(f"{file}: empty")
    found = next((form for form in candidates if form.fits(head)), None)
    if found is None:
        expected = " nor ".join(form.clue for form in candidates)
        raise ProtofedError(f"{file}: not {expected}: it begins {head[:8].hex()!r}")
    return found


def packets(file: Path, wanted: Wanted | None = None, tally: Tally | None = None) -> Iterator[Packet]:
    """The wanted packets of a capture, while it is read.

    Args:
        file: The capture.
        wanted: Which packets are wanted; by default all of the most common shape.
        tally: Counts what was given and left out.

    Returns:
        The packets in the order of the file. All have one shape. A capture that cannot be read further raises
        `Damaged` after the packets before.
    """
    wanted, tally = wanted or Wanted(), tally or Tally()
    yield from alike(sent(file, wanted, tally), _shape(file, wanted), tally)
    if not tally.given:
        raise ProtofedError(f"{file}: no packet with channel state information in it{_without(tally, wanted)}")


def alike(stream: Iterable[Packet], shape: tuple[int, int] | None, tally: Tally) -> Iterator[Packet]:
    """The packets of one shape.

    Args:
        stream: Packets of any shape.
        shape: The numbers of antennas and subcarriers; None takes the first packet's.
        tally: Counts what is given and left out.
    """
    for packet in stream:
        if shape is None:
            shape = packet.shape
        if packet.shape != shape:
            antennas, tones = packet.shape
            tally.leave_out(f"of {antennas} × {tones} antennas and subcarriers, not {shape[0]} × {shape[1]}")
            continue
        tally.given += 1
        yield packet


def of_sender(stream: Iterable[Packet], wanted: Wanted, tally: Tally) -> Iterator[Packet]:
    """The packets of the wanted sender; the tally counts the others."""
    sender = None if wanted.sender is None else wanted.sender.lower().replace("-", ":")
    for packet in stream:
        if sender is None or packet.sender == sender:
            yield packet
        else:
            tally.leave_out("of another sender" if packet.sender else "without a sender's address")


def _without(tally: Tally, wanted: Wanted) -> str:
    """Why a capture gave no packet."""
    settings = [f"{key}={value}" for key in ("bandwidth", "sender") if (value := getattr(wanted, key)) is not None]
    asked = f" for {', '.join(settings)}" if settings else ""
    return asked + (f" ({tally.text()})" if tally.left_out else "")


def _shape(file: Path, wanted: Wanted) -> tuple[int, int] | None:
    """The most common shape of the wanted packets; of several the one that comes first. Nothing is decoded for it."""
    if wanted.shapes == "first":
        return None
    shapes: Counter[tuple[int, int]] = Counter()
    with suppress(Damaged):  # what comes before counts
        shapes.update(packet.shape for packet in sent(file, wanted, Tally()))
    return shapes.most_common(1)[0][0] if shapes else None


def sent(file: Path, wanted: Wanted, tally: Tally) -> Iterator[Packet]:
    """The packets of the wanted sender in a capture, of any shape; `packets` has those of one shape."""
    try:
        with file.open("rb") as stream:
            form = format_of(file, stream)
            try:
                found = form.read(stream, tally, wanted.options)
                yield from of_sender(found, wanted, tally)
            except ProtofedError as error:
                raise ProtofedError(f"{file}: {error}") from None
    except OSError as error:
        raise ProtofedError(f"{file}: unreadable ({first_line(error)})") from None


@dataclass(frozen=True)
class Recording:
    """A whole capture in memory.

    Attributes:
        csi: The channel, complex `[packets, antennas, subcarriers]`; an antenna is a pair of a receive and a transmit one.
        time: Seconds of each packet; only differences have a meaning.
        rssi: The received power of each packet in dBm, NaN where the format has none.
        agc: The gain of the receiver in dB, likewise.
        noise: The noise in dBm, likewise.
        sender: The transmitter's address of each packet.
        tones: The numbers of the subcarriers, counted from the centre.
        tally: What was left out, and why.
    """

    csi: np.ndarray
    time: np.ndarray
    rssi: np.ndarray
    agc: np.ndarray
    noise: np.ndarray
    sender: tuple[str, ...]
    tones: np.ndarray
    tally: Tally = field(default_factory=Tally)


def read_capture(file: str | Path, wanted: Wanted | None = None) -> Recording:
    """Read a whole capture.

    Args:
        file: The capture.
        wanted: Which packets are wanted; by default all of the most common shape.

    Returns:
        The recording. `read_capture("office.pcap").csi.shape`. A damaged capture is an error of one line.
    """
    tally, path = Tally(), Path(file).expanduser()
    try:
        found = list(packets(path, wanted, tally))
    except Damaged as damage:
        raise ProtofedError(f"{path}: {damage}") from None
    numbers = {name: np.array([getattr(p, name) for p in found]) for name in ("time", "rssi", "agc", "noise")}
    channel = np.stack([packet.decode() for packet in found])
    return Recording(channel, **numbers, sender=tuple(p.sender for p in found), tones=found[0].tones, tally=tally)
