"""What a secure sum costs by step, at the clients and at the server: `python benchmarks/secure.py [FILE.json]`

100 clients, C = 100 classes of d = 512: 51 200 numbers of class sums and 200 counts. All clients run one after the other in
this process, so the seconds of the clients are the sum over all of them; they are CPU seconds, and `wall` is clock time.
`dropping` is the step that a third of the clients no longer answer. Each row is the median over `REPEATS` rounds. Vectors
are random words, since the cost does not depend on them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from protofed.privacy.protocol import STEPS
from protofed.privacy.secure import LocalParties, secure_total

CLIENTS, LENGTH, REPEATS = 100, 100 * 512 + 200, 5


def one_sum(dropping: str | None, number: int) -> dict[str, float]:
    """The seconds of one secure sum by side and step, and the bytes of one client."""
    rng = np.random.default_rng(number)
    vectors = {client: rng.integers(0, 2**64, LENGTH, dtype=np.uint64) for client in range(CLIENTS)}
    gone = set(rng.permutation(CLIENTS)[: CLIENTS // 3].tolist()) if dropping else set()
    context = f"benchmark, round {number}".encode()
    seconds = {f"{side} {step}": 0.0 for side in ("clients", "server") for step in STEPS}
    wall, begin = time.perf_counter(), time.process_time()
    last = begin
    parties = LocalParties(vectors, LENGTH, context, absent={dropping: gone} if dropping else None)

    def lap(name: str) -> None:
        nonlocal last
        now = time.process_time()
        seconds[name] += now - last
        last = now

    def ask(step, messages):
        lap(f"server {STEPS[max(STEPS.index(step) - 1, 0)]}")  # what the server did with the answers before
        for answer in parties.ask(step, messages):
            lap(f"clients {step}")
            yield answer
            lap(f"server {step}")

    total = secure_total(ask, range(CLIENTS), LENGTH, context)
    lap("server unmask")
    wall = time.perf_counter() - wall
    wanted = np.zeros(LENGTH, np.uint64)
    for client in total.contributors:
        wanted += vectors[client]
    assert np.array_equal(total.values, wanted) and set(total.dropped) == gone
    there = next(client for client in range(CLIENTS) if client not in gone)
    sizes = {"bytes up": total.up[there], "bytes down": total.down[there]}
    return {**seconds, "seconds": last - begin, "wall": wall, **sizes}


def table(rows: list[dict]) -> str:
    """The rows as they stand in docs/secure-sums.md."""
    sides = [f"{side} {step}" for side in ("clients", "server") for step in STEPS]
    lines = [f"| a third leaves at | {' | '.join(sides)} | all |", "| --- |" + " ---: |" * (len(sides) + 1)]
    for row in rows:
        cells = " | ".join(f"{row[name]:.2f}" for name in (*sides, "seconds"))
        lines.append(f"| {row['dropping'] or 'no step'} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    rows = []
    for dropping in (None, *STEPS):
        runs = [one_sum(dropping, number) for number in range(REPEATS)]
        row = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        rows.append({"clients": CLIENTS, "words": LENGTH, "dropping": dropping, "repeats": REPEATS, **row})
    print(table(rows))
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
