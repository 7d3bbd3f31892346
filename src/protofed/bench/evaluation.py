"""What an evaluation costs: beside the training round of each workload, and beside another checkout's."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ProtofedError
from .processes import Field
from .workloads import TRAINING, Many, Say, Training, goal

PROGRAM = Path(__file__).with_name("evaluating.py")
THIS_CODE, OTHER_CODE = "this code", "the other"
FASTER = 10.0  # the goal: times the other checkout's speed
SHARE = 0.5  # the goal: the largest part of the training round that an evaluation may take
MLP: dict[str, Any] = {"shape": (64,), "model": "mlp", "options": {"hidden": (128,), "embedding": 64}, "batch": 8}


@dataclass(frozen=True)
class Case:
    """A federation that evaluates all clients after each round, on test samples that they share."""

    name: str
    method: str
    clients: int
    per_round: int
    samples: int  # of each client
    tests: int  # of each client
    shape: tuple[int, ...]
    model: str
    options: dict[str, Any]
    batch: int
    classes: int = 10
    last: bool = False  # whether the rounds are a run's last ones, after which more is measured
    compared: bool = False  # whether it is measured beside the other checkout

    def quick(self) -> Case:
        """The same case in a tiny size."""
        few = min(self.clients, 6)
        options = TRAINING["cnn28"].smaller["options"] if self.model == "cnn" else self.options
        tests = min(self.tests, 20)
        return replace(self, clients=few, per_round=min(self.per_round, few), samples=20, tests=tests, options=options)

    def describe(self) -> str:
        """The sizes in one line."""
        some = "" if self.per_round == self.clients else f", {self.per_round:,} per round"
        return (
            f"{self.clients:,} clients × {self.samples} samples {'×'.join(map(str, self.shape))}{some}, "
            f"{self.tests:,} tests, {self.model}, {self.method}{', last rounds' if self.last else ''}"
        )


def _of(workload: Training, tests: int, **changes: Any) -> Case:
    """The case of a training workload, with so many test samples."""
    names = ("name", "method", "clients", "per_round", "samples", "shape", "model", "options", "batch", "classes")
    return Case(**{**{name: getattr(workload, name) for name in names}, "tests": tests, **changes})


CASES: tuple[Case, ...] = (
    Case("tests", "fedproto", 100, 100, samples=60, tests=10_000, **MLP, compared=True),
    _of(TRAINING["cifar-cohort"], 1000, name="shared", compared=True),
    _of(TRAINING["cifar-cohort"], 1000, name="shared, last rounds", last=True, compared=True),
    Case("crowd", "fedproto", 10_000, 10_000, samples=20, tests=100, **MLP, compared=True),
    _of(TRAINING["cnn28"], 300),
    _of(TRAINING["cifar-cohort"], 1000),
    _of(TRAINING["resnet18"], 40),
    _of(TRAINING["mlp-digits"], 60),
    _of(Many().federation(Many().many), 20, name="many"),
)


def measure_evaluation(repeats: int, quick: bool, say: Say, beside: Path | None = None) -> dict[str, Any]:
    """Measure the seconds of a round's training and of its evaluation.

    Args:
        repeats: The number of turns.
        quick: Whether tiny sizes are measured.
        say: A function that reports progress.
        beside: Another checkout, whose code takes turns with this one on the cases that are compared.

    Returns:
        The rows and goals. `measure_evaluation(3, True, print)`
    """
    if beside is not None and not (beside / "src" / "protofed").is_dir():
        raise ProtofedError(f"{beside}: not a checkout of protofed (it has no src/protofed)")
    rows: dict[str, Any] = {}
    goals: list[dict[str, Any]] = []
    for case in CASES:
        if case.compared and beside is None:
            continue
        say(f"evaluation, {case.name}: {case.describe()}")
        row = rows[case.name] = _measured(case.quick() if quick else case, repeats, beside if case.compared else None)
        if not case.compared:
            goals.append(goal(f"{case.name}: evaluation of a training round", row["share"], SHARE, at_least=False))
        elif not case.last:
            goals.append(goal(f"{case.name}: times the other's speed", row["speed_best"], FASTER, at_least=True))
    return {"kind": "evaluation", "rows": rows, "goals": goals}


def _measured(case: Case, repeats: int, beside: Path | None) -> dict[str, Any]:
    spec = {**asdict(case), "program": str(PROGRAM)}
    with Field() as field:
        field.add(THIS_CODE, spec)
        if beside is not None:
            field.add(OTHER_CODE, {**spec, "source": str(beside.absolute()), "settings": _settings(field)})
        turns = []
        if not case.last:
            field.turn()  # to warm up; of last rounds there are only a few
        for turn in range(repeats):
            turns.append(field.turn(backwards=turn % 2 == 1))  # so that none is always first
    if field.skipped:
        raise ProtofedError(f"bench evaluation, {case.name}: {field.skipped}")
    row: dict[str, Any] = {"description": case.describe(), "settings": _settings(field)}
    for label in field.runners:
        replies = [turn[label] for turn in turns]
        row[label] = {k: [reply[k] for reply in replies] for k in ("training", "evaluation", "evaluation_cpu")}
    this = row[THIS_CODE]
    row["share"] = min(this["evaluation"]) / min(this["training"])
    row["share_median"] = statistics.median(e / t for e, t in zip(this["evaluation"], this["training"], strict=True))
    if beside is not None:
        other = row[OTHER_CODE]
        pairs = list(zip(other["evaluation"], this["evaluation"], strict=True))
        row["speed_best"] = min(other["evaluation"]) / min(this["evaluation"])
        row["speed_median"] = statistics.median(theirs / ours for theirs, ours in pairs)
        row["speed_cpu"] = min(other["evaluation_cpu"]) / min(this["evaluation_cpu"])
        if turns[0][THIS_CODE]["products"] is not None:
            row["products"] = min(turn[THIS_CODE]["products"] for turn in turns)
        row["equal"] = all(_equal(turn[THIS_CODE], turn[OTHER_CODE]) for turn in turns)
    return row


def _settings(field: Field) -> dict[str, Any]:
    return field.runners[THIS_CODE].engine_settings if THIS_CODE in field.runners else {}


def _equal(this: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether all figures and confusions are the same, to the last bit, of those that both have."""
    return all(
        this[part][key] == other[part][key]
        for part in ("metrics", "confusions")
        for key in this[part].keys() & other[part].keys()
    )


