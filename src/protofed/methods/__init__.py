"""One file per method. Importing a file registers it; `available()` lists what there is."""

from __future__ import annotations

from . import (
    caring,
    fedapa,
    fedarpl,
    fedavg,
    fedmatch,
    fedmps,
    fedpagr,
    fedproc,
    fedproto,
    fedprox,
    fedrgd,
    fedsap,
    fedtgp,
    fixmatch,
    fl2,
    local,
    pfedknow,
    protofssl,
    semifl,
    wifederated,
)
from .base import (
    Batch,
    Loss,
    Method,
    Network,
    Pseudo,
    Received,
    Setup,
    SharedBank,
    SharedModel,
    Step,
    Trained,
    Upload,
    bank_of,
    paired_epochs,
    register,
    registry,
    uploaded_banks,
    weighted_average,
)

__all__ = [
    "Batch",
    "Loss",
    "Method",
    "Network",
    "Pseudo",
    "Received",
    "Setup",
    "SharedBank",
    "SharedModel",
    "Step",
    "Trained",
    "Upload",
    "available",
    "bank_of",
    "caring",
    "fedapa",
    "fedarpl",
    "fedavg",
    "fedmatch",
    "fedmps",
    "fedpagr",
    "fedproc",
    "fedproto",
    "fedprox",
    "fedrgd",
    "fedsap",
    "fedtgp",
    "fixmatch",
    "fl2",
    "get",
    "local",
    "paired_epochs",
    "pfedknow",
    "protofssl",
    "register",
    "registry",
    "semifl",
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
