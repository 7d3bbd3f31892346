"""FedAPA, Table V: kilobytes of one client and round, both directions."""

from __future__ import annotations

from .. import NUMBER_BYTES, Counts, parameters, prototype_bytes

CLIENTS = 6


def counts() -> Counts:
    """A model goes down and up. A client of FedAPA sends one bank and gets its personal one and those of the others."""
    model = 2 * NUMBER_BYTES * parameters("largeconvnet4", (1, 1000, 242), 20) / 1000
    banks = (1 + 1 + CLIENTS - 1) * prototype_bytes(classes=21, dim=256) / 1000
    return {
        "kB of a client and round": {"FedAvg": [model], "CARING": [model], "WiFederated": [model], "FedAPA": [banks]}
    }
