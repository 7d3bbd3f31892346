"""Text: notes with a label, read from .csv, .tsv or .jsonl files, and turned into token ids once.

A text that occurs several times is kept once, so that no copy of a training text is in the test part. A setting decides
which label it gets where its copies have different ones.
"""

from __future__ import annotations

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
from typing import Any, Literal

import numpy as np
import safetensors.numpy
import torch

from ..errors import ProtofedError
from ..pretrained import locate, quiet, transformers
from ..seeds import numpy_stream
from .lines import table
from .sources import DataSource, first_line, register
from .types import Dataset

log = logging.getLogger("protofed")

Several = Literal["error", "first", "drop", "rarest"]

_CLS, _SEP, _WORDS = 1, 2, 3  # token ids of the hashing tokenizer, whose words begin at 3
_WORD = re.compile(r"\w+|[^\w\s]")


# --- notes ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Note:
    """One labelled text, its file and line, and the group and unit it belongs to."""

    text: str
    label: str
    source: str
    test: bool = False
    group: str = ""
    unit: str = ""
    """A unit, such as the patient, whose notes are all in the training part or all in the test part."""


def distinct(notes: Sequence[Note], several: Several, repeats: bool, name: str) -> list[Note]:
    """Give each text one label, and keep each text once, unless repeats are allowed.

    Texts that differ in case and spacing only are the same. A text of both parts is kept in the test part.

    Args:
        notes: all labelled texts.
        several: what is done where copies of a text have different labels.
        repeats: whether copies of a text are kept.
        name: the source's, for messages.

    Returns:
        the notes that are kept, in their order.
    """
    copies: dict[bytes, list[Note]] = defaultdict(list)
    for note in sorted(notes, key=lambda n: not n.test):
        normalised = " ".join(note.text.split()).casefold()
        copies[hashlib.blake2b(normalised.encode("utf-8", "surrogatepass"), digest_size=16).digest()].append(note)
    texts_of = Counter(label for copies_of_text in copies.values() for label in {n.label for n in copies_of_text})
    selected_ids: set[int] = set()
    conflicts = 0
    for copies_of_text in copies.values():
        labels = {n.label for n in copies_of_text}
        label = copies_of_text[0].label
        if len(labels) > 1:
            conflicts += 1
            if several == "error":
                conflicting = next(n for n in copies_of_text if n.label != label)
                raise ProtofedError(
                    f"{conflicting.source}: label {conflicting.label!r}, "
                    f"but the same text is {label!r} in {copies_of_text[0].source}; "
                    "choose with several= first, drop or rarest"
                )
            if several == "drop":
                continue
            if several == "rarest":
                label = min(labels, key=lambda candidate: (texts_of[candidate], candidate))
        selected = [n for n in copies_of_text if n.label == label]
        selected = [n for n in selected if n.test == selected[0].test] if repeats else selected[:1]
        selected_ids |= {id(n) for n in selected}
    result = [n for n in notes if id(n) in selected_ids]
    if len(result) < len(notes):
        log.info(
            "%s: %d rows, %d distinct texts, %d of them under several labels (several=%s); %d rows kept",
            name,
            len(notes),
            len(copies),
            conflicts,
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
    cumulative = np.cumsum([sizes[unit] for unit in order])
    number = int(np.searchsorted(cumulative, share * len(notes), side="right"))
    test_units = set(order[: min(max(number, 1), len(order) - 1)])
    return [n.unit in test_units for n in notes]


# --- tokens ---------------------------------------------------------------------------------------------------------
def _hashed(vocabulary: int, length: int) -> Callable[[Sequence[str]], list[list[int]]]:
    """A tokenizer that needs no file: lower-cased words and signs, each numbered by a checksum."""

    def ids(text: str) -> list[int]:
        words = (m.group().lower() for m in islice(_WORD.finditer(text), length - 2))
        return [_CLS, *(_WORDS + zlib.crc32(w.encode("utf-8", "replace")) % (vocabulary - _WORDS) for w in words), _SEP]

    return lambda texts: [ids(text) for text in texts]


def _published(location: str, local: bool, length: int) -> Callable[[Sequence[str]], list[list[int]]]:
    """A tokenizer of the transformers library."""
    library = transformers(f"tokenizer {location!r}")
    try:
        with quiet(library):
            tokenizer = library.AutoTokenizer.from_pretrained(location, local_files_only=local)
    except Exception as error:  # the library has many errors: no network, no such name, damaged files
        raise ProtofedError(
            f"tokenizer {location!r} could not be loaded ({type(error).__name__}: {first_line(error)}); "
            "expected hash:SIZE, minilm, a folder with tokenizer.json, or a name of the hub"
        ) from None

    def ids(texts: Sequence[str]) -> list[list[int]]:
        return tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]

    def beginnings(texts: Sequence[str]) -> list[list[int]]:
        """Tokens of the first words of each text; where these are too few tokens, of the whole text."""
        parts = [text.split(None, length) for text in texts]
        beginnings_of_texts = [
            t[: len(t) - len(p[-1])] if len(p) > length else t for t, p in zip(texts, parts, strict=True)
        ]
        rows = ids(beginnings_of_texts)
        incomplete = [
            i for i, row in enumerate(rows) if len(row) < length and len(beginnings_of_texts[i]) < len(texts[i])
        ]
        for i, row in zip(incomplete, ids([texts[i] for i in incomplete]) if incomplete else (), strict=True):
            rows[i] = row
        return rows

    return beginnings


