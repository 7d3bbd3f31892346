"""Wi-Fi captures: channel state information cut into windows of amplitudes, labelled by a manifest.

This module follows the framing of each format, packet by packet, so that a capture of any size needs the memory of one
window, and damage is reported with its byte. The content of an intact packet is decoded by csiread, which would read
past the end of a broken one.
"""

from __future__ import annotations

import csv
import logging
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import ProtofedError
from .sources import DataSource, first_line, listed, register
from .types import Dataset

log = logging.getLogger("protofed")

Bandwidth = Literal[20, 40, 80]
Chip = Literal["43455c0", "4339", "4358", "4366c0"]

TONES: dict[int, tuple[Bandwidth, int, int]] = {64: (20, 1, 28), 128: (40, 2, 58), 256: (80, 2, 122)}
"""By length of the Fourier transform: the bandwidth in MHz, and the first and last used subcarrier on each side."""


class Damaged(Exception):
    """A capture cannot be read beyond this byte."""

    def __init__(self, offset: int, problem: str) -> None:
        super().__init__(f"damaged at byte {offset:,}: {problem}")


@register("csi")
@dataclass(frozen=True, kw_only=True)
class CSI(DataSource):
    """Captures named in a manifest (columns `file`, `room`, `people`; `session` if there are several).

    A sample is the amplitudes `[1, window, subcarriers]` of consecutive packets, its class the number of people, its
    group the room. By its ending a file is a capture of Nexmon (`.pcap`), the Intel 5300 (`.dat`), an ESP32 (`.csv`) or
    PicoScenes (`.csi`).
    """

    manifest: str
    window: int = 1000
    """The number of packets in a sample."""
    step: int | None = None
    """The number of packets from the start of a window to the next; by default windows do not overlap."""
    every: int = 1
    """Keep every n-th packet."""
    scale: Literal["none", "packet"] = "none"
    """`packet` undoes the receiver's gain control: each packet has mean square 1 over its subcarriers."""
    chip: Chip = "43455c0"
    """The chip of Nexmon captures; 43455c0 is in the Raspberry Pi 3B+, 4 and 5."""
    bandwidth: Bandwidth | None = None
    """The bandwidth of Nexmon captures in MHz; other packets are skipped. By default a capture must have only one."""
    damaged: Literal["error", "keep"] = "error"
    """`keep` uses the packets before the damage, with a warning."""
    test_session: str | int | None = None
    """The session that is the test part; by default there is no test part."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, value in (("window", self.window), ("step", self.step), ("every", self.every)):
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, got {value}")

    def read(self) -> Dataset:
        path = Path(self.manifest).expanduser()
        captures = read_manifest(path)
        test_flags = [self.is_test(capture, captures, path) for capture in captures]
        parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
        labels: dict[bool, list[int]] = {False: [], True: []}
        rooms: dict[bool, list[str]] = {False: [], True: []}
        reference: tuple[Path, int] | None = None
        for capture, test in zip(captures, test_flags, strict=True):
            windows = self.windows(capture.file)
            if not windows:
                continue
            reference = reference or (capture.file, windows[0].shape[1])
            if windows[0].shape[1] != reference[1]:
                raise ProtofedError(
                    f"{capture.file}: {windows[0].shape[1]} subcarriers, {reference[0]} has {reference[1]}; "
                    "captures of one data set must have equally many"
                )
            parts[test] += windows
            labels[test] += [capture.people] * len(windows)
            rooms[test] += [capture.room] * len(windows)
        for test, part in ((False, "training"), (True, "test")):
            if not parts[test] and (not test or any(test_flags)):
                raise ProtofedError(f"{path}: no window of {self.window} packets for the {part} part")
        has_test = bool(parts[True])
        classes = max(labels[False] + labels[True]) + 1
        return Dataset.from_arrays(
            _gathered(parts[False]),
            np.array(labels[False]),
            _gathered(parts[True]) if has_test else None,
            np.array(labels[True]) if has_test else None,
            num_classes=classes,
            group_train=np.array(rooms[False]),
            group_test=np.array(rooms[True]) if has_test else None,
            class_names=tuple(map(str, range(classes))),
            class_values=tuple(map(float, range(classes))),
            name=path.name,
            kind="csi",
        )

    def is_test(self, capture: Capture, captures: list[Capture], manifest: Path) -> bool:
        """Whether a capture belongs to the test part."""
        if self.test_session is None:
            return False
        sessions = sorted({c.session for c in captures if c.session is not None})
        if str(self.test_session) not in sessions:
            hint = f"found {listed(sessions)}" if sessions else "it has no column session"
            raise ProtofedError(f"{manifest}: no capture of test_session={self.test_session}; {hint}")
        return capture.session == str(self.test_session)

    def windows(self, file: Path) -> list[np.ndarray]:
        """The windows of one capture: amplitudes `[window, subcarriers]`."""
        windows: list[np.ndarray] = []
        try:
            windows.extend(cut(self.packets(file), self.window, self.step or self.window, self.every))
        except Damaged as damage:
            if self.damaged == "error":
                raise ProtofedError(f"{file}: {damage}; damaged=keep takes what comes before") from None
            log.warning("%s: %s; kept %d windows from before it", file, damage, len(windows))
        if not windows:
            if self.damaged == "error":
                raise ProtofedError(f"{file}: fewer packets than one window takes ({self.window} × every={self.every})")
            log.warning("%s: fewer packets than one window takes; left out", file)
        return windows

    def packets(self, file: Path) -> Iterator[np.ndarray]:
        """The amplitudes `[subcarriers]` of each packet, without null subcarriers, while the file is read."""
        reader = READERS.get(file.suffix.lower())
        if reader is None:
            raise ProtofedError(f"{file}: a capture ends in {listed(READERS)}")
        try:
            import csiread
        except ImportError:
            raise ProtofedError(f"{file}: captures need csiread: pip install 'protofed[csi]'") from None
        count = 0
        try:
            with file.open("rb") as stream:
                if not stream.peek(1):
                    raise ProtofedError(f"{file}: empty")
                for amplitude in reader(self, file, stream, csiread):
                    count += 1
                    if self.scale == "packet":
                        strength = np.sqrt(np.mean(amplitude**2))
                        amplitude = amplitude / strength if strength > 0 else amplitude
                    yield amplitude
        except OSError as error:
            raise ProtofedError(f"{file}: unreadable ({first_line(error)})") from None
        if not count:
            width = f" of {self.bandwidth} MHz" if self.bandwidth else ""
            raise ProtofedError(f"{file}: no packet with channel state information{width} in it")


def cut(packets: Iterator[np.ndarray], window: int, step: int, every: int) -> Iterator[np.ndarray]:
    """Cut a stream of packets into windows `[window, subcarriers]`. A remainder that is too short is dropped.

    Args:
        packets: The amplitudes of each packet.
        window: The number of packets in a window.
        step: The number of packets from the start of a window to the next.
        every: Use every n-th packet only.

    Returns:
        The windows, one after another.
    """
    buffer = np.empty((0, 0), np.float32)
    position = 0  # in the window; below 0, packets are skipped before the next window
    for number, packet in enumerate(packets):
        if number % every:
            continue
        if not number:
            buffer = np.empty((window, len(packet)), np.float32)
        if position >= 0:
            buffer[position] = packet
        position += 1
        if position == window:
            yield buffer.copy()
            buffer[: max(window - step, 0)] = buffer[step:].copy()
            position = window - step


def _gathered(windows: list[np.ndarray]) -> Tensor:
    """One tensor `[n, 1, window, subcarriers]`. The list is emptied meanwhile, so that no window is in memory twice."""
    x = torch.empty((len(windows), 1, *windows[0].shape))
    for row in reversed(range(len(windows))):
        x[row, 0] = torch.from_numpy(windows.pop())
    return x


# --- the manifest -----------------------------------------------------------------------------------------------------


class Capture(NamedTuple):
    """One row of a manifest."""

    file: Path
    room: str
    people: int
    session: str | None


def read_manifest(path: Path) -> list[Capture]:
    """The captures that a manifest names. Their paths are relative to the manifest."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            table = csv.DictReader(stream, skipinitialspace=True)
            columns = [name.strip() for name in table.fieldnames or ()]
            table.fieldnames = columns
            missing = [name for name in ("file", "room", "people") if name not in columns]
            if missing:
                raise ProtofedError(f"{path}: no column {listed(missing)}; found {listed(columns) or 'nothing'}")
            captures = [_capture(path, table.line_num, row) for row in table]
    except FileNotFoundError:
        raise ProtofedError(f"{path}: no such manifest; expected a CSV file with columns file, room, people") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ProtofedError(f"{path}: not a readable CSV file ({first_line(error)})") from None
    if not captures:
        raise ProtofedError(f"{path}: names no capture")
    return captures


