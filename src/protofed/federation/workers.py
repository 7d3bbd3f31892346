"""Worker processes: started once, one torch thread each, fed over pipes with what the wire carries.

Workers are forked, so they have the data without a copy. Clients' models live in shared memory that the parent owns: a
worker reads a client's last state there and writes the new one beside it; the parent makes it the current one when the
client's result arrives. A worker that dies therefore loses nothing but work: it is forked again, and its clients are
trained again from their last state, with the same random streams and so the same result.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from .. import wire
from ..errors import ProtofedError
from ..evaluate import Scores
from ..wire import Bundle, Message
from .engine import Judging
from .local import ClientState, Outcome, client_size
from .mixed import Inner

log = logging.getLogger("protofed")
ARENA = 1 << 30  # reserved for messages, per direction and worker; only what is used takes memory
PIPE = 1 << 16  # a message smaller than this goes over the pipe itself
TRIES = 3


def keep_pages() -> None:
    """Tell glibc to keep freed pages: tensors of one training step are the size of those of the next."""
    if os.name != "posix":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return
    for option, value in ((-3, 1 << 30), (-1, 1 << 30), (-2, 1 << 26)):  # mmap threshold, trim threshold, top pad
        mallopt(option, value)


def reserve(size: int) -> mmap.mmap:
    """Memory that forked processes share; pages take room when they are written, not before."""
    lazily = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    try:
        return mmap.mmap(-1, max(1, size), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | lazily)
    except OSError as error:
        raise ProtofedError(
            f"engine=workers cannot reserve {size / 2**30:.1f} GiB for the clients' models ({error.strerror}); "
            "use engine=loop"
        ) from None


class SharedStates(MutableMapping[int, ClientState]):
    """Clients' states where every process sees them: two places for each model, of which one is current.

    Only pages that were written take memory, so a client that never took part costs nothing.
    """

    def __init__(self, starts: Sequence[Mapping[str, Tensor]], owner: Sequence[int], with_weights: bool) -> None:
        self.starts, self.owner, self.with_weights = starts, owner, with_weights
        self.sizes = [sum(value.numel() for value in start.values()) for start in starts]
        each = [2 * self.sizes[which] for which in owner]
        self.begin = [0, *accumulate(each)]
        self.memory = reserve(self.begin[-1] * 4 if with_weights else 1)
        self.current = mmap.mmap(-1, len(owner))  # per client: 0 no state yet, 1 or 2 which place holds it
        self.extras: dict[int, bytes] = {}  # optimiser and memory; they go with the job
        self.pending: dict[int, int] = {}

    def _place(self, client: int, place: int) -> Tensor:
        size = self.sizes[self.owner[client]]
        offset = (self.begin[client] + (place - 1) * size) * 4
        return torch.frombuffer(self.memory, dtype=torch.float32, count=size, offset=offset)

    def __getitem__(self, client: int) -> ClientState:
        place = self.current[client]
        if place == 0:
            raise KeyError(client)
        weights = self.starts[self.owner[client]]
        if self.with_weights:
            pieces = self._place(client, place).split([value.numel() for value in weights.values()])
            weights = {n: p.view(v.shape) for (n, v), p in zip(weights.items(), pieces, strict=True)}
        extra = wire.decode(self.extras[client], f"client {client}'s state") if client in self.extras else Bundle()
        tensors = dict(extra.tensors)
        optimiser = {k.removeprefix("optimiser/"): tensors.pop(k) for k in list(tensors) if k.startswith("optimiser/")}
        return ClientState(weights, optimiser, Bundle(extra.bank, extra.banks, extra.weights, tensors, extra.scalars))

    def __setitem__(self, client: int, state: ClientState) -> None:
        """Write beside the current state; `commit` makes it the current one."""
        place = 2 if self.current[client] == 1 else 1
        if self.with_weights:
            flat = self._place(client, place)
            names = self.starts[self.owner[client]]
            torch.cat([state.weights[name].reshape(-1) for name in names], out=flat)
        memory = state.memory
        tensors = {**memory.tensors, **{f"optimiser/{k}": v for k, v in state.optimiser.items()}}
        self._keep(client, wire.encode(Bundle(memory.bank, memory.banks, memory.weights, tensors, memory.scalars)))
        self.pending[client] = place

    def _keep(self, client: int, extra: bytes) -> None:
        if extra:
            self.extras[client] = extra
        else:
            self.extras.pop(client, None)

    def commit(self, client: int, place: int, extra: bytes) -> None:
        self.current[client] = place
        self._keep(client, extra)

    def __delitem__(self, client: int) -> None:
        self.current[client] = 0
        self.extras.pop(client, None)

    def __contains__(self, client: object) -> bool:
        return isinstance(client, int) and self.current[client] != 0

    def __iter__(self) -> Iterator[int]:
        return (client for client in range(len(self.current)) if self.current[client])

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Arena:
    """Shared memory for messages: one side writes, then the other reads."""

    def __init__(self) -> None:
        self.memory = reserve(ARENA)
        self.used = 0

    def put(self, message: Message) -> tuple[int, int] | Message:
        """Where the message lies; the message itself where it is small or does not fit."""
        if len(message) < PIPE or self.used + len(message) > ARENA:
            return message
        begin = self.used
        self.memory[begin : begin + len(message)] = message
        self.used += len(message)
        return begin, len(message)

    def get(self, place: tuple[int, int] | Message) -> bytes:
        return self.memory[place[0] : place[0] + place[1]] if isinstance(place, tuple) else bytes(place)

    def take(self, place: tuple[int, int] | Message) -> Message:
        """The same as bytes of one's own, in which a message is decoded without another copy."""
        if not isinstance(place, tuple):
            return place
        with memoryview(self.memory) as whole:
            return bytearray(whole[place[0] : place[0] + place[1]])


