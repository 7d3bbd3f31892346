"""One file per method. Importing a file registers it; `available()` lists what there is."""

from __future__ import annotations

from . import (  # noqa: F401
    caring,
    compose,
    constellation,
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
    server_only,
    wifederated,
)
from .base import MODEL, MODEL_AND_PROTOTYPES, PROTOTYPES, Method, register, registry
from .client import Loss, Network, Pseudo, Terms, Trained
from .server import Measures, Setup, Shared, State, Teacher, state

__all__ = [
    "MODEL",
    "MODEL_AND_PROTOTYPES",
    "PROTOTYPES",
    "Loss",
    "Measures",
    "Method",
    "Network",
    "Pseudo",
    "Setup",
    "Shared",
    "State",
    "Teacher",
    "Terms",
    "Trained",
    "available",
    "get",
    "register",
    "registry",
    "state",
]


def available() -> list[str]:
    """The names of all methods, your own registered ones included."""
    return registry.names()


def get(name: str, **settings: object) -> Method:
    """A method by name.

    Args:
        name: as the setting `method` takes it.
        **settings: those of the method, which are checked.

    >>> get("fedproto", weight=0.5).weight
    0.5
    """
    return registry.make(name, settings)