def _capture(manifest: Path, line: int, row: dict[str, Any]) -> Capture:
    source = f"{manifest} line {line}"
    if None in row:
        raise ProtofedError(f"{source}: more values than columns")
    values = {name: (value or "").strip() for name, value in row.items()}
    for name in ("file", "room"):
        if not values[name]:
            raise ProtofedError(f"{source}: no {name}")
    if not values["people"].isascii() or not values["people"].isdigit():
        raise ProtofedError(f"{source}: people={values['people']!r}: expected a whole number, 0 or more")
    file = manifest.parent / Path(values["file"]).expanduser()
    if not file.is_file():
        raise ProtofedError(f"{source}: no file {file}")
    return Capture(file, values["room"], int(values["people"]), values.get("session") or None)


# --- one reader a format ----------------------------------------------------------------------------------------------


def used(tones: int, low: int, high: int) -> np.ndarray:
    """The bins of the used subcarriers in ascending frequency.

    Args:
        tones: The length of the Fourier transform, whose first bin is the centre.
        low: The first used subcarrier on each side of the centre.
        high: The last one.

    Returns:
        The bins. `used(64, 1, 28)` has 56.
    """
    side = np.arange(low, high + 1)
    return np.concatenate([-side[::-1], side]) % tones


_PCAP = {  # magic bytes: byte order, fractions of a second
    b"\xd4\xc3\xb2\xa1": ("<", 10**6),
    b"\xa1\xb2\xc3\xd4": (">", 10**6),
    b"\x4d\x3c\xb2\xa1": ("<", 10**9),
    b"\xa1\xb2\x3c\x4d": (">", 10**9),
}
_LONGEST = 262_144  # the longest packet that capture tools write


