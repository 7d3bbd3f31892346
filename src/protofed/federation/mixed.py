"""Clients of several architectures: one engine for each, with the clients' states in one place.

Weights of different architectures have nothing in common, so at the server their names begin with the architecture's
number, `"2:head.weight"`; a client sends and is sent its own without it. A server that averages weights by name thus
averages within each architecture, and needs to know nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..errors import ProtofedError
from ..evaluate import Scores
from ..wire import Bundle
from .engine import Downloads, PlainEngine, Taught
from .judge import Evaluation
from .local import ClientState, MemoryStates, Outcome


def marked(weights: Mapping[str, Tensor], architecture: int) -> dict[str, Tensor]:
    """Weights by the names that the server knows them by."""
    return {f"{architecture}:{name}": value for name, value in weights.items()}


def for_architecture(bundle: Bundle, architecture: int) -> Bundle:
    """A bundle of the server's with the weights of one architecture, by the names its clients know."""
    mark = f"{architecture}:"

    def own(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name.removeprefix(mark): value for name, value in weights.items() if name.startswith(mark)}

    return replace(bundle, weights=own(bundle.weights), models={name: own(w) for name, w in bundle.models.items()})


class MixedEngine:
    """Trains each client with the engine of its architecture."""

    def __init__(self, parts: Sequence[PlainEngine], owner: Sequence[int]) -> None:
        self.parts = list(parts)
        self.owner: tuple[int, ...] = tuple(owner)
        first = parts[0]
        self.method, self.data, self.device, self.dim = first.method, first.data, first.device, first.dim
        self.starts: tuple[Mapping[str, Tensor], ...] = tuple(part.start for part in parts)
        self.parameters: tuple[int, ...] = tuple(n for part in parts for n in part.parameters)
        self.states = MemoryStates()

    @property
    def states(self) -> MutableMapping[int, ClientState]:
        """All clients' states, in one place."""
        return self.parts[0].states

    @states.setter
    def states(self, states: MutableMapping[int, ClientState]) -> None:
        for part in self.parts:
            part.states = states

    @property
    def model_for_each(self) -> bool:
        return self.parts[0].model_for_each

    def state(self, client: int) -> ClientState:
        return self.parts[self.owner[client]].state(client)

    def _owned(self, clients: Sequence[int]) -> dict[int, list[int]]:
        """The clients of each architecture."""
        owned: dict[int, list[int]] = {}
        for client in clients:
            owned.setdefault(self.owner[client], []).append(client)
        return owned

    def _shares(self, downloads: Downloads) -> dict[int, Downloads]:
        """What the clients of each architecture are sent."""
        return {which: downloads.only(clients) for which, clients in self._owned(downloads.clients).items()}

    def groups(self, clients: Sequence[int]) -> list[list[int]]:
        """Clients that are trained together; they have one architecture."""
        return [group for which, own in self._owned(clients).items() for group in self.parts[which].groups(own)]

    def train(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        """In the order asked: each architecture's engine goes on to its next client when that one's turn has come."""
        running = {which: self.parts[which].train(share) for which, share in self._shares(downloads).items()}
        return (next(running[self.owner[client]]) for client in downloads.clients)

    def teach(self, state: Any, round: int) -> Taught:
        raise ProtofedError(f"{self.method.name} trains a model at the server, so all clients need one architecture")

    def evaluate(self, downloads: Downloads, how: Evaluation) -> dict[int, Scores]:
        scores: dict[int, Scores] = {}
        for which, share in self._shares(downloads).items():
            scores |= self.parts[which].evaluate(share, how)
        return {client: scores[client] for client in downloads.clients}

    def export(self) -> Mapping[int, ClientState]:
        return self.states

    def restore(self, states: Mapping[int, ClientState]) -> None:
        self.parts[0].restore(states)

    def close(self) -> None:
        """Nothing to release."""


SingleProcess = PlainEngine | MixedEngine
