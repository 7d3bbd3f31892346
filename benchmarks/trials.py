"""Trials of settings, on training samples alone: `python benchmarks/trials.py FILE.md PAPER/TABLE COLUMN --trial "lr=0.03"`.

Every trial is the laptop size of a preset's column with other settings; `--trial ""` is the column as it is. In place of the
data's test part stands a part of its training part, so no sample that a table is scored on reaches a run:

- data with a test part: a fifth of the training samples, permuted; each keeps its site;
- `--sites "session 1" "session 2"`: sites with the first words in their names train, those with the second test them;
- clients that hold out a part of their own samples: the samples that the column takes are left out before;
- simulated data: simulated with another seed.

A fixed generator permutes, and the seed of a run is none of the tables'. The file has the means of the last five
rounds, of what a server measures the largest value, and the accuracy round by round.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protofed.data import Dataset, DataSource
from protofed.data.csi_sim import CSISimulation
from protofed.data.rows import balanced
from protofed.data.sources import limited, shaped
from protofed.disk import write_atomically
from protofed.experiment.reproduce.planning import plan
from protofed.experiment.run import run
from protofed.experiment.settings import Settings, combine, resolve
from protofed.federation import Record
from protofed.grammar import parse_pairs
from protofed.results.rows import LAST

SPLIT, SEED, SHARE = 5, 77, 0.2  # of the generator, of the runs, and the share that is held out


def parts(data: Dataset, train: np.ndarray, test: np.ndarray, test_groups: torch.Tensor | None = None) -> Dataset:
    """The data with some of its training rows for training and others for tests."""
    rows, held = torch.from_numpy(train), torch.from_numpy(test)
    group, sequence = data.group_train, data.sequence_train
    return replace(
        data,
        x_train=data.x_train[rows],
        y_train=data.y_train[rows],
        x_test=data.x_train[held],
        y_test=data.y_train[held],
        group_train=None if group is None else group[rows],
        group_test=test_groups if group is None or test_groups is not None else group[held],
        sequence_train=None if sequence is None else sequence[rows],
    )


def without_tests(source: DataSource, test: str, sites: tuple[str, str] | None = None) -> tuple[Dataset, str]:
    """The data of a trial, and how it was made of training samples alone.

    Args:
        source: The data of a table.
        test: The setting `test`: the central test set, or a part of each client's own samples.
        sites: Words in the names of the sites that train and of those that test them.
    """
    if isinstance(source, CSISimulation):
        other = replace(source, seed=source.seed + SPLIT)
        return other.load(), f"Simulated with the seed {other.seed} in place of {source.seed}: no window is a table's."
    data = source.read()
    if data.x_test is None:
        raise SystemExit(f"{data.name}: it has no test part that could be left out")
    every, text = np.arange(len(data.y_train)), f"The test part of {data.name} is not used. "
    if sites is not None and data.group_train is not None:
        names = np.array([data.group_name(g) for g in data.group_train.tolist()])
        train, held = (np.flatnonzero(np.char.find(names, words) >= 0) for words in sites)
        owners = {data.group_name(g): g for g in data.group_train.unique().tolist()}
        owner = torch.tensor([owners[n.replace(sites[1], sites[0])] for n in names[held]])
        data = parts(data, train, held, owner)
        text += f"Sites with “{sites[0]}” in their names train, and are tested on the same with “{sites[1]}”"
    else:
        use = "train and the last fifth tests"
        if test == "local" and data.group_test is None:
            if source.limit_train is None:
                raise SystemExit(f"{data.name}: the tables take all of its training samples, and test on some of them")
            every = np.flatnonzero(~balanced(data.y_train.numpy(), source.limit_train))
            text += f"Nor are the {source.limit_train:,} training samples that the table takes. "
            use = "are the clients', who each test on a part of their own, and the last fifth is the test set of all"
        order = np.random.default_rng(SPLIT).permutation(every)
        cut = len(order) - round(SHARE * len(order))
        data = parts(data, order[:cut], order[cut:])
        text += (
            f"Of {len(order):,} training samples, permuted by numpy.random.default_rng({SPLIT}), the first four fifths "
        )
        text += use
    text += f": {len(data.y_train):,} and {len(data.x_test):,}"  # type: ignore[arg-type]
    data = shaped(limited(data, source.limit_train, source.limit_test), source.resize, source.image_channels)
    text += f", of which the settings take {len(data.y_train):,} and {len(data.x_test):,}."  # type: ignore[arg-type]
    return data if source.standardise == "none" else data.standardised(source.standardise), text


def figures(settings: Settings, keys: list[str]) -> tuple[list[str], list[float]]:
    """Of one run: what is asked for, and the curve of the first of it."""
    records: list[Record] = []
    run(settings, watch=lambda record, _: records.append(record))
    evaluated = [r.metrics for r in records if r.metrics]
    cells = []
    for key in keys:
        scores = [100 * m[key] for m in evaluated if key in m][-LAST:]
        measured = [(r.measures[key], r.round) for r in records if key in r.measures]
        if scores:
            cells.append(f"{statistics.fmean(scores):.1f}")
        else:
            cells.append("{:.3g} (round {})".format(*max(measured)) if measured else "–")
    return cells, [100 * m[keys[0]] for m in evaluated if keys[0] in m]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for name in ("file", "table", "column"):
        parser.add_argument(name)
    parser.add_argument("--rows", action="append", default=[], help="rows of the table; all without it")
    parser.add_argument("--trial", action="append", required=True, help="settings key=value, with spaces between")
    parser.add_argument("--show", nargs="+", default=["accuracy_head"], help="metrics, or measures of the server")
    parser.add_argument("--sites", nargs=2, help="words in the names of the sites that train, and of those that test")
    parser.add_argument("--question", required=True, help="what is looked for: a sentence for the file")
    asked = parser.parse_args(argv)
    grid = plan(asked.table, seeds=[SEED], only=[asked.column], rows=asked.rows).grids[asked.column]
    methods = [variant.method for variant in grid.variants]
    lines, curves, split = [], [], ""
    for trial in asked.trial:
        over: dict[str, Any] = parse_pairs(shlex.split(trial))
        if fixed := [key for key in over if key.startswith(("data", "test", "seed"))]:
            raise SystemExit(f"{fixed[0]}: a trial may not change which samples are trained on and tested")
        for variant in grid.variants:
            settings = resolve(None, combine(grid.cells[variant.cell(SEED)].to_dict(), over), also=methods)
            data, split = without_tests(settings.data, settings.general.test, asked.sites)
            cells, curve = figures(replace(settings, data=data), asked.show)
            label = f"| {trial or 'as it is'} | {variant.label} |"
            lines.append(f"{label} {' | '.join(cells)} |")
            curves.append(f"{label} {' '.join(f'{value:.0f}' for value in curve)} |")
            print(lines[-1], flush=True)
    words = [f"`{key}`" for key in asked.show]
    text = [
        f"# Trials of {asked.table}, {asked.column}",
        asked.question,
        f"{split} One seed, {SEED}, which no table has. Accuracies are in %, means of the last {LAST} rounds; what a "
        "server measures has the largest value of any round.",
        f"```console\npython benchmarks/trials.py {shlex.join(argv)}\n```",
        "\n".join([f"| settings | row | {' | '.join(words)} |", "| --- | --- |" + " ---: |" * len(words), *lines]),
        f"{words[0]} in the evaluated rounds:",
        "\n".join(["| settings | row | % |", "| --- | --- | --- |", *curves]),
    ]
    write_atomically(Path(asked.file), ("\n\n".join(text) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1:])