def _nexmon(source: CSI, file: Path, stream: BinaryIO, csiread: Any) -> Iterator[np.ndarray]:
    """pcap with Nexmon's UDP packets: 42 bytes of headers, 18 of its own, 4 for each subcarrier.

    Several cores and spatial streams have packets of their own; only those of the first packet's core and stream are used.
    """
    head = stream.read(24)
    if head[:4] == b"\x0a\x0d\x0d\x0a":
        raise ProtofedError(f"{file}: a pcapng file; expected pcap (editcap -F pcap makes one of it)")
    if head[:4] not in _PCAP or len(head) < 24:
        raise ProtofedError(f"{file}: not a pcap file: it begins {head[:4].hex()!r}")
    order, fractions = _PCAP[head[:4]]
    (link,) = struct.unpack(f"{order}I", head[20:])
    if link != 1:
        raise ProtofedError(f"{file}: link type {link}; expected Ethernet (1), as Nexmon's packets are")
    at, reader, stream_id, keep = 24, None, (0, b""), np.empty(0, int)
    while header := stream.read(16):
        if len(header) < 16:
            raise Damaged(at, "cut off within a packet's header")
        _, fraction, length, original = struct.unpack(f"{order}4I", header)
        if fraction >= fractions or length > min(original, _LONGEST):
            raise Damaged(at, "expected a packet's header")
        frame = stream.read(length)
        if len(frame) < length:
            raise Damaged(at, f"a packet of {length:,} bytes is cut off after {len(frame):,}")
        body = frame[42:]
        start, at = at, at + 16 + length
        if frame[6:12] != b"NEXMON":
            continue
        tones, remainder = divmod(len(body) - 18, 4)
        if remainder or tones not in TONES or body[:2] != b"\x11\x11":
            raise Damaged(start, f"not a packet of Nexmon's: {len(body):,} bytes that begin {body[:2].hex()!r}")
        bandwidth, low, high = TONES[tones]
        if source.bandwidth not in (None, bandwidth):
            continue
        if reader is None:
            # Newer firmware has signal strength and frame control in half of the magic bytes.
            reader_class = csiread.Nexmon if body[:4] == b"\x11" * 4 else csiread.NexmonPull46
            reader = reader_class(None, chip=source.chip, bw=bandwidth, if_report=False)
            stream_id, keep = (tones, body[12:14]), used(tones, low, high)
        if tones != stream_id[0]:
            raise ProtofedError(
                f"{file}: packets of {TONES[stream_id[0]][0]} MHz and, at byte {start:,}, of {bandwidth} MHz; "
                "choose with bandwidth="
            )
        if body[12:14] != stream_id[1]:
            continue
        if reader.pmsg(body) is None:
            raise Damaged(start, f"not a packet of Nexmon's: it begins {body[:4].hex()!r}")
        yield np.abs(reader.csi[0][keep])


