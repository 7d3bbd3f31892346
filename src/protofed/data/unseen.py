"""A domain that no client holds: its samples are taken out before anything is dealt, and all clients are scored on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..errors import ProtofedError, unknown
from .types import Dataset, FederatedData, Samples, Scale, rescaled


def without_group(data: Dataset, name: str) -> tuple[Dataset, Samples]:
    """Take a domain or natural group out of a data set.

    Standardised samples are standardised again, by the training rows that are left: nothing of the unseen group, not its
    mean either, is in what clients train on.

    Args:
        data: The data set, with group ids.
        name: The group's name, or its number where groups have no names.

    Returns:
        The data set without the group, and the group's test samples; all its samples where it has no test part.
    """
    number = _group(data, name)
    assert data.group_train is not None
    in_train = data.group_train == number
    if bool(in_train.all()):
        raise ProtofedError(f"unseen={name}: no other group has training samples, so no client would have any")
    in_test = torch.zeros(0, dtype=torch.bool)
    if data.y_test is not None:
        in_test = (
            torch.zeros_like(data.y_test, dtype=torch.bool) if data.group_test is None else data.group_test == number
        )
    left: dict[str, Any] = {f"{key}_train": getattr(data, f"{key}_train")[~in_train] for key in ("x", "y", "group")}
    if bool(in_test.any()):
        assert data.x_test is not None and data.y_test is not None
        x, y = data.x_test[in_test], data.y_test[in_test]
    else:
        x, y = data.x_train[in_train], data.y_train[in_train]
    tested = data.x_test is not None and not bool(in_test.all())
    seen = [data.x_test[~in_test]] if tested and data.x_test is not None else []
    # the unseen samples stand behind the test part while both are scaled
    whole = replace(data, **left, x_test=torch.cat([*seen, x]))
    whole = whole.standardised(data.scaling) if data.mean is not None else whole
    assert whole.x_test is not None
    rows = len(whole.x_test) - len(x)
    groups = data.group_test[~in_test] if tested and data.group_test is not None else None
    rest = replace(
        whole,
        x_test=whole.x_test[:rows] if tested else None,
        y_test=data.y_test[~in_test] if tested and data.y_test is not None else None,
        group_test=groups,
    )
    return rest, Samples(whole.x_test[rows:], y, torch.arange(len(y)))


def _group(data: Dataset, name: str) -> int:
    """The id of a group by its name."""
    if data.group_train is None:
        raise ProtofedError(f"unseen={name} needs domains or natural groups, and {data.name} has no group ids")
    ids = np.unique(data.group_train.numpy()).tolist()
    names = {data.group_names[i] if data.group_names else str(i): i for i in ids}
    if name not in names:
        raise unknown("unseen group", name, names)
    return names[name]


def with_unseen(data: FederatedData, unseen: Samples, scale: Scale = (None, None)) -> FederatedData:
    """Give each client the unseen samples of its own classes, to be scored on, in the scale of its own samples.

    Args:
        data: The data of all clients.
        unseen: The samples of the group that no client holds.
        scale: The mean and deviation that they are standardised by.

    Returns:
        The same data; a client none of whose classes occurs there has no unseen samples.
    """
    labels = unseen.labels
    views: list[Samples] = []  # clients of one scale share their samples
    for client in range(len(data.clients)):
        x = rescaled(unseen.x, scale, data.scaling(client)) if client == 0 or data.site_mean is not None else views[0].x
        views.append(replace(unseen, x=x))
    own = [
        view.subset(client.classes[labels].nonzero().flatten())
        for view, client in zip(views, data.clients, strict=True)
    ]
    if not any(map(len, own)):
        raise ProtofedError("unseen: no client has a class of the unseen samples")
    clients = [replace(c, unseen=s if len(s) else None) for c, s in zip(data.clients, own, strict=True)]
    return replace(data, clients=clients)
