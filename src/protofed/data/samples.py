"""Samples without labels, in the forms in which people have them, as a classifier takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ProtofedError
from .csi import CSI
from .lines import header, table
from .own import _SUFFIXES, _stack, opened
from .sources import DataSource, first_line, listed, reshaped
from .table import Columns, read_table, words_of
from .text import TextSource, tokens
from .types import _check_finite, _features

TABLES = (".csv", ".tsv", ".jsonl", ".parquet")
LABEL, SITE = "label", "site"  # columns of a table that are no features


@dataclass(frozen=True)
class Unseen:
    """Samples that were read to be classified, and their classes as texts or numbers where the file has them."""

    x: Any
    labels: list[str] | None = None

    def accuracy(self, predicted: Sequence[str], classes: Sequence[str], own: Sequence[bool]) -> list[float]:
        """The share of right predictions, of all samples and of those of a client's own classes, where there are some.

        Args:
            predicted: The name of each sample's predicted class.
            classes: The names of all classes. A label that is none of them is the number of a class.
            own: Of each class whether it is one of the client's own.
        """
        if not self.labels:
            return []
        numbers = {str(number): number for number in range(len(classes))}
        truth = [{**numbers, **{name: k for k, name in enumerate(classes)}}.get(label) for label in self.labels]
        right = [t is not None and classes[t] == p for t, p in zip(truth, predicted, strict=True)]
        known = [r for r, t in zip(right, truth, strict=True) if t is not None and own[t]]
        return [sum(part) / len(part) for part in (right, known) if part]


def read_samples(
    file: str | Path,
    source: DataSource | None,
    shape: tuple[int, ...],
    token_ids: bool = False,
    columns: Columns | None = None,
) -> Unseen:
    """Read samples to classify, as the data that a classifier was trained on was read.

    Args:
        file: An `.npz` or `.npy` file, a `.csv`, `.tsv` or `.parquet` table of features, a `.csv`, `.tsv` or `.jsonl` of
            texts, an image or a folder of images, or a Wi-Fi capture.
        source: The source of the training data, whose settings say how texts, images and captures become samples; None
            where it is not known.
        shape: The shape of one sample.
        token_ids: Whether samples are texts.
        columns: The columns of the training table, whose `encode` turns a frame into samples; None where it was none.

    Returns:
        The samples before scaling, with their labels where the file has some.

    Example: `read_samples("new.csv", None, (13,)).x`
    """
    path = Path(file).expanduser()
    if not path.exists():
        raise ProtofedError(f"{path}: no such file or folder")
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if path.is_dir() or suffix in _SUFFIXES:
        return _images(path, source, shape)
    if isinstance(source, CSI) and suffix not in (".npz", ".npy"):
        return Unseen(reshaped(torch.from_numpy(np.stack(source.windows(path))), source))
    if suffix in (".npz", ".npy"):
        return _arrays(path)
    if suffix not in TABLES:
        raise ProtofedError(f"{path}: expected .npz, .npy, {listed(TABLES)}, an image, a folder of images or a capture")
    label = getattr(source, "label", None) or LABEL
    return _texts(path, source, label) if token_ids else _features_of(path, columns, shape, label)


def _arrays(path: Path) -> Unseen:
    """Arrays of an .npz file, the samples of which are `x_test`, `x` or the first array; or the array of an .npy file."""
    try:
        stored = np.load(path, allow_pickle=False)
        if isinstance(stored, np.ndarray):
            return Unseen(stored)
        with stored:
            arrays = {name: stored[name] for name in stored.files}
    except Exception as error:  # a damaged file may fail in any way
        raise ProtofedError(f"{path}: not a file of plain arrays, or damaged ({first_line(error)})") from None
    name = next((name for name in ("x_test", "x", *arrays) if name in arrays), None)
    if name is None:
        raise ProtofedError(f"{path}: no array in it")
    labels = arrays.get({"x_test": "y_test"}.get(name, "y"))
    whole = labels is not None and labels.shape == arrays[name].shape[:1]
    return Unseen(arrays[name], list(map(str, labels.tolist())) if labels is not None and whole else None)


def _texts(path: Path, source: DataSource | None, label: str) -> Unseen:
    """Texts as token ids, by the tokenizer of the training data."""
    if not isinstance(source, TextSource):
        raise ProtofedError(f"{path}: texts need the tokenizer of the training data, and it was given as tokens")
    text = str(getattr(source, "text", "text"))
    labelled = path.name.lower().removesuffix(".gz").endswith(".jsonl") or label in header(path)
    rows = [row for _, row in table(str(path), [text, label] if labelled else [text])]
    if not rows:
        raise ProtofedError(f"{path}: no text in it")
    ids = tokens([row[text] for row in rows], source.tokenizer, source.length).astype(np.int64)
    return Unseen(ids, [row[label].strip() for row in rows] if labelled else None)


def _features_of(path: Path, columns: Columns | None, shape: tuple[int, ...], label: str) -> Unseen:
    """The rows of a table of features: encoded as the training table was, or else all columns but label and `site`."""
    cells = read_table(path)
    labels = None if label not in cells else [str(word) for word in words_of(cells[label])]
    if columns is not None:
        return Unseen(columns.encode(cells, path.name), labels)
    features = {name: values for name, values in cells.items() if name not in (label, SITE)}
    if shape != (len(features),):
        raise ProtofedError(f"{path}: {len(features)} columns of features; expected samples of shape {list(shape)}")
    for name, values in features.items():
        if values.dtype.kind != "f":
            raise ProtofedError(f"{path}: column {name!r} must be numbers, as in the training data")
    return Unseen(np.stack([*features.values()], 1).astype(np.float32), labels)


def _images(path: Path, source: DataSource | None, shape: tuple[int, ...]) -> Unseen:
    """An image, or the images of a folder; those in folders of its own are labelled by the folder's name."""
    if len(shape) != 3:
        raise ProtofedError(f"{path}: images, but the classifier was trained on samples of shape {list(shape)}")
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix.lower() in _SUFFIXES and not f.name.startswith("."))
    if not files:
        raise ProtofedError(f"{path}: no images in it ({listed(sorted(_SUFFIXES))})")
    (pixels,) = _stack([opened(files)], getattr(source, "size", None))
    x = reshaped(_features(pixels, str(path)), source)
    if (x.shape[1], shape[0]) == (1, 3):
        x = x.repeat(1, 3, 1, 1)
    parents = [file.parent for file in files]
    return Unseen(x, None if path in parents or path in files else [parent.name for parent in parents])