def _intel(source: CSI, file: Path, stream: BinaryIO, csiread: Any) -> Iterator[np.ndarray]:
    """Records of length (2 bytes), code (1 byte) and body. A packet has 30 subcarriers of every receive antenna.

    Only the first transmitted stream is used.
    """
    reader = csiread.Intel(None, nrxnum=3, ntxnum=3, if_report=False)
    at = 0
    antennas: list[int] | None = None
    while head := stream.read(3):
        if len(head) < 3:
            raise Damaged(at, "cut off within a record's header")
        length, code = struct.unpack(">HB", head)
        if code not in (0xBB, 0xC1) or not length:
            if not at:
                raise ProtofedError(f"{file}: not a capture of the Intel 5300: it begins {head.hex()!r}")
            raise Damaged(at, f"expected a record, got code {code:#x}")
        body = stream.read(length - 1)
        if len(body) < length - 1:
            raise Damaged(at, f"a record of {length:,} bytes is cut off after {len(body) + 1:,}")
        start, at = at, at + 2 + length
        if code != 0xBB:
            continue
        receive, send = (body[8], body[9]) if len(body) >= 20 else (0, 0)
        size = 60 * receive * send + 12
        if not (0 < receive <= 3 and 0 < send <= 3) or len(body) != 20 + size or body[16] | body[17] << 8 != size:
            raise Damaged(start, f"{len(body):,} bytes do not fit {receive}×{send} antennas")
        streams = sorted(body[15] >> 2 * antenna & 3 for antenna in range(receive))
        if len(set(streams)) < receive or streams[-1] > 2:
            raise Damaged(start, f"antennas {streams}")
        if antennas is not None and len(streams) != len(antennas):
            raise ProtofedError(f"{file}: {len(antennas)} receive antennas and, at byte {start:,}, {len(streams)}")
        antennas = streams
        reader.pmsg(head[2:] + body)
        yield np.abs(reader.csi[0, :, streams, 0]).ravel()


_LEGACY = np.concatenate([np.arange(-26, 0), np.arange(1, 27)])


