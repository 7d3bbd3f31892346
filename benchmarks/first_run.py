"""Whether what `protofed demo` shows holds with other seeds: `python benchmarks/first_run.py FOLDER [OUT.json] [SEEDS]`.

FOLDER has the situations with the seeds of the demo, as `protofed demo --out FOLDER` writes it, or packed. The same
situations are run with SEEDS (2001-2005), and the conclusions are compared. Until all runs are done they are kept in a
folder beside OUT, so that the command can be repeated.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from protofed.cli.options import parse_seeds
from protofed.disk import write_atomically
from protofed.experiment.demo import SITUATIONS, demonstrate
from protofed.results.lesson import lesson
from protofed.results.read import read_folder


def main() -> None:
    first = Path(sys.argv[1])
    out = Path(sys.argv[2] if len(sys.argv) > 2 else "docs/results/first-run.json")
    seeds = parse_seeds(sys.argv[3] if len(sys.argv) > 3 else "2001-2005")
    shown = {each.situation.name: each.lesson for each in demonstrate(out.with_suffix(""), seeds=seeds)}
    record: dict[str, Any] = {"seeds": seeds, "situations": {}}
    for situation in SITUATIONS:
        before = lesson([variant.row() for variant in read_folder(first / situation.name).variants])
        after = shown[situation.name]
        holds = before[-1] == after[-1]
        record["situations"][situation.name] = {"demo": before, "other seeds": after, "holds": holds}
        print(f"{situation.name}: {'holds' if holds else 'DOES NOT HOLD'}\n  {' '.join(after)}")
    write_atomically(out, (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())
    shutil.rmtree(out.with_suffix(""))


if __name__ == "__main__":
    main()
