"""What secure sums cost: a sum by step, and a whole round of FedProto: `python benchmarks/secure.py [FILE.json]`

100 clients, C = 100 classes of d = 512: 51 200 numbers of class sums, and counts. All clients run one after the other in
this process, so the seconds of the clients are the sum over all of them. Seconds are CPU seconds of this process, which
other processes of the machine disturb less than clock time; `wall` is clock time.

- `sum`: the protocol alone. `dropping` is the step that a third of the clients no longer answer. Each row is the median over
  `REPEATS` sums. Vectors are random words, since the cost does not depend on them.
- `round`: a round of FedProto with its training, plain and with `secure=sums`, in turns. Each client trains the package's
  CNN for one epoch on 200 random images of 3 × 32 × 32. No round is evaluated.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from protofed.data import Dataset
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation import rounds as federation_rounds
from protofed.privacy.protocol import STEPS
from protofed.privacy.secure import LocalParties, secure_total

CLIENTS, SAMPLES, CLASSES, DIM, REPEATS = 100, 200, 100, 512, 5
LENGTH = CLASSES * DIM + 2 * CLASSES + 1


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


def images() -> Dataset:
    """Random images of 100 classes, 200 for each client."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(0, CLASSES, (CLIENTS * SAMPLES,), generator=draw)
    x = torch.randn(len(y), 3, 32, 32, generator=draw)
    return Dataset.from_arrays(x, y, x[:CLIENTS], y[:CLIENTS], num_classes=CLASSES)


def whole_rounds() -> dict[str, float]:
    """The seconds of rounds of FedProto, plain and secure in turns, after one of each that is not counted."""
    given = {
        "data": images(),
        "clients": CLIENTS,
        "partition": "iid",
        "model": "cnn",
        "embedding": DIM,
        "rounds": 10**6,
    }
    given |= {
        "evaluate_every": 10**6,
        "engine": "loop",
        "threads": 1,
        "workers": 1,
        "snapshots": 0,
        "silhouette": False,
    }
    federations = {name: build(resolve("fedproto", {**given, "secure": name}))[1] for name in ("", "sums")}
    protocol, total_of_round = [], federation_rounds.total_of_round

    def timed(*arguments):
        begin = time.process_time()
        total = total_of_round(*arguments)
        protocol.append(time.process_time() - begin)
        return total

    federation_rounds.total_of_round = timed
    seconds: dict[str, list[float]] = {"": [], "sums": []}
    for _ in range(REPEATS + 1):
        for name, federation in federations.items():
            begin = time.process_time()
            record = federation.step()
            seconds[name].append(time.process_time() - begin)
            assert not record.dropped and not record.notes
    plain, secure, protocol = seconds[""][1:], seconds["sums"][1:], protocol[1:]
    return {
        "clients": CLIENTS,
        "samples": SAMPLES,
        "classes": CLASSES,
        "dim": DIM,
        "parameters": federations[""].engine.parameters[0],
        "repeats": REPEATS,
        "plain": statistics.median(plain),
        "secure": statistics.median(secure),
        "protocol": statistics.median(protocol),
        "ratio": statistics.median(s / p for s, p in zip(secure, plain, strict=True)),
        "largest ratio": max(s / p for s, p in zip(secure, plain, strict=True)),
    }


def round_table(row: dict[str, float]) -> str:
    """The comparison of rounds as it stands in docs/secure-sums.md."""
    return (
        "| plain round | secure round | of which the sum | secure / plain | largest of the turns |\n"
        "| ---: | ---: | ---: | ---: | ---: |\n"
        f"| {row['plain']:.1f} | {row['secure']:.1f} | {row['protocol']:.2f} | {row['ratio']:.2f} | "
        f"{row['largest ratio']:.2f} |"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = []
    for dropping in (None, *STEPS):
        runs = [one_sum(dropping, number) for number in range(REPEATS)]
        row = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        rows.append({"clients": CLIENTS, "words": LENGTH, "dropping": dropping, "repeats": REPEATS, **row})
    print(table(rows))
    compared = whole_rounds()
    print(round_table(compared))
    if sys.argv[1:]:
        content = {"sum": rows, "round": compared}
        Path(sys.argv[1]).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
