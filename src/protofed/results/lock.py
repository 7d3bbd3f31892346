"""The lock of a folder, which one process holds for a whole run and which ends with the process."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO

from ..errors import ProtofedError

try:
    import fcntl
except ImportError:  # Windows has no record locks of this kind; two writers in one process are still noticed
    fcntl = None  # type: ignore[assignment]

FILE = ".lock"
PATIENCE = 3.0  # seconds
_held: dict[tuple[int, int], str] = {}  # by device and inode of a lock file that this process holds, what stands in it


class FolderLock:
    """The right to write a folder. A second process that asks for it gets an error that names the holder.

    The lock is the operating system's: it ends with the process, however that ends, so a lock file that is left behind
    locks nothing. It is not inherited by child processes.

    Example: `with FolderLock(Path("runs/digits")): ...`
    """

    def __init__(self, folder: Path, name: str = FILE) -> None:
        """
        Args:
            folder: The folder.
            name: The name of the lock file in it. A folder whose parts have several writers has a lock for each part.
        """
        self.folder, self.name = folder, name
        self._file: IO[str] | None = None
        self._key = (0, 0)

    def acquire(self, patience: float = PATIENCE) -> FolderLock:
        """Take the lock, or raise an error that names the process that has it.

        Args:
            patience: For how many seconds to ask again. The processes of a comparison that was killed end by themselves
                within a second.
        """
        deadline = time.monotonic() + patience
        while True:
            try:
                return self._try()
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    sentence = _sentence(str(error))
                    raise ProtofedError(f"{self.folder}: {sentence}; wait for it, or stop it") from None
            time.sleep(0.1)

    def _try(self) -> FolderLock:
        """Take the lock; a `BlockingIOError` holds what its holder wrote into the file."""
        path = self.folder / self.name
        if path.is_file() and (key := (path.stat().st_dev, path.stat().st_ino)) in _held:
            raise BlockingIOError(_held[key])  # it is not opened here: closing it again would end the lock
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ProtofedError(f"{self.folder}: cannot be written ({error.strerror})") from None
        file = os.fdopen(handle, "r+", encoding="utf-8")
        status = os.fstat(handle)
        try:
            if fcntl is not None:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = file.read()
            file.close()
            if isinstance(error, BlockingIOError | PermissionError):
                raise BlockingIOError(holder) from None
            raise ProtofedError(f"{self.folder}: cannot be locked ({error.strerror})") from None
        file.seek(0)
        file.truncate()
        since = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "command": " ".join(sys.argv)}
        text = json.dumps(about) + "\n"
        with suppress(OSError):  # on a full disk the lock holds all the same
            file.write(text)
            file.flush()
        self._file, self._key = file, (status.st_dev, status.st_ino)
        _held[self._key] = text
        return self

    def release(self) -> None:
        """Release the lock. Where it is not held, nothing happens."""
        if self._file is not None:
            _held.pop(self._key, None)
            with suppress(OSError):  # unwritten content of the lock file does not matter any more
                self._file.close()
            self._file = None

    def __enter__(self) -> FolderLock:
        return self if self._file is not None else self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_held(folder: Path, name: str = FILE) -> bool:
    """Whether a process holds a lock of a folder: this one or, where the system can say it, another one."""
    path = folder / name
    try:
        status = path.stat()
        if fcntl is None or (status.st_dev, status.st_ino) in _held:
            return True  # it is not opened here: closing it again would end the lock
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False  # a file system without locks
    finally:
        os.close(handle)
    return False


def _sentence(text: str) -> str:
    """The sentence that names the holder of the lock, from what it wrote into the lock file."""
    try:
        about = json.loads(text)
        return (
            f"process {about['pid']} on {about['host']} has been writing to this folder since {about['since']} "
            f"({about['command']})"
        )
    except (ValueError, KeyError, TypeError):
        return "another process is writing to this folder"
