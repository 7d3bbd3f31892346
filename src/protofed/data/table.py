"""Tables of features: columns of numbers and words, and how a row of them becomes a vector.

A table is a mapping from column names to arrays of one length: numbers, NaN where there is none, or words, None where
there is none. `Columns` is the encoding, which a run keeps, so that a new table is encoded in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import ProtofedError
from . import lines
from .labels import ABSENT, sorted_names
from .words import first_line, listed, some

log = logging.getLogger("protofed")

Table = Mapping[str, np.ndarray]
Missing = Literal["error", "mean", "drop"]
TEXT_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
BINARY_SUFFIXES = (".parquet", ".feather")
MOST_WORDS = 50  # different words in a column, unless most of them occur several times


# --- reading ----------------------------------------------------------------------------------------------------------
def is_table_file(path: str) -> bool:
    """Whether a file's name is that of a table of columns."""
    return path.lower().endswith((*TEXT_SUFFIXES, *BINARY_SUFFIXES))


def column_names(path: str | Path) -> list[str]:
    """The names of a file's columns, without its rows."""
    file = existing(path)
    if file.name.lower().endswith(TEXT_SUFFIXES):
        return lines.header(file)
    return list(_arrow(file, [])) if file.name.lower().endswith(".feather") else _parquet_names(file)


def existing(path: str | Path) -> Path:
    """The path of a file that exists."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ProtofedError(f"{file}: no such file")
    return file


def read_table(path: str | Path) -> dict[str, np.ndarray]:
    """Read a table.

    Args:
        path: a .csv or .tsv file (`.gz` or not), or with the `tables` extra a .parquet or .feather file.

    Returns:
        its columns by name. A column whose values are all numbers is numbers, every other one words.

    Example: `read_table("wine.csv")["alcohol"].mean()`
    """
    file = existing(path)
    if file.name.lower().endswith(TEXT_SUFFIXES):
        columns: Mapping[str, Any] = lines.columns(file)
    elif file.name.lower().endswith(BINARY_SUFFIXES):
        columns = _arrow(file)
    else:
        raise ProtofedError(f"{file}: expected a table, {listed((*TEXT_SUFFIXES, *BINARY_SUFFIXES))}")
    return checked(columns, str(file))


def _parquet_names(file: Path) -> list[str]:
    library = _pyarrow(file)
    try:
        return list(library.parquet.read_schema(file).names)
    except Exception as error:  # the library has many errors
        raise ProtofedError(f"{file}: not a parquet file, or damaged ({first_line(error)})") from None


def _arrow(file: Path, only: list[str] | None = None) -> dict[str, Any]:
    """The columns of a parquet or feather file."""
    library = _pyarrow(file)
    try:
        reader = library.feather if file.suffix.lower() == ".feather" else library.parquet
        table = reader.read_table(file)
    except Exception as error:  # the library has many errors
        raise ProtofedError(f"{file}: not a {file.suffix[1:]} file, or damaged ({first_line(error)})") from None
    return {name: () if only is not None else table[name].to_pylist() for name in table.column_names}


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.feather
        import pyarrow.parquet
    except ImportError:
        raise ProtofedError(f"{file} needs pyarrow: pip install 'protofed[tables]'") from None
    return pyarrow


def is_frame(data: Any) -> bool:
    """Whether an object is a table of pandas, polars or pyarrow."""
    home = type(data).__module__.partition(".")[0]
    return home in ("pandas", "polars", "pyarrow") and type(data).__name__ in ("DataFrame", "LazyFrame", "Table")


def frame_columns(frame: Any, name: str) -> dict[str, np.ndarray]:
    """The columns of a table of pandas, polars or pyarrow."""
    if type(frame).__name__ == "LazyFrame":
        frame = frame.collect()
    names = [str(column) for column in (frame.column_names if hasattr(frame, "column_names") else frame.columns)]
    if twice := [column for column in names if names.count(column) > 1]:
        raise ProtofedError(f"{name}: two columns are called {twice[0]!r}")
    by_position = frame.columns if hasattr(frame, "column_names") else [frame[column] for column in frame.columns]
    return checked(
        {n: c.to_pylist() if hasattr(c, "to_pylist") else c for n, c in zip(names, by_position, strict=True)}, name
    )


def checked(columns: Mapping[str, Any], name: str) -> dict[str, np.ndarray]:
    """The columns as arrays of numbers or of words, each with as many rows as the others."""
    table = {str(column): _values(values, f"{name}: column {str(column)!r}") for column, values in columns.items()}
    lengths = {column: len(values) for column, values in table.items()}
    if len(set(lengths.values())) > 1:
        short, long = (choose(lengths, key=lambda c: lengths[c]) for choose in (min, max))
        raise ProtofedError(f"{name}: column {short!r} has {lengths[short]} rows, {long!r} has {lengths[long]}")
    if not table or not next(iter(lengths.values())):
        raise ProtofedError(f"{name}: no rows in it; its columns are {listed(table) or 'none'}")
    return table


def _values(values: Any, source: str) -> np.ndarray:
    """A column as numbers (NaN: missing), as words (None: missing), or as it is where its entries are arrays."""
    array = values if isinstance(values, np.ndarray) else _array(values)
    if array.dtype.kind in "fiub" and array.ndim == 1:
        return array.astype(np.float64)
    if array.ndim > 1:
        return array
    if array.dtype.kind in "mM" or any(
        type(v).__name__ in ("date", "datetime", "Timestamp", "timedelta") for v in array[:9]
    ):
        raise ProtofedError(f"{source} holds dates or times; turn them into numbers, or leave the column out (drop=)")
    if any(isinstance(value, np.ndarray | list | tuple) for value in array[:9]):
        try:
            return np.stack([np.asarray(value) for value in array])
        except ValueError:
            raise ProtofedError(f"{source} holds lists or arrays of different shapes") from None
    return _numbers_or_words(array)


def _array(values: Any) -> np.ndarray:
    """A column of any library as an array: of numbers where they are all there, else of Python's objects."""
    if type(values).__name__ == "Series":
        numbers = values.to_numpy() if "category" not in str(values.dtype) else np.empty(0, object)
        return numbers if numbers.dtype.kind in "fiub" else _as_objects(values.to_list())
    return _as_objects(list(values))


