"""Convert folders of results that hold a folder for each run into archives of four files.

    python benchmarks/pack_results.py docs/results

Every comparison below the folder is packed in its place. What is read from the archive is compared with what was read from
the runs' folders before these are removed; the table is written anew, and other files stay. With `--tables` the tables of
archives are written anew, where `protofed table` prints another text today than when they were packed.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from protofed.results.archive import is_archive, pack
from protofed.results.folder import COMPARISON
from protofed.results.lock import FILE
from protofed.results.read import StoredResults, read_folder, read_rows
from protofed.results.tables import comparison_markdown

LEFT_OUT = ("results.csv", "table.tex", "table.md", FILE)  # what `protofed table` makes again, and the lock


def comparable(folder: StoredResults) -> StoredResults:
    """What was read, without the place it was read from."""
    variants = [
        replace(v, runs=[replace(run, path=Path(run.name), archived_confusions=None, notes=[]) for run in v.runs])
        for v in folder.variants
    ]
    return replace(folder, path=Path(), variants=variants)


def convert(folder: Path) -> None:
    """Pack one comparison in its place."""
    work = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(work, ignore_errors=True)
    pack(folder, work)
    before, after = read_folder(folder), read_folder(work)
    if comparable(before) != comparable(after):
        raise SystemExit(f"{folder}: the archive does not read as the folder did")
    for one, other in zip(before.runs, after.runs, strict=True):
        confusions = [run.confusions() for run in (one, other)]
        if str(confusions[0]) != str(confusions[1]):
            raise SystemExit(f"{one.path}: the archive's confusions do not read as the folder's did")
    rows, columns = read_rows(work)
    (work / "table.md").write_text(comparison_markdown(rows, columns), encoding="utf-8")
    for file in folder.iterdir():
        if file.is_file() and file.name not in LEFT_OUT and not (work / file.name).exists():
            shutil.copyfile(file, work / file.name)
    shutil.rmtree(folder)
    work.rename(folder)
    print(f"{folder}: {len(after.runs)} runs")


def write_table(folder: Path) -> None:
    """Write the table of an archive anew, where it has changed."""
    file, text = folder / "table.md", comparison_markdown(*read_rows(folder))
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        file.write_text(text, encoding="utf-8")
        print(file)


if __name__ == "__main__":
    for record in sorted(Path(sys.argv[1]).rglob(COMPARISON)):
        if not is_archive(record.parent):
            convert(record.parent)
        elif "--tables" in sys.argv[2:]:
            write_table(record.parent)
