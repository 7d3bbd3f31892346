"""USPS, handwritten digits of envelopes, in the forms in which it is published."""

from __future__ import annotations

import bz2
import gzip
import io
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from ..errors import ProtofedError
from .sources import DataSource, first_line, listed, places, register
from .types import Dataset

SIDE = 16
PAIRS = (
    ("usps", "usps.t"),
    ("zip.train", "zip.test"),
)  # LIBSVM's names, and those of "Elements of Statistical Learning"
PACKED = {"": lambda raw: raw, ".bz2": bz2.decompress, ".gz": gzip.decompress}


@register("usps")
@dataclass(frozen=True, kw_only=True)
class USPS(DataSource):
    """USPS: 7,291 training and 2,007 test images of handwritten digits, 16×16.

    `path` is the folder of LIBSVM's `usps.bz2` and `usps.t.bz2`, of `zip.train.gz` and `zip.test.gz`, or of `usps.h5`;
    or the file `usps.h5` itself.
    """

    flips: ClassVar[bool] = False

    path: str | None = None

    def read(self) -> Dataset:
        parts = self.parts()
        train, test = read_h5(parts[0]) if len(parts) == 1 else [read_digits(file) for file in parts]
        names = tuple("0123456789")
        return Dataset.from_arrays(*train, *test, class_names=names, name=self.name, flips=self.flips)

    def parts(self) -> tuple[Path, ...]:
        """The files of the training and the test part, or the one that has both."""
        roots = places(self.name, self.path)
        for root in roots:
            if root.is_file() and root.suffix == ".h5":
                return (root,)
            for folder in (root, root / "USPS"):
                for stems in PAIRS:
                    files = [_packed(folder, stem) for stem in stems]
                    if files[0] is not None and files[1] is None:
                        raise ProtofedError(f"{self.name}: {files[0]} is there and its test part {stems[1]} is not")
                    if files[0] is not None and files[1] is not None:
                        return files[0], files[1]
                if (folder / "usps.h5").is_file():
                    return (folder / "usps.h5",)
        raise ProtofedError(
            f"{self.name}: no usps.bz2, zip.train.gz or usps.h5 in {listed(roots)}; put LIBSVM's usps.bz2 and usps.t.bz2 "
            "there, or name their folder with path="
        )


def _packed(folder: Path, stem: str) -> Path | None:
    return next((file for ending in PACKED if (file := folder / f"{stem}{ending}").is_file()), None)


def read_digits(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images `[n, 16, 16]` of bytes and digits of a text file: a label and 256 values from −1 to 1 in each line.

    In LIBSVM's files values are numbered, `1:-0.5`, zeros may be left out, and labels count from 1.
    """
    try:
        text = PACKED.get(file.suffix, PACKED[""])(file.read_bytes()).decode("ascii")
    except (OSError, EOFError, ValueError) as error:
        raise ProtofedError(f"{file}: damaged or unreadable ({first_line(error)})") from None
    numbered = ":" in text
    try:
        rows = _numbered(text) if numbered else np.loadtxt(io.StringIO(text), ndmin=2)
    except ValueError as error:
        raise ProtofedError(f"{file}: not a file of USPS digits ({first_line(error)})") from None
    if rows.ndim != 2 or rows.shape[1] != 1 + SIDE**2 or not len(rows):
        raise ProtofedError(f"{file}: expected a label and {SIDE**2} values in each line, got shape {rows.shape}")
    return _checked(rows[:, 1:], rows[:, 0] - numbered, -1.0, file)


def _numbered(text: str) -> np.ndarray:
    """The rows of a file in LIBSVM's format."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    rows = np.zeros((len(lines), 1 + SIDE**2))
    for row, (label, *values) in zip(rows, lines, strict=True):
        row[0] = float(label)
        for value in values:
            place, _, number = value.partition(":")
            if not 1 <= int(place) <= SIDE**2:
                raise ValueError(f"value number {place}; expected 1 to {SIDE**2}")
            row[int(place)] = float(number)
    return rows


def read_h5(file: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Both parts of an HDF5 file with `train` and `test`, each with `data [n, 256]` from 0 to 1 and `target [n]`."""
    try:
        import h5py
    except ImportError:
        raise ProtofedError(f"{file}: needs the h5py library: pip install h5py") from None
    try:
        with h5py.File(file) as stored:
            parts = [(stored[part]["data"][:], stored[part]["target"][:]) for part in ("train", "test")]
    except (OSError, KeyError) as error:
        raise ProtofedError(
            f"{file}: not the usps.h5 with train and test, data and target ({first_line(error)})"
        ) from None
    if any(x.shape != (len(y), SIDE**2) for x, y in parts):
        raise ProtofedError(f"{file}: expected data [n, {SIDE**2}] and target [n], got {[x.shape for x, _ in parts]}")
    return [_checked(x, y, 0.0, file) for x, y in parts]


def _checked(x: np.ndarray, y: np.ndarray, black: float, file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images of bytes and integer labels."""
    if not np.isfinite(x).all() or x.min() < black - 1e-3 or x.max() > 1 + 1e-3:
        raise ProtofedError(f"{file}: pixels run from {x.min():g} to {x.max():g}; expected {black:g} to 1")
    if not np.isin(y, range(10)).all():
        raise ProtofedError(f"{file}: labels run from {y.min():g} to {y.max():g} where 0 to 9 are the digits")
    levels = np.rint(255 * (x - black) / (1 - black)).clip(0, 255).astype(np.uint8)
    return levels.reshape(-1, SIDE, SIDE), y.astype(np.int64)
