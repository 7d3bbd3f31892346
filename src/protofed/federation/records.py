"""What is recorded of a round: who took part, what was lost, sent and measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..evaluate import Board, Scores
from .local import Outcome


@dataclass
class Record:
    """What happened in one round."""

    round: int
    participants: list[int]
    dropped: dict[int, str]
    loss: float
    terms: dict[str, float]
    up: Counter[str]
    down: Counter[str]
    seconds: float = 0.0
    board: Board | None = None
    """The scores of the clients that were evaluated, in columns."""
    absent: list[int] = field(default_factory=list)
    """The clients that were not evaluated: attackers, and those that could not be reached or would not."""
    validation: Board | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the server did beside the method's equations, such as keeping its last good state, as sentences."""
    snapshot: bool = False

    @cached_property
    def scores(self) -> list[Scores] | None:
        """The scores of the clients that were evaluated, in the order of the clients; None where none was."""
        return None if self.board is None else list(self.board.values())


@dataclass
class Receipt:
    """What the server received in a round: every client's outcome without its upload, the dropped clients with the
    reason, and the bytes. `asked` has those that it sent while it received, in secure sums."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    bytes: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


def mean_terms(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The mean of each loss term over clients, which all have the same weight."""
    names = list(dict.fromkeys(name for o in outcomes for name in o.terms))
    return {name: sum(o.terms.get(name, 0.0) for o in outcomes) / len(outcomes) for name in names}


def mean_values(measures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over those that have it."""
    values: dict[str, list[float]] = {}
    for entry in measures:
        for name, value in entry.items():
            values.setdefault(name, []).append(value)
    return {name: sum(column) / len(column) for name, column in values.items()}
