"""What a person should know of a data set before a run: things that are no errors, and that nobody would guess."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .types import Dataset, Samples, name_of
from .words import some

log = logging.getLogger("protofed")

MOST_VALUES = 20_000_000  # of samples that are searched for copies


def remarks(
    dataset: Dataset, x: Tensor, training: Sequence[np.ndarray], tests: Sequence[Samples], names: Sequence[str]
) -> tuple[str, ...]:
    """What is to be said of a data set and of its division among clients.

    Args:
        dataset: The data set.
        x: Its training samples, of which `training` has the rows.
        training: Each client's training rows.
        tests: The sets of test samples.
        names: The clients' names, where clients are sites with names.

    Returns:
        One sentence each, none where there is nothing to say.
    """
    found = (
        *_classes(dataset),
        *_copies(x, training, tests),
        *_neighbours(dataset, x, training, tests),
        *_columns(dataset, training),
    )
    return (*found, *_clients(dataset, training, names)) if names else found


@lru_cache(maxsize=256)
def _said(text: str) -> None:
    log.warning("%s", text)


def say(texts: Iterable[str]) -> None:
    """Write remarks as warnings, each of them once: the runs of a comparison have the same."""
    for text in texts:
        _said(text)


def _classes(dataset: Dataset) -> Iterator[str]:
    counts = np.bincount(dataset.y_train.numpy(), minlength=dataset.num_classes)
    single = [dataset.class_name(c) for c in np.flatnonzero(counts == 1).tolist()]
    if single:
        yield f"{dataset.name}: a class with one training sample: {some(single)}"
    if dataset.y_test is not None:
        tested = np.bincount(dataset.y_test.numpy(), minlength=dataset.num_classes)
        strange = np.flatnonzero((tested > 0) & (counts == 0)).tolist()
        if strange:
            classes = some([f"{dataset.class_name(c)} ({tested[c]})" for c in strange])
            yield f"{dataset.name}: test samples of classes that no training sample has: {classes}"


def _copies(x: Tensor, training: Sequence[np.ndarray], tests: Sequence[Samples]) -> Iterator[str]:
    """Test samples that are equal to training samples."""
    rows = torch.from_numpy(np.concatenate(list(training)))
    total = (len(rows) + sum(map(len, tests))) * x[0].numel()
    if not x.is_floating_point() or total > MOST_VALUES or not len(rows):
        return
    known = set(_bytes(x[rows]))
    tested = [row in known for samples in tests for row in _bytes(samples.take()[0])]
    if any(tested):
        yield f"{sum(tested):,} of {len(tested):,} test samples are equal to a training sample, and easier than new ones"


def beside(sequence: Tensor, test: Tensor, training: Tensor) -> int:
    """How many test rows stand beside a training row of the same recording.

    Args:
        sequence: `[n]`, the recording of each row; rows of one recording are in the order of time.
        test: The numbers of the test rows.
        training: The numbers of the training rows.

    Returns:
        The number of such test rows.

    >>> beside(torch.tensor([0, 0, 0, 1]), torch.tensor([1, 3]), torch.tensor([0, 2]))
    1
    """
    trained = torch.zeros(len(sequence), dtype=torch.bool)
    trained[training] = True
    same = sequence[1:] == sequence[:-1]
    near = torch.zeros(len(sequence), dtype=torch.bool)
    near[1:] |= same & trained[:-1]
    near[:-1] |= same & trained[1:]
    return int(near[test].sum())


def _neighbours(dataset: Dataset, x: Tensor, training: Sequence[np.ndarray], tests: Sequence[Samples]) -> Iterator[str]:
    """Windows of one recording on both sides."""
    drawn = [samples.index for samples in tests if samples.x is x]
    if dataset.sequence_train is None or not drawn:
        return
    test = torch.cat(drawn).unique()
    number = beside(dataset.sequence_train, test, torch.from_numpy(np.concatenate(list(training))))
    if number:
        yield (
            f"{dataset.name}: {number:,} of {len(test):,} test windows stand beside a training window of the same capture, "
            "which makes them easier than windows of another day; test_by= holds out captures, sessions or time as a whole"
        )


def _bytes(x: Tensor) -> list[bytes]:
    return [row.tobytes() for row in np.ascontiguousarray(x.flatten(1).numpy())]


def _columns(dataset: Dataset, training: Sequence[np.ndarray]) -> Iterator[str]:
    """Columns of a table that say nothing."""
    if dataset.columns is None:
        return
    rows = dataset.x_train[torch.from_numpy(np.concatenate(list(training)))]
    constant = (rows == rows[:1]).all(0).tolist()
    names = dataset.columns.features
    same = [name for name, is_constant in zip(names, constant, strict=True) if is_constant]
    if same:
        yield f"{dataset.name}: the same in every training row: {some(same)}"


def _clients(dataset: Dataset, training: Sequence[np.ndarray], names: Sequence[str]) -> Iterator[str]:
    """Sites from which little can be learnt."""
    labels = dataset.y_train.numpy()
    single = [name_of(k, names) for k, rows in enumerate(training) if len(rows) == 1]
    if single:
        yield f"{dataset.name}: a site with one training sample: {some(single)}"
    alone = [
        name_of(k, names) for k, rows in enumerate(training) if len(rows) > 1 and len(np.unique(labels[rows])) == 1
    ]
    if alone:
        yield f"{dataset.name}: a site whose training samples are all of one class: {some(alone)}"


def groups_without_match(dataset: Dataset, owner: np.ndarray, clients: int, names: Sequence[str]) -> Iterator[str]:
    """Test rows of sites that do not train, and sites that train without test rows of their own.

    Args:
        dataset: The data set, with natural ids in both parts.
        owner: The client of each test row, −1 where none has its site.
        clients: The number of clients.
        names: Their names.
    """
    assert dataset.group_test is not None
    strange, sizes = np.unique(dataset.group_test.numpy()[owner < 0], return_counts=True)
    if len(strange):
        sites = [f"{dataset.group_name(g)} ({n} rows)" for g, n in zip(strange.tolist(), sizes.tolist(), strict=True)]
        yield f"{dataset.name}: nobody is tested on the test rows of sites that do not train: {some(sites)}"
    untested = [name_of(k, names) for k in range(clients) if not (owner == k).any()]
    if untested:
        yield (
            f"{dataset.name}: a site without test rows, for which a share of its own training rows is held out: "
            f"{some(untested)}"
        )
