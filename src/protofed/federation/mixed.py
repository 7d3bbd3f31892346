"""Clients of several architectures: one engine for each, with the clients' states in one place.

Weights of different architectures have nothing in common, so at the server their names begin with the architecture's
number, `"2:head.weight"`; a client sends and is sent its own without it. A server that averages weights by name thus
averages within each architecture, and needs to know nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace

from torch import Tensor

from ..errors import ProtofedError
from ..evaluate import Scores
from ..wire import Bundle, Message
from .engine import Judging, PlainEngine
from .local import ClientState, Outcome


def marked(weights: Mapping[str, Tensor], architecture: int) -> dict[str, Tensor]:
    return {f"{architecture}:{name}": value for name, value in weights.items()}


def for_architecture(bundle: Bundle, architecture: int) -> Bundle:
    """A bundle of the server's with the weights of one architecture, by the names its clients know."""
    mark = f"{architecture}:"
    own = {name.removeprefix(mark): value for name, value in bundle.weights.items() if name.startswith(mark)}
    return replace(bundle, weights=own)


class MixedEngine:
    """Trains each client with the engine of its architecture."""

    def __init__(self, parts: Sequence[PlainEngine], owner: Sequence[int]) -> None:
        self.parts = list(parts)
        self.owner: tuple[int, ...] = tuple(owner)
        first = parts[0]
        self.method, self.data, self.device, self.dim = first.method, first.data, first.device, first.dim
        self.starts: tuple[Mapping[str, Tensor], ...] = tuple(part.start for part in parts)
        self.parameters: tuple[int, ...] = tuple(n for part in parts for n in part.parameters)
        self.clients = {}

    @property
    def clients(self) -> MutableMapping[int, ClientState]:
        return self.parts[0].clients

    @clients.setter
    def clients(self, states: MutableMapping[int, ClientState]) -> None:
        for part in self.parts:
            part.clients = states

    @property
    def model_for_each(self) -> bool:
        return self.parts[0].model_for_each

    def state(self, client: int) -> ClientState:
        return self.parts[self.owner[client]].state(client)

    def _shares(self, clients: Sequence[int]) -> dict[int, list[int]]:
        shares: dict[int, list[int]] = {}
        for client in clients:
            shares.setdefault(self.owner[client], []).append(client)
        return shares

    def train(self, round: int, downloads: Mapping[int, Message]) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        for which, share in self._shares(list(downloads)).items():
            outcomes |= self.parts[which].train(round, {c: downloads[c] for c in share})
        return {c: outcomes[c] for c in downloads}  # in the order asked: a sum depends on it

    def train_server(self, state: Bundle, round: int) -> tuple[Bundle | None, Mapping[str, float], str]:
        raise ProtofedError(f"{self.method.name} trains a model at the server, so all clients need one architecture")

    def evaluate(self, server: Bundle, clients: Sequence[int], how: Judging = Judging()) -> list[Scores]:  # noqa: B008
        scores: dict[int, Scores] = {}
        for which, share in self._shares(clients).items():
            own = for_architecture(server, which)
            scores |= dict(zip(share, self.parts[which].evaluate(own, share, how), strict=True))
        return [scores[c] for c in clients]

    def export(self) -> dict[int, ClientState]:
        return dict(self.clients)

    def restore(self, states: Mapping[int, ClientState]) -> None:
        self.parts[0].restore(states)
        self.clients = self.parts[0].clients

    def close(self) -> None:
        """Nothing to release."""


Inner = PlainEngine | MixedEngine
