"""STL-10 from its official binary files: few labelled pictures and many without a label."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import ProtofedError
from .sources import DataSource, first_line, listed, places, register, resized
from .types import Dataset

FOLDER = "stl10_binary"
NAMES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
SIDE = 96
BYTES = 3 * SIDE * SIDE


@register("stl10", "stl-10")
@dataclass(frozen=True, kw_only=True)
class STL10(DataSource):
    """STL-10: 5,000 training, 8,000 test and 100,000 unlabelled pictures of 10 kinds of things, 96×96.

    `path` names the folder or the one that holds it. The unlabelled pictures take 11 GB of memory in full size; with
    `resize` they are made smaller as they are read.
    """

    path: str | None = None
    limit_unlabelled: int | None = None
    """The most unlabelled pictures, of which the first are used; with 0 their file is not needed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit_unlabelled is not None and self.limit_unlabelled < 0:
            raise ValueError(f"limit_unlabelled must be at least 0, got {self.limit_unlabelled}")

    def read(self) -> Dataset:
        folder = self.folder()
        unlabelled = None
        if self.limit_unlabelled != 0:
            file = folder / "unlabeled_X.bin"
            if not file.is_file():
                raise ProtofedError(f"{file}: no such file; {FOLDER} has one, limit_unlabelled=0 does without it")
            unlabelled = read_pictures(file, self.resize, self.limit_unlabelled)
        return Dataset.from_arrays(
            *self.part(folder, "train"),
            *self.part(folder, "test"),
            class_names=NAMES,
            name=self.name,
            x_unlabelled=unlabelled,
            flips=True,
        )

    def part(self, folder: Path, part: str) -> tuple[Tensor, np.ndarray]:
        """The pictures and labels of the training or the test part."""
        images, labels = folder / f"{part}_X.bin", folder / f"{part}_y.bin"
        x, y = read_pictures(images, self.resize), _bytes(labels)
        if len(x) != len(y):
            raise ProtofedError(f"{images}: {len(x)} pictures, but {labels.name} has {len(y)} labels")
        if y.min() < 1 or y.max() > len(NAMES):
            raise ProtofedError(f"{labels}: labels run from {y.min()} to {y.max()}; expected 1 to {len(NAMES)}")
        return x, y.astype(np.int64) - 1

    def folder(self) -> Path:
        """The folder that has the files."""
        roots = places(self.name, self.path)
        for root in roots:
            for folder in (root, root / FOLDER):
                if (folder / "train_X.bin").is_file():
                    return folder
        raise ProtofedError(
            f"{self.name}: no folder {FOLDER} with train_X.bin in {listed(roots)}; unpack "
            f"http://ai.stanford.edu/~acoates/stl10/{FOLDER}.tar.gz there or name the folder with path="
        )


def read_pictures(file: Path, side: int | None, limit: int | None = None) -> Tensor:
    """Pictures `[n, 3, side, side]` from 0 to 1.

    They are resized in pieces, because all of them in full size may not fit into memory.
    """
    raw = _bytes(file)
    if len(raw) % BYTES:
        raise ProtofedError(f"{file}: {len(raw):,} bytes; expected {BYTES:,} (3×{SIDE}×{SIDE}) for each picture")
    stored = raw.reshape(-1, 3, SIDE, SIDE)[:limit]
    side = SIDE if side is None else side
    pictures = torch.empty(len(stored), 3, side, side)
    for start in range(0, len(stored), 1024):
        piece = stored[start : start + 1024].transpose(0, 1, 3, 2)  # the files are in column-major order
        x = torch.from_numpy(np.ascontiguousarray(piece)).to(torch.float32) / 255
        pictures[start : start + 1024] = x if side == SIDE else resized(x, side)
    return pictures


def _bytes(file: Path) -> np.ndarray:
    """The bytes of a file, mapped into memory."""
    try:
        if file.stat().st_size == 0:
            raise ProtofedError(f"{file}: empty")
        return np.memmap(file, np.uint8, "r")
    except FileNotFoundError:
        raise ProtofedError(f"{file}: no such file; {FOLDER} has one") from None
    except OSError as error:
        raise ProtofedError(f"{file}: unreadable ({first_line(error)})") from None
