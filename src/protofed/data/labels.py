"""Labels and site names as people have them, turned into numbers: integers, words, booleans, whole floats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import ProtofedError
from .words import some

ABSENT = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})  # what stands in a table where there is no value


def sorted_names(names: Iterable[str]) -> tuple[str, ...]:
    """Different names in alphabetical order, or in numerical order where all are whole numbers.

    >>> sorted_names(["10", "9", "9"]), sorted_names(["b", "10"])
    (('9', '10'), ('10', 'b'))
    """
    unique = set(names)
    key: Any = int if all(name.isdecimal() for name in unique) else str
    return tuple(sorted(unique, key=key))


def as_words(values: Any, source: str) -> np.ndarray:
    """Names, or numbers that serve as names, as text: whole numbers without a decimal point.

    Args:
        values: a list of them.
        source: what they are, for the error where one is missing.

    Returns:
        an array of text.

    >>> as_words([1.0, "b"], "sites").tolist()
    ['1', 'b']
    """
    words = [_word(value) for value in np.asarray(values, object).ravel()]
    if missing := sum(word is None for word in words):
        raise ProtofedError(f"{source}: {missing} of {len(words)} are missing")
    return np.asarray(words, str)


def _word(value: Any) -> str | None:
    if value is None or (isinstance(value, float | np.floating) and np.isnan(value)):
        return None
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    word = value.decode() if isinstance(value, bytes) else str(value).strip()
    return None if word.lower() in ABSENT else word


def numbered(
    parts: Sequence[Any], names: Sequence[str], sources: Sequence[str], by_name: bool = False
) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Number the labels of the parts of a data set.

    Integers are the numbers of classes. Words are numbered in the order of `names`, or else in alphabetical order, and
    are then the names. Booleans are two classes; floats must be whole numbers.

    Args:
        parts: the labels of the training part, and of the test part where there is one.
        names: the names of the classes, where they are given.
        sources: what each part is called, for messages.
        by_name: whether integers, too, are names and not numbers.

    Returns:
        the labels of each part as integers, and the names of the classes; none where labels are integers without names.

    >>> labels, names = numbered([["b", "a", "b"]], (), ["y"])
    >>> labels[0].tolist(), names
    ([1, 0, 1], ('a', 'b'))
    """
    labels = [_plain(part, source) for part, source in zip(parts, sources, strict=True)]
    kinds = {part.dtype.kind for part in labels}
    if kinds == {"b"} and not by_name:
        return [part.astype(np.int64) for part in labels], tuple(names) or ("false", "true")
    if len(kinds) > 1 and "U" in kinds and not by_name:
        raise ProtofedError(f"{sources[0]} has words and {sources[1]} numbers as labels, or the other way round")
    if "U" not in kinds and not by_name:
        return [part.astype(np.int64) for part in labels], tuple(names)
    words = [as_words(part, source) for part, source in zip(labels, sources, strict=True)]
    names = tuple(map(str, names)) or sorted_names(word for part in words for word in part.tolist())
    position = {name: number for number, name in enumerate(names)}
    for part, source in zip(words, sources, strict=True):
        if unknown := sorted_names(word for word in part.tolist() if word not in position):
            raise ProtofedError(f"{source} has the label {some([*map(repr, unknown)])}; known classes: {some(names)}")
    return [np.asarray([position[word] for word in part.tolist()], np.int64) for part in words], names


def _plain(labels: Any, source: str) -> np.ndarray:
    """Labels as an array of integers, of booleans or of text."""
    array = np.asarray(labels)
    if array.ndim != 1:
        raise ProtofedError(f"{source} must be one label for each sample, got shape {array.shape}")
    if array.dtype.kind == "O":
        absent = sum(_word(value) is None for value in array)
        if absent:
            raise ProtofedError(f"{source}: {absent} of {len(array)} labels are missing")
        words = sum(isinstance(value, str | bytes) for value in array)
        if 0 < words < len(array):
            raise ProtofedError(f"{source} mixes words and numbers: {words} of {len(array)} labels are words")
        if words:
            return as_words(array, source)
        try:
            array = np.asarray(array.tolist())
        except ValueError:
            array = np.empty(0, object)
    if array.dtype.kind in "US":
        return as_words(array, source)
    if array.dtype.kind == "b":
        return array
    if array.dtype.kind == "f":
        absent = int(np.isnan(array).sum())
        if absent:
            raise ProtofedError(f"{source}: {absent} of {len(array)} labels are missing")
        other = array[~(np.isfinite(array) & (array == np.round(array)))]
        if len(other):
            raise ProtofedError(
                f"{source} has the label {other[0]:g}, which is no whole number: this looks like regression, "
                "and protofed classifies; expected integers or words"
            )
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise ProtofedError(f"{source} must be integers or words, got {array.dtype}")
    if array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ProtofedError(f"{source} has the label {int(array.max())}; expected small integers from 0 on")
    return array.astype(np.int64)
