"""A comparison in few files, to keep and to share: its record, its table, its summaries, and all rows in one file.

| file | what is in it |
| --- | --- |
| `comparison.json` | variants, seeds and settings, as the comparison wrote it |
| `table.md` | the table |
| `summaries.json` | the summary of every finished run, by the name of its folder |
| `rows.jsonl.xz` | every row of every run, with its settings and confusions: `{"run": …, "file": …, "content": …}` |

Everything that reads a comparison's folder reads an archive too.
"""

from __future__ import annotations

import json
import lzma
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import disk
from ..errors import ProtofedError
from .comparison import FAILED, ComparisonFolder
from .folder import COMPARISON, CONFUSIONS, SETTINGS, check_free
from .rows import ROW_FILES, SUMMARY

ROWS, SUMMARIES, TABLE = "rows.jsonl.xz", "summaries.json", "table.md"


@dataclass
class ArchivedRun:
    """The files of one run: lines of rows, the settings' text and the confusions, by the name of the file."""

    lines: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in ROW_FILES})
    settings: str = ""
    confusions: str | None = None
    summary: Any = None


def is_archive(folder: Path) -> bool:
    """Whether a folder holds an archive."""
    return (folder / ROWS).is_file() and (folder / SUMMARIES).is_file()


def pack(folder: Path, out: Path) -> list[Path]:
    """Write a comparison's folder as an archive.

    Args:
        folder: A comparison's folder.
        out: The folder to write; it must not hold anything yet.

    Returns:
        The files that were written.

    Example: `pack(Path("runs/digits"), Path("results/digits"))`
    """
    record = ComparisonFolder(folder).read()
    check_free(out)
    cells = [cell for cell in record.cells if (folder / cell / SETTINGS).is_file()]
    with disk.writing(out):
        out.mkdir(parents=True, exist_ok=True)
        summaries = {}
        for cell in cells:
            if (folder / cell / SUMMARY).is_file():
                summaries[cell] = json.loads((folder / cell / SUMMARY).read_text(encoding="utf-8"))
        lines = [f"{json.dumps(cell)}: {json.dumps(summary)}" for cell, summary in summaries.items()]
        disk.write_atomically(out / SUMMARIES, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
        text = "".join(json.dumps(entry) + "\n" for cell in cells for entry in _entries(folder, cell))
        disk.write_atomically(out / ROWS, lzma.compress(text.encode(), preset=9))
        for name in (COMPARISON, FAILED, TABLE):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, out / name)
    return sorted(out.iterdir())


def unpack(folder: Path) -> None:
    """Give every run of an archive a folder of its own again, in the archive's place, so that more runs can join them.

    The runs have what an archive keeps of them: their settings, rows, confusions and summaries. They have no checkpoint and
    no model. A run that had not finished when the archive was made is left out, because it cannot go on.

    Args:
        folder: The archive. Its other files stay.

    Example: `unpack(Path("results/digits"))`
    """
    runs = read_archive(folder)
    with disk.writing(folder):
        for cell, run in runs.items():
            if run.summary is None:
                continue
            work = folder / f".{cell}.unpacked"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            texts = {name: "".join(lines) for name, lines in run.lines.items() if lines}
            texts |= {SETTINGS: run.settings, SUMMARY: json.dumps(run.summary, indent=1)}
            texts |= {} if run.confusions is None else {CONFUSIONS: run.confusions}
            for name, text in texts.items():
                disk.write_atomically(work / name, text.encode())
            shutil.rmtree(folder / cell, ignore_errors=True)
            work.rename(folder / cell)
        for name in (ROWS, SUMMARIES):  # last, so that an archive whose unpacking was cut off is still one
            (folder / name).unlink()


def _entries(folder: Path, cell: str) -> Iterator[dict[str, Any]]:
    """The files of a cell, one entry per row or file."""
    run = folder / cell
    yield {"run": cell, "file": SETTINGS, "content": (run / SETTINGS).read_text(encoding="utf-8")}
    for name in ROW_FILES:
        if (run / name).is_file():
            for line in (run / name).read_text(encoding="utf-8").splitlines():
                yield {"run": cell, "file": name, "content": json.loads(line)}
    if (run / CONFUSIONS).is_file():
        yield {"run": cell, "file": CONFUSIONS, "content": json.loads((run / CONFUSIONS).read_text(encoding="utf-8"))}


def read_summaries(folder: Path) -> dict[str, Any]:
    """Read the summaries of an archive, by the name of the run."""
    file = folder / SUMMARIES
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ProtofedError(f"{file}: not readable ({error})") from None


def read_archive(folder: Path) -> dict[str, ArchivedRun]:
    """Read all of an archive, by the name of the run.

    Example: `read_archive(Path("results/digits"))["fedsap-seed1234"].summary`
    """
    runs: dict[str, ArchivedRun] = {}
    file = folder / ROWS
    try:
        with lzma.open(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                entry = json.loads(line)
                run = runs.setdefault(entry["run"], ArchivedRun())
                if entry["file"] == SETTINGS:
                    run.settings = entry["content"]
                elif entry["file"] == CONFUSIONS:
                    run.confusions = json.dumps(entry["content"])
                else:
                    run.lines[entry["file"]].append(json.dumps(entry["content"]) + "\n")
    except (OSError, ValueError, KeyError, TypeError, EOFError, lzma.LZMAError) as error:
        raise ProtofedError(f"{file}: not readable ({type(error).__name__}: {error})") from None
    for name, summary in read_summaries(folder).items():
        runs.setdefault(name, ArchivedRun()).summary = summary
    return runs