def as_samples(x: Any, shape: tuple[int, ...], tokens: bool, source: str) -> Tensor:
    """Samples of one shape as a tensor, before any scaling.

    Args:
        x: An array, a tensor, a frame or nested lists; 8-bit images become numbers from 0 to 1, and images with
            channels last are turned. One sample alone stands for a batch of one.
        shape: The shape of one sample.
        tokens: Whether samples are token ids of text.
        source: What the samples are, for errors.

    Returns:
        `[n, *shape]`.

    >>> as_samples([[1, 2], [3, 4]], (2,), False, "mine").dtype
    torch.float32
    """
    if hasattr(x, "to_numpy"):
        x = x.to_numpy()
    if not isinstance(x, Tensor):
        try:
            x = np.asarray(x)
            if x.dtype == object:
                x = x.astype(np.float32)
        except (TypeError, ValueError) as error:
            raise ProtofedError(f"{source}: expected numbers [n, {_text(shape)}] ({error})") from None
    if tuple(x.shape) == shape:
        x = x[None]
    if tokens:
        x = torch.as_tensor(x)
        if x.is_floating_point() or x.dtype == torch.bool:
            raise ProtofedError(f"{source}: expected token ids, which are integers; got {x.dtype}")
        samples = x.long()
    else:
        samples = _features(x, source)
    if tuple(samples.shape[1:]) != shape and samples[:1].numel() == int(np.prod(shape)) and len(shape) > 1:
        samples = samples.reshape(-1, *shape)  # rows of a table that are images, such as scikit-learn's digits
    if tuple(samples.shape[1:]) != shape:
        raise ProtofedError(
            f"{source}: a sample has shape [{_text(samples.shape[1:])}], and it was trained on [{_text(shape)}]"
        )
    if not tokens:
        _check_finite(samples, f"{source}: the samples")
    return samples


def _text(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))
