"""Data sources: their registry, and `load`, which takes a name, a path or a data set.

A source is a frozen dataclass of its settings. `read` returns the data set as it is stored; `load` then limits, resizes
and standardises the samples, in the same way for all sources.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ..errors import ProtofedError, unknown
from ..registry import Registry
from ..seeds import numpy_stream
from .rows import balanced, hold_out
from .types import Dataset


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Base of all sources, with the settings they share."""

    name: ClassVar[str]

    standardise: bool = True
    """Mean 0 and deviation 1 per channel (images) or feature (flat samples), by the training part."""
    limit_train: int | None = None
    """The most training samples: the first of each class, the same number of each as far as it has them."""
    limit_test: int | None = None
    resize: int | None = None
    """The height and width in pixels to which images are resized."""
    image_channels: int | None = None
    """With 3, grey images get three equal channels."""

    def __post_init__(self) -> None:
        for key, limit in (("limit_train", self.limit_train), ("limit_test", self.limit_test)):
            if limit is not None and limit < 1:
                raise ValueError(f"{key} must be at least 1, got {limit}")
        if self.resize is not None and self.resize < 1:
            raise ValueError(f"resize must be at least 1, got {self.resize}")

    def load(self) -> Dataset:
        """The data set, limited, resized and standardised as the settings ask."""
        data = _shaped(_limited(self.read(), self.limit_train, self.limit_test), self.resize, self.image_channels)
        return data.standardised() if self.standardise else data

    def read(self) -> Dataset:
        """The data set as it is stored, which a source defines."""
        raise TypeError(f"{type(self).__name__} defines no read")


sources: Registry[DataSource] = Registry("data set")
register = sources.register


def load(data: str | Path | Dataset, **options: Any) -> Dataset:
    """Load a data set.

    Args:
        data: A registered name, the path of an `.npz` or `.csv` file or of an image folder, `hub:NAME`, or a
            `Dataset`, which is checked and returned as it is.
        **options: The settings of the source.

    Returns:
        The data set. `load("digits", limit_train=100)`
    """
    if isinstance(data, Dataset):
        if options:
            raise ProtofedError(f"{data.name}: settings {', '.join(options)} do not apply to a data set in memory")
        data.check()
        return data
    name, path_settings = source_of(data)
    return sources.make(name, {**path_settings, **options}).load()


def source_of(data: Any) -> tuple[str, dict[str, Any]]:
    """The source that a name, a path or `hub:NAME` refers to.

    Args:
        data: what the user gave: `digits`, `mine.npz`, `notes.csv`, the path of a folder of images, `hub:owner/name`.

    Returns:
        The source's registered name, and its settings, which have the path where `data` is one.
    """
    if not isinstance(data, str | Path):
        raise ProtofedError(
            f"data is {_described(data)}; expected a name, a path or a Dataset: pf.data.Dataset.from_arrays(x, y) makes one"
        )
    text = str(data)
    if text in sources:
        return text, {}
    if text.startswith("hub:"):
        return "hub", {"path": text.removeprefix("hub:")}
    if text.lower().endswith(".npz"):
        return "npz", {"path": text}
    if is_table(text):
        return "text", {"path": text}
    if _is_folder(text):
        return "folder", {"path": text}
    if isinstance(data, Path) or "/" in text or "\\" in text:
        raise ProtofedError(
            f"data {text!r}: no such folder; expected a name ({', '.join(sources)}), an .npz file, "
            "a .csv or .jsonl of texts, an image folder or hub:NAME"
        )
    raise unknown("data set", text, sources)


def _described(data: Any) -> str:
    """A description in a few words of an object that was given in place of a data set."""
    shape = getattr(data, "shape", None)
    size = f" of shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"{type(data).__name__}{size}" if size or not isinstance(data, bool | int | float) else repr(data)


def _is_folder(text: str) -> bool:
    try:
        return Path(text).expanduser().is_dir()
    except (OSError, RuntimeError, ValueError):  # too long for a path, or an unknown home folder
        return False


