"""One contender of the workload `evaluation`, in a process of its own: `python evaluating.py SPEC`.

It runs by its path and imports protofed absolutely, so that the same program measures any checkout: rounds that train and
evaluate, with the settings of `protofed run`. `Record.seconds` are those of the training, and the rest is the evaluation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from protofed.data import Dataset
from protofed.experiment.run import build
from protofed.experiment.settings import resolve

SEED = 1234
ROUNDS = 1000  # more than are measured, so that an evaluation is one of those that most rounds have
LAST = 5  # the rounds at the end of a run, after which more is measured
PIECE, STACK = 2048, 64  # the samples of one product, and the models of one product of a stack
ROWS = 200_000  # the samples whose products are measured


def dataset(spec: dict[str, Any]) -> Dataset:
    """Samples around a centre for each class, so that classes can be told apart and predictions are not all the same."""
    generator = torch.Generator().manual_seed(SEED)
    classes, shape = spec["classes"], tuple(spec["shape"])
    centres = torch.randn(classes, *shape, generator=generator)

    def drawn(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.arange(count) % classes
        x = torch.empty(count, *shape)
        for rows in torch.arange(count).split(4096):
            x[rows] = 0.3 * centres[y[rows]] + torch.randn(len(rows), *shape, generator=generator)
        return x, y

    x, y = drawn(spec["clients"] * spec["samples"])
    tests = drawn(spec["tests"])
    owner = torch.arange(spec["clients"]).repeat_interleave(spec["samples"])
    return Dataset.from_arrays(x, y, *tests, num_classes=classes, group_train=owner, name=spec["name"])


def processor_seconds() -> float:
    """The processor's time of this process. That of workers is counted where the system says it (`/proc`)."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    total = usage.ru_utime + usage.ru_stime
    try:
        ticks = os.sysconf("SC_CLK_TCK")
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / ticks
    except OSError:
        pass
    return total


def products(spec: dict[str, Any]) -> float | None:
    """The seconds in which all cores could do an evaluation's matrix products and nothing else, where layers are dense.

    Some of the clients are measured, with one thread; the others and the other cores are taken to be as fast.
    """
    if spec["model"] != "mlp":
        return None
    options, tests = spec["options"], spec["tests"]
    widths = [spec["shape"][0], *options["hidden"], options["embedding"], spec["classes"]]
    models = min(spec["clients"], max(1, ROWS // tests))
    layers = [torch.randn(models, a, b) for a, b in itertools.pairwise(widths)]
    x = torch.randn(tests, widths[0])
    stack = 1 if tests >= PIECE else STACK
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start_time = time.perf_counter()
    for first in range(0, models, stack):
        some = [layer[first : first + stack] for layer in layers]
        for piece in x.split(PIECE):
            z = piece.expand(len(some[0]), *piece.shape)
            for layer in some:
                z = torch.bmm(z, layer)
    seconds = time.perf_counter() - start_time
    torch.set_num_threads(threads)
    return seconds * spec["clients"] / models / len(os.sched_getaffinity(0))


class Evaluating:
    """A federation whose rounds are evaluated."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.settings, self.federation = build(
            resolve(
                spec["method"],
                {
                    "data": dataset(spec),
                    "partition": "natural",
                    "clients": spec["clients"],
                    "participation": spec["per_round"] / spec["clients"],
                    "rounds": LAST if spec.get("last") else ROUNDS,
                    "evaluate_every": 1,
                    "batch": spec["batch"],
                    "lr": 0.01,
                    "momentum": 0.5,
                    "model": {"name": spec["model"], **spec["options"]},
                    **({"reduce": "mean?by=holders"} if spec["method"] == "fedproto" else {}),
                    **spec.get("settings", {}),
                },
            )
        )

    def run(self) -> dict[str, Any]:
        """One round with its evaluation: the seconds of both, the metrics, and a digest of every client's confusions."""
        start_time = time.perf_counter()
        federation, cpu = self.federation, [0.0]
        evaluate = federation._evaluate

        def timed(record: Any) -> None:
            before = processor_seconds()
            evaluate(record)
            cpu[0] = processor_seconds() - before

        federation._evaluate = timed  # type: ignore[method-assign]
        record = federation.step()
        federation._evaluate = evaluate  # type: ignore[method-assign]
        seconds = time.perf_counter() - start_time
        digests = {}
        for name in ("head", "prototype"):
            confusions = [getattr(score, f"by_{name}") for score in record.scores or ()]
            if all(confusion is not None for confusion in confusions):
                digest = hashlib.sha256()
                for confusion in confusions:
                    digest.update(confusion.rows.astype("int64").tobytes())
                digests[name] = digest.hexdigest()
        return {
            "training": record.seconds,
            "evaluation": seconds - record.seconds,
            "evaluation_cpu": cpu[0],
            "products": products(self.spec),
            "metrics": record.metrics,
            "confusions": digests,
        }


def main() -> None:
    """Build the federation that the first argument describes, and run a round for each line of standard input."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not disturb the replies

    def reply(content: dict[str, Any]) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    contender = Evaluating(json.loads(sys.argv[1]))
    reply({"about": "", "settled": dataclasses.asdict(contender.settings.engine)})
    for _ in sys.stdin:
        reply(contender.run())
    contender.federation.engine.close()
    os._exit(0)  # at once, without finalising the interpreter


if __name__ == "__main__":
    main()
