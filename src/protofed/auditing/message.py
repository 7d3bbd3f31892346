"""The message that a client would send next, as its method returns it and as it leaves, and the model behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.func import functional_call

from .. import wire
from ..data.types import UNKNOWN, ClientData, FederatedData, Samples
from ..errors import ProtofedError
from ..federation import Federation
from ..federation.batches import Task, client_size
from ..federation.engine import PlainEngine
from ..federation.local import ClientState, outcome_of, trained_client, with_memory
from ..federation.mixed import MixedEngine
from ..models.base import Output
from ..models.skeleton import Skeleton, Weights
from ..parts.filters import Filter, restored
from ..wire import Bundle


@dataclass(frozen=True)
class Sent:
    """One message: what the server reads in it, and its bytes by kind."""

    content: Bundle
    bytes: Counter[str]


@dataclass(frozen=True)
class Encoder:
    """A model as an attacker would use it: the structure, and weights of which those in a message may be a part."""

    skeleton: Skeleton
    weights: Weights

    def outputs(self, x: Tensor) -> Output:
        """Embeddings and logits of samples, without gradient."""
        return self.skeleton.outputs(x, self.weights)

    def embedding(self, x: Tensor) -> Tensor:
        """Embeddings of samples, through which a gradient flows to the samples."""
        self.skeleton.module.eval()
        embedding: Tensor = functional_call(self.skeleton.module, dict(self.weights), (self.skeleton.arranged(x),))[0]
        return embedding


@dataclass(frozen=True)
class ClientMessage:
    """What one client would send next, and what an audit compares it with.

    `returned` is the message as the method returns it, before anything protects it; `leaves` is the message that the
    server gets. They are one object where nothing acts on the message. `members` are the samples that the client trains
    on, with their classes.
    """

    client: int
    name: str
    data: ClientData
    members: Samples
    trained_on: int
    weights: Weights = field(repr=False)
    skeleton: Skeleton = field(repr=False)
    returned: Sent = field(repr=False)
    leaves: Sent = field(repr=False)

    @property
    def protected(self) -> bool:
        """Whether what leaves is not what the method returned."""
        return self.leaves is not self.returned

    def encoder(self, sent: Sent) -> Encoder:
        """The client's model; where the message holds weights, these."""
        return Encoder(self.skeleton, {**self.weights, **sent.content.weights})


def next_message(federation: Federation, client: int) -> ClientMessage:
    """Train one client as in the next round, and give what it would send. Nothing of the federation changes.

    Args:
        federation: The federation, as a checkpoint left it, with a plain engine.
        client: The client's number.

    Returns:
        The client's message.
    """
    engine, name, round = _engine_of(federation, client), federation.name_of(client), federation.round + 1
    downloads, _ = federation.downloads([client], round)
    state, data = engine.state(client), federation.data.clients[client]
    received = with_memory(engine.message(downloads, client), state.memory)
    training = trained_client(engine.task, engine.skeleton, state, data, received, client, round)
    if training.trained is None:
        raise ProtofedError(f"{name} would send nothing: {training.failure}; audit other clients")
    weights = {key: value.clone() for key, value in training.trained.weights.items()}

    def message(task: Task) -> wire.Message:
        upload = outcome_of(task, training, data, received, client, round, keep=_forget).upload
        assert upload is not None
        return upload

    leaving, unprotected = message(engine.task), message(replace(engine.task, filters=()))
    leaves = _read(federation, client, leaving, federation.filters)
    returned = leaves if leaving == unprotected else _read(federation, client, unprotected, ())
    size = client_size(federation.method.feed, data)
    return ClientMessage(
        client, name, data, _members(federation.data, client), size, weights, engine.skeleton, returned, leaves
    )


def _engine_of(federation: Federation, client: int) -> PlainEngine:
    """The engine that trains a client."""
    engine = federation.engine
    if isinstance(engine, MixedEngine):
        return engine.parts[engine.owner[client]]
    assert isinstance(engine, PlainEngine)
    return engine


def _forget(client: int, state: ClientState) -> None:
    """Keep nothing of a client's training."""


def _read(federation: Federation, client: int, message: wire.Message, filters: Sequence[Filter]) -> Sent:
    """A message as the server reads it, after the filters have restored what they can."""
    name, expected = federation.name_of(client), federation.expected[federation.engine.owner[client]]
    content = wire.decode(message, name, replace(expected, shapes_only=True) if filters else expected)
    return Sent(restored(filters, content, name, federation.sent(client)), wire.sizes(message))


def _members(data: FederatedData, client: int) -> Samples:
    """The samples that a client trains on: the labelled ones, or else the unlabelled ones whose class is known here."""
    labelled, pool = data.clients[client].labelled, data.clients[client].unlabelled
    labels = data.held_back[client] if data.held_back else None
    if len(labelled) or pool is None or labels is None:
        return labelled
    known = labels != UNKNOWN
    y = torch.full((len(pool.x),), UNKNOWN)
    y[pool.index] = labels
    return Samples(pool.x, y, pool.index[known])