def is_table(path: str) -> bool:
    """Whether a path is that of a file of texts."""
    return path.lower().removesuffix(".gz").endswith((".csv", ".tsv", ".jsonl"))


def _limited(data: Dataset, train: int | None, test: int | None) -> Dataset:
    changes: dict[str, Any] = {}
    for part, limit in (("train", train), ("test", test)):
        labels = getattr(data, f"y_{part}")
        if limit is None or labels is None or limit >= len(labels):
            continue
        rows = torch.from_numpy(np.flatnonzero(balanced(labels.numpy(), limit)))
        for field_name in ("x", "y", "group"):
            tensor = getattr(data, f"{field_name}_{part}")
            changes[f"{field_name}_{part}"] = None if tensor is None else tensor[rows]
    return replace(data, **changes)


def _shaped(data: Dataset, resize: int | None, channels: int | None) -> Dataset:
    """The data set with its images resized, or with more channels."""
    if resize is None and channels is None:
        return data
    setting = f"resize={resize}" if resize is not None else f"image_channels={channels}"
    if data.x_train.ndim != 4 or not data.x_train.is_floating_point():
        sample_type = "samples" if data.x_train.is_floating_point() else "token ids"
        raise ProtofedError(
            f"{data.name}: {setting} is for images; it has {sample_type} of shape {list(data.sample_shape)}"
        )
    own_channels = data.sample_shape[0]
    if channels not in (None, own_channels) and (own_channels, channels) != (1, 3):
        raise ProtofedError(
            f"{data.name}: image_channels={channels}, but its images have {own_channels}; only 1 can become 3"
        )

    def shaped(x: Tensor | None) -> Tensor | None:
        if x is not None and resize is not None and x.shape[2:] != (resize, resize):
            x = torch.cat([resized(piece, resize) for piece in x.split(1024)])
        return x if x is None or channels in (None, own_channels) else x.repeat(1, 3, 1, 1)

    changes: dict[str, Any] = {part: shaped(getattr(data, part)) for part in ("x_train", "x_test", "x_unlabelled")}
    return replace(data, **changes)


def resized(x: Tensor, side: int) -> Tensor:
    """Images `[n, c, h, w]` resized to `side` pixels in height and width."""
    return interpolate(x, (side, side), mode="bilinear", antialias=True)


def places(name: str, path: str | None, *usual_folders: str) -> list[Path]:
    """The folders in which files are searched.

    Args:
        name: The data set's name.
        path: The folder that the user named; no other folder is searched then.
        *usual_folders: Further folders where systems put this data set.

    Returns:
        The folders, in the order of the search.
    """
    if path is not None:
        return [Path(path).expanduser()]
    home = os.environ.get("PROTOFED_DATA")
    data_folders = [Path(home).expanduser() / name] if home else []
    return [*data_folders, Path("~/.cache/protofed").expanduser() / name, *map(Path, usual_folders)]


def listed(items: Iterable[object]) -> str:
    """The items in one line, separated by commas."""
    return ", ".join(map(str, items))


def first_line(error: BaseException) -> str:
    """The first line of another library's error message, for our message of one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def digits_rows() -> np.ndarray:
    """The rows of scikit-learn's digits, 64 pixels and a label each.

    They are read from its file, because the import of scikit-learn takes longer than a short run.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is not None and spec.origin is not None:
        file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])


@register("digits")
@dataclass(frozen=True, kw_only=True)
class Digits(DataSource):
    """scikit-learn's handwritten digits: 1,797 grey images of 8×8, split 80/20 the same way every time."""

    def read(self) -> Dataset:
        rows = digits_rows()
        x, y = (rows[:, :-1] / 16.0).reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)
        test_mask = hold_out(y, 0.2, numpy_stream(0, "digits"))
        names = tuple("0123456789")
        return Dataset.from_arrays(
            x[~test_mask], y[~test_mask], x[test_mask], y[test_mask], class_names=names, name="digits", flips=False
        )
