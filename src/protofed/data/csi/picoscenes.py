"""Captures of PicoScenes: frames of named segments, from four kinds of hardware.

The channel is decoded here and not by csiread, which of an AX200 or AX210 takes some pilot tones for data and drops data
in their place (1.4.1).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

from . import intel
from .packets import NAN, Clock, Damaged, Format, Options, Packet, Tally, address, bits_of, sides
from .pilots import data_tones

_MAGIC = b"\x15\x03\x15\x20\x01\x00"
_LARGEST = 2**24  # bytes of a frame
_QCA9300, _IWL5300, _AX200, _AX210, _USRP = 0x9300, 0x5300, 0x2000, 0x2100, 0x1234
_EFFICIENT = 3  # the packet formats from here on are of 802.11ax
_CHANNEL = {  # by version: the layout of what stands before the values
    1: ("<HbHQQIHBBBBI", False, False),
    2: ("<HbHQQIHBBBBhI", False, False),
    3: ("<HbHQQIHBBBHBhI", False, True),
    4: ("<HBbHQQIHBBBHBhI", True, True),
}
_BASIC = {1: "<HQhBHHBBBBbbbbb", 2: "<HQhBHHBBBBBBbbbbb", 3: "<HQhhHBHHBBBBBBbbbbb"}
_REMAINDERS = {(True, 2020): range(996, 1024), (False, 498): range(242, 256)}  # between the halves of 160 MHz


class Unreadable(Exception):
    """A frame cannot be decoded; the message says why, as a reason for a tally."""


class _Segment(NamedTuple):
    version: int
    body: bytes


class _Channel(NamedTuple):
    """The numbers before the values of a channel, and the values."""

    device: int
    format: int
    bandwidth: int
    tones: int
    send: int
    receive: int
    values: bytes


def packets(stream: BinaryIO, tally: Tally, options: Options) -> Iterator[Packet]:
    """The frames that have a channel. An antenna is a pair of a receive and a transmit antenna."""
    clock, at = Clock(32, 1e-6), 0
    while head := stream.read(11):
        if len(head) < 11 or head[4:10] != _MAGIC:
            raise Damaged(at, "expected a frame")
        length = int.from_bytes(head[:4], "little") + 4
        body = stream.read(length - 11) if 11 <= length <= _LARGEST else b""
        found = _segments(body, head[10]) if len(body) == length - 11 else None
        if found is None:
            raise Damaged(at, f"a frame of {length:,} bytes is cut off or its segments do not fit")
        at += length
        segments, rest = found
        try:
            yield _packet(segments, rest, clock)
        except Unreadable as reason:
            tally.leave_out(str(reason))


def _segments(body: bytes, number: int) -> tuple[dict[bytes, _Segment], bytes] | None:
    """The segments of a frame by name, and the packet after them; None where they do not fit into the frame."""
    at, found = 0, {}
    for _ in range(number):
        if at + 5 > len(body):
            return None
        size, name = int.from_bytes(body[at : at + 4], "little"), body[at + 4]
        if size < 3 + name or at + 4 + size > len(body):
            return None
        start = at + 5 + name
        version = int.from_bytes(body[start : start + 2], "little")
        found[body[at + 5 : start].rstrip(b"\0")] = _Segment(version, body[start + 2 : at + 4 + size])
        at += 4 + size
    return found, body[at:]


def _packet(segments: dict[bytes, _Segment], rest: bytes, clock: Clock) -> Packet:
    if b"CSI" not in segments:
        raise Unreadable("without a channel")
    channel = _channel(segments[b"CSI"])
    if channel.device not in _DECODERS:
        raise Unreadable(f"of unknown hardware ({channel.device:#x})")
    antennas, tones, decode = _DECODERS[channel.device](channel)
    time, rssi, noise = _received(segments, channel.device, clock)
    return Packet(time, antennas, tones, decode, rssi=rssi, noise=noise, sender=address(rest[10:16]))


def _channel(segment: _Segment) -> _Channel:
    if segment.version not in _CHANNEL:
        raise Unreadable(f"of an unknown version ({segment.version})")
    layout, firmware, several = _CHANNEL[segment.version]
    start = struct.calcsize(layout)
    if len(segment.body) < start:
        raise Unreadable("garbled or cut short")
    numbers = list(struct.unpack(layout, segment.body[:start]))
    if firmware:
        del numbers[1]
    device, form, bandwidth, _, _, _, tones, send, receive, extra = numbers[:10]
    length, values = numbers[-1], segment.body[start:]
    measured = numbers[10] if several else 1
    if len(values) < length or not (0 < tones <= 4096 and 0 < receive <= 8 and 0 < send + extra <= 8 and measured <= 1):
        raise Unreadable("garbled or cut short")
    return _Channel(device, form, bandwidth, tones, send + extra, receive, values[:length])


def _received(segments: dict[bytes, _Segment], device: int, clock: Clock) -> tuple[float, float, float]:
    """When and how strongly a frame was received, and the noise: seconds and dBm."""
    basic = segments.get(b"RxSBasic")
    if basic is None or basic.version not in _BASIC or len(basic.body) < struct.calcsize(_BASIC[basic.version]):
        raise Unreadable("garbled or cut short")
    layout = _BASIC[basic.version]
    _, stamp, *_, noise, rssi, _, _, _ = struct.unpack(layout, basic.body[: struct.calcsize(layout)])
    time = stamp * (1e-9 if device == _USRP else 1e-6)
    extra = segments.get(b"MVMExtra")
    if device in (_AX200, _AX210) and extra is not None and len(extra.body) >= 94:
        time = clock(int.from_bytes(extra.body[90:94], "little"))
    strength = float(rssi if basic.version >= 3 else rssi + noise)
    return time, strength if strength else NAN, float(noise)


_Decoded = tuple[int, np.ndarray, Callable[[], np.ndarray]]


def _qca9300(channel: _Channel) -> _Decoded:
    send = len(channel.values) // (140 if channel.bandwidth == 20 else 285) // channel.receive
    tones = {56: sides(1, 28), 114: sides(2, 58)}.get(channel.tones)
    if tones is None or not send or 8 * len(channel.values) < 20 * len(tones) * send * channel.receive:
        raise Unreadable("garbled or cut short")
    pairs = send * channel.receive

    def decode() -> np.ndarray:
        numbers = bits_of(channel.values, 10)[: 2 * len(tones) * pairs].reshape(len(tones), send, channel.receive, 2)
        return (numbers[..., 1] + 1j * numbers[..., 0]).transpose(2, 1, 0).reshape(pairs, -1)

    return pairs, tones, decode


def _iwl5300(channel: _Channel) -> _Decoded:
    send = (len(channel.values) - 12) // 60 // channel.receive
    if channel.tones != 30 or send < 1 or 8 * len(channel.values) < 30 * (3 + 16 * send * channel.receive):
        raise Unreadable("garbled or cut short")

    def decode() -> np.ndarray:
        return intel.channel(channel.values, channel.receive, send).reshape(-1, 30)

    return send * channel.receive, intel.FORTY if channel.bandwidth == 40 else intel.TWENTY, decode


def _iwlmvm(channel: _Channel) -> _Decoded:
    efficient, pairs = channel.format >= _EFFICIENT, channel.send * channel.receive
    if len(channel.values) != 4 * pairs * channel.tones:
        raise Unreadable("garbled or cut short")
    between = _REMAINDERS.get((efficient, channel.tones), range(0))
    found = data_tones(efficient, channel.tones - len(between))
    if found is None:
        raise Unreadable(f"of an unknown kind ({channel.tones} tones)")
    places = np.delete(np.arange(channel.tones), between)[found[0]]

    def decode() -> np.ndarray:
        values = np.frombuffer(channel.values, "<i2").astype(np.float64)
        values = values.reshape(channel.send, channel.receive, channel.tones, 2).swapaxes(0, 1)[:, :, places]
        return (values[..., 0] + 1j * values[..., 1]).reshape(pairs, -1)

    return pairs, found[1], decode


def _usrp(channel: _Channel) -> _Decoded:
    """Numbers of the subcarriers, then a matrix `[tones, send, receive]` of doubles that says its own shape."""
    matrix = channel.values[2 * channel.tones :]
    width = {b"1": 4, b"2": 8}.get(matrix[3:4], 0)
    dimensions = matrix[4] if len(matrix) > 4 else 0
    start = 5 + width * dimensions + 4
    pairs = channel.send * channel.receive
    if not width or not 0 < dimensions <= 4 or len(matrix) < start + 16 * channel.tones * pairs:
        raise Unreadable("garbled or cut short")
    sizes = [int.from_bytes(matrix[5 + width * i : 5 + width * (i + 1)], "little") for i in range(dimensions)]
    if sizes[0] != channel.tones or int(np.prod(sizes)) != channel.tones * pairs:
        raise Unreadable("garbled or cut short")

    def decode() -> np.ndarray:
        values = np.frombuffer(matrix, "<c16", channel.tones * pairs, start)
        if matrix[start - 1 : start] == b"R":
            values = values.reshape(channel.tones, channel.send, channel.receive).transpose(2, 1, 0)
        return values.reshape(pairs, channel.tones)

    return pairs, np.frombuffer(channel.values, "<i2", channel.tones), decode


_DECODERS: dict[int, Callable[[_Channel], _Decoded]] = {
    _QCA9300: _qca9300,
    _IWL5300: _iwl5300,
    _AX200: _iwlmvm,
    _AX210: _iwlmvm,
    _USRP: _usrp,
}
FORMAT = Format("PicoScenes", (".csi",), lambda head: head[4:10] == _MAGIC, packets, "a PicoScenes capture")
