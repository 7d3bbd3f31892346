"""A run that is asked to end by SIGTERM finishes its round, writes a checkpoint and ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_asked = threading.Event()


def asked() -> bool:
    """Whether this process was asked to end."""
    return _asked.is_set()


def _ask(number: int, frame: FrameType | None) -> None:
    _asked.set()


def listen() -> None:
    """Answer SIGTERM from now on by setting the mark that `asked` reads; for the main thread of a worker process."""
    signal.signal(signal.SIGTERM, _ask)


@contextmanager
def listening() -> Iterator[None]:
    """Answer SIGTERM in this block. Only the main thread can; in another one, whoever runs it decides.

    Where a handler stands already that is not the system's, it stays.
    """
    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not mine:
        yield
        return
    _asked.clear()
    signal.signal(signal.SIGTERM, _ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _asked.clear()
