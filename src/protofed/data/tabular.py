"""Data sets from tables: which column is the label, which the site, which the part, and the rest as features."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BeforeValidator

from ..errors import ProtofedError
from ..registry import as_options
from .labels import as_words, numbered, sorted_names
from .own import read_npz
from .sources import IN_MEMORY, DataSource, register, site_files, sources
from .table import Columns, Missing, Table, missing_in, read_table, words_of
from .types import Dataset
from .words import listed, some

log = logging.getLogger("protofed")

NONE = "none"  # in place of a column's name: there is no such column
MOST = 20  # labels that a hint spells out
PARTS = {"train": False, "training": False, "test": True, "testing": True}


def _as_names(values: Any) -> Any:
    return tuple(map(str, values)) if isinstance(values, list | tuple) else values


Name = Annotated[str, BeforeValidator(lambda value: str(value or NONE))]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_names)]  # numbers may be names


@dataclass(frozen=True, kw_only=True)
class TableSource(DataSource):
    """The settings that all tables share: what their columns are."""

    label: Name = "label"
    """The column of labels: integers from 0 on, words, or booleans."""
    site: Name = "site"
    """The column of sites, the natural clients; it may be absent where it has this name. `none`: there is none."""
    split: Name = "split"
    """A column that says `train` or `test` in each row; it may be absent where it has this name. `none`: there is none."""
    classes: Names = ()
    """The labels in the order of their numbers. Integers with gaps are taken as names then."""
    drop: Names = ()
    """Columns that are left out."""
    missing: Missing = "error"
    """Missing values: an error, filled with the column's mean in the training part, or the row is dropped."""

    def dataset(self, table: Table, name: str) -> Dataset:
        """The data set of a table.

        Args:
            table: The columns by name.
            name: The table's name.
        """
        others = self._others(table, name)
        table = {column: values for column, values in table.items() if column not in self.drop}
        table = self._with_values(table, others, name)
        test = self._test_rows(table, name) if self.split in others else np.zeros(len(table[self.label]), bool)
        if test.all():
            raise ProtofedError(f"{name}: column {self.split!r} says test in every row; none is left to train on")
        features = [column for column in table if column not in others]
        columns: Columns | None = None
        if len(features) == 1 and table[features[0]].ndim > 1:
            x = table[features[0]]
        else:
            training = {column: values[~test] for column, values in table.items()}
            columns = Columns.of(training, (*others, *self.drop), self.missing, name)
            x = columns.encode(table, name)
        parts = [~test, test] if test.any() else [~test]
        sources = [f"{name}: column {self.label!r}"] * len(parts)
        labels, names = self.numbered([table[self.label][rows] for rows in parts], sources)
        arrays = [array for rows, y in zip(parts, labels, strict=True) for array in (x[rows], y)]
        data = replace(Dataset.from_arrays(*arrays, class_names=names, name=name), columns=columns)
        if self.site not in others:
            return data
        return _with_sites(data, table[self.site], test, f"{name}: column {self.site!r}")

    def parts(self, tables: Mapping[str, Table], name: str) -> dict[str, np.ndarray]:
        """One table of two, `train` and `test`, with a column that says so."""
        if self.split == NONE:
            raise ProtofedError(f"{name}: a training and a test part are given, and split is none")
        return stacked(tables, self.split, name)

    def numbered(self, parts: Sequence[Any], sources: Sequence[str]) -> tuple[list[np.ndarray], tuple[str, ...]]:
        """The labels of each part as integers, and the names of the classes, in the order of `classes` if it is given."""
        labels, names = numbered(parts, self.classes, sources, by_name=bool(self.classes))
        found = np.unique(np.concatenate(labels))
        if not names and not np.array_equal(found, np.arange(len(found))):
            values = found.tolist()
            hint = (
                f"classes={','.join(map(str, values))} takes them as names"
                if len(values) <= MOST
                else "words are names"
            )
            expected = f"integers from 0 to {len(values) - 1} without gaps"
            raise ProtofedError(f"{sources[0]} has the labels {some(values)}; expected {expected} ({hint})")
        return labels, names

    def _others(self, table: Table, name: str) -> tuple[str, ...]:
        """The columns of the table that are no features; one that was named and is not there is an error."""
        defaults = {"site": "site", "split": "split"}
        for key, column in (
            ("label", self.label),
            ("site", self.site),
            ("split", self.split),
            *(("drop", c) for c in self.drop),
        ):
            if column not in table and column not in (NONE, defaults.get(key)):
                raise ProtofedError(
                    f"{name}: no column {column!r}; found {some([*table])} "
                    f"({'name the right one with ' if key != 'drop' else ''}{key}=COLUMN)"
                )
        chosen = [column for column in (self.label, self.site, self.split) if column != NONE and column in table]
        if len(set(chosen)) < len(chosen) or self.label in self.drop:
            raise ProtofedError(
                f"{name}: label, site and split must be different columns and the label is needed; "
                f"got {listed(chosen)}, drop={listed(self.drop) or 'none'}"
            )
        return tuple(column for column in chosen if column not in self.drop)

    def _with_values(self, table: Table, others: tuple[str, ...], name: str) -> Table:
        """The table as `missing` leaves it: an error where values are missing, or without such rows."""
        absent = {
            c: missing_in(v) for c, v in table.items() if v.ndim == 1 and (c not in others or self.missing == "drop")
        }
        absent = {column: rows for column, rows in absent.items() if rows.any()}
        if not absent or self.missing == "mean":
            return table
        total = len(next(iter(table.values())))
        if self.missing == "error":
            counts = [f"{column!r} ({int(rows.sum())} of {total})" for column, rows in absent.items()]
            raise ProtofedError(
                f"{name}: missing values in column {some(counts)}; fill them in, or choose missing=mean or missing=drop"
            )
        keep = ~np.logical_or.reduce(list(absent.values()))
        if not keep.any():
            raise ProtofedError(f"{name}: missing=drop leaves no row; column {some([*absent])} have missing values")
        log.warning(
            "%s: %d of %d rows are left out, because a value is missing in them", name, int((~keep).sum()), total
        )
        return {column: values[keep] for column, values in table.items()}

    def _test_rows(self, table: Table, name: str) -> np.ndarray:
        """Whether each row is in the test part."""
        words = [word if word is None else word.lower() for word in words_of(table[self.split])]
        if unknown := sorted_names({str(word) for word in words if word not in PARTS}):
            raise ProtofedError(
                f"{name}: column {self.split!r} has {some([*map(repr, unknown)])}; expected train or test in each row "
                f"(split=none takes it as a feature, drop={self.split} leaves it out)"
            )
        return np.asarray([PARTS[str(word)] for word in words])


