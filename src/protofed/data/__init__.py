"""Data sets, partitions, and what each client holds.

data = load("digits")
federated = federate(data, partitions.make("dirichlet", {"alpha": 0.1}), clients=20, seed=1234)
"""

from __future__ import annotations

from . import (
    cifar,
    csi,
    csi_sim,
    idx,
    mimic,
    own,
    stl10,
    svhn,
    text,
    tiny_imagenet,
)  # their sources register themselves
from .federate import federate
from .partitions import Partition, partitions
from .picture import counts_table, draw_counts
from .sources import DataSource, load, sources
from .types import ClientData, Dataset, FederatedData, Samples, Unlabelled

__all__ = [
    "ClientData",
    "DataSource",
    "Dataset",
    "FederatedData",
    "Partition",
    "Samples",
    "Unlabelled",
    "available",
    "cifar",
    "counts_table",
    "csi",
    "csi_sim",
    "draw_counts",
    "federate",
    "idx",
    "load",
    "mimic",
    "own",
    "partitions",
    "sources",
    "stl10",
    "svhn",
    "text",
    "tiny_imagenet",
]


def available() -> list[str]:
    """The names of all data sources. `load` also takes a path, `hub:NAME` and a `Dataset`."""
    return sources.names()