def _fingerprint(location: str, local: bool) -> str:
    """An identity that changes with the tokenizer: its name, or a digest of the small files in its folder."""
    if not local:
        return location
    content = hashlib.blake2b(digest_size=16)
    for file in sorted(p for p in Path(location).iterdir() if p.suffix in (".json", ".txt", ".model")):
        content.update(file.name.encode() + b"\0" + file.read_bytes())
    return content.hexdigest()


def tokens(texts: Sequence[str], tokenizer: str, length: int) -> np.ndarray:
    """Turn texts into token ids. They are computed once, and cached in `~/.cache/protofed/tokens`.

    Args:
        texts: the texts.
        tokenizer: `hash:SIZE`, `minilm`, a folder, or a name of the hub.
        length: the most tokens of a text.

    Returns:
        `[n, length]`, padded with −1.
    """
    if tokenizer.startswith("hash:"):
        identity = tokenizer
    else:
        location, local = locate(tokenizer, "tokenizer")
        identity = _fingerprint(location, local)
    key = hashlib.blake2b(json.dumps(["tokens 1", identity, length]).encode(), digest_size=16)
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
        encode = _published(location, local, length)
    ids = np.full((len(texts), length), -1, np.int32)
    for start in range(0, len(texts), 1024):
        for row, tokens_of in enumerate(encode(texts[start : start + 1024]), start):
            ids[row, : len(tokens_of)] = tokens_of
    _cache(file, ids)
    return ids


