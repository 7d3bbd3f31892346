"""Data that some clients have tampered with: other labels, or copies of samples with a trigger."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import ProtofedError
from .types import ClientData, FederatedData, Samples


def relabelled(
    data: FederatedData, clients: Collection[int], change: Callable[[Tensor], Tensor], owner: str
) -> FederatedData:
    """The data with other labels of some clients' training samples.

    Clients still share one tensor of labels, because no two of them train on the same row.

    Args:
        data: The data of all clients.
        clients: Whose labels are changed.
        change: A function of a client's labels.
        owner: What asks for it, for errors.

    Returns:
        The same data with a changed copy of the labels.
    """
    labels: dict[int, Tensor] = {}
    for client in sorted(clients):
        samples = data.clients[client].labelled
        if not len(samples):
            raise ProtofedError(f"{owner} changes labels of training samples, and {data.name_of(client)} has none")
        new = change(samples.labels)
        if bool((new >= data.num_classes).any()):
            raise ProtofedError(f"{owner}: class {int(new.max())}; expected 0 to {data.num_classes - 1}")
        if id(samples.y) not in labels:
            labels[id(samples.y)] = samples.y.clone()
        labels[id(samples.y)][samples.index] = new
    return _mapped(data, lambda s: replace(s, y=labels[id(s.y)]) if id(s.y) in labels else s)


def triggered(
    data: FederatedData,
    clients: Collection[int],
    trigger: Callable[[Tensor], Tensor],
    target: int,
    share: float,
    owner: str,
) -> FederatedData:
    """The data with triggered copies in some clients' training samples, and triggered test samples of the others.

    Args:
        data: The data of all clients.
        clients: Who trains on copies of its samples that have the trigger and the label `target`.
        trigger: A function that puts the trigger on samples.
        target: The class that samples with the trigger are to be taken for.
        share: The share of a client's samples of other classes that are copied.
        owner: What asks for it, for errors.

    Returns:
        The data. `triggered` of each other client has its test samples of other classes with the trigger and the label
        `target`; the training data of all clients is in new shared tensors, to which the copies were added.
    """
    if target >= data.num_classes:
        raise ProtofedError(f"{owner}: class {target}; expected 0 to {data.num_classes - 1}")
    base = data.clients[0].labelled
    rows: dict[int, Tensor] = {}
    for client in sorted(clients):
        samples = data.clients[client].labelled
        others = samples.index[samples.labels != target]
        number = math.ceil(share * len(others) - 1e-9)
        chosen = torch.linspace(0, max(0, len(others) - 1), number).round().long()
        rows[client] = others[chosen.to(others.device)]
    x = torch.cat([base.x, *(trigger(base.x[r]) for r in rows.values())])
    y = torch.cat([base.y, *(torch.full_like(r, target, dtype=base.y.dtype) for r in rows.values())])
    poisoned = _mapped(data, lambda s: replace(s, x=x, y=y) if s.x is base.x else s)
    marked: dict[int, Tensor] = {}  # whole test sets with the trigger
    end, members = len(base.x), list(poisoned.clients)
    for client, own in rows.items():
        new = torch.arange(end, end + len(own), device=own.device)
        labelled = members[client].labelled
        members[client] = replace(members[client], labelled=replace(labelled, index=torch.cat([labelled.index, new])))
        end += len(own)
    for client, member in enumerate(members):
        if client not in rows:
            members[client] = replace(member, triggered=_with_trigger(member, trigger, target, marked))
    return replace(poisoned, clients=members)


def _with_trigger(
    member: ClientData, trigger: Callable[[Tensor], Tensor], target: int, marked: dict[int, Tensor]
) -> Samples | None:
    """A client's test samples of other classes with the trigger; None where it has none."""
    test = member.test
    index = test.index[test.labels != target]
    if id(test.x) not in marked:
        marked[id(test.x)] = trigger(test.x)
    return Samples(marked[id(test.x)], torch.full_like(test.y, target), index) if len(index) else None


def _mapped(data: FederatedData, change: Callable[[Samples], Samples]) -> FederatedData:
    """The data with changed sets of training, validation and test samples of all clients."""
    clients = [
        replace(
            c,
            labelled=change(c.labelled),
            test=change(c.test),
            validation=None if c.validation is None else change(c.validation),
        )
        for c in data.clients
    ]
    return replace(data, clients=clients)
