"""The manifest of captures: what each shows, whose it is, and which are the test."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import ProtofedError
from ..sources import first_line, listed


class Capture(NamedTuple):
    """One row of a manifest: a file, or the part of it between two moments, in seconds from its first packet."""

    file: Path
    label: str
    group: str
    columns: dict[str, str]
    start: float = 0.0
    end: float = float("inf")

    @property
    def name(self) -> str:
        """The file, and where the row has one, the part of it."""
        whole = not self.start and self.end == float("inf")
        return str(self.file) if whole else f"{self.file} from {self.start:g} s"


class Labels(NamedTuple):
    """The classes of a data set, and the class of each capture."""

    names: tuple[str, ...]
    values: tuple[float, ...]
    classes: tuple[int, ...]


def read_manifest(path: Path, label: str = "people", group: Sequence[str] = ("room",)) -> list[Capture]:
    """The captures that a manifest names.

    Args:
        path: A CSV file. Its column `file` is relative to it; `start` and `end` are optional.
        label: The column that has what a capture shows.
        group: The columns that say whose a capture is.

    Returns:
        The captures in the order of the rows.
    """
    needed = ("file", *dict.fromkeys([*group, label]))
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            table = csv.DictReader(stream, skipinitialspace=True)
            columns = [name.strip() for name in table.fieldnames or ()]
            table.fieldnames = columns
            missing = [name for name in needed if name not in columns]
            if missing:
                raise ProtofedError(f"{path}: no column {listed(missing)}; found {listed(columns) or 'nothing'}")
            captures = [_capture(path, table.line_num, row, label, group) for row in table]
    except FileNotFoundError:
        raise ProtofedError(f"{path}: no such manifest; expected a CSV file with columns {listed(needed)}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ProtofedError(f"{path}: not a readable CSV file ({first_line(error)})") from None
    if not captures:
        raise ProtofedError(f"{path}: names no capture")
    return captures


def _capture(manifest: Path, line: int, row: dict[str, Any], label: str, group: Sequence[str]) -> Capture:
    source = f"{manifest} line {line}"
    if None in row:
        raise ProtofedError(f"{source}: more values than columns")
    values = {name: (value or "").strip() for name, value in row.items()}
    for name in ("file", *group, label):
        if not values[name]:
            raise ProtofedError(f"{source}: no {name}")
    number = values[label].removeprefix("-")
    if label == "people" and not (number == values[label] and number.isascii() and number.isdigit()):
        raise ProtofedError(
            f"{source}: people={values[label]!r}: expected a whole number, 0 or more; label= names a column of text"
        )
    file = manifest.parent / Path(values["file"]).expanduser()
    if not file.is_file():
        raise ProtofedError(f"{source}: no file {file}")
    start, end = (_seconds(values, name, usual, source) for name, usual in (("start", 0.0), ("end", float("inf"))))
    if not 0 <= start < end:
        raise ProtofedError(f"{source}: start={start:g} and end={end:g}: expected seconds, the end after the start")
    return Capture(file, values[label], ", ".join(values[name] for name in group), values, start, end)


def _seconds(values: dict[str, str], name: str, usual: float, source: str) -> float:
    text = values.get(name, "")
    try:
        return float(text) if text else usual
    except ValueError:
        raise ProtofedError(f"{source}: {name}={text!r}: expected seconds") from None


def classes_of(captures: Sequence[Capture]) -> Labels:
    """The classes of captures.

    Args:
        captures: The captures.

    Returns:
        Where all labels are whole numbers from 0 to 1,000, a class for every number up to the largest, which have a
        value and so an error that can be measured in it; otherwise the labels in alphabetical order.
    """
    labels = [capture.label for capture in captures]
    if all(label.isascii() and label.isdigit() and int(label) <= 1000 for label in labels):
        numbers = range(max(map(int, labels)) + 1)
        return Labels(tuple(map(str, numbers)), tuple(map(float, numbers)), tuple(map(int, labels)))
    names = sorted(set(labels))
    return Labels(tuple(names), (), tuple(map(names.index, labels)))


def held_captures(
    captures: Sequence[Capture], manifest: Path, by: str | None, values: Sequence[str], share: float
) -> list[bool]:
    """Which captures are the test part as a whole.

    Args:
        captures: The captures.
        manifest: The manifest, for errors.
        by: A column whose values divide them, `capture` for the captures themselves, `time` or None for neither.
        values: The column's values that are the test; by default the last ones, in alphabetical order.
        share: How many are the test where no values are given: of the column's values, or of the captures of one
            group and label.

    Returns:
        Whether each capture is.
    """
    if by is None or by == "time":
        return [False] * len(captures)
    if by == "capture":
        return _last_captures(captures, manifest, share)
    if by not in captures[0].columns:
        raise ProtofedError(f"{manifest}: no column {by}; found {listed(captures[0].columns)}")
    found = sorted({capture.columns[by] for capture in captures} - {""})
    chosen = list(values) or found[len(found) - max(round(share * len(found)), 1) :]
    if unknown := [value for value in chosen if value not in found]:
        raise ProtofedError(f"{manifest}: no capture of {by}={unknown[0]}; found {listed(found)}")
    return [capture.columns[by] in chosen for capture in captures]


def _last_captures(captures: Sequence[Capture], manifest: Path, share: float) -> list[bool]:
    """The last captures of every group and label; a pair with one capture alone has none."""
    test = [False] * len(captures)
    for pair in sorted({(capture.group, capture.label) for capture in captures}):
        rows = [row for row, capture in enumerate(captures) if (capture.group, capture.label) == pair]
        for row in rows[len(rows) - max(round(share * len(rows)), 1) :] if len(rows) > 1 else []:
            test[row] = True
    if not any(test):
        raise ProtofedError(f"{manifest}: test_by=capture needs two captures of one group and label; there are none")
    return test


def last_windows(count: int, share: float, overlap: int) -> tuple[np.ndarray, np.ndarray]:
    """The last windows of a capture as its test, and windows that share samples with them, which are neither.

    Args:
        count: The number of windows.
        share: The share of them that is the test.
        overlap: How many windows before a window share samples with it.

    Returns:
        The rows of the training part and of the test part. `last_windows(10, 0.2, 1)` has 7 and 2.
    """
    first = count - round(share * count)
    return np.arange(max(first - overlap, 0)), np.arange(first, count)
