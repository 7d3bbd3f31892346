"""FedPAGR, section 4.4: kilobytes of one client and round."""

from __future__ import annotations

from .. import Counts, prototype_bytes


def counts() -> Counts:
    """Count a client that holds all ten classes, with d = 512; up and down are the same."""
    kilobytes = prototype_bytes(classes=10, dim=512) / 1000
    names = ("FedProto", "FedTGP", "FedProc", "FedPAGR")
    return {"kB of a client and round": {name: [kilobytes, kilobytes] for name in names}}