def table(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    """The header, the rows and the notes of the table of results."""
    header = [
        "workload",
        "s training",
        "s evaluation",
        "of training",
        "the other, s",
        "× the other",
        "median",
        "× its CPU",
    ]
    rows = []
    for name, row in result["rows"].items():
        this = row[THIS_CODE]
        cells = [name, f"{min(this['training']):.3f}", f"{min(this['evaluation']):.3f}", f"{row['share']:.0%}"]
        if OTHER_CODE in row:
            cells += [f"{min(row[OTHER_CODE]['evaluation']):.3f}"]
            cells += [f"{row[key]:.1f}" for key in ("speed_best", "speed_median", "speed_cpu")]
        rows.append(cells + ["–"] * (len(header) - len(cells)))
    notes = [f"{name}: {row['description']}" for name, row in result["rows"].items()]
    for name, row in result["rows"].items():
        if "products" in row:
            most = min(row[OTHER_CODE]["evaluation"]) / row["products"]
            notes.append(
                f"{name}: the matrix products alone would take {row['products']:.3f} s on all cores, "
                f"so no evaluation that does them can be more than {most:.1f} times as fast as the other"
            )
    compared = {name: row["equal"] for name, row in result["rows"].items() if "equal" in row}
    if compared:
        different = [name for name, equal in compared.items() if not equal]
        notes.append(
            f"DIFFERENT figures: {', '.join(different)}"
            if different
            else "figures and confusions of both are equal to the last bit"
        )
    return header, rows, notes
