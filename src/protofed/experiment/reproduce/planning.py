"""The plan of a reproduction: the settings of every cell, resolved before the first one starts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ... import methods
from ...errors import ProtofedError
from ..compare import Grid, make_grid
from ..settings import combine
from .preset import Preset, Size, load_preset, row_label, row_method


@dataclass(frozen=True)
class Plan:
    """A preset at one size, with the settings of every cell."""

    preset: Preset
    size: Size
    grids: dict[str, Grid]  # by column
    given: dict[str, Any]  # settings of the command line, which override the preset's
    rows: tuple[str, ...] = ()  # the rows that are run, where these are not all

    @property
    def columns(self) -> list[str]:
        """The names of the columns that are run, or counted."""
        return list(self.preset.file.columns) if self.preset.file.counted else list(self.grids)

    @property
    def cells(self) -> int:
        """The number of runs."""
        return sum(len(grid.cells) for grid in self.grids.values())

    @property
    def seeds(self) -> list[int]:
        """The seeds, which are the same for all columns; none where nothing is run."""
        return next((grid.seeds for grid in self.grids.values()), [])


def plan(
    name: str,
    *,
    size: Size = "laptop",
    seeds: Sequence[int] | int | None = None,
    only: Sequence[str] = (),
    rows: Sequence[str] = (),
    given: Mapping[str, Any] | None = None,
) -> Plan:
    """Make the plan of what `protofed reproduce NAME` runs.

    Args:
        name: The preset, `PAPER/TABLE`.
        size: `laptop` or `paper`.
        seeds: The number of seeds, or a list of seeds; None takes as many as the preset says.
        only: Texts; the columns whose names contain one of them are run.
        rows: Texts; the rows whose names are or contain one of them are run.
        given: Settings that override the preset's in every column.

    Returns:
        The plan, for `run_plan`.

    Example: `plan("fedsap/table1", seeds=1).cells`
    """
    preset = load_preset(name)
    overrides = dict(given or {})
    if preset.file.counted:
        if overrides or only or rows or seeds is not None:
            raise ProtofedError(
                f"{name}: this table is counted, not trained; it takes no settings, columns, rows or seeds"
            )
        return Plan(preset, size, {}, {})
    columns = _named(only, preset.file.columns, f"{name}: --only") if only else preset.columns(size)
    labels = tuple(_named(rows, map(row_label, preset.rows(size)), f"{name}: --rows", exact=True)) if rows else ()
    number = preset.file.seeds[size] if seeds is None else seeds
    grids = {c: column_grid(preset, c, size, number, overrides, labels) for c in columns}
    return Plan(preset, size, grids, overrides, labels)


def _named(texts: Sequence[str], names: Iterable[str], source: str, exact: bool = False) -> list[str]:
    """The names that one of the texts chooses, in their order.

    A text chooses the names that contain it, as whole words where there are such: CIFAR-10 is not CIFAR-100, and IID is not
    Non-IID. With `exact` it chooses one name alone where there is one that is the text: FedAvg is not FixMatch-FedAvg.
    """
    known = list(names)
    chosen: set[str] = set()
    for text in texts:
        found = [name for name in known if text.lower() in name.lower()]
        whole = [n for n in found if re.search(rf"(?<![\w-]){re.escape(text)}(?![\w-])", n, re.IGNORECASE)]
        equal = [n for n in found if exact and n.lower() == text.lower()]
        if not found:
            raise ProtofedError(f"{source} {text}: no name has that; there are {', '.join(known)}")
        chosen |= set(equal or whole or found)
    return [name for name in known if name in chosen]


def column_grid(
    preset: Preset,
    column: str,
    size: Size,
    seeds: Sequence[int] | int,
    overrides: Mapping[str, Any],
    labels: Sequence[str] = (),
) -> Grid:
    """Make the grid of one column: the preset's rows with every seed.

    Args:
        preset: The preset.
        column: The name of the column.
        size: `laptop` or `paper`.
        seeds: The number of seeds, or a list of seeds.
        overrides: Settings that override the preset's.
        labels: The names of the rows; without them, all.

    Returns:
        The grid, for a comparison.
    """
    rows = [row for row in preset.rows(size) if not labels or row_label(row) in labels]
    absent = [name for name in dict.fromkeys(map(row_method, rows)) if name not in methods.registry]
    if absent:
        raise ProtofedError(f"{preset.name} compares {', '.join(absent)}, which is not among the methods here")
    settings = combine(preset.settings(column, size), overrides)
    try:
        return make_grid(rows, seeds=seeds, given=settings, columns=preset.table_columns(size))
    except ProtofedError as error:
        raise ProtofedError(f"{preset.name}, {column}: {error}") from None
