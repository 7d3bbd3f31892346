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
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from .. import wire
from ..bank import PrototypeBank
from ..errors import ProtofedError
from ..evaluate import Scores
from ..wire import Bundle, Message
from .batches import client_size
from .engine import Downloads, Taught, in_order
from .judge import Evaluation
from .local import ClientState, Outcome
from .mixed import SingleProcess

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
    return mmap.mmap(-1, max(1, size), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | lazily)


def with_workers(inner: SingleProcess, workers: int) -> SingleProcess | WorkerEngine:
    """The engine in worker processes; the engine itself, which gives the same bits, where there can be none."""
    reason = ""
    if multiprocessing.current_process().daemon:
        reason = "a daemonic process may not start others"
    elif "fork" not in multiprocessing.get_all_start_methods():
        reason = "this system does not fork"
    else:
        try:
            return WorkerEngine(inner, workers)
        except OSError as error:
            reason = str(error)
    log.warning("engine: no worker processes (%s): clients are trained in this one, with the same result", reason)
    return inner


class SharedStates(MutableMapping[int, ClientState]):
    """Clients' states where every process sees them: two places for each model and its prototypes, one of them current.

    Only pages that were written take memory, so a client that never took part costs nothing.
    """

    def __init__(
        self, starts: Sequence[Mapping[str, Tensor]], owner: Sequence[int], with_weights: bool, bank: tuple[int, int]
    ) -> None:
        """`bank`: classes and width of the clients' prototypes."""
        self.starts, self.owner, self.with_weights, self.bank_shape = starts, owner, with_weights, bank
        behind = [bank[0] * bank[1], bank[0]]  # means and counts
        self.pieces = [[*(value.numel() for value in start.values()), *behind] for start in starts]
        self.sizes = [sum(pieces) for pieces in self.pieces]
        self.begin = [0, *accumulate(2 * self.sizes[which] for which in owner)]
        self.memory = reserve(self.begin[-1] * 4 if with_weights else 1)
        self.current = mmap.mmap(-1, len(owner))  # per client: 0 no state yet, 1 or 2 which place holds it
        self.banked = mmap.mmap(-1, 3 * len(owner))  # per client and place: 1 where prototypes are there too
        self.extras: dict[int, bytes] = {}  # optimiser and memory; they go with the job
        self.pending: dict[int, int] = {}

    def _place(self, client: int, place: int) -> Tensor:
        """The numbers of a client in one place: its model's, then its prototypes'."""
        size = self.sizes[self.owner[client]]
        offset = (self.begin[client] + (place - 1) * size) * 4
        return torch.frombuffer(self.memory, dtype=torch.float32, count=size, offset=offset)

    def __getitem__(self, client: int) -> ClientState:
        place = self.current[client]
        if place == 0:
            raise KeyError(client)
        extra = wire.decode(self.extras[client], f"client {client}'s state") if client in self.extras else Bundle()
        if not self.with_weights:
            return ClientState.of({}, extra, None)
        which = self.owner[client]
        *pieces, means, counts = self._place(client, place).split(self.pieces[which])
        weights = {n: p.view(v.shape) for (n, v), p in zip(self.starts[which].items(), pieces, strict=True)}
        if not self.banked[3 * client + place]:
            return ClientState.of(weights, extra, None)
        # copies, because the last bits of a product depend on where in memory its numbers begin
        bank = PrototypeBank(means.view(self.bank_shape).clone(), counts.clone())
        return ClientState.of(weights, extra, bank)

    def __setitem__(self, client: int, state: ClientState) -> None:
        """Write beside the current state; `commit` makes it the current one."""
        place = 2 if self.current[client] == 1 else 1
        if self.with_weights:
            values = [state.weights[name].reshape(-1) for name in self.starts[self.owner[client]]]
            size = self.sizes[self.owner[client]]
            if state.bank is None:
                size -= sum(self.pieces[self.owner[client]][-2:])
            else:
                values += [state.bank.means.reshape(-1), state.bank.counts]
            torch.cat(values, out=self._place(client, place)[:size])
            self.banked[3 * client + place] = state.bank is not None
        self._keep(client, wire.encode(state.beside_weights()))
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

    def __init__(self, size: int = ARENA) -> None:
        self.memory, self.size, self.used = reserve(size), size, 0

    def put(self, message: Message) -> tuple[int, int] | Message:
        """Where the message lies; the message itself where it is small or does not fit."""
        if len(message) < PIPE or self.used + len(message) > self.size:
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


