"""A comparison's folder: `comparison.json` says which variants and seeds it has, `failed.json` which of its runs failed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import disk
from ..errors import ProtofedError
from .folder import COMPARISON, make_folder
from .lock import FolderLock, is_held

FAILED = "failed.json"
PART = ".part-{}-of-{}.lock"
PATIENCE = 60.0  # seconds to wait for another part that is writing a table


@dataclass(frozen=True)
class Variant:
    """A method and the settings that make this variant differ; its runs are in `FOLDER-seed…`."""

    label: str
    method: str
    settings: dict[str, Any]
    folder: str

    def cell(self, seed: int) -> str:
        """The name of the folder of this variant's run with a seed."""
        return f"{self.folder}-seed{seed}"


@dataclass(frozen=True)
class ComparisonRecord:
    """The content of `comparison.json`.

    Attributes:
        variants: The lines of the comparison.
        seeds: The seeds, with each of which every variant is run.
        settings: The settings of each cell, by its name.
        columns: The columns of the tables, where a person has chosen them.
    """

    variants: list[Variant]
    seeds: list[int]
    settings: dict[str, Any]
    columns: list[str] | None = None

    def to_json(self) -> str:
        """Write the text of the file."""
        columns = {} if self.columns is None else {"columns": self.columns}
        variants = [dataclasses.asdict(variant) for variant in self.variants]
        return json.dumps({"variants": variants, "seeds": self.seeds, **columns, "settings": self.settings}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ComparisonRecord:
        """Read the text of the file. Early folders list `methods` in place of `variants`, and each of them is a variant."""
        record = json.loads(text)
        if "variants" in record:
            variants = [Variant(**variant) for variant in record["variants"]]
        else:
            variants = [Variant(name, name, {}, name) for name in record["methods"]]
        for variant in variants:
            if Path(variant.cell(0)).name != variant.cell(0):
                raise ValueError(f"folder {variant.folder!r} is not in this folder")
        seeds = [int(seed) for seed in record["seeds"]]
        return cls(variants, seeds, dict(record["settings"]), record.get("columns"))

    @property
    def cells(self) -> list[str]:
        """The names of all cells."""
        return [variant.cell(seed) for variant in self.variants for seed in self.seeds]


class ComparisonFolder:
    """The files of a comparison beside its runs. A process must hold the folder's lock to write them.

    Example: `ComparisonFolder(Path("runs/digits")).read().seeds`
    """

    def __init__(self, path: Path, lock: FolderLock | None = None) -> None:
        self.path, self._lock = path, lock

    def exists(self) -> bool:
        """Whether the folder is a comparison's."""
        return (self.path / COMPARISON).is_file()

    @classmethod
    def create(cls, path: Path, record: ComparisonRecord) -> ComparisonFolder:
        """Make a new folder and lock it. A folder that holds something already is an error."""
        return cls(path, make_folder(path, {COMPARISON: record.to_json().encode()}))

    @classmethod
    def open(cls, path: Path) -> ComparisonFolder:
        """Open a comparison's folder to go on with it, and take its lock. One whose parts are being run is an error."""
        lock = FolderLock(path).acquire()
        try:
            _check_parts(path)
        except ProtofedError:
            lock.release()
            raise
        return cls(path, lock)

    @classmethod
    def open_part(cls, path: Path, record: ComparisonRecord, number: int, of: int) -> ComparisonFolder:
        """Open a comparison's folder to run a part of it, beside processes that run the others.

        The folder is made where it does not exist yet. One that was made for another comparison is an error.

        Args:
            path: The folder.
            record: What `comparison.json` holds, or is to hold.
            number: The number of the part, from 1.
            of: The number of parts.

        Returns:
            The folder, of which this process has locked its part alone.
        """
        if not cls(path).exists():
            try:
                cls.create(path, record).close()
            except ProtofedError:
                if not cls(path).exists():  # otherwise another part was quicker
                    raise
        stored, given = cls(path).read_whole().to_json(), json.loads(record.to_json())
        if json.loads(stored) != given:
            raise ProtofedError(f"{path}: the folder of another comparison; all parts need the same words and settings")
        _check_parts(path, of)
        return cls(path, FolderLock(path, PART.format(number, of)).acquire())

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Within this context a part has the whole folder's lock, to write what belongs to all parts."""
        lock = FolderLock(self.path).acquire(PATIENCE)
        try:
            yield
        finally:
            lock.release()

    def close(self) -> None:
        """Release the lock, where this object holds it."""
        if self._lock is not None:
            self._lock.release()

    def read(self) -> ComparisonRecord:
        """Read `comparison.json`."""
        file = self.path / COMPARISON
        try:
            return ComparisonRecord.from_json(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ProtofedError(f"{self.path}: not a comparison's folder (it has no {COMPARISON})") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtofedError(f"{file}: not readable ({type(error).__name__}: {error})") from None

    def read_whole(self) -> ComparisonRecord:
        """Read `comparison.json` to go on with the comparison: the settings of every cell must be in it."""
        record = self.read()
        for cell in record.cells:
            if cell not in record.settings:
                raise ProtofedError(
                    f"{self.path / COMPARISON}: not readable (settings of the cell {cell!r} are missing)"
                )
        return record

    def write(self, record: ComparisonRecord) -> None:
        """Replace `comparison.json`, as is done where the record has other seeds than before."""
        disk.write_atomically(self.path / COMPARISON, record.to_json().encode())

    def failures(self) -> dict[str, str]:
        """Read which cells have failed, and why."""
        file = self.path / FAILED
        try:
            failures = json.loads(file.read_text(encoding="utf-8"))
            return {str(cell): str(reason) for cell, reason in failures.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError) as error:
            raise ProtofedError(f"{file}: not readable ({type(error).__name__}: {error})") from None

    def write_failures(self, failures: Mapping[str, str]) -> None:
        """Write which cells have failed and why. Where none has, the file is removed."""
        if failures:
            disk.write_atomically(self.path / FAILED, (json.dumps(dict(failures), indent=1) + "\n").encode())
        else:
            (self.path / FAILED).unlink(missing_ok=True)


def _check_parts(path: Path, of: int | None = None) -> None:
    """Raise an error where a part of a comparison is being run, other than one of so many parts."""
    for file in sorted(path.glob(PART.format("*", "*"))):
        part = file.name.removeprefix(".part-").removesuffix(".lock").replace("-of-", "/")
        if not part.endswith(f"/{of}") and is_held(path, file.name):
            raise ProtofedError(f"{path}: its part {part} is being run by another process; wait for it, or stop it")


def failures_of(variant: Variant, seeds: list[int], failures: Mapping[str, str]) -> dict[int, str]:
    """The reasons why runs of a variant failed, by seed."""
    return {seed: failures[variant.cell(seed)] for seed in seeds if variant.cell(seed) in failures}
