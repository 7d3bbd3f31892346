"""A server's arithmetic in fixed pieces, which several cores may share.

The pieces follow from sizes alone and each is computed by one core, so a result does not depend on the number of cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar, cast

import torch

P = TypeVar("P")
R = TypeVar("R")

_helpers: ContextVar[tuple[ThreadPoolExecutor, int] | None] = ContextVar("helpers", default=None)
"""The threads beside the caller's, and their number."""


@contextmanager
def on_cores(number: int) -> Iterator[None]:
    """A context in which pieces are shared out to so many threads; with one they are computed in the caller's.

    Each helper computes with one thread of torch's. A new thread would take as many as there are cores, and then several
    helpers would wait for each other and could round otherwise than the caller.

    Args:
        number: how many cores the caller may use.

    >>> with on_cores(2):
    ...     in_pieces(abs, [-1, 2, -3])
    [1, 2, 3]
    """
    if number < 2:
        yield
        return
    with ThreadPoolExecutor(number - 1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        token = _helpers.set((pool, number - 1))
        try:
            yield
        finally:
            _helpers.reset(token)


def in_pieces(function: Callable[[P], R], pieces: Sequence[P]) -> list[R]:
    """Compute every piece, on the cores that `on_cores` allows.

    Args:
        function: computes one piece. Pieces must not write what others read.
        pieces: what it is called with.

    Returns:
        the results in the order of the pieces.

    >>> in_pieces(len, ["a", "bc"])
    [1, 2]
    """
    helpers = _helpers.get()
    if helpers is None or len(pieces) < 2:
        return [function(piece) for piece in pieces]
    pool, threads = helpers
    results: list[R | None] = [None] * len(pieces)
    numbers = iter(range(len(pieces)))

    def compute() -> None:
        for number in numbers:  # each thread takes the next piece that nobody has
            results[number] = function(pieces[number])

    others = [pool.submit(compute) for _ in range(min(threads, len(pieces) - 1))]
    try:
        compute()  # the caller is one of the threads, so that it need not be woken
    finally:
        for other in others:
            other.result()
    return cast("list[R]", results)
