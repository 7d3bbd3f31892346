"""The share of a round that is forward pass, backward pass and optimiser; the rest is the engine's overhead.

The engines' calls are timed in this process and in worker processes forked from it. A profiler would slow small
operations down by more than the overhead, and could not distinguish the indexing of a batch from that of the model. A
second, reduced loop would differ from the first by noise as large as the overhead.
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
        """Time the engines' calls: the loss with its forward pass, the backward pass, the optimiser, and the eval pass."""
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
            module.vmap = lambda *args, vmap=vmap, **options: self.timed(vmap(*args, **options))

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call with a timer around it. Nested calls count once."""

        @functools.wraps(call)
        def wrapper(*args: Any, **options: Any) -> Any:
            if self._inside:
                return call(*args, **options)
            if self._pid != os.getpid():
                self._enter_process()
            self._inside = True
            start_time = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self._seconds[self._slot] += time.perf_counter() - start_time
                self._inside = False

        return wrapper

    def _enter_process(self) -> None:
        with self._taken.get_lock():
            self._slot = self._taken.value
            self._taken.value += 1
        self._pid = os.getpid()

    def read(self) -> list[float]:
        """The seconds so far, one number for each process that has computed anything."""
        return list(self._seconds[: self._taken.value])
