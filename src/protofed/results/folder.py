"""The run folder for its one writer, which makes it in one step, locks it for the whole run and accounts for its rows.

| file | one object per | what is in it |
| --- | --- | --- |
| `run.json` | run | the format's number, and digests of the settings and of the data |
| `settings.toml` | run | the complete settings |
| `rounds.jsonl`, `metrics.jsonl`, `clients.jsonl` | round | see `rows` |
| `confusion.json` | run | at the last evaluation, how often each client took which class for which |
| `snapshots/round-N.npz` | pictured round | some clients' test embeddings, and the prototypes they are compared with |
| `models/` | run | the clients' classifiers after the last round, as `classifier.store` writes them |
| `summary.json` | run | the figures; it is written last, so its presence means that the run has finished |
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import disk
from ..errors import ProtofedError
from .lock import FolderLock
from .rows import (
    CLIENTS,
    EVALUATIONS,
    FORMAT,
    LAST,
    ROUNDS,
    ROW_FILES,
    SUMMARY,
    ClientsRow,
    EvaluationRow,
    RoundRow,
    finite,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RUN, SETTINGS, CONFUSIONS, SNAPSHOTS, MODELS, COMPARISON = (
    "run.json",
    "settings.toml",
    "confusion.json",
    "snapshots",
    "models",
    "comparison.json",
)


def reserve(base: Path) -> Path:
    """Make an empty folder called `base`, or `base-2` and so on where that name is taken. No two callers get the same.

    Example: `reserve(Path("runs/20260101-120000-fedsap-digits"))`
    """
    with disk.writing(base):
        base.parent.mkdir(parents=True, exist_ok=True)
        for number in range(1, 10_000):
            path = base if number == 1 else base.with_name(f"{base.name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    raise ProtofedError(f"{base}: ten thousand folders of this name exist; choose another with --out")


def check_free(path: Path) -> None:
    """Raise an error where a folder holds something, so that no run overwrites another. An empty one may be taken."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if any((path / name).is_file() for name in (SETTINGS, COMPARISON)):
        raise ProtofedError(
            f"{path}: this run folder exists already; `protofed resume {path}` continues it, or choose another --out"
        )
    raise ProtofedError(f"{path}: exists already and is not a run folder; choose another --out")


