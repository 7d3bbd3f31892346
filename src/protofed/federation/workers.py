"""Worker processes: started once, one torch thread each, fed over pipes with what the wire carries.

Workers are forked, so they have the data without a copy. Clients' models live in shared memory that the parent owns: a
worker reads a client's last state there and writes the new one into a second slot, which the parent makes the current
one when the client's result arrives. A worker that dies therefore loses nothing but work: it is forked again, and its
clients are trained again from their last state, with the same random streams and so the same result.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .. import wire
from ..errors import ProtofedError
from ..evaluate import Board
from ..models.base import Output
from ..wire import Bundle, Message
from .batches import ClientSizes
from .engine import Downloads, Taught, in_order
from .judge import Evaluation
from .local import ClientState, Outcome
from .mixed import SingleProcess
from .pages import keep_pages
from .shared import Arena, SharedStates

log = logging.getLogger("protofed")
TRIES = 3
BUNDLES = 4  # jobs of an evaluation for each worker


def with_workers(inner: SingleProcess, workers: int) -> SingleProcess | WorkerEngine:
    """The engine in worker processes; where these cannot be started, the engine itself, which gives the same bits."""
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


def _merged(groups: Sequence[list[int]]) -> list[list[int]]:
    """Groups of clients, in which those of one client each are one: they are evaluated alone in any case."""
    single = [client for group in groups if len(group) == 1 for client in group]
    return [*(group for group in groups if len(group) > 1), *([single] if single else ())]


@dataclass
class Worker:
    """A worker process and the parent's end of its pipe."""

    process: Any
    pipe: Connection
    arena: Arena  # the worker's messages
    job: int | None = None  # the number of the job it works on


class ArenaMessages:
    """The messages of a job in shared memory. A worker copies one when it decodes it."""

    def __init__(self, arena: Arena, locations: Mapping[int, tuple[int, int] | Message]) -> None:
        self.arena, self.locations = arena, locations

    def __getitem__(self, audience: int, /) -> Message:
        return self.arena.take(self.locations[audience])


