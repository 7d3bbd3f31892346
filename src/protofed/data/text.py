"""Text: notes with a label, read from .csv, .tsv or .jsonl files, and turned into token ids once.

A text that stands there several times is kept once, so that no copy of a training text is ever tested on; what it is
called where its copies disagree is a setting, not an accident of order.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import logging
import os
import re
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import safetensors.numpy
import torch

from ..errors import ProtofedError
from ..pretrained import locate, quiet, transformers
from ..seeds import numpy_stream
from .sources import DataSource, first_line, listed, register
from .types import Dataset

log = logging.getLogger("protofed")

Several = Literal["error", "first", "drop", "rarest"]

_CLS, _SEP, _WORDS = 1, 2, 3  # of the hashing tokenizer: 0 is padding, and words begin at 3
_WORD = re.compile(r"\w+|[^\w\s]")


# --- tables ---------------------------------------------------------------------------------------------------------
def table(path: str, columns: Sequence[str], skip: bool = False) -> Iterator[tuple[str, dict[str, str]]]:
    """Read some columns of a .csv, .tsv or .jsonl file (`.gz` or not).

    Args:
        path: the file.
        columns: their names.
        skip: whether rows that cannot be read are left out; otherwise they are errors.

    Returns:
        for each row where it is, and the text in each of these columns; what is missing from a row is empty.
    """
    file = Path(path).expanduser()
    suffixes = [s for s in map(str.lower, file.suffixes) if s != ".gz"]
    kind = suffixes[-1] if suffixes else ""
    if kind not in (".csv", ".tsv", ".jsonl"):
        raise ProtofedError(f"{file}: expected a file .csv, .tsv or .jsonl, or one of these with .gz")
    if not file.is_file():
        raise ProtofedError(f"{file}: no such file")
    rows = _json_lines if kind == ".jsonl" else _delimited("\t" if kind == ".tsv" else ",")
    skipped = 0
    try:
        with _opened(file) as stream:
            for line, row in rows(stream, file, columns):
                if isinstance(row, str):
                    if not skip:
                        raise ProtofedError(f"{file} line {line}: {row} (damaged=skip leaves such rows out)")
                    skipped += 1
                else:
                    yield f"{file} line {line}", row
    except UnicodeDecodeError as error:
        raise ProtofedError(f"{file}: not UTF-8 text ({first_line(error)})") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ProtofedError(f"{file}: unreadable or damaged ({first_line(error)})") from None
    if skipped:
        log.warning("%s: %d rows that cannot be read are left out", file, skipped)


def _opened(file: Path) -> IO[str]:
    if file.suffix.lower() == ".gz":
        return gzip.open(file, "rt", encoding="utf-8-sig", newline="")
    return file.open(encoding="utf-8-sig", newline="")


Rows = Callable[[IO[str], Path, Sequence[str]], Iterator[tuple[int, "dict[str, str] | str"]]]


def _delimited(delimiter: str) -> Rows:
    def rows(stream: IO[str], file: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str] | str]]:
        limit = csv.field_size_limit(2**31 - 1)  # a note may be longer than the library's usual limit
        try:
            reader = csv.reader(stream, delimiter=delimiter, strict=True)
            header = next(reader, [])
            if missing := [c for c in columns if c not in header]:
                raise ProtofedError(f"{file}: no column {listed(missing)}; found {listed(header) or 'nothing'}")
            where = [header.index(c) for c in columns]
            begin = reader.line_num + 1
            for cells in reader:
                if len(cells) == len(header):
                    yield begin, {c: cells[i] for c, i in zip(columns, where, strict=True)}
                elif cells:
                    yield begin, f"{len(cells)} fields, but the header has {len(header)}"
                begin = reader.line_num + 1
        except csv.Error as error:
            raise ProtofedError(f"{file} line {reader.line_num}: {first_line(error)}") from None
        finally:
            csv.field_size_limit(limit)

    return rows


def _json_lines(stream: IO[str], file: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str] | str]]:
    known: set[str] = set()
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
            known |= item.keys()
            yield line, {c: "" if item.get(c) is None else str(item[c]) for c in columns}
    if missing := [c for c in columns if c not in known]:
        raise ProtofedError(f"{file}: no key {listed(missing)} in any line; found {listed(sorted(known)) or 'nothing'}")


# --- notes ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Note:
    """One labelled text, where it was read, and what it belongs to."""

    text: str
    label: str
    where: str
    test: bool = False
    group: str = ""
    unit: str = ""
    """What must not be divided between training and test part, such as the patient."""


def distinct(notes: Sequence[Note], several: Several, repeats: bool, name: str) -> list[Note]:
    """Give each text one label; and, unless repeats may stay, keep each text once.

    Texts are the same whatever their case and spacing. A text of both parts stays in the test part.

    Args:
        notes: all labelled texts.
        several: what is done where copies of a text have different labels.
        repeats: whether copies of a text may stay.
        name: the source's, for messages.

    Returns:
        the notes that stay, in their order.
    """
    copies: dict[bytes, list[Note]] = defaultdict(list)
    for note in sorted(notes, key=lambda n: not n.test):
        plain = " ".join(note.text.split()).casefold()
        copies[hashlib.blake2b(plain.encode("utf-8", "surrogatepass"), digest_size=16).digest()].append(note)
    texts_of = Counter(label for same in copies.values() for label in {n.label for n in same})
    chosen_ids: set[int] = set()
    disagree = 0
    for same in copies.values():
        labels = {n.label for n in same}
        label = same[0].label
        if len(labels) > 1:
            disagree += 1
            if several == "error":
                other = next(n for n in same if n.label != label)
                raise ProtofedError(
                    f"{other.where}: label {other.label!r}, but the same text is {label!r} in {same[0].where}; "
                    "choose with several= first, drop or rarest"
                )
            if several == "drop":
                continue
            if several == "rarest":
                label = min(labels, key=lambda one: (texts_of[one], one))
        chosen = [n for n in same if n.label == label]
        chosen = [n for n in chosen if n.test == chosen[0].test] if repeats else chosen[:1]
        chosen_ids |= {id(n) for n in chosen}
    result = [n for n in notes if id(n) in chosen_ids]
    if len(result) < len(notes):
        log.info(
            "%s: %d rows, %d distinct texts, %d of them under several labels (several=%s); %d rows kept",
            name,
            len(notes),
            len(copies),
            disagree,
            several,
            len(result),
        )
    return result


def split_off(notes: Sequence[Note], share: float, name: str) -> list[bool]:
    """Choose the test part: whole units in random order, the same every time, up to a share of the notes.

    Args:
        notes: all labelled texts; a unit is a patient, say.
        share: of the notes.
        name: the source's, for messages.

    Returns:
        for each note whether it is in the test part.
    """
    sizes = Counter(n.unit for n in notes)
    if len(sizes) < 2:
        raise ProtofedError(f"{name}: {len(sizes)} distinct value to split by; expected at least 2")
    units = sorted(sizes)
    order = [units[i] for i in numpy_stream(0, "text split").permutation(len(units))]
    reached = np.cumsum([sizes[unit] for unit in order])
    number = int(np.searchsorted(reached, share * len(notes), side="right"))
    held = set(order[: min(max(number, 1), len(order) - 1)])
    return [n.unit in held for n in notes]


# --- tokens ---------------------------------------------------------------------------------------------------------
def _hashed(vocabulary: int, length: int) -> Callable[[Sequence[str]], list[list[int]]]:
    """A tokenizer that needs no file: lower-cased words and signs, each numbered by a checksum."""

    def ids(text: str) -> list[int]:
        words = (m.group().lower() for m in islice(_WORD.finditer(text), length - 2))
        return [_CLS, *(_WORDS + zlib.crc32(w.encode("utf-8", "replace")) % (vocabulary - _WORDS) for w in words), _SEP]

    return lambda texts: [ids(text) for text in texts]


def _published(where: str, local: bool, length: int) -> Callable[[Sequence[str]], list[list[int]]]:
    """A tokenizer of the transformers library."""
    library = transformers(f"tokenizer {where!r}")
    try:
        with quiet(library):
            tokenizer = library.AutoTokenizer.from_pretrained(where, local_files_only=local)
    except Exception as error:  # no network, no such name, damaged files: the library has many kinds
        raise ProtofedError(
            f"tokenizer {where!r} could not be loaded ({type(error).__name__}: {first_line(error)}); "
            "expected hash:SIZE, minilm, a folder with tokenizer.json, or a name of the hub"
        ) from None

    def ids(texts: Sequence[str]) -> list[list[int]]:
        return tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]

    def beginnings(texts: Sequence[str]) -> list[list[int]]:
        """Of a long text the first words are enough, where they give all the tokens that are wanted."""
        parts = [text.split(None, length) for text in texts]
        heads = [t[: len(t) - len(p[-1])] if len(p) > length else t for t, p in zip(texts, parts, strict=True)]
        rows = ids(heads)
        short = [i for i, row in enumerate(rows) if len(row) < length and len(heads[i]) < len(texts[i])]
        for i, row in zip(short, ids([texts[i] for i in short]) if short else (), strict=True):
            rows[i] = row
        return rows

    return beginnings


def _fingerprint(where: str, local: bool) -> str:
    """A text that changes when a tokenizer does: of a folder, a digest of its small files."""
    if not local:
        return where
    content = hashlib.blake2b(digest_size=16)
    for file in sorted(p for p in Path(where).iterdir() if p.suffix in (".json", ".txt", ".model")):
        content.update(file.name.encode() + b"\0" + file.read_bytes())
    return content.hexdigest()


def tokens(texts: Sequence[str], tokenizer: str, length: int) -> np.ndarray:
    """Turn texts into token ids. They are computed once, and cached in `~/.cache/protofed/tokens`.

    Args:
        texts: the texts.
        tokenizer: `hash:SIZE`, `minilm`, a folder, or a name of the hub.
        length: tokens kept of each text.

    Returns:
        `[n, length]`, −1 where a text has ended.
    """
    if tokenizer.startswith("hash:"):
        kind = tokenizer
    else:
        where, local = locate(tokenizer, "tokenizer")
        kind = _fingerprint(where, local)
    key = hashlib.blake2b(json.dumps(["tokens 1", kind, length]).encode(), digest_size=16)
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        key.update(len(raw).to_bytes(8, "big") + raw)
    file = Path("~/.cache/protofed/tokens").expanduser() / f"{key.hexdigest()}.safetensors"
    cached = _cached(file, (len(texts), length))
    if cached is not None:
        return cached
    if tokenizer.startswith("hash:"):
        encode = _hashed(int(tokenizer.removeprefix("hash:")), length)
    else:
        encode = _published(where, local, length)
    ids = np.full((len(texts), length), -1, np.int32)
    for start in range(0, len(texts), 1024):
        for row, tokens_of in enumerate(encode(texts[start : start + 1024]), start):
            ids[row, : len(tokens_of)] = tokens_of
    _cache(file, ids)
    return ids


def _cached(file: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """The cached token ids, or none where the file is not there or damaged."""
    if not file.is_file():
        return None
    try:
        ids = safetensors.numpy.load_file(file)["ids"]
    except Exception as error:  # damaged in any way
        log.warning("%s is damaged (%s); it is made again", file, first_line(error))
        return None
    return ids if ids.shape == shape and ids.dtype == np.int32 else None


def _cache(file: Path, ids: np.ndarray) -> None:
    """Write token ids. The file has its name only when it is whole, so that readers find all of it or nothing."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as part:
            part.write(safetensors.numpy.save({"ids": ids}))
        os.replace(part.name, file)  # noqa: PTH105
    except OSError as error:
        log.warning("%s cannot be written (%s); the texts are tokenised again next time", file, first_line(error))


