"""Which samples an audit compares: those a client trains on, and those of other people."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..data.types import FederatedData, Samples
from .message import ClientMessage

Labelled = tuple[Tensor, Tensor]
"""Samples and their classes."""
MOST_OTHERS = 4000


def drawn(sets: Sequence[Samples], number: int, rng: np.random.Generator) -> Labelled:
    """Some samples of several sets, drawn without replacement; of fewer than `number`, all.

    Args:
        sets: The sets to draw from.
        number: The number of samples.
        rng: The random stream of the draws.

    Returns:
        The samples and their classes, in random order.
    """
    sizes = [len(samples) for samples in sets]
    rows = rng.permutation(sum(sizes))[:number]
    owner = np.searchsorted(np.cumsum(sizes), rows, side="right")
    first = np.cumsum([0, *sizes])
    parts = [s.take(torch.from_numpy(rows[owner == k] - first[k])) for k, s in enumerate(sets)]
    x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    order = torch.from_numpy(rng.permutation(len(y)))
    return x[order], y[order]


def others_of(data: FederatedData, message: ClientMessage, rng: np.random.Generator, tests: bool = True) -> Labelled:
    """Samples that a client does not train on: the other clients' training samples, and test samples.

    Args:
        data: The data of all clients.
        message: The client's message, with the samples it trains on.
        rng: The random stream of the draws.
        tests: Whether test samples are among them.

    Returns:
        At most 4,000 samples and their classes, in random order. None of them is one of the client's own.
    """
    sets = [c.labelled for k, c in enumerate(data.clients) if k != message.client]
    if tests:
        shared = (
            data.central_test if data.site_mean is None else None
        )  # where sites scale by themselves, each has its own
        sets += [c.test for c in data.clients] if shared is None else [shared]
    return drawn([_without(samples, message.members) for samples in sets], MOST_OTHERS, rng)


def candidates(
    message: ClientMessage, classes: Tensor, most: int, rng: np.random.Generator
) -> tuple[Labelled, Labelled]:
    """As many members as non-members of each class: samples that the client trains on, and test samples.

    Args:
        message: The client's message, with the samples it trains on and its test samples.
        classes: The classes, as a mask.
        most: The largest number of members.
        rng: The random stream of the draws.

    Returns:
        The members and the non-members.
    """
    tests = _without(message.data.test, message.members)
    labels, test_labels = message.members.labels, tests.labels
    rows: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    chosen = classes.nonzero().flatten().tolist()
    for label in chosen:
        own, other = (np.flatnonzero((y == label).cpu().numpy()) for y in (labels, test_labels))
        number = min(len(own), len(other), max(1, most // len(chosen)))
        for part, found in zip(rows, (own, other), strict=True):
            part.append(rng.permutation(found)[:number])
    picked = [torch.from_numpy(np.concatenate([np.empty(0, np.int64), *part])) for part in rows]
    return message.members.take(picked[0]), tests.take(picked[1])


def _without(samples: Samples, own: Samples) -> Samples:
    """Samples without those that are rows of `own`."""
    if samples.x is not own.x:
        return samples
    return samples.subset(~torch.isin(samples.index, own.index))
