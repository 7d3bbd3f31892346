"""Files that a kill or a power cut leaves with the old content or the new one, and digests by which damage is seen."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import ProtofedError

BLOCK = 2**20
DIGEST = "digest"  # the key of a sealed object under which the digest of the rest stands


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within this context an error of the file system becomes one line that names the file.

    Example: `with writing(path): path.write_bytes(content)`
    """
    try:
        yield
    except OSError as error:
        hint = "; make space and resume" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise ProtofedError(f"{path}: cannot be written ({error.strerror or error}){hint}") from None


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file in one step: a reader sees the old content or the new one, never a part.

    Args:
        path: The file to write. Its folder must exist.
        content: All of the new content.

    Example: `write_atomically(Path("runs/table.md"), text.encode())`
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            write_durably(temporary, content)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder: a new file's name is not durable before that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Wait until the disk has what was appended to a file."""
    with writing(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def digest_of(path: Path, length: int | None = None) -> str:
    """The SHA-256 of a file, or of its first `length` bytes. A file that is shorter is taken as a whole."""
    state = hashlib.sha256()
    remaining = length
    with path.open("rb") as file:
        while remaining is None or remaining > 0:
            block = file.read(BLOCK if remaining is None else min(BLOCK, remaining))
            if not block:
                break
            state.update(block)
            remaining = None if remaining is None else remaining - len(block)
    return state.hexdigest()


def sealed(content: Mapping[str, Any]) -> bytes:
    """Write an object as JSON text that holds a digest of itself, so that a changed byte is noticed.

    Example: `opened(sealed({"round": 3}), Path("x.json"))` is `{"round": 3}`.
    """
    return (json.dumps({**content, DIGEST: _digest(content)}, indent=1) + "\n").encode()


def opened(text: bytes, path: Path) -> dict[str, Any]:
    """Read the object that `sealed` wrote. Damaged text is an error that names `path`."""
    try:
        content = json.loads(text)
        digest = content.pop(DIGEST)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ProtofedError(f"{path}: not readable ({type(error).__name__}: {error})") from None
    if digest != _digest(content):
        raise ProtofedError(f"{path}: damaged (its content does not match the digest in it)")
    return dict(content)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
