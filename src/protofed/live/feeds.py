"""Where live packets come from: a UDP port, a serial line, or a recorded capture at its own speed.

A thread of its own takes in what comes and notes when, so that nothing waits while a window is classified.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..data.csi import Packet, Tally, Wanted, esp32, nexmon
from ..data.csi.packets import LONGEST, Clock, Damaged
from ..data.csi.read import sent
from ..data.csi.replay import paced
from ..errors import ProtofedError

WAITING = 4096  # what may wait to be decoded; beyond it, what comes is dropped
PATIENCE = 0.2  # seconds after which a feed from which nothing comes is looked at again
BAUD = 921_600
SOURCES = "udp:PORT, udp:HOST:PORT, serial:DEVICE[@BAUD] or replay:CAPTURE[@SPEED]"


class Arrival(NamedTuple):
    """A packet and when it came, by `time.monotonic`; no packet where nothing came for a moment."""

    packet: Packet | None
    at: float


class Feed:
    """A source of live packets, used as a context: `with feed: for arrival in feed.arrivals(tally): …`.

    Attributes:
        name: What it is, as a person wrote it.
        dropped: How many packets came and were dropped, because too many waited already.
    """

    def __init__(self, name: str) -> None:
        self.name, self.dropped = name, 0
        self.stop = threading.Event()
        self._waiting: queue.Queue[tuple[float, Any] | None] = queue.Queue(WAITING)
        self._problem: ProtofedError | None = None
        self._thread = threading.Thread(target=self._fill, name=name, daemon=True)

    def __enter__(self) -> Feed:
        self.open()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        if self._thread.is_alive():
            self._thread.join(2)
        self.close()

    def open(self) -> None:
        """Take hold of the source; a problem of it is an error here."""

    def close(self) -> None:
        """Let go of the source."""

    def taken(self) -> Iterator[tuple[float, Any]]:
        """When something came and what it is, until `stop`. It runs in a thread of its own."""
        raise NotImplementedError

    def keep(self, item: tuple[float, Any]) -> None:
        """Let something wait to be decoded, or drop it where too much does."""
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self.dropped += 1

    def decoded(self, item: Any, at: float, tally: Tally) -> Iterator[Packet]:
        """The packets of something that came; with None, those that waited for more and will not get it."""
        raise NotImplementedError

    def prepare(self, wanted: Wanted, antennas: int | None) -> None:
        """Say which packets are wanted, and of how many antennas a packet should be, where that is known."""
        self.wanted, self.antennas = wanted, antennas

    def arrivals(self, tally: Tally) -> Iterator[Arrival]:
        """The packets as they come, until the feed ends.

        Args:
            tally: Counts what is left out.

        Returns:
            Arrivals; every moment in which nothing comes gives one without a packet.
        """
        while True:
            try:
                entry = self._waiting.get(timeout=PATIENCE)
            except queue.Empty:
                at = time.monotonic()
                yield from (Arrival(packet, at) for packet in self.decoded(None, at, tally))
                yield Arrival(None, at)
                continue
            if entry is None:
                break
            at, item = entry
            yield from (Arrival(packet, at) for packet in self.decoded(item, at, tally))
        if self._problem is not None:
            raise self._problem

    def _fill(self) -> None:
        try:
            for item in self.taken():
                self.keep(item)
        except ProtofedError as error:
            self._problem = error
        except OSError as error:
            self._problem = ProtofedError(f"{self.name}: {error.strerror or error}")
        while True:  # the end waits behind everything else
            try:
                self._waiting.put(None, timeout=PATIENCE)
                return
            except queue.Full:
                if self.stop.is_set():
                    return


class Udp(Feed):
    """Datagrams of Nexmon's extractor, which sends to port 5500, or with lines of an ESP32."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"udp:{host}:{port}")
        self.address = host, port

    def open(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self._socket.settimeout(PATIENCE)
        try:
            self._socket.bind(self.address)
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise ProtofedError(f"{self.name}: cannot be listened to ({error})") from None
        self.address = self._socket.getsockname()
        self.name = "udp:{}:{}".format(*self.address)

    def close(self) -> None:
        self._socket.close()

    def prepare(self, wanted: Wanted, antennas: int | None) -> None:
        super().prepare(wanted, antennas)
        self._frames, self._clock = nexmon.Frames(antennas), Clock(32, 1e-6)

    def taken(self) -> Iterator[tuple[float, bytes]]:
        while not self.stop.is_set():
            try:
                content = self._socket.recv(65535)
            except TimeoutError:
                continue
            yield time.monotonic(), content

    def decoded(self, item: bytes | None, at: float, tally: Tally) -> Iterator[Packet]:
        if item is None:
            yield from self._frames.rest(at)
        elif item[:2] == nexmon.MARK:
            piece = nexmon.piece_of(item, at, tally, self.wanted.options)
            if piece is not None:
                yield from self._frames.add(piece, tally)
        elif esp32.MARK in item:
            found = (esp32.packet_of(line, self._clock, tally) for line in item.splitlines())
            yield from (packet for packet in found if packet is not None)
        else:
            tally.leave_out("of neither Nexmon nor an ESP32")


class Serial(Feed):
    """Lines of an ESP32 on a serial line."""

    def __init__(self, device: str, baud: int = BAUD) -> None:
        super().__init__(f"serial:{device}@{baud}")
        self.device, self.baud = device, baud

    def open(self) -> None:
        try:
            import serial
        except ImportError:
            raise ProtofedError(f"{self.name}: a serial line needs pyserial: pip install 'protofed[serial]'") from None
        try:
            self._line = serial.Serial(self.device, self.baud, timeout=PATIENCE)
        except (OSError, ValueError) as error:  # a SerialException is an OSError
            raise ProtofedError(f"{self.name}: cannot be opened ({error})") from None

    def close(self) -> None:
        self._line.close()

    def prepare(self, wanted: Wanted, antennas: int | None) -> None:
        super().prepare(wanted, antennas)
        self._clock = Clock(32, 1e-6)

    def taken(self) -> Iterator[tuple[float, bytes]]:
        begun = b""
        while not self.stop.is_set():
            begun += self._line.read(max(1, self._line.in_waiting))
            at = time.monotonic()
            *lines, begun = begun.split(b"\n")
            if len(begun) > LONGEST:
                begun = b""
            yield from ((at, line) for line in lines)

    def decoded(self, item: bytes | None, at: float, tally: Tally) -> Iterator[Packet]:
        packet = None if item is None else esp32.packet_of(item, self._clock, tally)
        if packet is not None:
            yield packet


class Replay(Feed):
    """A recorded capture of any format, at its own speed. It drops nothing: what is late is late."""

    def __init__(self, file: str | Path, speed: float = 1.0) -> None:
        super().__init__(f"replay:{file}" + (f"@{speed:g}" if speed != 1 else ""))
        self.file, self.speed, self.tally = Path(file).expanduser(), speed, Tally()

    def open(self) -> None:
        if not self.file.is_file():
            raise ProtofedError(f"{self.file}: no such file")

    def keep(self, item: tuple[float, Any]) -> None:
        while not self.stop.is_set():
            try:
                self._waiting.put(item, timeout=PATIENCE)
                return
            except queue.Full:
                continue

    def taken(self) -> Iterator[tuple[float, Packet]]:
        found = sent(self.file, self.wanted, self.tally)
        try:
            yield from paced(((packet.time, packet) for packet in found), self.speed, self.stop)
        except Damaged as damage:
            raise ProtofedError(f"{self.file}: {damage}") from None

    def decoded(self, item: Packet | None, at: float, tally: Tally) -> Iterator[Packet]:
        if item is not None:
            yield item

    def arrivals(self, tally: Tally) -> Iterator[Arrival]:
        yield from super().arrivals(tally)
        tally.left_out.update(self.tally.left_out)  # what the file holds besides is known at its end


def feed_of(text: str) -> Feed:
    """The feed that a person has written.

    Args:
        text: `udp:PORT`, `udp:HOST:PORT`, `serial:DEVICE[@BAUD]` or `replay:CAPTURE[@SPEED]`.

    Returns:
        The feed, which is not open yet. `feed_of("replay:office.pcap@2").speed` is 2.
    """
    kind, _, rest = text.partition(":")
    if kind not in ("udp", "serial", "replay") or not rest:
        raise ProtofedError(f"--live {text}: expected {SOURCES}")
    if kind == "udp":
        host, _, port = rest.rpartition(":")
        if not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ProtofedError(f"--live {text}: expected a port from 0 to 65535, got {port!r}")
        return Udp(host or "0.0.0.0", int(port))
    name, at, number = rest.rpartition("@")
    if not at or (kind == "replay" and Path(rest).expanduser().exists()):
        name, number = rest, "1" if kind == "replay" else str(BAUD)
    try:
        value = float(number)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf") or (kind == "serial" and value != int(value)):
        what = "a speed above 0" if kind == "replay" else "a whole number of baud"
        raise ProtofedError(f"--live {text}: expected {what} after @, got {number!r}")
    return Replay(name, value) if kind == "replay" else Serial(name, int(value))
