"""Recorded captures as live ones: packets at the moments at which they came, for tests, and to a UDP port.

python -m protofed.data.csi.replay office.pcap 127.0.0.1:5500
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from ...errors import ProtofedError
from . import esp32, nexmon
from .packets import LONGEST, Clock, Damaged, Tally
from .read import format_of

T = TypeVar("T")


def paced(
    items: Iterable[tuple[float, T]], speed: float = 1.0, stop: threading.Event | None = None
) -> Iterator[tuple[float, T]]:
    """Wait with each item until its moment has come. Where time goes back, an item comes at once.

    Args:
        items: Times in seconds and items.
        speed: How many times as fast as recorded.
        stop: Ends the wait and the items.

    Returns:
        Each item with the moment at which it was due, by `time.monotonic`; what comes late is given at once.

    >>> [item for _, item in paced([(0.0, "a"), (0.001, "b")])]
    ['a', 'b']
    """
    stop = stop or threading.Event()
    due = time.monotonic()
    last: float | None = None
    for recorded, item in items:
        due += max(0.0, recorded - last) / speed if last is not None else 0.0
        last = recorded
        wait = due - time.monotonic()
        if stop.is_set() or (wait > 0 and stop.wait(wait)):
            return
        yield due, item


def datagrams(file: str | Path) -> Iterator[tuple[float, bytes]]:
    """What the recording device sent: contents of UDP packets of Nexmon, lines of an ESP32.

    Args:
        file: A capture of one of them.

    Returns:
        The time in seconds and the bytes of each, unchecked: what is garbled in the file is garbled here.
    """
    path = Path(file).expanduser()
    try:
        with path.open("rb") as stream:
            form = format_of(path, stream)
            if form is nexmon.FORMAT:
                yield from nexmon.bodies(stream, Tally())
            elif form is esp32.FORMAT:
                yield from _lines(iter(lambda: stream.readline(LONGEST), b""))
            else:
                raise ProtofedError(f"{path}: {form.name} sends no datagrams; expected Nexmon or ESP32")
    except OSError as error:
        raise ProtofedError(f"{path}: unreadable ({error.strerror})") from None
    except Damaged as damage:
        raise ProtofedError(f"{path}: {damage}") from None


def _lines(lines: Iterable[bytes]) -> Iterator[tuple[float, bytes]]:
    """Lines with the time of the last packet before them."""
    clock, last = Clock(32, 1e-6), 0.0
    for line in lines:
        packet = esp32.packet_of(line, clock, Tally())
        last = last if packet is None else packet.time
        yield last, line


def send(file: str | Path, address: tuple[str, int], speed: float = 1.0, stop: threading.Event | None = None) -> int:
    """Send a capture to a UDP port as its device did, at its own speed.

    Args:
        file: A capture of Nexmon or an ESP32.
        address: The host and the port.
        speed: How many times as fast as recorded.
        stop: Ends it early.

    Returns:
        The number of datagrams. `send("office.pcap", ("127.0.0.1", 5500))`
    """
    number = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        for _, content in paced(datagrams(file), speed, stop):
            out.sendto(content, address)
            number += 1
    return number


def _main(words: list[str]) -> None:
    try:
        file, target, *rest = words
        host, _, port = target.rpartition(":")
        speed = float(rest[0]) if rest else 1.0
        address = host or "127.0.0.1", int(port)
    except ValueError:
        sys.exit("usage: python -m protofed.data.csi.replay CAPTURE HOST:PORT [SPEED]")
    try:
        number = send(file, address, speed)
    except ProtofedError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        return
    sys.stdout.write(f"{number:,} datagrams sent to {target}\n")


if __name__ == "__main__":
    _main(sys.argv[1:])