def _esp32(source: CSI, file: Path, stream: BinaryIO, csiread: Any) -> Iterator[np.ndarray]:
    """Lines of the ESP32 CSI tool; other lines, such as its messages, are skipped.

    A packet has the 52 subcarriers of the legacy training field, which come first in every line.
    """
    reader = csiread.ESP32(None, if_report=False)
    at = 0
    while line := stream.readline(_LONGEST):
        start, at = at, at + len(line)
        if not line.startswith(b"CSI_DATA,"):
            continue
        text = line.decode("ascii", "replace").strip()
        fields = text.removesuffix("]").split(",")
        values = fields[-1].strip().removeprefix("[").split()
        if len(fields) != 26 or not text.endswith("]") or str(len(values)) != fields[24].strip() or len(values) < 128:
            raise Damaged(start, "a line CSI_DATA of 26 fields was expected, with as many values as it says")
        try:
            reader.pmsg(",".join([*fields[:25], f"[{' '.join(values)} ]"]))
        except (ValueError, IndexError) as error:
            raise Damaged(start, first_line(error)) from None
        # With a second channel the centre is in the middle, otherwise it is the first value.
        yield np.abs(reader.csi[0, _LEGACY % 64 if fields[17].strip() == "0" else _LEGACY + 32])


def _picoscenes(source: CSI, file: Path, stream: BinaryIO, csiread: Any) -> Iterator[np.ndarray]:
    """Frames of segments. csiread reads PicoScenes from a file's start only, so the intact part is held in memory.

    A packet has the subcarriers of every receive antenna for the first stream.
    """
    count = at = 0
    damage: Damaged | None = None
    while head := stream.read(11):
        if len(head) < 11 or head[4:10] != b"\x15\x03\x15\x20\x01\x00":
            if not at:
                raise ProtofedError(f"{file}: not a PicoScenes capture csiread can read: it begins {head.hex()!r}")
            damage = Damaged(at, "expected a frame")
            break
        length = int.from_bytes(head[:4], "little") + 4
        body = stream.read(length - 11) if 11 <= length <= 2**24 else b""
        if len(body) != length - 11 or not _segments(body, head[10]):
            damage = Damaged(at, f"a frame of {length:,} bytes is cut off or its segments do not fit")
            break
        count, at = count + 1, at + length
    if damage is not None and not count:
        raise damage

    def opened(shape: list[int], number: int) -> np.ndarray:
        reader = csiread.Picoscenes(None, {"CSI": shape}, if_report=False, bufsize=number)
        try:
            reader.seek(str(file), 0, number)
        except (ArithmeticError, LookupError, ValueError) as error:  # the sizes in a frame are inconsistent
            raise ProtofedError(f"{file}: csiread could not read a frame ({first_line(error)})") from None
        return reader.raw["CSI"]

    most = [2048, 8, 8]
    info = opened(most, 1)["Info"][0]
    tones, receive, send = int(info["NumTones"]), int(info["NumRx"]), int(info["NumTx"]) + int(info["NumESS"])
    if not (0 < tones <= most[0] and 0 < receive <= most[1] and 0 < send <= most[2]):
        raise ProtofedError(f"{file}: csiread {csiread.__version__} does not know this version of PicoScenes' frames")
    frames = opened([tones, receive, send], count)
    for number, frame in enumerate(frames):
        if (int(frame["Info"]["NumTones"]), int(frame["Info"]["NumRx"])) != (tones, receive):
            raise ProtofedError(f"{file}: frame {number} has other subcarriers or antennas than the first")
        yield np.abs(frame["CSI"][:, :, 0]).T.ravel()
    if damage is not None:
        raise damage


def _segments(body: bytes, number: int) -> bool:
    """Whether a frame holds `number` whole segments, and one of them is channel state information."""
    at, names = 0, []
    for _ in range(number):
        if at + 5 > len(body):
            return False
        size, name = int.from_bytes(body[at : at + 4], "little"), body[at + 4]
        if size < 3 + name or at + 4 + size > len(body):
            return False
        names.append(body[at + 5 : at + 5 + name])
        at += 4 + size
    return b"CSI" in names


READERS: dict[str, Callable[[CSI, Path, BinaryIO, Any], Iterator[np.ndarray]]] = {
    ".pcap": _nexmon,
    ".dat": _intel,
    ".csv": _esp32,
    ".csi": _picoscenes,
}
