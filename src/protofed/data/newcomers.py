"""Clients that are held out of a federation, to join it when it has finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ..errors import ProtofedError, unknown
from ..seeds import numpy_stream
from .types import FederatedData

T = TypeVar("T")


def held_out(data: FederatedData, which: int | str | Sequence[str], seed: int) -> FederatedData:
    """Hold clients out of a federation. What the others hold stays as it is.

    Args:
        data: The data of all clients.
        which: How many clients, which are drawn by the seed, or the names of some.
        seed: The run's seed.

    Returns:
        The data of the other clients, with those held out as `newcomers`.

    Raises:
        ProtofedError: One line, where nobody would be left or where no client has such a name.

    Example: `held_out(federate(data, "dirichlet", clients=20, seed=1), 4, seed=1).newcomers`
    """
    total = len(data.clients)
    if isinstance(which, int):
        if which >= total:
            raise ProtofedError(f"new_clients={which}: there are {total} clients, and at least one must train")
        chosen = sorted(numpy_stream(seed, "new clients").permutation(total)[:which].tolist())
    else:
        names = [which] if isinstance(which, str) else list(dict.fromkeys(which))
        if not data.client_names:
            raise ProtofedError(
                f"new_clients={','.join(names)}: the clients of this data have no names; give the number of new clients"
            )
        for name in names:
            if name not in data.client_names:
                raise unknown("client", name, data.client_names)
        chosen = sorted(data.client_names.index(name) for name in names)
        if len(chosen) == total:
            raise ProtofedError(f"new_clients={','.join(names)}: these are all clients, and at least one must train")
    names_of_all = data.client_names or tuple(f"client {c}" for c in range(total))

    def others(values: Sequence[T]) -> list[T]:
        return [value for c, value in enumerate(values) if c not in chosen]

    rows = [*others(range(total)), *chosen]  # new clients stand after the others
    return replace(
        data,
        site_mean=None if data.site_mean is None else data.site_mean[rows],
        site_std=None if data.site_std is None else data.site_std[rows],
        clients=others(data.clients),
        held_back=others(data.held_back),
        client_names=tuple(others(data.client_names)),
        newcomers=[data.clients[c] for c in chosen],
        newcomer_names=tuple(names_of_all[c] for c in chosen),
    )
