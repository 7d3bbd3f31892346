"""Clients that join a federation when it has finished: what they can predict at once, and after a few local epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .. import wire
from ..evaluate import Scores
from ..methods.base import Method
from ..methods.server import Setup
from ..wire import Bundle
from . import judge
from .engine import Downloads, PlainEngine
from .judge import Evaluation
from .local import trained_client, with_memory
from .mixed import MixedEngine, for_architecture
from .visits import LoadedModel, PlainVisit

EPOCHS = (0, 1, 5)
"""After how many epochs of its local training a newcomer is scored."""


def welcomed(method: Method, state: Any, setup: Setup, clients: Sequence[int], round: int) -> dict[int, Bundle]:
    """What a server would send to clients that are new to it.

    Args:
        method: The method.
        state: The server's state after the last round.
        setup: What the server knows, of all clients and the new ones after them.
        clients: The new clients' numbers.
        round: The round in which they would take part first.

    Returns:
        The message to each of them.
    """
    state = state.enlarged(method.start(setup))
    return {client: method.exchange.message(state, client, round) for client in clients}


def scores_of_newcomers(
    engine: PlainEngine | MixedEngine, messages: Mapping[int, Bundle], round: int, options: Evaluation
) -> dict[int, list[Scores]]:
    """Score new clients by what they were sent and their first local training, which changes nothing.

    Args:
        engine: An engine of all clients and the new ones.
        messages: What each new client is sent.
        round: The round it is for.
        options: How they are scored.

    Returns:
        Each client's scores after every number of `EPOCHS`. Each begins from the message; training that became NaN counts
        as none.
    """
    scores: dict[int, list[Scores]] = {}
    for client, message in messages.items():
        part = engine.parts[engine.owner[client]] if isinstance(engine, MixedEngine) else engine
        content = for_architecture(message, engine.owner[client]) if isinstance(engine, MixedEngine) else message
        downloads = Downloads(round, [wire.encode(content)], {client: 0})
        scores[client] = [_score(part, downloads, client, epochs, options) for epochs in EPOCHS]
    return scores


def _score(engine: PlainEngine, downloads: Downloads, client: int, epochs: int, options: Evaluation) -> Scores:
    message = engine.message(downloads, client)
    state, received, data = engine.state(client), with_memory(message, Bundle()), engine.data.clients[client]
    local = replace(
        engine.task.local,
        epochs=max(1, epochs),
        lr_schedule="constant",  # a schedule has ended with the last round
        keep_optimiser=False,
        shared_optimiser=False,
    )
    task = replace(engine.task, local=local, held_back=())
    trains = epochs > 0 and engine.method.exchange.asks_clients
    failed = not trains
    if trains:
        failed = bool(trained_client(task, engine.skeleton, state, data, received, client, downloads.round).failure)
    if failed:
        engine.skeleton.load(engine.method.begin(state.weights, received))
    if engine.method.predict.common:
        message = judge.as_held(message, engine.skeleton.loaded())
    visit = PlainVisit(client, message, LoadedModel(engine.skeleton, engine.data, False))
    return judge.score(visit, engine.method.predict, engine.data, options)
