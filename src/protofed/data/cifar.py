"""CIFAR-10 and CIFAR-100 from their official Python archives, as a folder or as the .tar.gz itself.

The archives are pickles, and a pickle can run any code. They are read by an unpickler that allows nothing but lists,
text, numbers and a stand-in for NumPy arrays; not even NumPy is called with a file's content.
"""

from __future__ import annotations

import io
import math
import pickle
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import numpy as np

from ..errors import ProtofedError
from .sources import DataSource, first_line, listed, places, register
from .types import Dataset


class _Refused(pickle.UnpicklingError):
    pass


class _ByteType:
    """Stands in for `numpy.dtype`, and accepts bytes only."""

    def __init__(self, code: str | bytes, *options: object) -> None:
        if code not in ("u1", b"u1", "|u1", b"|u1"):
            raise _Refused(f"an array of {code!r}")

    def __setstate__(self, state: object) -> None:
        pass  # byte order and alignment, which bytes do not have


class _Array:
    """Stands in for `numpy.ndarray`: keeps the shape and the bytes."""

    shape: tuple[int, ...] = (0,)
    raw: bytes = b""
    fortran: bool = False

    def __setstate__(self, state: tuple[int, tuple[int, ...], _ByteType, bool, bytes]) -> None:
        _, self.shape, _, self.fortran, self.raw = state

    def array(self) -> np.ndarray:
        if math.prod(self.shape) != len(self.raw):
            raise ValueError(f"an array of shape {self.shape} with {len(self.raw)} bytes")
        return np.frombuffer(self.raw, np.uint8).reshape(self.shape, order="F" if self.fortran else "C")


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    if encoding != "latin1":
        raise _Refused(f"an encoding {encoding!r}")
    return text.encode("latin1")


def _reconstruct(*_: object) -> _Array:
    return _Array()


class _Unpickler(pickle.Unpickler):
    allowed: ClassVar[dict[tuple[str, str], Callable[..., Any]]] = {
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _ByteType,
        ("_codecs", "encode"): _latin1,  # how Python 3 writes bytes in the official files' protocol
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.allowed[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None


def read_batch(raw: bytes, source: str) -> dict[str, Any]:
    """The dictionary in one CIFAR file.

    Args:
        raw: The content of the file.
        source: What errors call the file.

    Returns:
        The entries by name.
    """
    try:
        batch = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
    except _Refused as error:
        raise ProtofedError(
            f"{source}: refused: it asks for {error}; a CIFAR file holds byte arrays, lists, numbers and text only"
        ) from None
    except Exception as error:  # a damaged pickle may fail in any way
        raise ProtofedError(
            f"{source}: not a CIFAR file, or damaged ({type(error).__name__}: {first_line(error)})"
        ) from None
    if not isinstance(batch, dict):
        raise ProtofedError(f"{source}: expected a dictionary, got {type(batch).__name__}")
    return {_text(key): value for key, value in batch.items()}


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


@dataclass(frozen=True, kw_only=True)
class CifarSource(DataSource):
    """`path` names the archive, its unpacked folder, or the folder that holds either."""

    folder: ClassVar[str]
    archive: ClassVar[str]
    files: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]]  # training, test
    meta: ClassVar[tuple[str, str]]  # file and key of the class names
    label_key: ClassVar[str]
    classes: ClassVar[int]

    path: str | None = None

    def read(self) -> Dataset:
        root, content = self.open()
        train, test = (self.part(names, root, content) for names in self.files)
        names: tuple[str, ...] = ()
        if self.meta[0] in content:
            listed_names = read_batch(content[self.meta[0]], f"{root}/{self.meta[0]}").get(self.meta[1])
            if isinstance(listed_names, list) and len(listed_names) == self.classes:
                names = tuple(map(_text, listed_names))
        return Dataset.from_arrays(
            *train, *test, num_classes=self.classes, class_names=names, name=self.name, flips=True
        )

    def part(self, names: tuple[str, ...], root: Path, content: dict[str, bytes]) -> tuple[np.ndarray, np.ndarray]:
        """The images and labels of the training or the test part."""
        images, labels = [], []
        for name in names:
            file = f"{root}/{name}"
            if name not in content:
                raise ProtofedError(f"{self.name}: {file} is missing; expected {listed(sum(self.files, ()))} there")
            batch = read_batch(content[name], file)
            for key in ("data", self.label_key):
                if key not in batch:
                    raise ProtofedError(f"{file}: no {key!r} in it; found {listed(sorted(batch))}")
            images.append(_images(batch["data"], file))
            labels.append(_integers(batch[self.label_key], self.classes, file))
            if len(images[-1]) != len(labels[-1]):
                raise ProtofedError(f"{file}: {len(images[-1])} images but {len(labels[-1])} labels")
        return np.concatenate(images), np.concatenate(labels)

    def open(self) -> tuple[Path, dict[str, bytes]]:
        """The folder or archive with the files, and the content of each file."""
        roots = places(self.name, self.path)
        names = {self.meta[0], *sum(self.files, ())}
        for root in roots:
            for folder in (root / self.folder, root):
                if (folder / self.files[0][0]).is_file():
                    files = {name: folder / name for name in names if (folder / name).is_file()}
                    try:
                        return folder, {name: path.read_bytes() for name, path in files.items()}
                    except OSError as error:
                        raise ProtofedError(f"{folder}: unreadable ({first_line(error)})") from None
            for archive in (root, root / self.archive):
                if archive.is_file():
                    return archive, _members(archive, names)
        raise ProtofedError(
            f"{self.name}: no {self.archive} and no folder {self.folder} in {listed(roots)}; "
            f"download https://www.cs.toronto.edu/~kriz/{self.archive} into it or name the file with path="
        )


