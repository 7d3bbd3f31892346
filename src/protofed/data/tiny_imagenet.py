"""Tiny ImageNet from its official folder, `tiny-imagenet-200`; the validation images are the test part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ProtofedError
from .rows import balanced
from .sources import DataSource, first_line, listed, places, register
from .types import Dataset

FOLDER = "tiny-imagenet-200"


@register("tiny-imagenet")
@dataclass(frozen=True, kw_only=True)
class TinyImageNet(DataSource):
    """Tiny ImageNet: 100,000 training and 10,000 validation pictures of 200 kinds of things, 64×64.

    `path` names the folder or the one that holds it; `size` makes the pictures smaller as they are read.
    """

    path: str | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size is not None and self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")

    def read(self) -> Dataset:
        root = self.root()
        ids = [line.strip() for line in _lines(root / "wnids.txt") if line.strip()]
        words = dict(line.split("\t", 1) for line in _lines(root / "words.txt") if "\t" in line)
        if not ids or len(set(ids)) != len(ids):
            raise ProtofedError(f"{root / 'wnids.txt'}: expected one class id a line, each once; got {len(ids)} lines")
        parts = []
        for (files, labels), limit in (
            (_training(root / "train", ids), self.limit_train),
            (_validation(root / "val", ids), self.limit_test),
        ):
            if limit is not None and limit < len(files):  # only the samples that `load` would keep are decoded
                selected = np.flatnonzero(balanced(labels, limit))
                files, labels = [files[i] for i in selected], labels[selected]
            parts += [_pictures(files, self.size), labels]
        names = tuple(words.get(i, i).split(",")[0].strip() for i in ids)
        return Dataset.from_arrays(*parts, class_names=names, name=self.name, flips=True)

    def root(self) -> Path:
        """The folder that has the files."""
        roots = places(self.name, self.path)
        for root in roots:
            for folder in (root, root / FOLDER):
                if (folder / "wnids.txt").is_file():
                    return folder
        raise ProtofedError(
            f"{self.name}: no folder {FOLDER} with wnids.txt in {listed(roots)}; "
            f"unpack {FOLDER}.zip there or name the folder with path="
        )


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ProtofedError(f"{file}: no such file; {FOLDER}.zip has one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ProtofedError(f"{file}: unreadable ({first_line(error)})") from None


def _training(folder: Path, ids: Sequence[str]) -> tuple[list[Path], np.ndarray]:
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(ids):
        pictures = sorted((folder / name / "images").glob("*.JPEG"))
        if not pictures:
            raise ProtofedError(f"{folder / name / 'images'}: no pictures; expected *.JPEG of class {name}")
        files += pictures
        labels += [label] * len(pictures)
    return files, np.asarray(labels)


def _validation(folder: Path, ids: Sequence[str]) -> tuple[list[Path], np.ndarray]:
    notes = folder / "val_annotations.txt"
    label_of = {name: label for label, name in enumerate(ids)}
    files: list[Path] = []
    labels: list[int] = []
    for number, line in enumerate(_lines(notes), 1):
        cells = line.split("\t")
        if len(cells) < 2 or cells[1] not in label_of:
            raise ProtofedError(f"{notes} line {number}: expected a file name, a tab and a class id; got {line[:60]!r}")
        files.append(folder / "images" / cells[0])
        labels.append(label_of[cells[1]])
    if not files:
        raise ProtofedError(f"{notes}: empty; expected one line for each picture")
    return files, np.asarray(labels)


def _pictures(files: Sequence[Path], size: int | None) -> np.ndarray:
    """Bytes `[n, 3, height, width]`; the few grey pictures become colour."""
    from PIL import Image, UnidentifiedImageError

    pixels = np.empty((0, 3, 0, 0), np.uint8)
    for number, file in enumerate(files):
        try:
            with Image.open(file) as opened:
                image = opened.convert("RGB")
        except FileNotFoundError:
            raise ProtofedError(f"{file}: no such picture") from None
        except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise ProtofedError(f"{file}: not a picture, or damaged ({first_line(error)})") from None
        if size is not None:
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        if number == 0:
            pixels = np.empty((len(files), 3, image.height, image.width), np.uint8)
        if (image.height, image.width) != pixels.shape[2:]:
            expected_size = f"{pixels.shape[3]}×{pixels.shape[2]}"
            raise ProtofedError(
                f"{file} is {image.width}×{image.height} pixels, {files[0]} is {expected_size}; set size="
            )
        pixels[number] = np.asarray(image).transpose(2, 0, 1)
    return pixels