# --- sources --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class TextSource(DataSource):
    """What sources of text share: how it becomes tokens, and what is done about rows that are not right."""

    tokenizer: str = "hash:8192"
    """`hash:SIZE`, `minilm`, or the folder or hub name of a published tokenizer: the encoder's."""
    length: int = 128
    """Tokens kept of each text."""
    damaged: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 3:
            raise ValueError(f"length must be at least 3, got {self.length}")
        size = self.tokenizer.removeprefix("hash:")
        if self.tokenizer.startswith("hash:") and not (size.isdecimal() and int(size) > _WORDS):
            raise ValueError(f"tokenizer must be hash:SIZE with a size above {_WORDS}, got {self.tokenizer!r}")

    def dataset(self, notes: Sequence[Note], test: Sequence[bool], classes: Sequence[str], grouped: bool) -> Dataset:
        ids = torch.from_numpy(tokens([n.text for n in notes], self.tokenizer, self.length).astype(np.int64))
        number = {label: y for y, label in enumerate(classes)}
        y = torch.tensor([number[n.label] for n in notes], dtype=torch.int64)
        groups = sorted({n.group for n in notes}) if grouped else []
        number_of = {group: i for i, group in enumerate(groups)}
        group = torch.tensor([number_of[n.group] for n in notes]) if grouped else None
        held = torch.tensor(test, dtype=torch.bool)
        has_test = bool(held.any())
        data = Dataset(
            ids[~held],
            y[~held],
            ids[held] if has_test else None,
            y[held] if has_test else None,
            len(classes),
            None if group is None else group[~held],
            None if group is None or not has_test else group[held],
            tuple(classes),
            self.name,
            group_names=tuple(groups),
        )
        data.check()
        return data


