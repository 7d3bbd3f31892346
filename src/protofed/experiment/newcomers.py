"""The figures of clients that join a finished federation, beside those of Local from scratch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import methods
from ..data.types import FederatedData
from ..evaluate import Scores
from ..federation import Federation
from ..federation.choose import EngineInputs, EngineSettings
from ..federation.newcomers import EPOCHS, scores_of_newcomers, welcomed
from .settings import Settings

Inputs = Callable[[Settings, FederatedData], tuple[Settings, EngineInputs, tuple[str, ...]]]
PLAIN = EngineSettings("loop", "loop", "contiguous", "grouped", 1, 1)


def newcomer_figures(settings: Settings, federation: Federation, inputs_of: Inputs) -> dict[str, Any]:
    """What clients that were held out can do when they join after the last round.

    Args:
        settings: The settings of the run.
        federation: The federation after its last round.
        inputs_of: Gives what an engine for some data is made of.

    Returns:
        `new_clients` of `summary.json`: accuracies by head and by prototype after each number of local epochs, as means
        over the new clients and for each, and beside them `local`, which starts from scratch.
    """
    data, first = federation.data, len(federation.data.clients)
    clients = range(first, first + len(data.newcomers))
    everybody = replace(data, clients=[*data.clients, *data.newcomers], held_back=[], newcomers=[], client_names=())
    plain = settings.with_general(attack="", filters=(), privacy="", secure="")  # newcomers upload nothing
    round = federation.round + 1
    options = replace(federation.evaluations.options, votes=False, silhouette=0, drawn=0)

    def scored(chosen: Settings, state: Any) -> dict[str, Any]:
        _, inputs, _ = inputs_of(chosen, everybody)
        engine = inputs.engine(PLAIN)
        architectures = (*federation.setup.architectures, *inputs.owner[first:])
        setup = replace(federation.setup, num_clients=len(everybody.clients), architectures=architectures)
        if state is None:
            state = inputs.method.start(setup)
        messages = welcomed(inputs.method, state, setup, clients, round)
        return _accuracies(scores_of_newcomers(engine, messages, round, options), federation.predictions)

    figures = {
        "clients": list(data.newcomer_names),
        "epochs": list(EPOCHS),
        **scored(plain, federation.state),
    }
    if all(len(client.labelled) for client in data.newcomers):
        alone = replace(plain.with_general(control=""), method=methods.get("local"))
        figures["local"] = scored(alone, None)
    return figures


def _accuracies(scores: Mapping[int, Sequence[Scores]], predictions: Sequence[str]) -> dict[str, Any]:
    """By head and by prototype: the mean after each number of epochs, and the same for each client."""
    figures: dict[str, Any] = {}
    per_client: dict[str, list[list[float]]] = {}
    for name in predictions:
        rows = [
            [getattr(s[k], f"accuracy_{name}") for s in scores.values() if getattr(s[k], f"by_{name}") is not None]
            for k in range(len(EPOCHS))
        ]
        if all(len(row) == len(scores) for row in rows):
            figures[name] = [float(np.mean(row)) for row in rows]
            per_client[name] = rows
    return {**figures, "per_client": per_client}
