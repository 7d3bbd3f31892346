"""Rows of .csv, .tsv and .jsonl files, compressed or not, with the line that each comes from."""

from __future__ import annotations

import csv
import gzip
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..errors import ProtofedError
from .words import first_line, listed

log = logging.getLogger("protofed")


def table(path: str, columns: Sequence[str], skip: bool = False) -> Iterator[tuple[str, dict[str, str]]]:
    """Read some columns of a .csv, .tsv or .jsonl file (`.gz` or not).

    Args:
        path: the file.
        columns: their names.
        skip: whether rows that cannot be read are left out; otherwise they are errors.

    Returns:
        for each row its file and line, and the text in each of these columns, empty where the row has none.
    """
    file = Path(path).expanduser()
    suffixes = [s for s in map(str.lower, file.suffixes) if s != ".gz"]
    suffix = suffixes[-1] if suffixes else ""
    if suffix not in (".csv", ".tsv", ".jsonl"):
        raise ProtofedError(f"{file}: expected a file .csv, .tsv or .jsonl, or one of these with .gz")
    if not file.is_file():
        raise ProtofedError(f"{file}: no such file")
    rows = _json_lines if suffix == ".jsonl" else _delimited("\t" if suffix == ".tsv" else ",")
    skipped = 0
    with _opened(file) as stream:
        for line, row in rows(stream, file, columns):
            if isinstance(row, str):
                if not skip:
                    raise ProtofedError(f"{file} line {line}: {row} (damaged=skip leaves such rows out)")
                skipped += 1
            else:
                yield f"{file} line {line}", row
    if skipped:
        log.warning("%s: %d rows that cannot be read are left out", file, skipped)


@contextmanager
def _opened(file: Path) -> Iterator[IO[str]]:
    """The file's text, compressed or not. What cannot be read is an error that names the file."""
    try:
        if file.suffix.lower() == ".gz":
            with gzip.open(file, "rt", encoding="utf-8-sig", newline="") as stream:
                yield stream
        else:
            with file.open(encoding="utf-8-sig", newline="") as stream:
                yield stream
    except UnicodeDecodeError as error:
        raise ProtofedError(f"{file}: not UTF-8 text ({first_line(error)})") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ProtofedError(f"{file}: unreadable or damaged ({first_line(error)})") from None


def header(file: Path) -> list[str]:
    """The column names of a .csv or .tsv file: the fields of its first line, without spaces around them."""
    with _opened(file) as stream:
        line = stream.readline()
    try:
        return [name.strip() for name in next(csv.reader([line], delimiter=separator(file, line)), [])]
    except csv.Error as error:
        raise ProtofedError(f"{file} line 1: {first_line(error)}") from None


def separator(file: Path, line: str) -> str:
    """What separates the fields of a file, by its name and first line: a tab, a comma, or semicolons where no comma is."""
    if ".tsv" in map(str.lower, file.suffixes):
        return "\t"
    return ";" if ";" in line and "," not in line else ","


def columns(file: Path) -> dict[str, list[str]]:
    """All columns of a .csv or .tsv file of numbers and words, by name; spaces around a field do not count.

    A column without a name holds row numbers, most often, and is left out with a warning. Every row must have a field for
    each column.
    """
    names = header(file)
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise ProtofedError(f"{file}: two columns are called {twice[0]!r}")
    if names and all(_is_number(name) for name in names):
        raise ProtofedError(
            f"{file}: its first line has numbers, {listed(names[:3])} …; expected the names of the columns"
        )
    rows: list[list[str]] = []
    with _opened(file) as stream:
        reader = csv.reader(stream, delimiter=separator(file, stream.readline()), strict=True)
        try:
            for cells in reader:
                if len(cells) == len(names):
                    rows.append(cells)
                elif cells:
                    raise ProtofedError(
                        f"{file} line {reader.line_num + 1}: {len(cells)} fields, but the header has {len(names)}"
                    )
        except csv.Error as error:
            raise ProtofedError(f"{file} line {reader.line_num + 1}: {first_line(error)}") from None
    if "" in names:
        log.warning("%s: a column without a name (row numbers?) is left out", file)
    by_column = zip(*rows, strict=True) if rows else ([] for _ in names)
    return {name: [cell.strip() for cell in cells] for name, cells in zip(names, by_column, strict=True) if name}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


Rows = Callable[[IO[str], Path, Sequence[str]], Iterator[tuple[int, "dict[str, str] | str"]]]


def _delimited(delimiter: str) -> Rows:
    def rows(stream: IO[str], file: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str] | str]]:
        limit = csv.field_size_limit(2**31 - 1)  # a note may be longer than the library's usual limit
        try:
            reader = csv.reader(stream, delimiter=delimiter, strict=True)
            header = next(reader, [])
            if missing_columns := [c for c in columns if c not in header]:
                raise ProtofedError(f"{file}: no column {listed(missing_columns)}; found {listed(header) or 'nothing'}")
            positions = [header.index(c) for c in columns]
            begin = reader.line_num + 1
            for cells in reader:
                if len(cells) == len(header):
                    yield begin, {c: cells[i] for c, i in zip(columns, positions, strict=True)}
                elif cells:
                    yield begin, f"{len(cells)} fields, but the header has {len(header)}"
                begin = reader.line_num + 1
        except csv.Error as error:
            raise ProtofedError(f"{file} line {reader.line_num}: {first_line(error)}") from None
        finally:
            csv.field_size_limit(limit)

    return rows


def _json_lines(stream: IO[str], file: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str] | str]]:
    known_keys: set[str] = set()
    for line, text in enumerate(stream, 1):
        if not text.strip():
            continue
        try:
            item = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            yield line, f"not JSON ({first_line(error)})"
            continue
        if not isinstance(item, dict):
            yield line, f"expected an object {{...}}, got {type(item).__name__}"
        elif nested := [c for c in columns if isinstance(item.get(c), dict | list)]:
            yield line, f"{nested[0]} must be text or a number, got {type(item[nested[0]]).__name__}"
        else:
            known_keys |= item.keys()
            yield line, {c: "" if item.get(c) is None else str(item[c]) for c in columns}
    if missing_keys := [c for c in columns if c not in known_keys]:
        raise ProtofedError(
            f"{file}: no key {listed(missing_keys)} in any line; found {listed(sorted(known_keys)) or 'nothing'}"
        )
