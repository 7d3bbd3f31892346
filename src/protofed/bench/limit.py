"""The limit: one model trained on the round's samples with all clients' batches merged.

No federation can be expected to be faster, since the limit does the same arithmetic in fewer and larger pieces. It is
measured with its best batch size, memory format, threads and allocator.

`OwnBatch` is the limit for the clients' own batch size: one model for each core takes steps of that size.
"""

from __future__ import annotations

import multiprocessing
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .plain import EVAL_BATCH, fedproto_loss
from .workloads import SEED, Training

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class Timed(NamedTuple):
    """The seconds of a round's training steps, and of the pass that gives the prototypes (0 where none are sent)."""

    training: float
    prototypes: float

    @property
    def seconds(self) -> float:
        """The seconds of the whole round."""
        return self.training + self.prototypes


def layouts(workload: Training) -> tuple[str, ...]:
    """The memory formats that are tried for a workload."""
    return tuple(LAYOUTS) if len(workload.shape) == 3 else ("contiguous",)


def batches(workload: Training) -> list[int]:
    """The batch sizes that are tried: the clients' batches merged, and smaller and larger ones."""
    merged = workload.per_round * workload.batch
    sizes = {max(8, round(merged * factor)) for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)}
    return sorted(size for size in sizes if size <= workload.samples_per_round)


class Merged:
    """One model that is trained on the samples of all clients."""

    def __init__(
        self, workload: Training, x: Tensor, y: Tensor, batch: int, layout: str, eval_batch: int | None = None
    ) -> None:
        self.workload, self.batch, self.eval_batch = workload, batch, eval_batch or batch
        self.x, self.y = x, y
        self.model = workload.build_model()
        if x.ndim == 4:
            self.model = self.model.to(memory_format=LAYOUTS[layout])  # type: ignore[call-overload]
        self.optimiser = torch.optim.SGD(
            self.model.parameters(), lr=workload.lr, momentum=workload.momentum, fused=True
        )
        self.generator = torch.Generator().manual_seed(SEED)
        self.table = torch.randn(workload.classes, self.model.dim)  # type: ignore[call-overload]
        self.known = torch.ones(workload.classes, dtype=torch.bool)

    def round(self, cap: float = float("inf"), min_steps: int = 1) -> Timed:
        """Time a round.

        Args:
            cap: Seconds after which each of the round's two parts stops; its time is then scaled up to the whole round.
            min_steps: The least number of training steps, whatever the cap.

        Returns:
            The seconds of the two parts.
        """
        w = self.workload
        clients = torch.randperm(w.clients, generator=self.generator)[: w.per_round]
        rows = (clients[:, None] * w.samples + torch.arange(w.samples)).flatten()
        start_time = time.perf_counter()
        self.model.train()
        samples_done = 0
        for step, batch in enumerate(rows[torch.randperm(len(rows), generator=self.generator)].split(self.batch), 1):
            loss = self._loss(self.x[batch], self.y[batch])
            self.optimiser.zero_grad()
            loss.backward()
            self.optimiser.step()
            samples_done += len(batch)
            if step >= min_steps and time.perf_counter() - start_time > cap:
                break
        training_end = time.perf_counter()
        training = (training_end - start_time) * len(rows) / samples_done
        if not w.prototypes:
            return Timed(training, 0.0)
        self.model.eval()
        total, counts = torch.zeros_like(self.table), torch.zeros(w.classes)
        samples_done = 0
        with torch.no_grad():
            for batch in rows.split(self.eval_batch):
                z, _ = self.model(self.x[batch])
                member = F.one_hot(self.y[batch], w.classes).to(z.dtype)
                total += member.T @ z
                counts += member.sum(0)
                samples_done += len(batch)
                if time.perf_counter() - training_end > cap:
                    break
        self.table = total / counts.clamp_min(1)[:, None]
        return Timed(training, (time.perf_counter() - training_end) * len(rows) / samples_done)

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.workload.prototypes:
            return fedproto_loss(self.model, x, y, self.table, self.known)
        return F.cross_entropy(self.model(x)[1], y)


class OwnBatch:
    """A process for each core, with one model that takes the steps of a share of the clients in their batch size."""

    def __init__(self, workload: Training, x: Tensor, y: Tensor, processes: int) -> None:
        self.layout = min(layouts(workload), key=lambda layout: self._tried(workload, x, y, layout))
        context = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        x = in_layout(x, self.layout)
        for k in range(processes):
            share = replace(workload, per_round=len(range(k, workload.per_round, processes)))
            parent_end, child_end = context.Pipe()
            merged = self._merged(share, x, y, self.layout)
            self.pipes.append(parent_end)
            context.Process(target=self._serve, args=(merged, child_end, list(self.pipes)), daemon=True).start()
            child_end.close()

    @staticmethod
    def _merged(workload: Training, x: Tensor, y: Tensor, layout: str) -> Merged:
        return Merged(workload, x, y, workload.batch, layout, eval_batch=max(workload.batch, EVAL_BATCH))

    def _tried(self, workload: Training, x: Tensor, y: Tensor, layout: str) -> float:
        merged = self._merged(workload, in_layout(x, layout), y, layout)
        merged.round(cap=0.0)
        return merged.round(cap=0.2, min_steps=2).seconds

    @staticmethod
    def _serve(merged: Merged, pipe: Connection, inherited: list[Connection]) -> None:
        """Run a round for each message; end when the other end of the pipe is closed."""
        for connection in inherited:
            connection.close()
        with suppress(EOFError):
            while pipe.recv():
                merged.round()
                pipe.send(True)

    def round(self) -> None:
        """Run one round in all processes."""
        for pipe in self.pipes:
            pipe.send(True)
        for pipe in self.pipes:
            pipe.recv()


def in_layout(x: Tensor, layout: str) -> Tensor:
    """Samples in the model's memory format, so that a batch of them has it too."""
    return x.contiguous(memory_format=LAYOUTS[layout]) if x.ndim == 4 else x