def _cached(file: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """The cached token ids; None where the file is missing or damaged."""
    if not file.is_file():
        return None
    try:
        ids = safetensors.numpy.load_file(file)["ids"]
    except Exception as error:  # damaged in any way
        log.warning("%s is damaged (%s); it is made again", file, first_line(error))
        return None
    return ids if ids.shape == shape and ids.dtype == np.int32 else None


def _cache(file: Path, ids: np.ndarray) -> None:
    """Write token ids. The file gets its name when it is whole, so that no reader finds a part of it."""
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
    """The settings that sources of text share: how text becomes tokens, and what is done with damaged rows."""

    tokenizer: str = "hash:8192"
    """`hash:SIZE`, `minilm`, or the folder or hub name of a published tokenizer: the encoder's."""
    length: int = 128
    """The most tokens of a text."""
    damaged: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 3:
            raise ValueError(f"length must be at least 3, got {self.length}")
        size = self.tokenizer.removeprefix("hash:")
        if self.tokenizer.startswith("hash:") and not (size.isdecimal() and int(size) > _WORDS):
            raise ValueError(f"tokenizer must be hash:SIZE with a size above {_WORDS}, got {self.tokenizer!r}")

    def dataset(self, notes: Sequence[Note], test: Sequence[bool], classes: Sequence[str], grouped: bool) -> Dataset:
        """The data set of some notes.

        Args:
            notes: The labelled texts.
            test: Whether each note is in the test part.
            classes: The labels in the order of their numbers.
            grouped: Whether the notes' groups are natural client ids.
        """
        ids = torch.from_numpy(tokens([n.text for n in notes], self.tokenizer, self.length).astype(np.int64))
        class_number = {label: y for y, label in enumerate(classes)}
        y = torch.tensor([class_number[n.label] for n in notes], dtype=torch.int64)
        groups = sorted({n.group for n in notes}) if grouped else []
        group_number = {group: i for i, group in enumerate(groups)}
        group = torch.tensor([group_number[n.group] for n in notes]) if grouped else None
        test_mask = torch.tensor(test, dtype=torch.bool)
        has_test = bool(test_mask.any())
        data = Dataset(
            ids[~test_mask],
            y[~test_mask],
            ids[test_mask] if has_test else None,
            y[test_mask] if has_test else None,
            len(classes),
            None if group is None else group[~test_mask],
            None if group is None or not has_test else group[test_mask],
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
    """The label of a text that has several: the first, the rarest, or none (the text is dropped)."""
    min_class: int = 1
    classes: int | None = None
    """The most classes, of which the most frequent are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.test_share < 1:
            raise ValueError(f"test_share must be between 0 and 1, got {self.test_share}")
        if self.split_by is not None and self.path_test is not None:
            raise ValueError("split_by and path_test both make a test part; give one of them")
        for key, value, minimum in (("min_class", self.min_class, 1), ("classes", self.classes, 2)):
            if value is not None and value < minimum:
                raise ValueError(f"{key} must be at least {minimum}, got {value}")

    def read(self) -> Dataset:
        notes = list(self.notes(self.path, test=False))
        if self.path_test is not None:
            notes += self.notes(self.path_test, test=True)
        training_labels = {n.label for n in notes if not n.test}
        for note in notes:
            if note.label not in training_labels:
                raise ProtofedError(f"{note.source}: label {note.label!r} does not occur in {self.path}")
        notes = distinct(notes, self.several, self.duplicates == "keep", self.path)
        sizes = Counter(n.label for n in notes if not n.test)
        frequent = sorted(sizes, key=lambda label: (-sizes[label], label))[: self.classes]
        names = _sorted_labels([label for label in frequent if sizes[label] >= self.min_class])
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
        """The notes of one file; rows with an empty column are errors or left out."""
        columns = [c for c in (self.text, self.label, self.group, self.split_by) if c is not None]
        empty = 0
        for source, row in table(path, columns, self.damaged == "skip"):
            empty_column = next((c for c in columns if not row[c].strip()), None)
            if empty_column is None:
                group = row[self.group].strip() if self.group else ""
                unit = row[self.split_by].strip() if self.split_by else ""
                yield Note(row[self.text], row[self.label].strip(), source, test, group, unit)
            elif self.damaged == "error":
                raise ProtofedError(f"{source}: {empty_column} is empty (damaged=skip leaves such rows out)")
            else:
                empty += 1
        if empty:
            log.warning("%s: %d rows with an empty %s are left out", path, empty, " or ".join(columns))


def _sorted_labels(labels: Sequence[str]) -> list[str]:
    """Labels in alphabetical order, or in numerical order where all are numbers."""
    key: Callable[[str], Any] = int if all(label.isdecimal() for label in labels) else str
    return sorted(labels, key=key)
