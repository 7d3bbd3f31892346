"""A user's own data: arrays in an .npz file, a folder of images, or a data set of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from ..errors import ProtofedError, unknown
from .layout import arranged
from .sources import DataSource, first_line, listed, register
from .types import Dataset, SampleKind

if TYPE_CHECKING:
    from PIL.Image import Image

_KEYS = ("x_train", "y_train", "x_test", "y_test", "group_train", "group_test", "class_names", "class_values")
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}


@register("npz")
@dataclass(frozen=True, kw_only=True)
class Npz(DataSource):
    """Arrays `x_train`, `y_train`; optional `x_test`, `y_test`, `group_train`, `group_test`, `class_names`,
    `class_values` (what each class means as a number), `kind` (what a sample is) and, of windows of channel state
    information, `axes` (what their axes are)."""

    path: str
    kind: SampleKind = "auto"
    """What a sample is, where its shape does not say so: `csi` for windows that have the shape of grey images."""

    def read(self) -> Dataset:
        arrays = read_npz(self.path)
        names, values = (tuple(arrays.pop(key, ())) for key in ("class_names", "class_values"))
        own = arrays.pop("kind", "auto")
        kind = own if self.kind == "auto" else self.kind
        name = Path(self.path).name
        return Dataset.from_arrays(**arrays, class_names=names, class_values=values, name=name, kind=kind)


def read_npz(path: str | Path) -> dict[str, Any]:
    """The arrays of an .npz file that a data set has, by name."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ProtofedError(f"{file}: no such file; expected an .npz file with x_train, y_train, x_test, y_test")
    try:
        opened = np.load(file, allow_pickle=False)
        if isinstance(opened, np.ndarray):
            raise ProtofedError(f"{file}: a single array, not an .npz archive; expected x_train and y_train in it")
        with opened as stored:
            missing = [key for key in ("x_train", "y_train") if key not in stored.files]
            if missing:
                raise ProtofedError(f"{file}: no {' and no '.join(missing)} in it; found {listed(stored.files)}")
            arrays: dict[str, Any] = {key: stored[key] for key in _KEYS if key in stored.files}
            kind, axes = (_words(stored, key) for key in ("kind", "axes"))
    except ProtofedError:
        raise
    except Exception as error:  # a damaged archive may fail in any way
        raise ProtofedError(f"{file}: not an .npz file of plain arrays, or damaged ({first_line(error)})") from None
    names = arrays.pop("class_names", np.empty(0))
    if names.ndim != 1:
        raise ProtofedError(f"{file}: class_names must be one name for each class")
    try:
        values = tuple(map(float, arrays.pop("class_values", ())))
    except (TypeError, ValueError):
        raise ProtofedError(f"{file}: class_values must be one number for each class") from None
    if len(names):
        arrays["class_names"] = tuple(map(str, names))
    if values:
        arrays["class_values"] = values
    for key in arrays.keys() & {"x_train", "x_test"} if axes else ():
        arrays[key] = arranged(arrays[key], axes, f"{file}: {key}")
    if axes or kind:
        arrays["kind"] = "csi" if axes else kind[0]
        if arrays["kind"] not in get_args(SampleKind):
            raise unknown(f"{file}: kind", arrays["kind"], get_args(SampleKind))
    return arrays


