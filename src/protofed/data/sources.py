"""Where data comes from: one registry of sources, and `load`, which takes a name, a path or a data set.

A source is a frozen dataclass of its settings. `read` gives the data set as it is stored; `load` then keeps as many
samples as were asked for and standardises, the same way for all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

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
    """Keep only so many training samples: the first of each class, equally many as far as they go."""
    limit_test: int | None = None

    def __post_init__(self) -> None:
        for what, limit in (("limit_train", self.limit_train), ("limit_test", self.limit_test)):
            if limit is not None and limit < 1:
                raise ValueError(f"{what} must be at least 1, got {limit}")

    def load(self) -> Dataset:
        data = _limited(self.read(), self.limit_train, self.limit_test)
        return data.standardised() if self.standardise else data

    def read(self) -> Dataset:
        raise TypeError(f"{type(self).__name__} defines no read")


sources: Registry[DataSource] = Registry("data set")
register = sources.register


def load(data: str | Path | Dataset, **options: Any) -> Dataset:
    """A data set by registered name, path of an `.npz` file, path of an image folder, or `hub:NAME`.

    A `Dataset` is checked and returned as it is.
    """
    if isinstance(data, Dataset):
        if options:
            raise ProtofedError(f"{data.name}: settings {', '.join(options)} do not apply to a data set in memory")
        data.check()
        return data
    text = str(data)
    if text in sources:
        return sources.make(text, options).load()
    if text.startswith("hub:"):
        return sources.make("hub", {"path": text.removeprefix("hub:"), **options}).load()
    if text.lower().endswith(".npz"):
        return sources.make("npz", {"path": text, **options}).load()
    if Path(text).expanduser().is_dir():
        return sources.make("folder", {"path": text, **options}).load()
    if isinstance(data, Path) or "/" in text or "\\" in text:
        raise ProtofedError(
            f"data {text!r}: no such folder; expected a name ({', '.join(sources)}), an .npz file, "
            "an image folder or hub:NAME"
        )
    raise unknown("data set", text, sources)


def _limited(data: Dataset, train: int | None, test: int | None) -> Dataset:
    changes: dict[str, Any] = {}
    for part, limit in (("train", train), ("test", test)):
        labels = getattr(data, f"y_{part}")
        if limit is None or labels is None or limit >= len(labels):
            continue
        kept = torch.from_numpy(np.flatnonzero(balanced(labels.numpy(), limit)))
        for what in ("x", "y", "group"):
            tensor = getattr(data, f"{what}_{part}")
            changes[f"{what}_{part}"] = None if tensor is None else tensor[kept]
    return replace(data, **changes)


def places(name: str, path: str | None, *known: str) -> list[Path]:
    """The folders to look in: the one a person named, or else the usual ones."""
    if path is not None:
        return [Path(path).expanduser()]
    home = os.environ.get("PROTOFED_DATA")
    usual = [Path(home).expanduser() / name] if home else []
    return [*usual, Path("~/.cache/protofed").expanduser() / name, *map(Path, known)]


def listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))


def first_line(error: BaseException) -> str:
    """Of another library's message, what goes into our one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@register("digits")
@dataclass(frozen=True, kw_only=True)
class Digits(DataSource):
    """scikit-learn's handwritten digits: 1,797 grey images of 8×8, split 80/20 the same way every time."""

    def read(self) -> Dataset:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        x, y = (bunch.images / 16.0)[:, None], bunch.target
        held = hold_out(y, 0.2, numpy_stream(0, "digits"))
        names = tuple("0123456789")
        return Dataset.from_arrays(x[~held], y[~held], x[held], y[held], class_names=names, name="digits")