def make_folder(path: Path, files: Mapping[str, bytes]) -> FolderLock:
    """Make a folder that has its first files and its lock from the moment it exists.

    Args:
        path: The folder. It must not exist, or be empty.
        files: Content by name.

    Returns:
        The lock of the folder, held by this process.

    Example: `make_folder(Path("runs/digits"), {"comparison.json": text.encode()}).release()`
    """
    check_free(path)
    work = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    lock = FolderLock(work)
    try:
        with disk.writing(path):
            work.mkdir(parents=True)
            lock.acquire()
            for name, content in files.items():
                disk.write_durably(work / name, content)
            disk.sync_folder(work)
            try:
                work.rename(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                check_free(path)
                raise
            disk.sync_folder(path.parent)
    except BaseException:
        lock.release()
        shutil.rmtree(work, ignore_errors=True)
        raise
    lock.folder = path
    return lock


@dataclass
class History:
    """The rows of a run so far: one per round, one per evaluated round, and the clients' rows of the last evaluations."""

    rounds: list[RoundRow] = field(default_factory=list)
    evaluations: list[EvaluationRow] = field(default_factory=list)
    clients: list[ClientsRow] = field(default_factory=list)

    def add(self, row: RoundRow, evaluation: EvaluationRow | None = None, clients: ClientsRow | None = None) -> None:
        """Add the row of a round, and its evaluation where it had one."""
        self.rounds.append(row)
        if evaluation is not None and clients is not None:
            self.evaluations.append(evaluation)
            self.clients = [*self.clients[1 - LAST :], clients]


class RunFolder:
    """A run folder that this process writes. It holds the folder's lock until `close`.

    Example: `RunFolder.open(Path("runs/digits-fedsap")).settings()`
    """

    def __init__(self, path: Path, lock: FolderLock) -> None:
        self.path, self._lock = path, lock
        self._digests = {name: hashlib.sha256() for name in ROW_FILES}
        self._rows = dict.fromkeys(ROW_FILES, 0)
        self._bytes = dict.fromkeys(ROW_FILES, 0)
        self._snapshots: dict[str, str] = {}

    @classmethod
    def create(cls, path: Path, settings: str, about: Mapping[str, Any]) -> RunFolder:
        """Make a new run folder. A folder that holds something already is an error.

        Args:
            path: The folder.
            settings: The text of `settings.toml`.
            about: Entries of `run.json` beside the format and the digest of the settings, such as the digest of the data.

        Returns:
            The folder, locked by this process.
        """
        text = settings.encode()
        record = {"format": FORMAT, "settings": hashlib.sha256(text).hexdigest(), **about}
        return cls(path, make_folder(path, {SETTINGS: text, RUN: disk.sealed(record)}))

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open a folder to go on with its run, and take its lock."""
        check_is_run(path)
        return cls(path, FolderLock(path).acquire())

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    @property
    def checkpoint(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.path / "checkpoint"

    def about(self) -> dict[str, Any]:
        """Read `run.json`, and compare the settings with their digest."""
        return read_about(self.path)

    def settings(self) -> dict[str, Any]:
        """Read the settings of `settings.toml`."""
        return read_settings(self.path)

    def append(self, row: RoundRow, evaluation: EvaluationRow | None, clients: ClientsRow | None) -> None:
        """Append the row of a round to its file, and the rows of its evaluation where it had one."""
        for name, content in ((ROUNDS, row), (EVALUATIONS, evaluation), (CLIENTS, clients)):
            if content is None:
                continue
            line = (json.dumps(finite(content)) + "\n").encode()
            with disk.writing(self.path / name), (self.path / name).open("ab") as file:
                file.write(line)
            self._digests[name].update(line)
            self._rows[name] += 1
            self._bytes[name] += len(line)

    def write_confusions(self, confusions: Mapping[str, Any]) -> None:
        """Write `confusion.json`: which class was taken for which at the last evaluation."""
        disk.write_atomically(self.path / CONFUSIONS, json.dumps(confusions).encode())

    def write_snapshot(self, round: int, content: bytes) -> None:
        """Write the snapshot of a round: the content of an `.npz` file of embeddings and prototypes."""
        folder = self.path / SNAPSHOTS
        with disk.writing(folder):
            folder.mkdir(exist_ok=True)
        name = f"round-{round:06d}.npz"
        disk.write_atomically(folder / name, content)
        self._snapshots[name] = hashlib.sha256(content).hexdigest()

    def sync(self) -> None:
        """Wait until the disk has the rows that were appended so far."""
        for name in ROW_FILES:
            if self._rows[name]:
                disk.sync_file(self.path / name)

    def account(self) -> dict[str, Any]:
        """Count the rows and snapshots written so far, for a checkpoint that refers to them once they are durable."""
        confusions = self.path / CONFUSIONS
        return {
            "rows": {
                name: {"rows": self._rows[name], "bytes": self._bytes[name], "digest": self._digests[name].hexdigest()}
                for name in ROW_FILES
            },
            "snapshots": dict(self._snapshots),
            "confusions": disk.digest_of(confusions) if confusions.is_file() else None,
        }

    def check_account(self, account: Mapping[str, Any], finished: bool = False) -> None:
        """Raise an error where rows or snapshots that a checkpoint refers to are missing or changed.

        Args:
            account: The account of the time when the checkpoint was written.
            finished: Whether no round is left to run, so that `confusion.json` will not be written again either.
        """
        for name, counted in account["rows"].items():
            file, length = self.path / name, counted["bytes"]
            size = file.stat().st_size if file.is_file() else 0
            if size < length or (length and disk.digest_of(file, length) != counted["digest"]):
                raise ProtofedError(f"{file}: rows are missing or changed ({counted['rows']} were written)")
        digests = {self.path / SNAPSHOTS / name: digest for name, digest in account["snapshots"].items()}
        if finished and account["confusions"] is not None:
            digests[self.path / CONFUSIONS] = account["confusions"]
        for file, digest in digests.items():
            if not file.is_file() or disk.digest_of(file) != digest:
                raise ProtofedError(f"{file}: missing or changed since it was written")

    def rewind(self, account: Mapping[str, Any] | None) -> History:
        """Remove what was written after a checkpoint, because those rounds are about to be run again.

        Args:
            account: The checkpoint's account, which has been checked; None where the run starts from the beginning.

        Returns:
            The rows that stay.
        """
        rows: dict[str, list[Any]] = {}
        for name in ROW_FILES:
            file = self.path / name
            length = account["rows"][name]["bytes"] if account else 0
            content = b""
            if file.exists():
                with disk.writing(file), file.open("r+b") as handle:
                    content = handle.read(length)
                    handle.truncate(length)
                    handle.flush()
                    os.fsync(handle.fileno())
            rows[name] = [json.loads(line) for line in content.splitlines()]
            self._digests[name] = hashlib.sha256(content)
            self._rows[name], self._bytes[name] = len(rows[name]), length
        self._snapshots = dict(account["snapshots"]) if account else {}
        for file in (self.path / SNAPSHOTS).glob("round-*.npz"):
            if file.name not in self._snapshots:
                file.unlink()
        (self.path / SUMMARY).unlink(missing_ok=True)
        shutil.rmtree(self.path / MODELS, ignore_errors=True)
        for folder in (self.path, self.path / SNAPSHOTS, self.checkpoint):
            for leftover in folder.glob(".*.tmp"):  # of a process that was killed while it wrote
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        return History(rows[ROUNDS], rows[EVALUATIONS], rows[CLIENTS][-LAST:])

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, with digests of the rows it was made of. Its presence means that the run has finished."""
        self.sync()
        rows = {name: counted["digest"] for name, counted in self.account()["rows"].items()}
        disk.write_atomically(self.path / SUMMARY, disk.sealed({**finite(summary), "rows": rows}))


def check_is_run(path: Path) -> None:
    """Raise an error where a folder is not a run folder."""
    if not path.is_dir():
        raise ProtofedError(f"{path}: no such run folder")
    if not (path / SETTINGS).is_file():
        raise ProtofedError(f"{path}: not a run folder (it has no {SETTINGS})")


def read_about(path: Path) -> dict[str, Any]:
    """What the `run.json` of a folder holds, after the settings were compared with their digest."""
    file = path / RUN
    try:
        record = disk.opened(file.read_bytes(), file)
    except FileNotFoundError:
        raise ProtofedError(
            f"{path}: it has no {RUN}, so it is damaged or of an earlier version, and cannot be resumed"
        ) from None
    except OSError as error:
        raise ProtofedError(f"{file}: not readable ({error.strerror})") from None
    if record.get("format") != FORMAT:
        raise ProtofedError(f"{path}: run folder format {record.get('format')!r}; this version goes on with {FORMAT}")
    if disk.digest_of(path / SETTINGS) != record.get("settings"):
        raise ProtofedError(
            f"{path / SETTINGS}: not what the run began with; restore it, or start a new run with "
            f"`protofed run --config {path / SETTINGS}`"
        )
    return record


def read_settings(path: Path) -> dict[str, Any]:
    """Read a run's settings from its folder: `read_settings(Path("runs/digits-fedsap"))["rounds"]`."""
    file = path / SETTINGS
    try:
        return parse_settings(file, file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProtofedError(f"{file}: not readable ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ProtofedError(f"{file}: not readable ({error})") from None


def parse_settings(file: Path, text: str) -> dict[str, Any]:
    """Read settings from the text of a `settings.toml`; errors name `file`."""
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ProtofedError(f"{file}: not readable ({error})") from None