@register("text", "csv", "jsonl")
@dataclass(frozen=True, kw_only=True)
class Text(TextSource):
    """Labelled texts in a .csv, .tsv or .jsonl file (`.gz` or not), one a row.

    Without `path_test` and `split_by` there is no test part: the federation holds one out.
    """

    path: str
    path_test: str | None = None
    text: str = "text"
    label: str = "label"
    group: str | None = None
    """A column of natural client ids, such as the hospital."""
    split_by: str | None = None
    """A column, such as the patient: whole values of it are held out as the test part."""
    test_share: float = 0.3
    duplicates: Literal["drop", "keep"] = "drop"
    several: Several = "error"
    """The label of a text that stands under several: the first, the rarest, or none (it is dropped)."""
    min_class: int = 1
    classes: int | None = None
    """Keep only so many classes, the most frequent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.test_share < 1:
            raise ValueError(f"test_share must be between 0 and 1, got {self.test_share}")
        if self.split_by is not None and self.path_test is not None:
            raise ValueError("split_by and path_test both make a test part; give one of them")
        for what, value, least in (("min_class", self.min_class, 1), ("classes", self.classes, 2)):
            if value is not None and value < least:
                raise ValueError(f"{what} must be at least {least}, got {value}")

    def read(self) -> Dataset:
        notes = list(self.notes(self.path, test=False))
        if self.path_test is not None:
            notes += self.notes(self.path_test, test=True)
        seen = {n.label for n in notes if not n.test}
        for note in notes:
            if note.label not in seen:
                raise ProtofedError(f"{note.where}: label {note.label!r} does not occur in {self.path}")
        notes = distinct(notes, self.several, self.duplicates == "keep", self.path)
        sizes = Counter(n.label for n in notes if not n.test)
        frequent = sorted(sizes, key=lambda label: (-sizes[label], label))[: self.classes]
        names = _in_order([label for label in frequent if sizes[label] >= self.min_class])
        if not names:
            raise ProtofedError(
                f"{self.path}: no class has min_class={self.min_class} texts; the largest has "
                f"{max(sizes.values(), default=0)}"
            )
        labels = set(names)
        notes = [n for n in notes if n.label in labels]
        test = [n.test for n in notes]
        if self.split_by is not None:
            test = split_off(notes, self.test_share, f"{self.path} column {self.split_by}")
        return self.dataset(notes, test, names, self.group is not None)

    def notes(self, path: str, test: bool) -> Iterator[Note]:
        columns = [c for c in (self.text, self.label, self.group, self.split_by) if c is not None]
        empty = 0
        for where, row in table(path, columns, self.damaged == "skip"):
            missing = next((c for c in columns if not row[c].strip()), None)
            if missing is None:
                group = row[self.group].strip() if self.group else ""
                unit = row[self.split_by].strip() if self.split_by else ""
                yield Note(row[self.text], row[self.label].strip(), where, test, group, unit)
            elif self.damaged == "error":
                raise ProtofedError(f"{where}: {missing} is empty (damaged=skip leaves such rows out)")
            else:
                empty += 1
        if empty:
            log.warning("%s: %d rows with an empty %s are left out", path, empty, " or ".join(columns))


def _in_order(labels: Sequence[str]) -> list[str]:
    """By name, or where all are numbers by size."""
    key: Callable[[str], Any] = int if all(label.isdecimal() for label in labels) else str
    return sorted(labels, key=key)
