"""A server with data: its training is a client's, with its own loss, its own samples and its state in place of a message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..data.types import ClientData, FederatedData
from ..errors import ProtofedError
from ..methods.base import Batch, Loss, Method, Network, Received, Step, Trained, View, epoch_rows
from ..wire import Bundle
from .local import ClientState, Skeleton, Task, Training, train_client

SERVER = -1  # its number among the random streams


@dataclass(frozen=True)
class ServerSide(Method):
    """A method as its own server trains by it."""

    name = "server"
    inner: Method

    @property
    def labelled_view(self) -> View:  # type: ignore[override]
        return self.inner.server_view

    def steps(
        self, labels: Tensor, num_unlabelled: int, epochs: int, batch: int, round: int, generator: torch.Generator
    ) -> Iterator[Step]:
        return (Step(rows) for rows in epoch_rows(len(labels), epochs, batch, generator))

    def collapse(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self.inner.collapse(weights)

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> dict[str, Tensor] | Loss:
        return self.inner.server_loss(network, batch, received, round)

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        state = Bundle(received.bank, received.banks, received.weights, received.tensors, received.scalars)
        return self.inner.server_trained(state, trained, round)


def train_server(
    task: Task, skeleton: Skeleton, data: FederatedData, start: Bundle, state: Bundle, round: int
) -> Training:
    """The server's state after its own training is the upload. `start` holds the initial model."""
    method = task.method
    if data.server is None:
        raise ProtofedError(
            f"{method.name} trains at the server: set server_labels, the number of its labelled samples"
        )
    everything = torch.ones(data.num_classes, dtype=torch.bool, device=data.server.x.device)
    own = ClientData(data.server, data.server, everything)
    local = replace(task.local, epochs=method.server_training_epochs, keep_optimiser=False)
    side = replace(task, method=ServerSide(method), local=local, held_back=())
    return train_client(side, skeleton, ClientState(start.weights), own, state, SERVER, round)
