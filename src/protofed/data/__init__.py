"""Data sets, partitions, and what each client holds.

data = load("digits")
federated = federate(data, partitions.make("dirichlet", {"alpha": 0.1}), clients=20, seed=1234)
"""

from __future__ import annotations

from . import (
    cifar,
    csi,
    csi_sim,
    domains,
    idx,
    memory,
    mimic,
    own,
    sensefi,
    stl10,
    svhn,
    tabular,
    text,
    tiny_imagenet,
    uneven,
    usps,
)  # their sources and partitions register themselves
from .federate import federate
from .memory import as_dataset
from .partitions import Partition, partitions
from .picture import counts_table, draw_counts
from .sources import DataSource, load, sources
from .table import Columns
from .types import ClientData, Dataset, FederatedData, Samples, Unlabelled

__all__ = [
    "ClientData",
    "Columns",
    "DataSource",
    "Dataset",
    "FederatedData",
    "Partition",
    "Samples",
    "Unlabelled",
    "as_dataset",
    "available",
    "cifar",
    "counts_table",
    "csi",
    "csi_sim",
    "domains",
    "draw_counts",
    "federate",
    "idx",
    "load",
    "memory",
    "mimic",
    "own",
    "partitions",
    "sensefi",
    "sources",
    "stl10",
    "svhn",
    "tabular",
    "text",
    "tiny_imagenet",
    "uneven",
    "usps",
]


def available() -> list[str]:
    """The names of all data sources. `load` also takes a path, `hub:NAME` and data in memory."""
    return sources.names()
