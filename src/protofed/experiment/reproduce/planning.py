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
from .preset import Preset, Size, load_preset, row_method


@dataclass(frozen=True)
class Plan:
    """A preset at one size, with the settings of every cell."""

    preset: Preset
    size: Size
    grids: dict[str, Grid]  # by column
    given: dict[str, Any]  # settings of the command line, which override the preset's

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
        """The seeds, which are the same for all columns."""
        return next(iter(self.grids.values())).seeds


def plan(
    name: str,
    *,
    size: Size = "laptop",
    seeds: Sequence[int] | int | None = None,
    only: Sequence[str] = (),
    given: Mapping[str, Any] | None = None,
) -> Plan:
    """Make the plan of what `protofed reproduce NAME` runs.

    Args:
        name: The preset, `PAPER/TABLE`.
        size: `laptop` or `paper`.
        seeds: The number of seeds, or a list of seeds; None takes as many as the preset says.
        only: Texts; the columns whose names contain one of them are run.
        given: Settings that override the preset's in every column.

    Returns:
        The plan, for `run_plan`.

    Example: `plan("fedsap/table1", seeds=1).cells`
    """
    preset = load_preset(name)
    overrides = dict(given or {})
    if preset.file.counted:
        if overrides or only or seeds is not None:
            raise ProtofedError(f"{name}: this table is counted, not trained; it takes no settings, columns or seeds")
        return Plan(preset, size, {}, {})
    chosen = {column for text in only for column in _columns_named(text, preset.file.columns)}
    columns = [c for c in preset.file.columns if c in chosen] if only else preset.columns(size)
    if not columns:
        raise ProtofedError(
            f"{name}: --only {', '.join(only)} is in no column's name: {', '.join(preset.file.columns)}"
        )
    number = preset.file.seeds[size] if seeds is None else seeds
    return Plan(preset, size, {c: column_grid(preset, c, size, number, overrides) for c in columns}, overrides)


def _columns_named(text: str, columns: Iterable[str]) -> list[str]:
    """The columns whose names contain a text, as whole words where there are such: CIFAR-10 is not CIFAR-100."""
    matches = [c for c in columns if text.lower() in c.lower()]
    return [c for c in matches if re.search(rf"(?<!\w){re.escape(text)}(?!\w)", c, re.IGNORECASE)] or matches


def column_grid(
    preset: Preset, column: str, size: Size, seeds: Sequence[int] | int, overrides: Mapping[str, Any]
) -> Grid:
    """Make the grid of one column: the preset's rows with every seed.

    Args:
        preset: The preset.
        column: The name of the column.
        size: `laptop` or `paper`.
        seeds: The number of seeds, or a list of seeds.
        overrides: Settings that override the preset's.

    Returns:
        The grid, for a comparison.
    """
    rows = preset.rows(size)
    absent = [name for name in dict.fromkeys(map(row_method, rows)) if name not in methods.registry]
    if absent:
        raise ProtofedError(f"{preset.name} compares {', '.join(absent)}, which is not among the methods here")
    settings = combine(preset.settings(column, size), overrides)
    try:
        return make_grid(rows, seeds=seeds, given=settings)
    except ProtofedError as error:
        raise ProtofedError(f"{preset.name}, {column}: {error}") from None
