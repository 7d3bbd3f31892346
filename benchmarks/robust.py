"""What robust rules withstand and what they cost: `python benchmarks/robust.py [FASHION-MNIST-FOLDER]`, then `--table`.

A fifth of 20 clients attack, in each of a number of ways, on three seeds. First the method's own mean is run under every
attack; then every rule under those that cost the mean ten points or more, under a backdoor that succeeds, and under none.
Each finished run is a line of docs/results/robust/runs.jsonl, and is not run again. `--table` writes the tables of
docs/robust.md from that file. Accuracies are those of the honest clients, by the method's own prediction, means over the
last five rounds. The guard against absurd uploads is off, so that the rules are measured by themselves.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import protofed as pf
from protofed.experiment.general import general_keys

FOLDER = Path(__file__).parent.parent / "docs" / "results" / "robust"
SEEDS = (1234, 1235, 1236)
LOSS, ALLOWED = 0.10, 0.03  # what the mean must lose for an attack to count, and what a rule may lose then
NONE = "none"
MEAN = "mean"  # the method's own: by size for FedProto and FedAvg, over holders for FedSAP
RULES = (
    "median",
    "trimmed?share=0.2",
    "geometric-median",
    "krum?attackers=0.2",
    "multi-krum?attackers=0.2",
    "bounded?factor=1",
)
ATTACKS = (
    "sign-flip?scale=5",
    "scaling?factor=10",
    "random?scale=20",
    "colluders?scale=20",
    "label-swap",
    "hijack?target=0&source=1&scale=5",
    "free-riders?noise=0.1",
    "backdoor?target=0",
)
COMMON = {
    "clients": 20, "epochs": 2, "batch": 16, "model": "mlp", "hidden": [64], "embedding": 32, "evaluate_every": 1000,
    "snapshots": 0, "silhouette": False, "engine": "stack", "workers": 1,
}  # fmt: skip
APART = {"partition": "n-way", "way": 5}  # each client holds about half of the classes
SOON = {"alignment": {"start": 0, "end": 5}}  # FedSAP's ramp for runs of few rounds
CASES: dict[tuple[str, str], dict[str, Any]] = {
    ("digits", "fedproto"): {**APART, "shot": 12, "lr": 0.1, "rounds": 12},
    ("digits", "fedsap"): {**APART, "shot": 12, "lr": 0.1, "rounds": 12, **SOON},
    ("digits", "fedavg"): {"partition": "iid", "lr": 0.1, "rounds": 30},
    ("digits", "fedavg, classes apart"): {**APART, "shot": 12, "lr": 0.1, "rounds": 30},
    ("digits", "fedavg, half the rounds"): {"partition": "iid", "lr": 0.1, "rounds": 15},
    ("fashion-mnist", "fedproto"): {**APART, "shot": 25, "lr": 0.05, "rounds": 15},
    ("fashion-mnist", "fedsap"): {**APART, "shot": 25, "lr": 0.02, "rounds": 15, **SOON},
    ("fashion-mnist", "fedavg"): {"partition": "iid", "lr": 0.1, "rounds": 25},
}
Run = tuple[str, str, str, str, int]  # data, case, rule, attack, seed


def given(run: Run, folder: str) -> tuple[str, dict[str, Any]]:
    """The method and the settings of a run."""
    data, case, rule, attack, seed = run
    chosen = {**COMMON, **CASES[data, case], "data": data, "seed": seed}
    if data == "fashion-mnist":
        chosen |= {"limit_train": 4000, "limit_test": 1000, **({"path": folder} if folder else {})}
    if rule != MEAN:
        chosen["reduce"] = rule
    if attack != NONE:
        chosen["attack"] = f"{attack}{'&' if '?' in attack else '?'}share=0.2"
    if "guard" in general_keys():
        chosen["guard"] = 0
    return case.partition(",")[0], chosen


def planned(found: dict[Run, dict[str, Any]]) -> Iterator[Run]:
    """The runs that are to be there, in order. What comes after the means depends on these."""
    for data, case in CASES:
        for attack in (NONE, *ATTACKS):
            if not (case.startswith("fedavg") and attack.startswith("hijack")):  # no prototypes travel
                yield from ((data, case, MEAN, attack, seed) for seed in SEEDS)
    for data, case in CASES:
        for attack in (NONE, *attacks_that_count(found, data, case)):
            for rule in RULES:
                yield from ((data, case, rule, attack, seed) for seed in SEEDS)


def attacks_that_count(found: dict[Run, dict[str, Any]], data: str, case: str) -> list[str]:
    """The attacks that cost the mean ten points or more, and a backdoor that succeeds as often."""
    counted = []
    for attack in ATTACKS:
        loss = mean_of(found, data, case, MEAN, NONE) - mean_of(found, data, case, MEAN, attack)
        success = mean_of(found, data, case, MEAN, attack, "attack_success")
        if loss >= LOSS or success >= LOSS:
            counted.append(attack)
    return counted


def mean_of(
    found: dict[Run, dict[str, Any]], data: str, case: str, rule: str, attack: str, key: str = "accuracy"
) -> float:
    """A figure's mean over the seeds; NaN where a run is missing, or has no such figure."""
    values = [found.get((data, case, rule, attack, seed), {}).get(key) for seed in SEEDS]
    return float("nan") if None in values else fmean(v for v in values if v is not None)


