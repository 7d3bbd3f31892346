"""A run that is asked to end by SIGTERM finishes its round, writes a checkpoint and ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ..errors import Stopped

_asked = threading.Event()


def asked() -> bool:
    """Whether this process was asked to end."""
    return _asked.is_set()


def _ask(number: int, frame: FrameType | None) -> None:
    _asked.set()


def listen() -> None:
    """Answer SIGTERM from now on by setting the mark that `asked` reads; for the main thread of a worker process."""
    signal.signal(signal.SIGTERM, _ask)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Stopped("stopped", 143)


@contextmanager
def interrupting() -> Iterator[None]:
    """Answer SIGTERM in this block by raising `Stopped`, as Ctrl-C raises `KeyboardInterrupt`: for whoever waits for
    processes that do the work."""
    with _handling(_interrupt):
        yield


@contextmanager
def listening() -> Iterator[None]:
    """Answer SIGTERM in this block. Only the main thread can; in another one, whoever runs it decides.

    Where a handler stands already that is not the system's, it stays.
    """
    with _handling(_ask):
        yield


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not mine:
        yield
        return
    _asked.clear()
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _asked.clear()
