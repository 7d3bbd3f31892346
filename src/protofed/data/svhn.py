"""SVHN, house numbers in street views, from its official MATLAB files of single digits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ProtofedError
from .rows import balanced
from .sources import DataSource, first_line, listed, places, register
from .types import Dataset


@register("svhn")
@dataclass(frozen=True, kw_only=True)
class SVHN(DataSource):
    """SVHN: 73,257 training and 26,032 test pictures of house-number digits, 32×32.

    `path` names the folder of the files `train_32x32.mat` and `test_32x32.mat`.
    """

    path: str | None = None
    extra: bool = False
    """Add the 531,131 easier pictures of `extra_32x32.mat` to the training part."""

    def read(self) -> Dataset:
        folder = self.folder()
        parts = [read_digits(folder / f"{part}_32x32.mat") for part in ("train", "test", "extra")[: 2 + self.extra]]
        train, test = (
            (np.concatenate([x for x, _ in half]), np.concatenate([y for _, y in half]))
            for half in (parts[::2], parts[1:2])
        )
        return Dataset.from_arrays(
            *_first(*train, self.limit_train),
            *_first(*test, self.limit_test),
            class_names=tuple("0123456789"),
            name=self.name,
            flips=False,
        )

    def folder(self) -> Path:
        """The folder that has the files."""
        roots = places(self.name, self.path)
        for root in roots:
            if (root / "train_32x32.mat").is_file():
                return root
        raise ProtofedError(
            f"{self.name}: no train_32x32.mat in {listed(roots)}; download it and test_32x32.mat from "
            "http://ufldl.stanford.edu/housenumbers into it or name their folder with path="
        )


def read_digits(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pictures `[n, 3, 32, 32]` of bytes and the digits on them."""
    from scipy.io import loadmat

    if not file.is_file():
        raise ProtofedError(f"{file}: no such file; SVHN's cropped digits have one")
    try:
        stored = loadmat(file, variable_names=("X", "y"))
    except Exception as error:  # a damaged or foreign file may fail in any way
        raise ProtofedError(f"{file}: not a MATLAB file, or damaged ({first_line(error)})") from None
    for key in ("X", "y"):
        if key not in stored:
            raise ProtofedError(f"{file}: no {key!r} in it; expected X [32, 32, 3, n] and y [n, 1]")
    x, y = stored["X"], np.asarray(stored["y"])
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[:3] != (32, 32, 3):
        raise ProtofedError(f"{file}: expected pictures X [32, 32, 3, n] of bytes, got shape {x.shape} of {x.dtype}")
    if y.shape not in ((x.shape[3], 1), (1, x.shape[3])):
        raise ProtofedError(f"{file}: {x.shape[3]} pictures but labels y of shape {y.shape}")
    if not np.isin(y, range(1, 11)).all():
        raise ProtofedError(f"{file}: labels run from {y.min()} to {y.max()}; expected whole numbers from 1 to 10")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y.ravel().astype(np.int64) % 10  # 10 is the digit 0


def _first(x: np.ndarray, y: np.ndarray, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The samples that `load` would keep, selected while they are bytes."""
    selected = slice(None) if limit is None or limit >= len(y) else balanced(y, limit)
    return x[selected], y[selected]