class PlacedMessages:
    """The messages of a job where they lie in shared memory; a worker copies one out when it decodes it."""

    def __init__(self, arena: Arena, places: Mapping[int, tuple[int, int] | Message]) -> None:
        self.arena, self.places = arena, places

    def __getitem__(self, audience: int, /) -> Message:
        return self.arena.take(self.places[audience])


class WorkerEngine:
    """Spreads clients over worker processes, each of which trains them with `inner` (a loop or a stack)."""

    def __init__(self, inner: SingleProcess, workers: int) -> None:
        self.inner = inner
        self.starts, self.owner, self.dim, self.parameters = inner.starts, inner.owner, inner.dim, inner.parameters
        self.method, self.data = inner.method, inner.data
        if any(v.dtype != torch.float32 or v.device.type != "cpu" for start in self.starts for v in start.values()):
            raise ProtofedError("engine=workers holds float32 models on the CPU; choose engine=stack or engine=loop")
        keeps_model = self.method.exchange.keeps_model
        self.states = SharedStates(self.starts, self.owner, keeps_model, (self.data.num_classes, self.dim))
        inner.states = self.states
        self.arena = Arena()
        self.count = workers
        self.workers: list[Worker] = []
        self.places: dict[int, tuple[int, int] | Message] = {}  # where the messages of a call lie in the arena

    # --- the parent -----------------------------------------------------------------------------------------------
    def train(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        """Outcomes in the order asked, because a sum depends on it; those that come too early wait for their turn."""
        groups = self.inner.groups(downloads.clients)
        large = any(part.kind == "weights" for part in self.method.exchange.up)
        if not large:  # what comes back in another order than asked may wait
            groups.sort(key=lambda group: -self._work(group))
        return in_order(downloads.clients, self._trained(downloads, groups))

    def _trained(self, downloads: Downloads, groups: Sequence[list[int]]) -> Iterator[tuple[int, Outcome]]:
        self.places, self.arena.used = {}, 0
        for job, replies in self._run([self._job(downloads, clients, self._extras(clients)) for clients in groups]):
            if replies is None:
                lost = Outcome(None, {}, "its worker process died each time it was tried")
                replies = dict.fromkeys(groups[job], lost)
            yield from replies.items()

    def teach(self, state: Any, round: int) -> Taught:
        return self.inner.teach(state, round)

    def evaluate(self, downloads: Downloads, how: Evaluation) -> dict[int, Scores]:
        if not self.inner.model_for_each:
            return self.inner.evaluate(downloads, how)
        groups = self.inner.groups(downloads.clients)
        groups.sort(key=lambda group: -self._work(group, of_tests=not self.method.predict.tuning))
        self.places, self.arena.used = {}, 0
        scores: dict[int, Scores] = {}
        for job, reply in self._run([self._job(downloads, clients, how) for clients in groups]):
            if reply is None:
                raise RuntimeError(f"the worker evaluating clients {groups[job]} died {TRIES} times")
            scores |= reply
        return {client: scores[client] for client in downloads.clients}

    def _job(self, downloads: Downloads, clients: Sequence[int], beside: Any) -> tuple[Any, ...]:
        """What a worker is told: which clients, what they were sent, and their states' extras or how to evaluate."""
        audience = {c: downloads.audience[c] for c in clients}
        for which in dict.fromkeys(audience.values()):
            if which not in self.places:
                self.places[which] = self.arena.put(downloads.messages[which])
        places = {which: self.places[which] for which in dict.fromkeys(audience.values())}
        return downloads.purpose, downloads.round, audience, places, downloads.serial, beside

    def _work(self, group: Sequence[int], of_tests: bool = False) -> int:
        """How long a group takes, for giving out the longest first, so that the last one to end is a short one."""
        own = [self.data.clients[c] for c in group]
        samples = sum(len(c.test) if of_tests else client_size(self.method.feed, c) for c in own)
        return samples * self.parameters[self.owner[group[0]]]

    def _extras(self, clients: Sequence[int]) -> dict[int, Any]:
        return {c: self.arena.put(self.states.extras[c]) for c in clients if c in self.states.extras}

    def _run(self, jobs: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Any]]:
        """Each job's number and reply as it comes, None where its worker died `TRIES` times.

        A worker is given a job when it waits for one: with both sides writing at once, full pipes would block both.
        """
        self._start_all()
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
                break
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                try:
                    kind, content = worker.pipe.recv()
                except (EOFError, OSError):
                    job = self._bury(worker)
                    tries[job] += 1
                    if tries[job] < TRIES:
                        waiting.appendleft(job)
                    else:
                        yield job, None
                    continue
                assert worker.job is not None
                if kind == "error":
                    self.close()
                    raise content
                job, worker.job = worker.job, None
                reply = self._take(worker.arena, jobs[job][0], content)
                if waiting:  # it works on while the reply is used
                    worker.job = waiting.popleft()
                    with contextlib.suppress(OSError):
                        worker.pipe.send(jobs[worker.job])
                yield job, reply
        yield from self._run_here(jobs, waiting)  # those that are left because no worker could be started

    def _start_all(self) -> None:
        """Start the workers that are missing, or as many of them as the system allows."""
        try:
            while len(self.workers) < self.count:
                self.workers.append(self._start())
        except OSError as error:
            self.count = len(self.workers)
            log.warning("engine: only %d worker processes could be started (%s)", self.count, error)

    def _run_here(self, jobs: Sequence[tuple[Any, ...]], numbers: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """Some of the jobs one after another in this process."""
        nowhere = Arena(0)
        for number in numbers:
            extras = self.states.extras
            content = self._do(jobs[number], nowhere)
            self.states.extras = extras
            yield number, self._take(nowhere, jobs[number][0], content)

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
        self._start_all()
        assert worker.job is not None
        return worker.job

    def _take(self, arena: Arena, kind: str, content: Any) -> Any:
        if kind == "evaluate":
            return content
        outcomes = {}
        for client, place, extra, upload, *about in content:
            if place:
                self.states.commit(client, place, arena.get(extra))
            outcomes[client] = Outcome(None if upload is None else arena.take(upload), *about)
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
        for number in (signal.SIGINT, signal.SIGTERM):  # they are the parent's to answer; it closes the pipe
            signal.signal(number, signal.SIG_IGN)
        torch.set_num_threads(1)  # as in the parent, where engine=workers allows no more
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
        purpose, round, audience, places, serial, beside = job
        downloads = Downloads(round, PlacedMessages(self.arena, places), audience, purpose, serial)
        if purpose == "evaluate":
            self.states.extras = {}
            return self.inner.evaluate(downloads, beside)
        self.states.extras, self.states.pending = {c: self.arena.get(e) for c, e in beside.items()}, {}
        replies = []
        for client, outcome in self.inner.train(downloads):
            place = 0 if outcome.failure else self.states.pending.get(client, 0)
            upload = None if outcome.upload is None else arena.put(outcome.upload)
            extra = arena.put(self.states.extras.get(client, b""))
            replies.append((client, place, extra, upload, dict(outcome.terms), outcome.failure, dict(outcome.pseudo)))
        return replies

    # --- states ---------------------------------------------------------------------------------------------------
    def export(self) -> Mapping[int, ClientState]:
        return self.states

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