def read() -> dict[Run, dict[str, Any]]:
    """The finished runs."""
    file = FOLDER / "runs.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {(r["data"], r["case"], r["rule"], r["attack"], r["seed"]): r for r in rows}


def measure(folder: str) -> None:
    """Run what is not there yet."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    logging.getLogger("protofed").setLevel(logging.ERROR)
    found = read()
    while missing := [run for run in planned(found) if run not in found]:
        run = missing[0]
        method, settings = given(run, folder)
        begin = time.perf_counter()
        figures = pf.run(method, **settings).summary["last_five"]
        row = dict(zip(("data", "case", "rule", "attack", "seed"), run, strict=True))
        row |= {k: round(figures[k], 6) for k in ("accuracy", "attack_success") if k in figures}
        found[run] = {**row, "seconds": round(time.perf_counter() - begin, 1)}
        with (FOLDER / "runs.jsonl").open("a") as file:
            file.write(json.dumps(found[run]) + "\n")
        print(f"{len(missing) - 1:4d} left", *run, f"{row['accuracy']:.3f}", flush=True)


# --- tables -----------------------------------------------------------------------------------------------------------
def name(text: str) -> str:
    return text.partition("?")[0]


def points(value: float) -> str:
    return "" if value != value else f"{round(100 * value, 1) + 0.0:.1f}"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def change(found: dict[Run, dict[str, Any]], data: str, case: str, rule: str, attack: str) -> float:
    """How much is lost against the mean without attackers."""
    return mean_of(found, data, case, MEAN, NONE) - mean_of(found, data, case, rule, attack)


def most_lost(found: dict[Run, dict[str, Any]], data: str, case: str, rule: str, attack: str) -> float:
    """The most that one seed loses against the mean without attackers of the same seed."""
    none, other = ([found[data, case, r, a, s]["accuracy"] for s in SEEDS] for r, a in ((MEAN, NONE), (rule, attack)))
    return max(a - b for a, b in zip(none, other, strict=True))


def tables(found: dict[Run, dict[str, Any]]) -> str:
    """The tables of docs/robust.md."""
    lines = ["**The mean.** Accuracy without attackers, and points lost when a fifth of the clients attack:", ""]
    lines += [row("data", "method", "no attack", *map(name, ATTACKS)), row(*["---"] * (3 + len(ATTACKS)))]
    for data, case in CASES:
        cells = [points(change(found, data, case, MEAN, attack)) for attack in ATTACKS]
        lines.append(row(data, case, points(mean_of(found, data, case, MEAN, NONE)), *cells))
    lines += [
        "",
        "**The rules.** Points lost against the mean without attackers, where the mean loses ten or more:",
        "",
    ]
    lines += [row("data", "method", "attack", MEAN, *map(name, RULES)), row(*["---"] * (4 + len(RULES)))]
    held: dict[str, list[bool]] = {rule: [] for rule in RULES}
    always: dict[str, list[bool]] = {rule: [] for rule in RULES}
    for data, case in CASES:
        for attack in [NONE, *attacks_that_count(found, data, case)]:
            if attack.startswith("backdoor"):
                continue
            cells = []
            for rule in RULES:
                lost = change(found, data, case, rule, attack)
                if attack != NONE:
                    held[rule].append(lost <= ALLOWED + 1e-9)
                    always[rule].append(most_lost(found, data, case, rule, attack) <= ALLOWED + 1e-9)
                text = points(lost)
                cells.append(f"**{text}**" if lost > ALLOWED + 1e-9 else text)
            lines.append(row(data, case, name(attack), points(change(found, data, case, MEAN, attack)), *cells))
    for title, counts in (("lost at most 3 in", held), ("and in every seed", always)):
        lines.append(row("", "", title, "", *(f"{sum(v)} of {len(v)}" for v in counts.values())))
    lines.append("")
    lines += ["Losses of more than three points are bold, and rows without an attack say what a rule costs.", ""]
    backdoors = [(d, c, a) for d, c in CASES for a in attacks_that_count(found, d, c) if a.startswith("backdoor")]
    if backdoors:
        lines += [
            "**The backdoor.** Share of test samples with the trigger that honest clients take for the target, in %:",
            "",
        ]
        lines += [row("data", "method", MEAN, *map(name, RULES)), row(*["---"] * (3 + len(RULES)))]
        for data, case, attack in backdoors:
            cells = [points(mean_of(found, data, case, rule, attack, "attack_success")) for rule in (MEAN, *RULES)]
            lines.append(row(data, case, *cells))
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--table" in sys.argv:
        (FOLDER / "table.md").write_text(tables(read()), encoding="utf-8")
        print(tables(read()))
    else:
        measure(sys.argv[1] if len(sys.argv) > 1 else "")
