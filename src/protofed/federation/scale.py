"""Scale-out with torch.distributed: `torchrun --nproc-per-node N -m protofed run …`.

Every rank runs the same rounds in step and holds the same server. Each rank trains and evaluates its share of the
clients with the engine of its host, and the encoded uploads are gathered on all ranks. The result is that of one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import ProtofedError
from ..evaluate import Board
from ..ranks import asked_for, rank  # noqa: F401, part of what this module offers
from .engine import Downloads, Engine, Taught
from .judge import Evaluation
from .local import ClientState, Outcome, Snapshot

T = TypeVar("T")


def begin() -> None:
    """Join the other ranks, with nccl where each rank has a GPU and with gloo otherwise."""
    if dist.is_initialized():
        return
    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if gpu else "gloo")


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_first(value: Any) -> Any:
    """Return the first rank's value on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_first(work: Callable[[], T]) -> T:
    """Call `work` on the first rank only. Every rank gets its result or its error. Without ranks, it is just called."""
    if not dist.is_initialized():
        return work()
    outcome: Any = None
    if dist.get_rank() == 0:
        try:
            outcome = (work(), None)
        except ProtofedError as error:
            outcome = (None, error)
    result, failure = from_first(outcome)
    if failure is not None:
        raise failure
    return result


class ScaledEngine:
    """This rank's share of the clients, trained by `inner`; client c belongs to rank c mod the number of ranks."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.starts, self.owner, self.dim, self.parameters = inner.starts, inner.owner, inner.dim, inner.parameters
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def _mine(self, clients: Sequence[int]) -> list[int]:
        return [c for c in clients if c % self.ranks == self.rank]

    def train(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        """Train this rank's clients, and gather the outcomes of all ranks."""
        members = self._mine(downloads.clients)
        local_outcomes = dict(self.inner.train(downloads.only(members))) if members else {}
        outcomes = {c: outcome for share in gather(local_outcomes) for c, outcome in share.items()}
        return ((c, outcomes[c]) for c in downloads.clients)  # in this order, because a sum depends on it

    def teach(self, state: Any, round: int) -> Taught:
        """Train the server's model on every rank, with the same result."""
        return self.inner.teach(state, round)

    def evaluate(self, downloads: Downloads, options: Evaluation) -> Board:
        """Score this rank's clients, and gather the scores of all ranks."""
        members = self._mine(downloads.clients)
        local_scores = self.inner.evaluate(downloads.only(members), options) if members else {}
        return Board.joined(gather(local_scores), downloads.clients)

    def export(self) -> Mapping[int, ClientState]:
        """The states of all clients, gathered on every rank. The first rank writes them."""
        mine = Snapshot.of(self.inner.export())
        shares = gather(({c: _detached(state) for c, state in mine.items()}, mine.versions))
        states = {c: state for share, _ in shares for c, state in share.items()}
        versions = {c: version for share, numbers in shares for c, version in numbers.items() if c in share}
        return Snapshot(dict(sorted(states.items())), versions)

    def restore(self, states: Mapping[int, ClientState]) -> None:
        """Restore the states of this rank's clients."""
        self.inner.restore({c: states[c] for c in self._mine(list(states))})

    def close(self) -> None:
        """Release what the engine of this rank holds."""
        self.inner.close()


def _detached(state: ClientState) -> ClientState:
    """A copy that owns its memory, so that it can be sent."""
    return replace(state, weights={k: v.cpu().clone() for k, v in state.weights.items()})
