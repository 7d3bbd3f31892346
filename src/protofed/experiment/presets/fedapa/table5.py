"""FedAPA, Table V: kilobytes of one client and round, both directions."""

from __future__ import annotations

from .. import NUMBER_BYTES, Counts, parameters, prototype_bytes

CLIENTS = 6


def counts() -> Counts:
    """Count a model down and up, and for FedAPA the bank a client sends, its personal bank and those of the others."""
    model = 2 * NUMBER_BYTES * parameters("largeconvnet4", (1, 1000, 242), 20) / 1000
    banks = (1 + 1 + CLIENTS - 1) * prototype_bytes(classes=21, dim=256) / 1000
    return {
        "kB of a client and round": {"FedAvg": [model], "CARING": [model], "WiFederated": [model], "FedAPA": [banks]}
    }
