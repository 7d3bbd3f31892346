"""The answer to SIGTERM: a run finishes its round, writes a checkpoint and ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ..errors import Stopped

_requested = False  # no `threading.Event`: a second signal while the first is noted would wait for the event's lock


def requested() -> bool:
    """Whether this process was asked to end by SIGTERM."""
    return _requested


def _note(request: bool) -> None:
    global _requested
    _requested = request


def _note_request(number: int, frame: FrameType | None) -> None:
    _note(True)


def listen() -> None:
    """From now on SIGTERM makes `requested` true. This is for the main thread of a worker process."""
    signal.signal(signal.SIGTERM, _note_request)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Stopped("stopped", 143)


@contextmanager
def interrupting() -> Iterator[None]:
    """Within this context SIGTERM raises `Stopped`, as Ctrl-C raises `KeyboardInterrupt`.

    It is for a process that waits for others, which do the work.
    """
    with _handling(_interrupt):
        yield


@contextmanager
def listening() -> Iterator[None]:
    """Within this context SIGTERM makes `requested` true.

    Only the main thread can handle signals; in another thread this does nothing. A handler that a program has set
    already stays.
    """
    with _handling(_note_request):
        yield


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    is_ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not is_ours:
        yield
        return
    _note(False)
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _note(False)