class WorkerEngine:
    """Trains clients in worker processes, each of which uses the engine `inner` (a loop or a stack)."""

    def __init__(self, inner: SingleProcess, workers: int) -> None:
        self.inner = inner
        self.starts, self.owner, self.dim, self.parameters = inner.starts, inner.owner, inner.dim, inner.parameters
        self.method, self.data = inner.method, inner.data
        self.sizes = ClientSizes(self.method.feed, self.data)
        if any(v.dtype != torch.float32 or v.device.type != "cpu" for start in self.starts for v in start.values()):
            raise ProtofedError("engine=workers holds float32 models on the CPU; choose engine=stack or engine=loop")
        keeps_model = self.method.exchange.keeps_model
        self.states = SharedStates(self.starts, self.owner, keeps_model, (self.data.num_classes, self.dim))
        inner.states = self.states
        self.arena = Arena()
        self.count = workers
        self.workers: list[Worker] = []
        self.locations: dict[
            int, tuple[int, int] | Message
        ] = {}  # the locations of a broadcast's messages in the arena

    # --- the parent -----------------------------------------------------------------------------------------------
    def train(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        """Train the clients, and yield their outcomes in the order of the downloads, because a sum depends on it."""
        groups = self.inner.groups(downloads.clients)
        returns_weights = any(part.kind == "weights" for part in self.method.exchange.up)
        if not returns_weights:  # small uploads may wait for their turn
            groups.sort(key=lambda group: -self._work(group))
        return in_order(downloads.clients, self._trained(downloads, groups))

    def _trained(self, downloads: Downloads, groups: Sequence[list[int]]) -> Iterator[tuple[int, Outcome]]:
        self.locations, self.arena.used = {}, 0
        for job, replies in self._run([self._job(downloads, clients, self._extras(clients)) for clients in groups]):
            if replies is None:
                failed = Outcome(None, {}, "its worker process died each time it was tried")
                replies = dict.fromkeys(groups[job], failed)
            yield from replies.items()

    def teach(self, state: Any, round: int) -> Taught:
        """Train the server's own model in the parent process."""
        return self.inner.teach(state, round)

    def evaluate(self, downloads: Downloads, options: Evaluation) -> Board:
        """Score the clients in the worker processes; in this one those that need no pass over samples of their own."""
        self.locations, self.arena.used = {}, 0
        central = self._central(downloads, options)
        alike, groups = self.inner.shares(downloads, options)
        groups.sort(key=lambda group: -self._work(group, of_tests=not self.method.predict.tuning))
        # a worker gets its next job only when this process has scored its own clients
        number = min(len(groups), (1 if alike else BUNDLES) * max(1, self.count))
        bundles = [_merged(groups[k::number]) for k in range(number)]
        jobs = []
        for bundle in bundles:
            clients = [c for g in bundle for c in g]
            extras = self._extras(clients) if self.method.predict.common else {}
            jobs.append(self._job(downloads, clients, (options, bundle, central, extras)))
        own: list[Board] = []

        def meanwhile() -> None:
            if alike:
                own.append(self.inner.evaluate(downloads.only(alike), options))

        boards: list[Board] = [*self._replies(jobs, "evaluating clients", meanwhile), *own]
        self.inner.central = {}
        return Board.joined(boards, downloads.clients)

    def _central(self, downloads: Downloads, options: Evaluation) -> dict[int, tuple[int, int] | Message]:
        """Let the workers run shared models over the central test set, and keep the outputs.

        Returns:
            The location of the outputs for each audience, for workers that need them.
        """
        pieces = self.inner.central_pieces(downloads, options)
        if len(pieces) < 2:
            return {}
        jobs = [("outputs", *self._job(downloads, [c], [row])[1:]) for c, row in pieces]
        outputs: dict[int, list[Any]] = {}
        for (client, _), output in zip(pieces, self._replies(jobs, "running tests of"), strict=True):
            outputs.setdefault(downloads.audience[client], []).append(map(torch.from_numpy, output))
        whole = {k: Output(*(torch.cat(c) for c in zip(*parts, strict=True))) for k, parts in outputs.items()}
        self.inner.central = {(downloads.serial, k): output for k, output in whole.items()}
        return {k: self.arena.put(wire.encode(Bundle(tensors=o._asdict()))) for k, o in whole.items()}

    def _replies(
        self, jobs: Sequence[tuple[Any, ...]], purpose: str, meanwhile: Callable[[], None] | None = None
    ) -> list[Any]:
        """The replies to jobs, in their order. `meanwhile` is called once, after the workers have begun."""
        replies: dict[int, Any] = {}
        for job, reply in self._run(jobs, meanwhile):
            if reply is None:
                raise RuntimeError(f"the worker {purpose} {list(jobs[job][2])} died {TRIES} times")
            replies[job] = reply
        return [replies[job] for job in range(len(jobs))]

    def _job(self, downloads: Downloads, clients: Sequence[int], parameters: Any) -> tuple[Any, ...]:
        """A job for a worker: the clients, their messages, and `parameters`, which are the states' extras for training
        and, beside other things, the options for an evaluation."""
        audience = {c: downloads.audience[c] for c in clients}
        numbers = dict.fromkeys([*audience.values(), *([] if downloads.common is None else [downloads.common])])
        for number in numbers:
            if number not in self.locations:
                self.locations[number] = self.arena.put(downloads.messages[number])
        locations = {number: self.locations[number] for number in numbers}
        identity = downloads.serial, downloads.common
        return downloads.purpose, downloads.round, audience, locations, identity, parameters

    def _work(self, group: Sequence[int], of_tests: bool = False) -> int:
        """An estimate of a group's time. The longest groups are started first, so that the last one is short."""
        sizes = self.sizes.of("test") if of_tests else self.sizes.training()
        return sum(sizes[client] for client in group) * self.parameters[self.owner[group[0]]]

    def _extras(self, clients: Sequence[int]) -> dict[int, Any]:
        return {c: self.arena.put(self.states.extras[c]) for c in clients if c in self.states.extras}

    def _run(
        self, jobs: Sequence[tuple[Any, ...]], meanwhile: Callable[[], None] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yield each job's number and its reply, None where its worker died `TRIES` times.

        What this process does `meanwhile` begins when the workers have begun. A worker is sent a job only when it waits for
        one: if both sides wrote at once, full pipes would block both.
        """
        self._start_all()
        tries = [0] * len(jobs)
        waiting = deque(range(len(jobs)))
        while True:
            for worker in self.workers:
                if waiting and worker.job is None:
                    worker.job = waiting.popleft()
                    with contextlib.suppress(OSError):  # a dead worker is noticed when its pipe is read
                        worker.pipe.send(jobs[worker.job])
            if meanwhile is not None:
                try:
                    meanwhile()
                except BaseException:
                    self.close()  # or the workers' replies would be taken for those to the next jobs
                    raise
                meanwhile = None
            busy = {worker.pipe: worker for worker in self.workers if worker.job is not None}
            if not busy:
                break
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                try:
                    status, content = worker.pipe.recv()
                except (EOFError, OSError):
                    job = self._bury(worker)
                    tries[job] += 1
                    if tries[job] < TRIES:
                        waiting.appendleft(job)
                    else:
                        yield job, None
                    continue
                assert worker.job is not None
                if status == "error":
                    self.close()
                    raise content
                job, worker.job = worker.job, None
                reply = self._take(worker.arena, jobs[job][0], content)
                if waiting:  # the worker goes on while the reply is processed
                    worker.job = waiting.popleft()
                    with contextlib.suppress(OSError):
                        worker.pipe.send(jobs[worker.job])
                yield job, reply
        yield from self._run_in_parent(jobs, waiting)  # the remaining jobs, where no worker could be started

    def _start_all(self) -> None:
        """Start the workers that are missing, or as many of them as the system allows."""
        try:
            while len(self.workers) < self.count:
                self.workers.append(self._start())
        except OSError as error:
            self.count = len(self.workers)
            log.warning("engine: only %d worker processes could be started (%s)", self.count, error)

    def _run_in_parent(self, jobs: Sequence[tuple[Any, ...]], job_numbers: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """Do some of the jobs one after another in this process."""
        arena = Arena(0)
        for number in job_numbers:
            extras = self.states.extras
            content = self._do(jobs[number], arena)
            self.states.extras = extras
            yield number, self._take(arena, jobs[number][0], content)

    def _bury(self, worker: Worker) -> int:
        """Replace a dead worker and return the number of its job."""
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

    def _take(self, arena: Arena, purpose: str, content: Any) -> Any:
        if purpose in ("evaluate", "outputs"):
            return content
        outcomes = {}
        for client, slot, extra, upload, *details in content:
            if slot:
                self.states.commit(client, slot, arena.get(extra))
            outcomes[client] = Outcome(None if upload is None else arena.take(upload), *details)
        return outcomes

    def _start(self) -> Worker:
        context = multiprocessing.get_context("fork")
        parent_end, child_end = context.Pipe()
        arena = Arena()
        other_pipes = [w.pipe for w in self.workers]
        process = context.Process(target=self._serve, args=(child_end, arena, [parent_end, *other_pipes]), daemon=True)
        process.start()
        child_end.close()
        return Worker(process, parent_end, arena)

    # --- the child ------------------------------------------------------------------------------------------------
    def _serve(self, pipe: Connection, arena: Arena, inherited: Sequence[Connection]) -> None:
        """Run a worker: receive a job, do it, reply; end when the parent's end of the pipe is closed."""
        for connection in inherited:
            connection.close()  # otherwise a sibling's pipe would stay open after the parent has ended
        for signal_number in (signal.SIGINT, signal.SIGTERM):  # the parent answers them and closes the pipe
            signal.signal(signal_number, signal.SIG_IGN)
        torch.set_num_threads(1)  # as in the parent, where engine=workers allows no more
        keep_pages()
        gc.freeze()  # what there is was made before, and is not looked through again and again
        while True:
            try:
                job = pipe.recv()
            except (EOFError, OSError):
                os._exit(0)
            try:
                reply = ("done", self._do(job, arena))
            except ProtofedError as error:
                reply = ("error", error)
            except Exception as error:  # the parent must be told, or it would wait for ever
                trace = traceback.format_exc()
                reply = ("error", RuntimeError(f"a worker process failed: {error}\n{trace}"))
            try:
                pipe.send(reply)
            except (BrokenPipeError, OSError):
                os._exit(0)

    def _do(self, job: tuple[Any, ...], arena: Arena) -> Any:
        arena.used = 0  # the parent has read the replies of the last job
        purpose, round, audience, locations, identity, parameters = job
        downloads = Downloads(round, ArenaMessages(self.arena, locations), audience, purpose, *identity)
        if purpose in ("evaluate", "outputs"):
            self.states.extras = {}
            return self._evaluated(replace(downloads, purpose="evaluate"), parameters, purpose == "outputs")
        self.states.extras, self.states.pending = {c: self.arena.get(e) for c, e in parameters.items()}, {}
        replies = []
        for client, outcome in self.inner.train(downloads):
            slot = 0 if outcome.failure else self.states.pending.get(client, 0)
            upload = None if outcome.upload is None else arena.put(outcome.upload)
            extra = arena.put(self.states.extras.get(client, b""))
            details = dict(outcome.terms), outcome.failure, dict(outcome.pseudo), dict(outcome.measures)
            replies.append((client, slot, extra, upload, *details))
        return replies

    def _evaluated(self, downloads: Downloads, parameters: Any, outputs_only: bool) -> Any:
        """The outputs of a piece of the central test set, or the scores of some groups of clients."""
        if outputs_only:
            output = self.inner.run_piece(downloads, downloads.clients[0], parameters[0])
            return [t.numpy() for t in output]
        options, groups, central, extras = parameters
        self.states.extras = {c: self.arena.get(e) for c, e in extras.items()}
        tensors = {k: wire.decode(self.arena.take(location), "outputs").tensors for k, location in central.items()}
        self.inner.central = {(downloads.serial, k): Output(**t) for k, t in tensors.items()}
        boards = [self.inner.evaluate(downloads.only(group), options) for group in groups]
        return Board.joined(boards, downloads.clients)

    # --- states ---------------------------------------------------------------------------------------------------
    def export(self) -> Mapping[int, ClientState]:
        """The states of all clients that have one."""
        return self.states

    def restore(self, states: Mapping[int, ClientState]) -> None:
        """Replace the clients' states by those of a checkpoint."""
        for client, state in states.items():
            self.states[client] = state
            self.states.commit(client, self.states.pending.pop(client), self.states.extras.get(client, b""))

    def close(self) -> None:
        """End the worker processes."""
        for worker in self.workers:
            worker.pipe.close()
        for worker in self.workers:
            worker.process.join(timeout=2)
            if worker.process.is_alive():
                worker.process.kill()
        self.workers = []