def _with_sites(data: Dataset, values: np.ndarray, test: np.ndarray, source: str) -> Dataset:
    """The data set with the site of each row, in alphabetical or numerical order."""
    words = as_words(values, source)
    names = sorted_names(words.tolist())
    ids = torch.tensor([names.index(word) for word in words.tolist()])
    rows = torch.from_numpy(test)
    return replace(data, group_train=ids[~rows], group_test=ids[rows] if bool(rows.any()) else None, group_names=names)


def stacked(tables: Mapping[str, Table], column: str, name: str) -> dict[str, np.ndarray]:
    """One table of several with the same columns, with a column that says which one a row is from.

    Args:
        tables: The tables by name.
        column: The column that is added; a table that has it already is an error.
        name: What they are together, for messages.
    """
    first, reference = next(iter(tables.items()))
    for key, table in tables.items():
        if column in table:
            raise ProtofedError(
                f"{name}: {key!r} has a column {column!r} already, and is the data of one {column}; leave one out"
            )
        if set(table) != set(reference):
            lacking, further = (sorted(a - b) for a, b in ((set(reference), set(table)), (set(table), set(reference))))
            problem = (
                f"no column {some(lacking)}, as {first!r} has"
                if lacking
                else f"a column {some(further)}, as {first!r} has not"
            )
            raise ProtofedError(f"{name}: {key!r} has {problem}; all need the same columns")
    result: dict[str, np.ndarray] = {}
    for field in reference:
        parts = [table[field] for table in tables.values()]
        if len({part.dtype.kind for part in parts}) > 1:  # words in one, numbers in another
            parts = [np.asarray(words_of(part), object) for part in parts]
        result[field] = np.concatenate(parts)
    owner = [key for key, table in tables.items() for _ in range(len(next(iter(table.values()))))]
    return {**result, column: np.asarray(owner, object)}


@register("site-files")
@dataclass(frozen=True, kw_only=True)
class Sites(TableSource):
    """A folder of one file a site, all tables (.csv, .tsv, .parquet, .feather) or all .npz; the site is the file's name."""

    path: str

    def read(self) -> Dataset:
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            raise ProtofedError(f"{folder}: no such folder; expected a folder of one file a site")
        files = site_files(folder)
        archives = [file for file in files if file.suffix.lower() == ".npz"]
        if not files or 0 < len(archives) < len(files):
            found = "both" if files else "none"
            raise ProtofedError(f"{folder}: expected one file a site, all tables or all .npz files; found {found}")
        if self.site == NONE:
            raise ProtofedError(f"{folder}: its files are sites, and site is none")
        names = [_stem(file) for file in files]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ProtofedError(f"{folder}: two files of one site, {twice[0]!r}")
        if archives:
            arrays = {name: read_npz(file) for name, file in zip(names, files, strict=True)}
            options = {key: value for key, value in as_options(self).items() if key != "path"}
            kinds = {each.pop("kind", "auto") for each in arrays.values()}
            if len(kinds) > 1:
                raise ProtofedError(f"{folder}: samples of several kinds, {listed(sorted(kinds))}; expected one")
            data = sources.make(IN_MEMORY, {"content": arrays, **options}).read()
            return replace(data, name=folder.name, kind=kinds.pop() if data.kind == "auto" else data.kind)
        tables = {name: read_table(file) for name, file in zip(names, files, strict=True)}
        return self.dataset(stacked(tables, self.site, str(folder)), folder.name)


def _stem(file: Path) -> str:
    return file.name.removesuffix(".gz").rpartition(".")[0]


@register("table", "parquet")
@dataclass(frozen=True, kw_only=True)
class FeatureTable(TableSource):
    """A table of features, one sample a row: .csv, .tsv (`.gz` or not), .parquet or .feather.

    The columns `label`, `site` and `split`, or those you name, say what a row is; all others are features: numbers as
    they are, words as one feature for each word. Without test rows the federation holds some out.
    """

    path: str
    path_test: str | None = None
    """A second table, of test rows."""

    def read(self) -> Dataset:
        name = Path(self.path).name
        table: Any = read_table(self.path)
        if self.path_test is not None:
            tables = {"train": table, "test": read_table(self.path_test)}
            return self.dataset(self.parts(tables, f"{self.path} and {self.path_test}"), name)
        return self.dataset(table, name)
