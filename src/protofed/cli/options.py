"""The options that several commands share, and the functions that read their texts."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from ..errors import ProtofedError

if TYPE_CHECKING:
    from ..experiment.shares import Part

FOLDER = "protofed.folder"  # the key under which a click context holds the folder that its command writes


def method_names(incomplete: str = "") -> list[str]:
    """The names of the methods that begin with a text, for shell completion. The source is read, and nothing is loaded."""
    files = sorted((Path(__file__).parent.parent / "methods").glob("*.py"))
    names = (re.findall(r'^@register\("([^"]+)"', file.read_text(encoding="utf-8"), re.M) for file in files)
    return sorted(name for name in chain.from_iterable(names) if name.startswith(incomplete))


Method = Annotated[str, typer.Argument(autocompletion=method_names)]
Pairs = Annotated[list[str] | None, typer.Argument(help="Settings as key=value, for instance rounds=20 lr=0.05")]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[[LABEL=]METHOD[?key=value&...]]... [key=value...]", show_default=False, autocompletion=method_names
    ),
]
Config = Annotated[
    list[Path] | None,
    typer.Option("--config", "-c", help="Settings in a TOML file; later files and key=value override it."),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The run folder to write; must not exist yet.")]
Load = Annotated[
    list[Path] | None, typer.Option("--load", help="A Python file that registers methods, models or data of your own.")
]
Seeds = Annotated[str, typer.Option(help="How many seeds, or which: 3; 1234,1235; 1234-1236; 77, for one alone.")]
Columns = Annotated[str | None, typer.Option(help="The table's columns: head,weighted_prototype,seconds and so on.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs at a time; default: as many as there are cores.")]


PartOption = Annotated[
    str | None, typer.Option("--part", metavar="I/N", help="Only this part of the runs; other hosts run the others.")
]
LauncherOption = Annotated[
    str | None, typer.Option(help="Submit the parts as an array job: slurm, slurm?parts=8&minutes=60, or local.")
]


def parse_part(text: str | None) -> Part | None:
    """Read the option `--part`; None where it is not given."""
    from ..experiment.shares import Part

    return None if text is None else Part.parse(text)


def load_files(files: list[Path] | None) -> None:
    """Run Python files that register methods, models, data sources or partitions of a person's own."""
    for file in files or []:
        if not file.is_file():
            raise ProtofedError(f"--load {file}: no such file")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None:
            raise ProtofedError(f"--load {file}: not a Python file (.py)")
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)


def given_settings(config: list[Path] | None, pairs: list[str] | None) -> dict[str, Any]:
    """Combine the settings of files and of words.

    Args:
        config: Files of settings; later ones override earlier ones.
        pairs: Words `key=value`, which override the files.

    Returns:
        Flat keys and their values.
    """
    from ..experiment.settings import combine, parse_pairs, read_run

    given: dict[str, Any] = {}
    for file in config or []:
        given = combine(given, read_run(file))
    return combine(given, parse_pairs(pairs or []))


def out_folder(out: Path | None, label: str) -> Path:
    """The folder that a command writes.

    Args:
        out: The folder of the option `--out`; None makes a new one under `runs/`, named by the time and the label. It is
            reserved for this process: two that start in the same second get two folders.
        label: The end of a new folder's name.

    Returns:
        The folder.
    """
    if out is None:
        from ..results.folder import reserve

        out = reserve(Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{label}")
    return writing_to(out)


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Remove a folder that was reserved in vain: one that is still empty when the block ends."""
    try:
        yield
    finally:
        with suppress(OSError):
            folder.rmdir()


def writing_to(folder: Path) -> Path:
    """Note the folder that the running command writes, so that `main` can say how to go on where it is stopped."""
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta[FOLDER] = folder
    return folder


def parse_seeds(text: str) -> int | list[int]:
    """Read the option `--seeds`.

    Args:
        text: A number of seeds, a list or a range.

    Returns:
        The number of seeds, or the list of seeds.

    >>> parse_seeds("3"), parse_seeds("1234,1236"), parse_seeds("1234-1236")
    (3, [1234, 1236], [1234, 1235, 1236])
    """
    try:
        if "," in text:
            return [int(part) for part in text.split(",") if part.strip()]
        if "-" in text:
            first, last = map(int, text.split("-"))
            return list(range(first, last + 1))
        return int(text)
    except ValueError:
        raise ProtofedError(
            f"--seeds {text!r}: expected a number of seeds, a list (1234,1235) or a range (1234-1236)"
        ) from None


def parse_columns(text: str | None) -> list[str] | None:
    """Read the option `--columns`, names between commas, and check each, so that a misspelt one is found before a run."""
    if text is None:
        return None
    from ..results.columns import parse_column

    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ProtofedError(f"--columns {text!r}: expected names of columns between commas")
    return [parse_column(name).name for name in names]
