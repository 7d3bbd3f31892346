"""Who was taken for whom: the confusion matrices that a run wrote, client by client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic

from ..errors import ProtofedError, first_problem
from ..evaluate.confusion import Confusion
from .archive import is_archive, read_archive
from .folder import COMPARISON, CONFUSIONS, SETTINGS

By = Literal["head", "prototype"]
Index = Annotated[int, pydantic.Field(ge=0)]
Times = Annotated[int, pydantic.Field(ge=1)]
Rows = Annotated[list[tuple[Index, Index, Times]], pydantic.Field(min_length=1)]


class _Client(pydantic.BaseModel):
    """A method that trains no head has no rows by head, one without prototypes none by prototype."""

    head: Rows | None = None
    prototype: Rows | None = None

    @pydantic.model_validator(mode="after")
    def _one_at_least(self) -> _Client:
        if self.head is None and self.prototype is None:
            raise ValueError("neither head nor prototype is there")
        return self


class _File(pydantic.BaseModel):
    """`confusion.json`. Before `values` were written there was no telling which classes are numbers."""

    round: int
    classes: list[str]
    values: list[float] = []
    clients: Annotated[dict[str, _Client], pydantic.Field(min_length=1)]

    @pydantic.model_validator(mode="after")
    def _every_class_is_there(self) -> _File:
        top = max(max(row[:2]) for c in self.clients.values() for row in (*(c.head or ()), *(c.prototype or ())))
        for key, those in (("classes", self.classes), ("values", self.values)):
            if those and len(those) <= top:
                raise ValueError(f"{key} has {len(those)} entries, and a row names class {top}")
        return self


@dataclass(frozen=True)
class Confusions:
    """What the clients of one run took for what. `values` is empty where classes are no numbers."""

    round: int
    by: By
    names: Sequence[str]
    values: Sequence[float]
    clients: dict[str, Confusion]
    ways: Sequence[By] = ("head", "prototype")  # that were stored

    def name(self, c: int) -> str:
        return self.names[c] if self.names else str(c)


def read_confusions(folder: Path, by: By | None = None) -> Confusions:
    """Read a run's `confusion.json`, of a finished run or of one under way.

    Unless `by` says otherwise, what the head predicts, or the prototypes where no head is trained.
    """
    if not folder.is_dir():
        stored = read_archive(folder.parent).get(folder.name) if is_archive(folder.parent) else None
        if stored is None or stored.confusions is None:
            raise ProtofedError(f"{folder}: no such run folder")
        return parse_confusions(folder / CONFUSIONS, stored.confusions, by)
    if (folder / COMPARISON).is_file():
        runs = sorted(path.parent for path in folder.glob(f"*/{CONFUSIONS}"))
        if is_archive(folder):
            runs = sorted(folder / name for name, run in read_archive(folder).items() if run.confusions is not None)
        example = f", for instance {runs[0]}" if runs else ""
        raise ProtofedError(f"{folder}: this is a comparison; name one of its runs{example}")
    file = folder / CONFUSIONS
    if not file.is_file():
        if not (folder / SETTINGS).is_file():
            raise ProtofedError(f"{folder}: not a run folder (it has no {SETTINGS})")
        raise ProtofedError(
            f"{folder}: it has no {CONFUSIONS}; the run has not come to a checkpoint yet, or an earlier version made it"
        )
    try:
        return parse_confusions(file, file.read_bytes(), by)
    except OSError as error:
        raise ProtofedError(f"{file}: not readable ({error.strerror})") from None


def parse_confusions(file: Path, text: str | bytes, by: By | None = None) -> Confusions:
    """Confusions from the text of a `confusion.json`; `file` is what errors name."""
    folder = file.parent
    try:
        stored = _File.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise ProtofedError(f"{file}: not readable ({first_problem(error)})") from None
    ways: tuple[By, ...] = ("head", "prototype")
    ways = tuple(way for way in ways if all(getattr(client, way) is not None for client in stored.clients.values()))
    if not ways:
        raise ProtofedError(f"{file}: not readable (neither head nor prototype is there for all clients)")
    if by is not None and by not in ways:
        raise ProtofedError(f"{folder}: no predictions by {by}, as this method has none; use --by {ways[0]}")
    by = by or ways[0]
    clients = {name: Confusion(np.array(getattr(client, by))) for name, client in stored.clients.items()}
    return Confusions(stored.round, by, stored.classes, stored.values, clients, ways)
