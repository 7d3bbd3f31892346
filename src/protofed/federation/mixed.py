"""Clients of several architectures: one engine for each, with one store of the clients' states.

Weights of different architectures have nothing in common, so at the server their names begin with the architecture's
number, `"2:head.weight"`. Messages to and from a client have the names without it. A server that averages weights by
name thus averages within each architecture, without knowing about architectures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..errors import ProtofedError
from ..evaluate import Board
from ..models.base import Output
from ..wire import Bundle
from .engine import Downloads, PlainEngine, Taught
from .judge import Evaluation, Visit
from .local import ClientState, MemoryStates, Outcome


def for_architecture(bundle: Bundle, architecture: int) -> Bundle:
    """A bundle of the server's with the weights of one architecture, by the names that its clients use."""
    prefix = f"{architecture}:"

    def select(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}

    return replace(bundle, weights=select(bundle.weights), models={n: select(w) for n, w in bundle.models.items()})


class MixedEngine:
    """Trains each client with the engine of its architecture."""

    def __init__(self, parts: Sequence[PlainEngine], owner: Sequence[int]) -> None:
        self.parts = list(parts)
        self.owner: tuple[int, ...] = tuple(owner)
        any_part = parts[0]
        self.method, self.data, self.device, self.dim = any_part.method, any_part.data, any_part.device, any_part.dim
        self.starts: tuple[Mapping[str, Tensor], ...] = tuple(part.start for part in parts)
        self.parameters: tuple[int, ...] = tuple(n for part in parts for n in part.parameters)
        self.states = MemoryStates()

    @property
    def states(self) -> MutableMapping[int, ClientState]:
        """The states of all clients, which the engines of all architectures share."""
        return self.parts[0].states

    @states.setter
    def states(self, states: MutableMapping[int, ClientState]) -> None:
        for part in self.parts:
            part.states = states

    @property
    def model_for_each(self) -> bool:
        """Whether each client is evaluated by a model of its own."""
        return self.parts[0].model_for_each

    def state(self, client: int) -> ClientState:
        """A client's state, or its initial model."""
        return self.parts[self.owner[client]].state(client)

    def _owned(self, clients: Sequence[int]) -> dict[int, list[int]]:
        """The clients of each architecture."""
        owned: dict[int, list[int]] = {}
        for client in clients:
            owned.setdefault(self.owner[client], []).append(client)
        return owned

    def _shares(self, downloads: Downloads) -> dict[int, Downloads]:
        """The downloads of each architecture's clients."""
        return {k: downloads.only(clients) for k, clients in self._owned(downloads.clients).items()}

    def groups(self, clients: Sequence[int]) -> list[list[int]]:
        """The groups of clients that are trained together. The clients of a group have one architecture."""
        return [group for k, members in self._owned(clients).items() for group in self.parts[k].groups(members)]

    def train(self, downloads: Downloads) -> Iterator[tuple[int, Outcome]]:
        """Train the clients in the order of the downloads; the engines of the architectures take turns."""
        running = {k: self.parts[k].train(share) for k, share in self._shares(downloads).items()}
        return (next(running[self.owner[client]]) for client in downloads.clients)

    def teach(self, state: Any, round: int) -> Taught:
        """Refuse the training at a server, which needs one architecture for all clients."""
        raise ProtofedError(f"{self.method.name} trains a model at the server, so all clients need one architecture")

    def evaluate(self, downloads: Downloads, options: Evaluation) -> Board:
        """Score each client with the engine of its architecture."""
        boards = [self.parts[k].evaluate(share, options) for k, share in self._shares(downloads).items()]
        return Board.joined(boards, downloads.clients)

    def shares(self, downloads: Downloads, options: Evaluation) -> tuple[list[int], list[list[int]]]:
        """How an evaluation can be shared out: the shares of all architectures."""
        shares = [self.parts[k].shares(share, options) for k, share in self._shares(downloads).items()]
        return [c for alike, _ in shares for c in alike], [group for _, groups in shares for group in groups]

    def central_pieces(self, downloads: Downloads, options: Evaluation) -> list[tuple[int, int]]:
        """The pieces in which the central test set is run by the models of all architectures."""
        shares = self._shares(downloads).items()
        return [piece for k, share in shares for piece in self.parts[k].central_pieces(share, options)]

    def run_piece(self, downloads: Downloads, client: int, row: int) -> Output:
        """The outputs of one piece of the central test set by the model of a client."""
        return self.parts[self.owner[client]].run_piece(downloads, client, row)

    @property
    def central(self) -> dict[tuple[int, int], Output]:
        """The outputs of the central test set that other processes gave, which the engines of all architectures share."""
        return self.parts[0].central

    @central.setter
    def central(self, central: dict[tuple[int, int], Output]) -> None:
        for part in self.parts:
            part.central = central

    def visits(self, downloads: Downloads, options: Evaluation) -> Iterator[Visit]:
        """Every client with its model loaded, architecture by architecture."""
        for k, share in self._shares(downloads).items():
            yield from self.parts[k].visits(share, options)

    def export(self) -> Mapping[int, ClientState]:
        """The states of all clients that have one."""
        return self.states

    def restore(self, states: Mapping[int, ClientState]) -> None:
        """Replace the clients' states by those of a checkpoint."""
        self.parts[0].restore(states)

    def close(self) -> None:
        """There is nothing to release."""


SingleProcess = PlainEngine | MixedEngine
