"""Runs and comparisons as they were read from their folders, finished or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..errors import ProtofedError
from .columns import Row
from .confusions import By, Confusions, parse_confusions, read_confusions
from .folder import CONFUSIONS
from .lock import is_held
from .protocol import with_protocol
from .rows import LAST, JsonRow, number

State = Literal["finished", "under way", "interrupted"]


@dataclass(frozen=True)
class Run:
    """One run as it was read.

    Attributes:
        path: The run folder.
        label: The label of its variant.
        seed: Its seed.
        settings: Its settings, empty where they could not be read.
        rounds: One row per round.
        metrics: One row per evaluated round.
        clients: One row per evaluated round, with the figures of every client.
        summary: The figures; None while the run has not finished.
        notes: What could not be read.
        archived_confusions: The text of `confusion.json`, where the run was read from an archive.
    """

    path: Path
    label: str
    seed: int
    settings: Mapping[str, Any]
    rounds: Sequence[JsonRow]
    metrics: Sequence[JsonRow]
    clients: Sequence[JsonRow]
    summary: JsonRow | None
    notes: list[str] = field(default_factory=list)
    archived_confusions: str | None = None

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.path.name

    @property
    def method(self) -> str:
        """The method's name."""
        method = self.settings.get("method")
        return str(method.get("name", self.label)) if isinstance(method, Mapping) else self.label

    @property
    def planned(self) -> int | None:
        """The number of rounds that the settings ask for; None where they could not be read."""
        rounds = self.settings.get("rounds")
        return rounds if isinstance(rounds, int) else None

    @property
    def state(self) -> State:
        """Whether it has finished, is under way, or was interrupted: no process writes it or its comparison any more."""
        if self.summary is not None:
            return "finished"
        return "under way" if is_held(self.path) or is_held(self.path.parent) else "interrupted"

    @cached_property
    def _stored_names(self) -> list[str]:
        names = (self.summary or {}).get("client_names")
        if names:
            return [str(name) for name in names]
        confusions = self.confusions()
        return list(confusions.clients) if confusions is not None else []

    def client_names(self, clients: int) -> list[str]:
        """The names of so many clients, as the run wrote them; `client 3` where it wrote none."""
        names = self._stored_names
        return list(names) if len(names) == clients else [f"client {c}" for c in range(clients)]

    @cached_property
    def whole_summary(self) -> JsonRow | None:
        """The summary with protocol, clients' accuracies and names, which early ones lack and other files have."""
        if self.summary is None:
            return None
        summary = with_protocol(self.summary, self.settings)
        if not self.clients:
            return summary
        per_client = self.summary.get("per_client") or _per_client(self.clients)
        names = self.client_names(len(self.clients[-1]["samples"]))
        return {**summary, "per_client": per_client, "client_names": names}

    @property
    def last(self) -> int:
        """The number of the last round that was written, or 0."""
        return max((row["round"] for row in (*self.rounds, *self.metrics)), default=0)

    def confusions(self, by: By | None = None) -> Confusions | None:
        """Read the confusions. They are None where there is no file yet, or (with a note) where it is not readable."""
        file = self.path / CONFUSIONS
        if self.archived_confusions is None and not file.is_file():
            return None
        try:
            if self.archived_confusions is not None:
                return parse_confusions(file, self.archived_confusions, by)
            return read_confusions(self.path, by)
        except ProtofedError as error:
            note = str(error)
            if note not in self.notes:
                self.notes.append(note)
            return None


def _per_client(rows: Sequence[JsonRow]) -> dict[str, list[float | None]]:
    """Each client's accuracies, as means over the evaluations of the last five rounds."""
    last = [row for row in rows if row["round"] > rows[-1]["round"] - LAST]
    kinds = [key for key in rows[-1] if key.startswith("accuracy_")]
    lists = {kind: [row[kind] for row in last if len(row.get(kind, ())) == len(rows[-1][kind])] for kind in kinds}
    return {kind: [_mean(values) for values in zip(*lists[kind], strict=True)] for kind in kinds}


def _mean(values: Iterable[Any]) -> float | None:
    present = [v for value in values if (v := number({"value": value}, "value")) is not None]
    return sum(present) / len(present) if present else None


@dataclass(frozen=True)
class VariantRuns:
    """The runs of one variant: one for each seed that has begun, and by seed why others failed."""

    label: str
    method: str
    settings: Mapping[str, Any]
    runs: Sequence[Run]
    failures: Mapping[int, str] = field(default_factory=dict)

    @property
    def finished(self) -> list[JsonRow]:
        """The summaries of the runs that have finished."""
        return [summary for run in self.runs if (summary := run.whole_summary) is not None]

    def row(self) -> Row:
        """The line of this variant in a table."""
        return Row(self.label, self.method, self.settings, self.finished, self.failures)


@dataclass(frozen=True)
class StoredResults:
    """What a folder holds: a run, which is one variant with one seed, or the variants and seeds of a comparison.

    Attributes:
        path: The folder.
        comparison: Whether it holds a comparison, or several runs.
        variants: The runs by variant.
        columns: The columns of the tables, where a person has chosen them.
        planned_runs: The number of runs that there will be.
        own_notes: What could not be read of the files beside the runs.
    """

    path: Path
    comparison: bool
    variants: Sequence[VariantRuns]
    columns: Sequence[str] | None = None
    planned_runs: int = 1
    own_notes: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        """All runs that have begun, variant by variant."""
        return [run for variant in self.variants for run in variant.runs]

    def without_interrupted(self) -> StoredResults:
        """These results without the runs that were interrupted, which enter no mean. Where all were, they are shown."""
        variants = [replace(v, runs=[run for run in v.runs if run.state != "interrupted"]) for v in self.variants]
        return replace(self, variants=variants) if any(v.runs for v in variants) else self

    def notes(self) -> list[str]:
        """What could not be read, of the folder and of its runs."""
        return [*self.own_notes, *(note for run in self.runs for note in run.notes)]
