"""How much of a round is forward, backward and optimiser, and how much is the engine's own.

Timers stand around those calls where the engines make them, in this process and in worker processes forked from it. A
profiler would slow small operations down more than what is looked for, and would not tell the indexing that cuts a batch
from the model's own; a second, stripped loop would differ from the first by noise as large as what is looked for.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from ..federation.optimiser import Optimiser
from ..federation.stack import outputs, training
from ..methods.base import Method
from ..models.skeleton import Skeleton

MOST_PROCESSES = 1024


class Clock:
    """Seconds inside the timed calls, by process. It must be set up before an engine starts its workers."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._seconds: Any = context.Array("d", MOST_PROCESSES, lock=False)
        self._taken: Any = context.Value("i", 0)
        self._pid = -1
        self._slot = 0
        self._inside = False

    def attach(self, method: type[Method]) -> None:
        """Time what the engines call: the loss with its forward pass, backward, the optimiser, and the eval pass."""
        for owner, name in (
            (method, "terms"),
            (torch.autograd, "grad"),
            (torch.Tensor, "backward"),
            (Optimiser, "step"),
            (Skeleton, "outputs"),
        ):
            setattr(owner, name, self.timed(getattr(owner, name)))
        module: Any
        for module in (training, outputs):
            vmap = module.vmap
            module.vmap = lambda *given, vmap=vmap, **options: self.timed(vmap(*given, **options))

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, timed; one inside another counts once."""

        @functools.wraps(call)
        def wrapper(*args: Any, **options: Any) -> Any:
            if self._inside:
                return call(*args, **options)
            if self._pid != os.getpid():
                self._enter_process()
            self._inside = True
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self._seconds[self._slot] += time.perf_counter() - began
                self._inside = False

        return wrapper

    def _enter_process(self) -> None:
        with self._taken.get_lock():
            self._slot = self._taken.value
            self._taken.value += 1
        self._pid = os.getpid()

    def read(self) -> list[float]:
        """Seconds so far, one figure for each process that computed anything."""
        return list(self._seconds[: self._taken.value])
