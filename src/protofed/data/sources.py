"""Data sources and their registry.

A source is a frozen dataclass of its settings. `read` returns the data set as it is stored; `load` then limits, resizes
and standardises the samples, in the same way for all sources.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import BeforeValidator
from torch import Tensor
from torch.nn.functional import interpolate

from ..errors import ProtofedError, unknown
from ..registry import Registry
from ..seeds import numpy_stream
from .rows import balanced, hold_out
from .table import column_names, is_table_file
from .types import Dataset, Scaling
from .words import first_line as first_line
from .words import listed as listed
from .words import some

log = logging.getLogger("protofed")

IN_MEMORY = "in-memory"  # the name of the source of what is given in Python


def _scaling(value: Any) -> Any:
    """The scaling that a person has written: `true` and `false` are words for `all` and `none`."""
    return {"true": "all", "false": "none", "none": "none"}.get(str(value).lower(), value)


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Base of all sources, with the settings they share."""

    name: ClassVar[str]

    standardise: Annotated[Scaling, BeforeValidator(_scaling)] = "all"
    """Mean 0 and deviation 1 per channel (images) or feature (flat samples): by the training rows of `all` clients, of each
    client (`site`) by its own, or `none`. `true` is `all` and `false` is `none`."""
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
        data = self.unscaled()
        return data if self.standardise == "none" else data.standardised(self.standardise)

    @property
    def title(self) -> str:
        """What the data is called in the name of a folder: as its file, where a person has to name one, or as the source."""
        needed = any(field.name == "path" and field.default is MISSING for field in fields(self))
        stem = Path(str(getattr(self, "path", ""))).name.partition(".")[0] if needed else ""
        return re.sub(r"[^\w-]+", "-", stem) or self.name

    def unscaled(self) -> Dataset:
        """The data set, limited and resized as the settings ask, with the values that are stored."""
        return shaped(limited(self.read(), self.limit_train, self.limit_test), self.resize, self.image_channels)

    def read(self) -> Dataset:
        """The data set as it is stored, which a source defines."""
        raise TypeError(f"{type(self).__name__} defines no read")


sources: Registry[DataSource] = Registry("data set")
register = sources.register


def load(data: Any, **options: Any) -> Dataset:
    """Load a data set.

    Args:
        data: A registered name; the path of a file (`.csv`, `.parquet`, `.npz`, `.npy`, `.jsonl`) or of a folder of images
            or of one file a site; `hub:NAME`; data in memory as `as_dataset` takes it; or a `Dataset`, which is checked
            and returned as it is.
        **options: The settings of the source.

    Returns:
        The data set. `load("digits", limit_train=100)`
    """
    if isinstance(data, Dataset):
        if options:
            raise ProtofedError(f"{data.name}: settings {', '.join(options)} do not apply to a data set in memory")
        data.check()
        return data
    if in_memory(data):
        return sources.make(IN_MEMORY, {"content": data, **options}).load()
    name, path_settings = source_of(data, options)
    return sources.make(name, {**path_settings, **options}).load()


def in_memory(data: Any) -> bool:
    """Whether what was given is data in memory, and neither a name, a path, a `Dataset` nor settings.

    A mapping is settings where it has the name of a source, or plain values alone.
    """
    if isinstance(data, Mapping) and not isinstance(data.get("name"), str):
        return any(not _is_plain(value) for value in data.values())
    return not isinstance(data, str | Path | Dataset | Mapping | bool | int | float | type(None))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(entry) for entry in value)
    return value is None or isinstance(value, str | bool | int | float | Path)