def _words(stored: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The words of an array of text, or of one text with commas; none where there is no such array."""
    if key not in stored:
        return ()
    return tuple(word.strip() for text in np.atleast_1d(stored[key]).ravel() for word in str(text).split(","))


@register("npy")
@dataclass(frozen=True, kw_only=True)
class Npy(DataSource):
    """Samples in one .npy file and their labels in another, `labels_file`; if there are sites, in a third, `sites_file`."""

    path: str
    labels_file: str | None = None
    """The file of the labels: integers from 0 on, or words."""
    sites_file: str | None = None
    """The file of natural client ids, one for each sample."""
    kind: SampleKind = "auto"

    def read(self) -> Dataset:
        x = _read_npy(self.path)
        if self.labels_file is None:
            raise ProtofedError(
                f"{self.path}: one array of shape {x.shape}, without labels; give labels_file=FILE.npy, "
                "or save both in an .npz file as x_train and y_train"
            )
        sites = None if self.sites_file is None else _read_npy(self.sites_file)
        name = Path(self.path).name
        return Dataset.from_arrays(x, _read_npy(self.labels_file), group_train=sites, name=name, kind=self.kind)


def _read_npy(path: str) -> np.ndarray:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ProtofedError(f"{file}: no such file; expected an .npy file")
    try:
        array = np.load(file, allow_pickle=False)
    except Exception as error:  # a damaged file may fail in any way
        raise ProtofedError(f"{file}: not an .npy file of plain values, or damaged ({first_line(error)})") from None
    if not isinstance(array, np.ndarray):
        raise ProtofedError(f"{file}: an archive of several arrays; expected one array, or the name of an .npz file")
    return array


@register("folder")
@dataclass(frozen=True, kw_only=True)
class Folder(DataSource):
    """Images in `PATH/train/CLASS/` and, if there are any, `PATH/test/CLASS/`; all in `PATH/CLASS/`; or, for each site, in
    `PATH/SITE/CLASS/`.

    Classes are numbered in the order of their names. Images of one size are kept as they are; else `size` is needed.
    """

    path: str
    size: int | None = None

    def read(self) -> Dataset:
        root = Path(self.path).expanduser()
        if not root.is_dir():
            raise ProtofedError(f"{root}: no such folder; expected images in {root}/train/CLASS/")
        sites = _site_folders(root)
        if sites:
            names = tuple(sorted({name for site in sites for name in _folders(site)}))
            found = [_files(site, names, partial=True) for site in sites]
            groups = np.repeat(np.arange(len(sites)), [len(files) for files, _ in found])
            parts = [([f for files, _ in found for f in files], np.concatenate([y for _, y in found]))]
        else:
            train = root / "train" if (root / "train").is_dir() else root
            names = tuple(_folders(train))
            if not names:
                raise ProtofedError(f"{train}: no class folders; expected images in {train}/CLASS/")
            parts = [_files(train, names)]
            if train != root and (root / "test").is_dir():
                parts.append(_files(root / "test", names, partial=True))
        images = _stack([opened(files) for files, _ in parts], self.size)
        arrays = [array for x, (_, y) in zip(images, parts, strict=True) for array in (x, y)]
        data = Dataset.from_arrays(*arrays, class_names=names, name=root.name)
        if not sites:
            return data
        return replace(data, group_train=torch.from_numpy(groups), group_names=tuple(site.name for site in sites))


def _folders(folder: Path) -> list[str]:
    """The names of the folders in a folder, in alphabetical order."""
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _site_folders(root: Path) -> list[Path]:
    """The folders of the sites, in each of which is a folder for each class; none where the folders are parts or classes."""
    sites = [root / name for name in _folders(root)]
    if {site.name for site in sites} <= {"train", "test"}:
        return []
    nested = [site for site in sites if _folders(site)]
    if nested and len(nested) < len(sites):
        flat = next(site for site in sites if site not in nested)
        raise ProtofedError(
            f"{root}: {nested[0].name!r} has folders in it and {flat.name!r} has none; expected images in "
            f"{root}/CLASS/, in {root}/SITE/CLASS/, or in {root}/train/CLASS/ and {root}/test/CLASS/"
        )
    return nested


def opened(files: Sequence[Path]) -> Iterable[tuple[str, Image]]:
    """The images of some files, each with the file's name."""
    from PIL import Image, UnidentifiedImageError

    for file in files:
        try:
            with Image.open(file) as image:
                image.load()
                yield str(file), image
        except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as e:
            raise ProtofedError(f"{file}: not an image, or damaged ({first_line(e)})") from None


def _files(folder: Path, names: tuple[str, ...], partial: bool = False) -> tuple[list[Path], np.ndarray]:
    """The image files of one part and their labels."""
    folders = set(_folders(folder))
    if unknown_folders := sorted(folders - set(names)):
        raise ProtofedError(
            f"{folder / unknown_folders[0]}: no such class in the training part; known: {listed(names)}"
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        class_files = sorted((folder / name).glob("*")) if name in folders else []
        class_files = [p for p in class_files if p.suffix.lower() in _SUFFIXES and not p.name.startswith(".")]
        if not class_files and not partial:
            raise ProtofedError(f"{folder / name}: no images ({listed(sorted(_SUFFIXES))})")
        files += class_files
        labels += [label] * len(class_files)
    if not files:
        raise ProtofedError(f"{folder}: no images; expected some in {folder}/CLASS/, or no such folder")
    return files, np.asarray(labels)


def _stack(parts: Sequence[Iterable[tuple[str, Image]]], size: int | None) -> list[np.ndarray]:
    """Images of all parts as bytes `[n, channels, height, width]`; grey where all are grey."""
    from PIL import Image as Pillow

    expected: tuple[int, ...] | None = None
    reference = ""
    pixels: list[list[np.ndarray]] = []
    for part in parts:
        pixels.append([])
        for source, image in part:
            if image.mode.startswith("I"):  # 16 bits of grey
                image = Pillow.fromarray((np.asarray(image, np.float32) / 257).clip(0, 255).astype(np.uint8))
            image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
            if size is not None:
                image = image.resize((size, size), Pillow.Resampling.BILINEAR)
            array = np.asarray(image)
            if expected is None:
                expected, reference = array.shape[:2], source
            elif array.shape[:2] != expected:
                size_text, expected_size = ("×".join(map(str, s[::-1])) for s in (array.shape[:2], expected))
                raise ProtofedError(
                    f"{source} is {size_text} pixels, {reference} is {expected_size}; set size= to bring all to one size"
                )
            pixels[-1].append(array)
    colour = any(a.ndim == 3 for part_pixels in pixels for a in part_pixels)
    return [np.stack([_planes(a, colour) for a in part_pixels]) for part_pixels in pixels]


def _planes(pixels: np.ndarray, colour: bool) -> np.ndarray:
    if pixels.ndim == 2:
        return np.repeat(pixels[None], 3 if colour else 1, axis=0)
    return pixels.transpose(2, 0, 1)


@register("hub")
@dataclass(frozen=True, kw_only=True)
class Hub(DataSource):
    """An image data set of the Hugging Face hub, `hub:NAME`, or a copy of one on disk.

    The image column and the label column are found by their type; where there are several, name one. A data set
    without the split `split_test` comes without a test part.
    """

    path: str
    config: str | None = None
    split_train: str = "train"
    split_test: str | None = "test"
    image: str | None = None
    label: str | None = None
    group: str | None = None
    """A column of natural client ids, such as the writer."""
    size: int | None = None

    def read(self) -> Dataset:
        name = f"hub:{self.path}"
        splits = self.splits(name)
        if self.split_train not in splits:
            raise ProtofedError(f"{name}: no split {self.split_train!r}; found {listed(splits)}")
        parts = [splits[self.split_train]]
        if self.split_test in splits:
            parts.append(splits[self.split_test])
        elif self.split_test not in (None, "test"):
            raise ProtofedError(f"{name}: no split {self.split_test!r}; found {listed(splits)}")
        images, labels, names, groups = images_of_splits(parts, self.image, self.label, self.group, self.size, name)
        arrays = [array for pair in zip(images, labels, strict=True) for array in pair]
        return Dataset.from_arrays(
            *arrays,
            class_names=names,
            group_train=groups[0],
            group_test=groups[1] if len(groups) > 1 else None,
            name=name,
        )

    def splits(self, name: str) -> dict[str, Any]:
        """The splits of the data set by name."""
        try:
            import datasets
        except ImportError:
            raise ProtofedError(f"{name} needs the datasets library: pip install 'protofed[hub]'") from None
        try:
            if (Path(self.path).expanduser() / "dataset_dict.json").is_file():
                return dict(datasets.load_from_disk(str(Path(self.path).expanduser())))
            return dict(datasets.load_dataset(self.path, self.config))
        except Exception as error:  # the library has many errors: no network, no such name, a gated set
            raise ProtofedError(
                f"{name}: could not be loaded ({type(error).__name__}: {first_line(error)}); "
                "it needs the network the first time, or a copy on disk as hub:FOLDER"
            ) from None


def _column(features: Any, column_name: str | None, type_name: str, setting: str, name: str) -> str:
    """The column that the user named, or the only one of its type."""
    if column_name is not None:
        if column_name not in features:
            raise ProtofedError(f"{name}: no column {setting}={column_name!r}; found {listed(features)}")
        return column_name
    candidates = [column for column, feature in features.items() if type(feature).__name__ == type_name]
    if len(candidates) != 1:
        problem = f"several {type_name} columns ({listed(candidates)})" if candidates else f"no {type_name} column"
        raise ProtofedError(f"{name}: {problem} among {listed(features)}; choose one with {setting}=")
    return candidates[0]


def images_of_splits(
    parts: Sequence[Any], image: str | None, label: str | None, group: str | None, size: int | None, name: str
) -> tuple[list[np.ndarray], list[np.ndarray], tuple[str, ...], list[np.ndarray | None]]:
    """The images of one or two splits of a Hugging Face data set.

    Args:
        parts: The training split, and the test split if there is one.
        image: The column of images; None finds it by its type.
        label: The column of labels, likewise.
        group: The column of natural client ids, if there is one.
        size: The side to which images are resized.
        name: The data set's, for messages.

    Returns:
        Images and labels of each split, the names of the classes, and the group ids of each split.
    """
    features = parts[0].features
    image = _column(features, image, "Image", "image", name)
    label = _column(features, label, "ClassLabel", "label", name)
    if group is not None and group not in features:
        raise ProtofedError(f"{name}: no column group={group!r}; found {listed(features)}")

    def opened(split: Any, part: str) -> Iterable[tuple[str, Image]]:
        for row, item in enumerate(split.select_columns([image])):
            if item[image] is None:
                raise ProtofedError(f"{name}: {part} row {row} has no image")
            yield f"{name} {part} row {row}", item[image]

    try:
        images = _stack([opened(s, p) for s, p in zip(parts, ("train", "test"), strict=False)], size)
        labels = [np.asarray(split[label][:]) for split in parts]
        groups = [None if group is None else np.asarray(split[group][:]) for split in parts]
    except ProtofedError:
        raise
    except Exception as error:  # the library decodes, so any error is about this data set
        raise ProtofedError(f"{name}: could not be read ({type(error).__name__}: {first_line(error)})") from None
    return images, labels, tuple(getattr(features[label], "names", None) or ()), groups
