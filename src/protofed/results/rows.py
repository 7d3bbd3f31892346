"""The types of a run folder's rows and of its summary, and the number of their format.

| file | one object per | type |
| --- | --- | --- |
| `rounds.jsonl` | round | `RoundRow` |
| `metrics.jsonl` | evaluated round | `EvaluationRow` |
| `clients.jsonl` | evaluated round | `ClientsRow` |
| `summary.json` | run | `Summary` |

Rows may hold more than is named here: an evaluation's figures are named by measure and prediction (`weighted_head`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pydantic
from typing_extensions import NotRequired, TypedDict

from ..errors import first_problem
from ..evaluate.confusion import PREDICTIONS

FORMAT = 2
"""The format of a run folder. Format 1, before 0.2, has no `run.json`; its `last_five` are the last five *evaluations*."""

ROUNDS, EVALUATIONS, CLIENTS, SUMMARY = "rounds.jsonl", "metrics.jsonl", "clients.jsonl", "summary.json"
ROW_FILES = (ROUNDS, EVALUATIONS, CLIENTS)
LAST = 5
"""The number of last rounds over whose evaluations the figures of tables are means."""
DIRECTIONS = ("bytes_up", "bytes_down")
FIGURE = "last_five"
JsonRow = dict[str, Any]

_open = pydantic.ConfigDict(extra="allow", strict=True)


@pydantic.with_config(_open)
class RoundRow(TypedDict):
    """What happened in a round: who took part, who was dropped and why, the loss by terms, and bytes by kind."""

    round: int
    participants: list[int]
    dropped: dict[str, str]
    loss: float | None
    terms: dict[str, float | None]
    measures: NotRequired[dict[str, float | None]]
    notes: NotRequired[list[str]]
    up: dict[str, int]
    down: dict[str, int]
    seconds: float


@pydantic.with_config(_open)
class EvaluationRow(TypedDict):
    """Accuracies over all clients after a round, with the round's loss, bytes and seconds.

    `dropped_clients` counts client rounds since the evaluation before.
    """

    round: int
    loss: float | None
    bytes_up: int
    bytes_down: int
    seconds: NotRequired[float]
    dropped_clients: NotRequired[int]


@pydantic.with_config(_open)
class ClientsRow(TypedDict):
    """The accuracy of every client after a round, by each prediction, and the number of its test samples."""

    round: int
    accuracy_head: NotRequired[list[float | None]]
    accuracy_prototype: NotRequired[list[float | None]]
    accuracy_mix: NotRequired[list[float | None]]
    samples: list[int]


@pydantic.with_config(_open)
class Summary(TypedDict):
    """The figures of a finished run."""

    format: NotRequired[int]
    method: str
    seed: int
    rounds: int
    clients: NotRequired[int]
    last_round: dict[str, float | None]
    last_five: dict[str, float | None]
    bytes_up: dict[str, int]
    bytes_down: dict[str, int]
    seconds: float
    dropped_clients: NotRequired[int]
    client_rounds: NotRequired[int]
    empty_rounds: NotRequired[int]
    round_notes: NotRequired[list[str]]
    failure: NotRequired[str | None]
    privacy: NotRequired[dict[str, Any]]


_SHAPES: dict[str, pydantic.TypeAdapter[Any]] = {
    ROUNDS: pydantic.TypeAdapter(RoundRow),
    EVALUATIONS: pydantic.TypeAdapter(EvaluationRow),
    CLIENTS: pydantic.TypeAdapter(ClientsRow),
    SUMMARY: pydantic.TypeAdapter(Summary),
}


def rough_problem_of(file: str, row: Any) -> str | None:
    """The problem that makes a row useless even to a tolerant reader, or None where there is none.

    Example: `rough_problem_of("rounds.jsonl", {"loss": 1.5})` is `"it has no round"`.
    """
    if not isinstance(row, dict) or type(row.get("round")) is not int:
        return "it has no round"
    return _problem_of_clients(row) if file == CLIENTS else None


def _problem_of_clients(row: Mapping[str, Any]) -> str | None:
    lists = [row[key] for key in (*(f"accuracy_{by}" for by in PREDICTIONS), "samples") if key in row]
    whole = len(lists) > 1 and "samples" in row and all(isinstance(values, list) and values for values in lists)
    if not whole or len({len(values) for values in lists}) > 1:
        return "expected accuracies and samples of the same clients"
    return None


def problem_of(file: str, row: Any) -> str | None:
    """The problem of an object of the file of that name, or None where there is none.

    Example: `problem_of("rounds.jsonl", {"round": 1})` is `"participants is missing"`.
    """
    try:
        _SHAPES[file].validate_python(row)
    except pydantic.ValidationError as error:
        return first_problem(error)
    if file == CLIENTS:
        return _problem_of_clients(row)
    if file == SUMMARY and row["rounds"] < 1:
        return "rounds: expected at least one"
    return None


def finite(value: Any) -> Any:
    """The value with None in place of NaN and infinities, which JSON cannot hold.

    >>> finite({"loss": float("nan"), "round": 1})
    {'loss': None, 'round': 1}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def number(row: Mapping[str, Any], key: str) -> float | None:
    """The finite number under a key, or None where it is missing, null, text or not finite.

    >>> number({"loss": 1}, "loss"), number({"loss": None}, "loss")
    (1.0, None)
    """
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