def _as_objects(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _numbers_or_words(array: np.ndarray) -> np.ndarray:
    """Numbers where every value that is there is one, or is true or false; else words."""
    values = [_absent_as_none(value) for value in array.tolist()]
    truth = {"true": 1.0, "false": 0.0}
    present = [value for value in values if value is not None]
    if present and all(isinstance(value, str) and value.lower() in truth for value in present):
        return np.asarray([np.nan if value is None else truth[value.lower()] for value in values])
    try:
        return np.asarray([np.nan if value is None else float(value) for value in values], np.float64)
    except (TypeError, ValueError):
        return _as_objects([None if value is None else _text(value) for value in values])


def _absent_as_none(value: Any) -> Any:
    if isinstance(value, str):
        return None if value.strip().lower() in ABSENT else value.strip()
    return None if value is None or type(value).__name__ in ("NAType", "NaTType") or value != value else value


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


# --- the encoding -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Column:
    """One column: a number, or words of `categories`, each of which becomes a feature that is 1 for it and else 0.

    `fill` stands for a missing number; a missing word is then none of the categories. Without it, a missing value is an
    error.
    """

    name: str
    categories: tuple[str, ...] | None = None
    fill: float | None = None

    @property
    def kind(self) -> str:
        """`number` or `category`."""
        return "number" if self.categories is None else "category"

    @property
    def features(self) -> list[str]:
        """The names of the features that the column becomes."""
        return [self.name] if self.categories is None else [f"{self.name}={word}" for word in self.categories]

    def encode(self, values: np.ndarray, source: str) -> np.ndarray:
        """The features of some values `[n, features]`."""
        absent = int(missing_in(values).sum())
        if absent and self.fill is None:
            raise ProtofedError(
                f"{source}: {absent} of {len(values)} values of column {self.name!r} are missing; "
                "expected a value in each row, as in the training data"
            )
        return self._number(values, source) if self.categories is None else self._words(values, source)

    def _number(self, values: np.ndarray, source: str) -> np.ndarray:
        if values.dtype.kind != "f":
            word = next(value for value in values if value is not None and not _is_number(value))
            raise ProtofedError(
                f"{source}: column {self.name!r} has {word!r}; expected numbers, as in the training data"
            )
        filled = values if self.fill is None else np.where(np.isnan(values), self.fill, values)
        return filled[:, None]

    def _words(self, values: np.ndarray, source: str) -> np.ndarray:
        assert self.categories is not None
        words = words_of(values)
        unknown = sorted_names({word for word in words if word is not None and word not in self.categories})
        if unknown:
            log.warning(
                "%s: column %r has %s, which the training data does not have; such a row is none of its categories",
                source,
                self.name,
                some([*map(repr, unknown)]),
            )
        return np.asarray([[word == category for category in self.categories] for word in words], np.float64)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def words_of(values: np.ndarray) -> list[str | None]:
    """The values as words, None where one is missing."""
    return [None if value is None or value != value else _text(value) for value in values.tolist()]


def missing_in(values: np.ndarray) -> np.ndarray:
    """Whether each value is missing."""
    if values.dtype.kind == "f":
        return np.isnan(values)
    return np.asarray([value is None for value in values])


@dataclass(frozen=True)
class Columns:
    """How the columns of a table become the features of a sample.

    `others` are the columns that are known and no features: the label, the site, the part, and those that were left out.

    Example: `Columns.of(read_table("wine.csv"), others=("label",)).encode(read_table("new.csv"))`
    """

    columns: tuple[Column, ...]
    others: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, table: Table, others: Sequence[str] = (), missing: Missing = "error", name: str = "the table"
    ) -> Columns:
        """The encoding of the columns of a table.

        Args:
            table: the training rows.
            others: columns that are no features.
            missing: with `mean`, missing numbers are filled with the column's mean.
            name: the table's, for messages.
        """
        columns = []
        for column, values in table.items():
            if column in others:
                continue
            if values.ndim > 1:
                raise ProtofedError(
                    f"{name}: column {column!r} holds arrays of shape {values.shape[1:]}, beside other columns; expected "
                    "numbers or words, or arrays in one column alone"
                )
            present = values[~missing_in(values)]
            if not len(present):
                raise ProtofedError(
                    f"{name}: column {column!r} has no value in any row; leave it out with drop={column}"
                )
            if values.dtype.kind == "f":
                columns.append(Column(column, None, float(present.mean()) if missing == "mean" else None))
                continue
            words = sorted_names(present.tolist())
            if len(words) > MOST_WORDS and 2 * len(words) > len(present):
                raise ProtofedError(
                    f"{name}: column {column!r} has {len(words)} different words in {len(present)} rows, such as "
                    f"{words[0]!r}; an id or a text is no feature: leave it out with drop={column}"
                )
            columns.append(Column(column, words, 0.0 if missing == "mean" else None))
        if not columns:
            raise ProtofedError(f"{name}: no column of features beside {listed(others)}")
        return cls(tuple(columns), tuple(others))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(column.name for column in self.columns)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each column is: `number` or `category`."""
        return tuple(column.kind for column in self.columns)

    @property
    def categories(self) -> dict[str, tuple[str, ...]]:
        """The words of each column of words, in the order of their features."""
        return {column.name: column.categories for column in self.columns if column.categories is not None}

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features: a column's name, or `colour=red` for a word of a column of words."""
        return tuple(feature for column in self.columns for feature in column.features)

    def encode(self, rows: Any, name: str = "the table") -> np.ndarray:
        """Encode the rows of a table.

        The order of the columns does not count. Columns that the training data does not have are left out with a
        warning, and a column that is not there is an error; label and site may be there or not. A word that the training
        data does not have is none of the categories, and a warning names it.

        Args:
            rows: a file's path, a table of pandas, polars or pyarrow, or arrays by column name.
            name: what the rows are called in messages.

        Returns:
            the features `[n, features]`, in the scale of the table.
        """
        if isinstance(rows, str | Path):
            name, table = Path(rows).name, read_table(rows)
        else:
            table = frame_columns(rows, name) if is_frame(rows) else checked(rows, name)
        if absent := [column for column in self.names if column not in table]:
            raise ProtofedError(f"{name}: no column {some(absent)}; found {some([*table])}")
        if extra := [column for column in table if column not in self.names and column not in self.others]:
            log.warning("%s: columns that the training data does not have are left out: %s", name, some(extra))
        features = [column.encode(table[column.name], name) for column in self.columns]
        return np.concatenate(features, axis=1).astype(np.float32)

    def to_dict(self) -> dict[str, Any]:
        """The encoding as JSON can hold it."""
        entries = [
            {"name": c.name, "kind": c.kind}
            | ({} if c.categories is None else {"categories": list(c.categories)})
            | ({} if c.fill is None else {"fill": c.fill})
            for c in self.columns
        ]
        return {"columns": entries, "others": list(self.others)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Columns:
        """The encoding that `to_dict` wrote."""
        try:
            columns = tuple(
                Column(str(c["name"]), tuple(c["categories"]) if "categories" in c else None, c.get("fill"))
                for c in content["columns"]
            )
            return cls(columns, tuple(content.get("others", ())))
        except (KeyError, TypeError, AttributeError):
            raise ProtofedError("columns: not an encoding of columns as protofed writes it") from None
