"""Classes that come and go: a class that nobody has before some round, and one that nobody has from some round on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import ProtofedError
from .types import ClientData, FederatedData, Samples, Unlabelled


@dataclass(frozen=True)
class Timetable:
    """When classes appear and vanish: of each class the first round in which somebody has it, or the first without it."""

    appear: tuple[tuple[int, int], ...] = ()
    vanish: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, appear: str, vanish: str, data: FederatedData, rounds: int) -> Timetable:
        """The timetable of two settings, `"3@20,4@20"`, whose classes are named or numbered.

        Args:
            appear: The setting `classes_appear`.
            vanish: The setting `classes_vanish`.
            data: The data of all clients.
            rounds: The number of rounds.

        """
        table = cls(
            _entries("classes_appear", appear, data, rounds),
            _entries("classes_vanish", vanish, data, rounds),
        )
        starts = dict(table.appear)
        for label, end in table.vanish:
            if starts.get(label, 0) >= end:
                raise ProtofedError(
                    f"classes_vanish: class {label} would vanish in round {end}, before it appears in round {starts[label]}"
                )
        return table

    def check(self, data: FederatedData) -> None:
        """Raise an error where a client would have no samples left in some round."""
        for round in (1, *self.changes):
            self.at(data, round)

    @property
    def changes(self) -> tuple[int, ...]:
        """The rounds, in order, in which the classes are others than in the round before."""
        return tuple(sorted({round for _, round in (*self.appear, *self.vanish)}))

    def absent(self, round: int) -> frozenset[int]:
        """The classes that nobody has in a round."""
        coming = {label for label, first in self.appear if round < first}
        return frozenset(coming | {label for label, end in self.vanish if round >= end})

    def at(self, data: FederatedData, round: int) -> FederatedData:
        """What each client holds in a round.

        Args:
            data: What it holds at any time.
            round: The round, counted from 1.

        Returns:
            The data without the samples of absent classes, in training, validation and test.
        """
        absent = self.absent(round)
        if not absent:
            return data
        rows = _Rows(torch.tensor(sorted(absent), device=data.clients[0].labelled.x.device))
        held_back = list(data.held_back) or [None] * len(data.clients)
        clients, labels = [], []
        for number, (client, hidden) in enumerate(zip(data.clients, held_back, strict=True)):
            clients.append(rows.client(client, hidden))
            labels.append(None if hidden is None else hidden[rows.present(hidden)])
            for part in ("labelled", "test", "validation"):
                if len(getattr(client, part) or ()) and not len(getattr(clients[-1], part)):
                    raise ProtofedError(
                        f"classes_appear, classes_vanish: {data.name_of(number)} has no {part} samples in round {round}; "
                        "every client needs another class"
                    )
        return replace(
            data,
            clients=clients,
            newcomers=[rows.client(newcomer, None) for newcomer in data.newcomers],
            server=None if data.server is None else rows.samples(data.server),
            central_test=None if data.central_test is None else rows.samples(data.central_test),
            held_back=labels if data.held_back else [],
        )


class _Rows:
    """Restricts samples to the classes that are present. Lists of rows that clients share are still shared."""

    def __init__(self, absent: Tensor) -> None:
        self.absent = absent
        self.kept: dict[tuple[int, int], tuple[Tensor, Samples]] = {}

    def present(self, labels: Tensor) -> Tensor:
        return ~torch.isin(labels, self.absent.to(labels.device))

    def samples(self, samples: Samples) -> Samples:
        key = id(samples.index), id(samples.y)
        if key not in self.kept:
            index = samples.index[self.present(samples.labels)]
            self.kept[key] = samples.index, replace(samples, index=index)
        return replace(samples, index=self.kept[key][1].index)

    def client(self, client: ClientData, hidden: Tensor | None) -> ClientData:
        classes = client.classes.clone()
        classes[self.absent.to(classes.device)] = False
        pool = client.unlabelled
        if pool is not None and hidden is not None:
            pool = Unlabelled(pool.x, pool.index[self.present(hidden).to(pool.index.device)])
        validation = None if client.validation is None else self.samples(client.validation)
        labelled, test = self.samples(client.labelled), self.samples(client.test)
        return replace(client, labelled=labelled, test=test, classes=classes, unlabelled=pool, validation=validation)


def _entries(key: str, text: str, data: FederatedData, rounds: int) -> tuple[tuple[int, int], ...]:
    """Read `CLASS@ROUND` entries."""
    found: dict[int, int] = {}
    for entry in filter(None, (word.strip() for word in text.split(","))):
        name, _, number = entry.rpartition("@")
        if not name or not number.isdecimal():
            raise ProtofedError(f"{key}={text}: expected CLASS@ROUND, such as 3@20, got {entry!r}")
        label, round = _label(key, text, name, data.num_classes, data.class_names), int(number)
        if not 2 <= round <= rounds:
            raise ProtofedError(f"{key}={text}: expected a round from 2 to {rounds}, the last, got {round}")
        if label in found:
            raise ProtofedError(f"{key}={text}: class {name} is there twice")
        found[label] = round
    return tuple(found.items())


def _label(key: str, text: str, name: str, classes: int, names: Sequence[str]) -> int:
    if name in names:
        return list(names).index(name)
    if name.isdecimal() and int(name) < classes:
        return int(name)
    known = ", ".join(names[:10]) if names else f"0 to {classes - 1}"
    raise ProtofedError(f"{key}={text}: no class {name!r}; classes are {known}")