def _members(archive: Path, names: set[str]) -> dict[str, bytes]:
    content = {}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                member_name = PurePosixPath(member.name).name
                stream = tar.extractfile(member) if member.isfile() and member_name in names else None
                if stream is not None:
                    content[member_name] = stream.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise ProtofedError(f"{archive}: not a tar archive, or damaged ({first_line(error)})") from None
    return content


def _images(data: object, file: str) -> np.ndarray:
    try:
        array = data.array() if isinstance(data, _Array) else None
    except (TypeError, ValueError) as error:
        raise ProtofedError(f"{file}: its images are damaged ({first_line(error)})") from None
    if array is None or array.ndim != 2 or array.shape[1] != 3072:
        form = type(data).__name__ if array is None else f"shape {array.shape}"
        raise ProtofedError(f"{file}: expected images [n, 3072] of bytes, got {form}")
    return array.reshape(-1, 3, 32, 32)


def _integers(labels: object, classes: int, file: str) -> np.ndarray:
    if not isinstance(labels, list) or not all(isinstance(y, int) and 0 <= y < classes for y in labels):
        raise ProtofedError(f"{file}: expected a list of labels from 0 to {classes - 1}")
    return np.asarray(labels, np.int64)


@register("cifar10", "cifar-10")
@dataclass(frozen=True, kw_only=True)
class CIFAR10(CifarSource):
    """CIFAR-10: 60,000 colour pictures of 10 kinds of things, 32×32."""

    folder: ClassVar[str] = "cifar-10-batches-py"
    archive: ClassVar[str] = "cifar-10-python.tar.gz"
    files: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = (
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        ("test_batch",),
    )
    meta: ClassVar[tuple[str, str]] = ("batches.meta", "label_names")
    label_key: ClassVar[str] = "labels"
    classes: ClassVar[int] = 10


@register("cifar100", "cifar-100")
@dataclass(frozen=True, kw_only=True)
class CIFAR100(CifarSource):
    """CIFAR-100: 60,000 colour pictures of 100 kinds of things, 32×32."""

    folder: ClassVar[str] = "cifar-100-python"
    archive: ClassVar[str] = "cifar-100-python.tar.gz"
    files: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]] = (("train",), ("test",))
    meta: ClassVar[tuple[str, str]] = ("meta", "fine_label_names")
    label_key: ClassVar[str] = "fine_labels"
    classes: ClassVar[int] = 100
