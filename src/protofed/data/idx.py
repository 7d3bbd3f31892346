"""MNIST and its relatives: the idx format, as it is or in gzip."""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from string import ascii_letters, ascii_lowercase, ascii_uppercase, digits
from typing import ClassVar, Literal

import numpy as np

from ..errors import ProtofedError
from .sources import DataSource, first_line, listed, places, register
from .types import Dataset


def read_idx(path: Path) -> np.ndarray:
    """An idx file of unsigned bytes: two zero bytes, the type (8), the number of axes, their lengths, the values."""
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise ProtofedError(f"{path}: damaged or unreadable ({first_line(error)})") from None
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise ProtofedError(f"{path}: not an idx file of bytes: expected it to begin 000008, got {raw[:3].hex()!r}")
    axes = raw[3]
    if len(raw) < 4 + 4 * axes:
        raise ProtofedError(f"{path}: cut off within its header ({len(raw)} bytes)")
    shape = struct.unpack_from(f">{axes}I", raw, 4)
    expected = 1
    for length in shape:
        expected *= length  # Python integers, which do not overflow
    values = len(raw) - 4 - 4 * axes
    if values != expected:
        raise ProtofedError(f"{path}: its header promises {expected:,} values of shape {shape}, it has {values:,}")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)


def read_pair(folder: Path, images: str, labels: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The images and labels of one part.

    Args:
        folder: The folder with the files.
        images: The name of the image file, without `.gz`.
        labels: The name of the label file, without `.gz`.
        name: The data set's name, for error messages.

    Returns:
        Images `[n, height, width]` and labels `[n]`.
    """
    x_path, y_path = find(folder, images), find(folder, labels)
    for path, stem in ((x_path, images), (y_path, labels)):
        if path is None:
            raise ProtofedError(f"{name}: {stem} (or {stem}.gz) is missing in {folder}")
    assert x_path is not None and y_path is not None
    x, y = read_idx(x_path), read_idx(y_path)
    if x.ndim != 3:
        raise ProtofedError(f"{x_path}: expected images [n, height, width], got shape {x.shape}")
    if y.ndim != 1:
        raise ProtofedError(f"{y_path}: expected labels [n], got shape {y.shape}")
    if len(x) != len(y):
        raise ProtofedError(f"{x_path}: {len(x)} images, but {y_path.name} has {len(y)} labels")
    return x, y


def find(folder: Path, stem: str) -> Path | None:
    """The file with this stem, with or without `.gz`; None where there is none."""
    # Some unpacking tools turn "-idx3" into ".idx3".
    for name in (stem, stem.replace("-idx", ".idx")):
        for path in (folder / f"{name}.gz", folder / name):
            if path.is_file():
                return path
    return None


@dataclass(frozen=True, kw_only=True)
class IdxSource(DataSource):
    """Four idx files in one folder. `path` names the folder; by default the usual folders are searched."""

    usual_folders: ClassVar[tuple[str, ...]] = ()
    subfolders: ClassVar[tuple[str, ...]] = ()
    """Subfolders into which other tools put the files."""
    advice: ClassVar[str] = ""
    flips: ClassVar[bool] = False

    path: str | None = None

    def stems(self, part: Literal["train", "test"]) -> tuple[str, str]:
        """The names of the image file and the label file of one part, without `.gz`."""
        start = {"train": "train", "test": "t10k"}[part]
        return f"{start}-images-idx3-ubyte", f"{start}-labels-idx1-ubyte"

    def names(self) -> tuple[str, ...]:
        """The names of the classes."""
        return tuple(digits)

    def arrays(self, part: Literal["train", "test"], folder: Path) -> tuple[np.ndarray, np.ndarray]:
        """The images and labels of one part."""
        return read_pair(folder, *self.stems(part), self.name)

    def read(self) -> Dataset:
        folder = self.folder()
        x_train, y_train = self.arrays("train", folder)
        x_test, y_test = self.arrays("test", folder)
        names = self.names()
        return Dataset.from_arrays(
            x_train,
            y_train,
            x_test,
            y_test,
            num_classes=len(names),
            class_names=names,
            name=self.name,
            flips=self.flips,
        )

    def folder(self) -> Path:
        """The folder that has the files."""
        roots = places(self.name, self.path, *self.usual_folders)
        stem = self.stems("train")[0]
        for root in roots:
            for folder in (root, *(root / sub for sub in self.subfolders)):
                if find(folder, stem) is not None:
                    return folder
        raise ProtofedError(f"{self.name}: no {stem}.gz (or without .gz) in {listed(roots)}; {self.advice}")


@register("mnist")
@dataclass(frozen=True, kw_only=True)
class MNIST(IdxSource):
    """MNIST: 70,000 handwritten digits, 28×28."""

    subfolders: ClassVar[tuple[str, ...]] = ("MNIST/raw", "raw")
    advice: ClassVar[str] = "put MNIST's four idx files there, name their folder with path=, or use hub:ylecun/mnist"


@register("fashion-mnist")
@dataclass(frozen=True, kw_only=True)
class FashionMNIST(IdxSource):
    """Fashion-MNIST: 70,000 pictures of clothes, 28×28."""

    usual_folders: ClassVar[tuple[str, ...]] = ("/usr/share/datasets/fashion-mnist",)
    subfolders: ClassVar[tuple[str, ...]] = ("FashionMNIST/raw", "raw")
    flips: ClassVar[bool] = True
    advice: ClassVar[str] = (
        "on Debian and Ubuntu: apt-get install dataset-fashion-mnist; or name the folder of its four idx files with path="
    )

    def names(self) -> tuple[str, ...]:
        return (
            "T-shirt",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        )


_MERGED = digits + ascii_uppercase + "abdefghnqrt"
_EMNIST = {
    "balanced": _MERGED,
    "bymerge": _MERGED,
    "byclass": digits + ascii_uppercase + ascii_lowercase,
    "letters": ascii_uppercase,
    "digits": digits,
    "mnist": digits,
}
assert len(_MERGED) == 47 and set(_MERGED) < set(digits + ascii_letters)


@register("emnist")
@dataclass(frozen=True, kw_only=True)
class EMNIST(IdxSource):
    """EMNIST: handwritten letters and digits, 28×28, in six splits."""

    subfolders: ClassVar[tuple[str, ...]] = ("gzip", "EMNIST/raw", "raw")
    advice: ClassVar[str] = (
        "put the files of NIST's EMNIST gzip.zip there, name their folder with path=, or choose another split="
    )

    split: Literal["balanced", "byclass", "bymerge", "digits", "letters", "mnist"] = "balanced"

    def stems(self, part: Literal["train", "test"]) -> tuple[str, str]:
        return (f"emnist-{self.split}-{part}-images-idx3-ubyte", f"emnist-{self.split}-{part}-labels-idx1-ubyte")

    def names(self) -> tuple[str, ...]:
        return tuple(_EMNIST[self.split])

    def arrays(self, part: Literal["train", "test"], folder: Path) -> tuple[np.ndarray, np.ndarray]:
        x, y = super().arrays(part, folder)
        # The files hold every image with rows and columns exchanged; "letters" counts from 1.
        return x.transpose(0, 2, 1), y.astype(np.int64) - (self.split == "letters")
