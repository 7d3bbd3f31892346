"""The confusion matrices that a run wrote, client by client: which class was taken for which."""

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

By = Literal["head", "prototype", "mix"]
KINDS: tuple[By, ...] = ("head", "prototype", "mix")
Index = Annotated[int, pydantic.Field(ge=0)]
Times = Annotated[int, pydantic.Field(ge=1)]
Rows = Annotated[list[tuple[Index, Index, Times]], pydantic.Field(min_length=1)]


class _Client(pydantic.BaseModel):
    """The rows of a client. A method without a head has none by head, and one without prototypes none by prototype."""

    head: Rows | None = None
    prototype: Rows | None = None
    mix: Rows | None = None

    @pydantic.model_validator(mode="after")
    def _has_a_prediction(self) -> _Client:
        if self.head is None and self.prototype is None:
            raise ValueError("neither head nor prototype is present")
        return self


class _File(pydantic.BaseModel):
    """The content of `confusion.json`. Early files have no `values`, which say that classes are numbers."""

    round: int
    classes: list[str]
    values: list[float] = []
    clients: Annotated[dict[str, _Client], pydantic.Field(min_length=1)]

    @pydantic.model_validator(mode="after")
    def _names_every_class(self) -> _File:
        lists = [getattr(c, kind) or () for c in self.clients.values() for kind in KINDS]
        top = max(max(row[:2]) for rows in lists for row in rows)
        for key, entries in (("classes", self.classes), ("values", self.values)):
            if entries and len(entries) <= top:
                raise ValueError(f"{key} has {len(entries)} entries, and a row names class {top}")
        return self


@dataclass(frozen=True)
class Confusions:
    """The confusions of the clients of one run.

    Attributes:
        round: The round after which they were counted.
        by: The prediction they are of.
        names: The names of the classes.
        values: The classes as numbers; it is empty where they are none.
        clients: By the name of the client, how often it took which class for which.
        predictions: The predictions that were stored.
    """

    round: int
    by: By
    names: Sequence[str]
    values: Sequence[float]
    clients: dict[str, Confusion]
    predictions: Sequence[By] = ("head", "prototype")

    def name(self, c: int) -> str:
        """The name of a class, or its number where classes have no names."""
        return self.names[c] if self.names else str(c)


def read_confusions(folder: Path, by: By | None = None) -> Confusions:
    """Read a run's `confusion.json`, whether the run has finished or is under way.

    Args:
        folder: The run folder, or the name of a run within an archive.
        by: The prediction; None takes the head, or the prototypes where the method trains no head.

    Returns:
        The confusions of all clients.

    Example: `read_confusions(Path("runs/digits-fedsap"), by="prototype")`
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
    """Read confusions from the text of a `confusion.json`.

    Args:
        file: The file that errors name.
        text: Its text.
        by: The prediction; None takes the first that was stored.

    Returns:
        The confusions of all clients.
    """
    folder = file.parent
    try:
        stored = _File.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise ProtofedError(f"{file}: not readable ({first_problem(error)})") from None
    kinds = tuple(
        kind for kind in KINDS if all(getattr(client, kind) is not None for client in stored.clients.values())
    )
    if not kinds:
        raise ProtofedError(f"{file}: not readable (neither head nor prototype is present for all clients)")
    if by is not None and by not in kinds:
        raise ProtofedError(f"{folder}: no predictions by {by}, as this method has none; use --by {kinds[0]}")
    by = by or kinds[0]
    clients = {name: Confusion(np.array(getattr(client, by))) for name, client in stored.clients.items()}
    return Confusions(stored.round, by, stored.classes, stored.values, clients, kinds)
