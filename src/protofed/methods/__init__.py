"""One file per method. Importing a file registers it; `available()` lists what there is."""

from __future__ import annotations

from . import (
    caring,
    fedapa,
    fedavg,
    fedmps,
    fedpagr,
    fedproc,
    fedproto,
    fedprox,
    fedsap,
    fedtgp,
    local,
    wifederated,
)
from .base import (
    Batch,
    Method,
    Network,
    Received,
    Setup,
    SharedBank,
    Step,
    Trained,
    Upload,
    bank_of,
    register,
    registry,
    uploaded_banks,
    weighted_average,
)

__all__ = [
    "Batch",
    "Method",
    "Network",
    "Received",
    "Setup",
    "SharedBank",
    "Step",
    "Trained",
    "Upload",
    "available",
    "bank_of",
    "caring",
    "fedapa",
    "fedavg",
    "fedmps",
    "fedpagr",
    "fedproc",
    "fedproto",
    "fedprox",
    "fedsap",
    "fedtgp",
    "get",
    "local",
    "register",
    "registry",
    "uploaded_banks",
    "weighted_average",
    "wifederated",
]


def available() -> list[str]:
    """Names of all methods, your own registered ones included."""
    return registry.names()


def get(name: str, **settings: object) -> Method:
    """A method by name with its settings, checked."""
    return registry.make(name, settings)