def source_of(data: Any, options: Collection[str] = ()) -> tuple[str, dict[str, Any]]:
    """The source that a name, a path or `hub:NAME` refers to.

    Args:
        data: what the user gave: `digits`, `mine.npz`, `wine.csv`, the path of a folder, `hub:owner/name`.
        options: the settings that were given with it, which say what a .csv holds where its columns do not.

    Returns:
        The source's registered name, and its settings, which have the path where `data` is one.
    """
    if not isinstance(data, str | Path):
        raise ProtofedError(
            f"data is {described(data)}; expected a name, a path, or data in memory such as a tuple (x, y)"
        )
    text = str(data)
    if text in sources:
        return text, {}
    if text.startswith("hub:"):
        return "hub", {"path": text.removeprefix("hub:")}
    lower = text.lower()
    if lower.endswith((".npz", ".npy")):
        return lower[-3:], {"path": text}
    if lower.removesuffix(".gz").endswith(".jsonl"):
        return "text", {"path": text}
    if is_table_file(text):
        return _table_source(text, options), {"path": text}
    if _is_folder(text):
        return "site-files" if holds_tables(Path(text).expanduser()) else "folder", {"path": text}
    if isinstance(data, Path) or "/" in text or "\\" in text:
        raise ProtofedError(
            f"data {text!r}: no such folder; expected a name ({', '.join(sources)}), a .csv, .parquet, .npz, .npy or "
            ".jsonl file, a folder of images or of one file a site, or hub:NAME"
        )
    raise unknown("data set", text, sources)


def _table_source(path: str, options: Collection[str]) -> str:
    """Whether a table is one of texts or one of features: by its settings, or else by its columns."""
    of_text, of_features = (set(sources.options(name)) for name in ("text", "table"))
    names = {option.removeprefix("data.") for option in options}
    text_keys, feature_keys = sorted(names & (of_text - of_features)), sorted(names & (of_features - of_text))
    if text_keys and feature_keys:
        raise ProtofedError(
            f"{path}: {text_keys[0]} is a setting of texts and {feature_keys[0]} one of tables of features; "
            "write data=text or data=table with path= for one of them"
        )
    if text_keys or feature_keys:
        return "text" if text_keys else "table"
    if not Path(path).expanduser().is_file():
        return "table"  # which says so when it is read
    columns = column_names(path)
    if "text" in columns and (others := [c for c in columns if c not in ("text", "label", "site", "split")]):
        log.info("%s: read as texts, for it has a column text; data=table path=… reads all of %s", path, some(others))
    return "text" if "text" in columns else "table"


def holds_tables(folder: Path) -> bool:
    """Whether a folder holds one file a site: tables or .npz files, and no folders."""
    return bool(site_files(folder)) and not any(p.is_dir() and not p.name.startswith(".") for p in folder.iterdir())


def site_files(folder: Path) -> list[Path]:
    """The tables and .npz files in a folder, by name."""
    files = (p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    return sorted(p for p in files if is_table_file(p.name) or p.suffix.lower() == ".npz")


def described(data: Any) -> str:
    """A description in a few words of an object that was given in place of a data set."""
    shape = getattr(data, "shape", None)
    size = f" of shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"{type(data).__name__}{size}" if size or not isinstance(data, bool | int | float) else repr(data)


def _is_folder(text: str) -> bool:
    try:
        return Path(text).expanduser().is_dir()
    except (OSError, RuntimeError, ValueError):  # too long for a path, or an unknown home folder
        return False


def limited(data: Dataset, train: int | None, test: int | None) -> Dataset:
    """The data set with at most so many training and test samples, the first of each class."""
    changes: dict[str, Any] = {}
    for part, limit in (("train", train), ("test", test)):
        labels = getattr(data, f"y_{part}")
        if limit is None or labels is None or limit >= len(labels):
            continue
        rows = torch.from_numpy(np.flatnonzero(balanced(labels.numpy(), limit)))
        for field_name in ("x", "y", "group", *(("sequence",) if part == "train" else ())):
            tensor = getattr(data, f"{field_name}_{part}")
            changes[f"{field_name}_{part}"] = None if tensor is None else tensor[rows]
    return replace(data, **changes)


def shaped(data: Dataset, resize: int | None, channels: int | None) -> Dataset:
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

    def changed(x: Tensor | None) -> Tensor | None:
        if x is not None and resize is not None and x.shape[2:] != (resize, resize):
            x = torch.cat([resized(piece, resize) for piece in x.split(1024)])
        return x if x is None or channels in (None, own_channels) else x.repeat(1, 3, 1, 1)

    changes: dict[str, Any] = {part: changed(getattr(data, part)) for part in ("x_train", "x_test", "x_unlabelled")}
    return replace(data, **changes)


def reshaped(x: Tensor, source: DataSource | None) -> Tensor:
    """Images with the size and the channels that a source gives its own."""
    if source is None:
        return x
    blank = Dataset(x, torch.zeros(len(x), dtype=torch.long), name=source.name)
    return shaped(blank, source.resize, source.image_channels).x_train


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