@dataclass
class Worker:
    process: Any
    pipe: Connection
    arena: Arena  # what the worker sends
    job: int | None = None  # what it is at


class WorkerEngine:
    """Spreads clients over worker processes, each of which trains them with `inner` (a loop or a stack)."""

    def __init__(self, inner: Inner, workers: int, *, stacked: Sequence[bool] = (False,)) -> None:
        """`stacked`: for each architecture, whether a worker takes its share of all clients at once, or one at a time."""
        self.inner, self.stacked = inner, stacked
        self.starts, self.owner, self.dim, self.parameters = inner.starts, inner.owner, inner.dim, inner.parameters
        self.method, self.data = inner.method, inner.data
        if any(v.dtype != torch.float32 or v.device.type != "cpu" for start in self.starts for v in start.values()):
            raise ProtofedError("engine=workers holds float32 models on the CPU; choose engine=stack or engine=loop")
        self.states = SharedStates(self.starts, self.owner, self.method.private_model)
        inner.clients = self.states
        self.arena = Arena()
        self.count = workers
        self.workers: list[Worker] = []
        self.last: tuple[int, tuple[int, int] | Message, Message] | None = None  # what a worker was sent

    # --- the parent -----------------------------------------------------------------------------------------------
    def train(self, round: int, downloads: Mapping[int, Message]) -> dict[int, Outcome]:
        self.arena.used = 0
        placed: dict[int, Any] = {}
        for message in downloads.values():
            if id(message) not in placed:
                placed[id(message)] = self.arena.put(message)
        groups = self._groups(list(downloads))
        jobs = []
        for clients in groups:
            distinct = list(dict.fromkeys(id(downloads[c]) for c in clients))
            messages = [placed[key] for key in distinct]
            which = {c: distinct.index(id(downloads[c])) for c in clients}
            jobs.append(("train", round, which, messages, self._extras(clients)))
        outcomes: dict[int, Outcome] = {}
        for clients, replies in zip(groups, self._run(jobs), strict=True):
            if replies is None:
                lost = "its worker process died each time it was tried"
                outcomes |= {
                    c: Outcome(None, client_size(self.method, self.data.clients[c]), {}, lost) for c in clients
                }
                continue
            outcomes |= replies
        return {client: outcomes[client] for client in downloads}  # in the order asked: a sum depends on it

    def train_server(self, state: Bundle, round: int) -> tuple[Bundle | None, Mapping[str, float], str]:
        return self.inner.train_server(state, round)

    def evaluate(self, server: Bundle, clients: Sequence[int], how: Judging = Judging()) -> list[Scores]:  # noqa: B008
        if not self.inner.model_for_each:
            return self.inner.evaluate(server, clients, how)
        self.arena.used = 0
        message = self.arena.put(wire.encode(server))
        groups = self._groups(list(clients), of_tests=not self.method.tuning_epochs)
        jobs = [("evaluate", message, group, how) for group in groups]
        scores: dict[int, Scores] = {}
        for group, reply in zip(groups, self._run(jobs), strict=True):
            if reply is None:
                raise RuntimeError(f"the worker evaluating clients {group} died {TRIES} times")
            scores |= dict(zip(group, reply, strict=True))
        return [scores[c] for c in clients]

    def _groups(self, clients: list[int], of_tests: bool = False) -> list[list[int]]:
        """Most work first, so that the last job to end is a short one. A job holds clients of one architecture."""

        def work(group: list[int]) -> int:
            own = [self.data.clients[c] for c in group]
            samples = sum(len(c.test) if of_tests else client_size(self.method, c) for c in own)
            return samples * self.parameters[self.owner[group[0]]]

        groups: list[list[int]] = []
        for which, stacked in enumerate(self.stacked):
            members = sorted((c for c in clients if self.owner[c] == which), key=lambda c: -work([c]))
            shares = min(self.count, len(members)) if stacked else len(members)
            groups += [members[i::shares] for i in range(shares)]
        return sorted(groups, key=work, reverse=True)

    def _extras(self, clients: Sequence[int]) -> dict[int, Any]:
        return {c: self.arena.put(self.states.extras[c]) for c in clients if c in self.states.extras}

    def _run(self, jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Each job's reply, or None where its worker died `TRIES` times.

        A worker is given a job when it waits for one: with both sides writing at once, full pipes would block both.
        """
        while len(self.workers) < self.count:
            self.workers.append(self._start())
        replies: list[Any] = [None] * len(jobs)
        tries = [0] * len(jobs)
        waiting = deque(range(len(jobs)))
        while True:
            for worker in self.workers:
                if waiting and worker.job is None:
                    worker.job = waiting.popleft()
                    with contextlib.suppress(OSError):  # its death is noticed when its pipe is read
                        worker.pipe.send(jobs[worker.job])
            busy = {worker.pipe: worker for worker in self.workers if worker.job is not None}
            if not busy:
                return replies
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                try:
                    kind, content = worker.pipe.recv()
                except (EOFError, OSError):
                    job = self._bury(worker)
                    tries[job] += 1
                    if tries[job] < TRIES:
                        waiting.appendleft(job)
                    continue
                assert worker.job is not None
                if kind == "error":
                    self.close()
                    raise content
                replies[worker.job] = self._take(worker, jobs[worker.job][0], content)
                worker.job = None

    def _bury(self, worker: Worker) -> int:
        """Replace a dead worker; gives the job it was at."""
        worker.process.join()
        log.warning(
            "worker process %d died (exit code %s); started again, its clients are trained from their last state",
            worker.process.pid,
            worker.process.exitcode,
        )
        worker.pipe.close()
        self.workers.remove(worker)
        self.workers.append(self._start())
        assert worker.job is not None
        return worker.job

    def _take(self, worker: Worker, kind: str, content: Any) -> Any:
        if kind == "evaluate":
            return content
        outcomes = {}
        for client, place, extra, upload, num_samples, terms, failure, pseudo in content:
            if place:
                self.states.commit(client, place, worker.arena.get(extra))
            encoded = None if upload is None else worker.arena.take(upload)
            outcomes[client] = Outcome(encoded, num_samples, terms, failure, pseudo)
        return outcomes

    def _start(self) -> Worker:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        arena = Arena()
        held = [w.pipe for w in self.workers]
        process = context.Process(target=self._serve, args=(theirs, arena, [ours, *held]), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours, arena)

    # --- the child ------------------------------------------------------------------------------------------------
    def _serve(self, pipe: Connection, arena: Arena, inherited: Sequence[Connection]) -> None:
        """A worker's life: take a job, do it, reply; end when the parent's end of the pipe is closed."""
        for other in inherited:
            other.close()  # else a sibling's pipe would stay open after the parent is gone
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer; it closes the pipe
        torch.set_num_threads(1)
        keep_pages()
        while True:
            try:
                job = pipe.recv()
            except (EOFError, OSError):
                os._exit(0)
            try:
                reply = ("done", self._do(job, arena))
            except ProtofedError as error:
                reply = ("error", error)
            except Exception as error:  # the parent must hear of it: a silent worker would be waited for without end
                trace = traceback.format_exc()
                reply = ("error", RuntimeError(f"a worker process failed: {error}\n{trace}"))
            try:
                pipe.send(reply)
            except (BrokenPipeError, OSError):
                os._exit(0)

    def _do(self, job: tuple[Any, ...], arena: Arena) -> Any:
        arena.used = 0  # the parent has read what the last job left there
        if job[0] == "evaluate":
            _, message, clients, how = job
            self.states.extras = {}
            return self.inner.evaluate(wire.decode(self.arena.get(message), "server's state"), clients, how)
        _, round, which, messages, extras = job
        self.states.extras, self.states.pending = {c: self.arena.get(e) for c, e in extras.items()}, {}
        arrived = [self._received(round, m) for m in messages]
        outcomes = self.inner.train(round, {c: arrived[i] for c, i in which.items()})
        replies = []
        for client, outcome in outcomes.items():
            place = 0 if outcome.failure else self.states.pending.get(client, 0)
            upload = None if outcome.upload is None else arena.put(outcome.upload)
            extra = arena.put(self.states.extras.get(client, b""))
            about = (dict(outcome.terms), outcome.failure, dict(outcome.pseudo))
            replies.append((client, place, extra, upload, outcome.num_samples, *about))
        return replies

    def _received(self, round: int, place: tuple[int, int] | Message) -> Message:
        """A message to clients. Most often all get the same, and the worker's next client finds what the last one had."""
        if self.last is None or self.last[:2] != (round, place):
            self.last = (round, place, self.arena.take(place))
        return self.last[2]

    # --- states ---------------------------------------------------------------------------------------------------
    def export(self) -> dict[int, ClientState]:
        return dict(self.states)

    def restore(self, states: Mapping[int, ClientState]) -> None:
        for client, state in states.items():
            self.states[client] = state
            self.states.commit(client, self.states.pending.pop(client), self.states.extras.get(client, b""))

    def close(self) -> None:
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.process.join(timeout=2)
            if worker.process.is_alive():
                worker.process.kill()
        self.workers = []
