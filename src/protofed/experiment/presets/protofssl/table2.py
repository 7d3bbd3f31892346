"""ProtoFSSL, Table 2: operations and bytes of one client and round, by the formulae of its Table 1."""

from __future__ import annotations

from .... import models
from ....evaluate import cost
from .. import Counts

ROWS: dict[str, cost.Family] = {
    "FixMatch-FedAvg, FedRGD": "fixmatch",
    "FedMatch": "fedmatch",
    "ProtoFSSL": "protofssl",
}


def counts() -> Counts:
    """Count ResNet9, one pass over 50 labelled and 490 unlabelled images, and two helpers, chosen again every 10 rounds."""
    network = models.build("resnet9", (3, 32, 32), 10)
    forward, size = cost.forward_flops(network, (3, 32, 32)), models.parameter_count(network)
    table = {}
    for label, family in ROWS.items():
        flops = cost.client_flops(family, forward, 50, 490, 1, helpers=2, classes=10, dim=512)
        sent = cost.client_bytes(family, size, helpers=2, refresh=10, classes=10, dim=512)
        table[label] = [flops / 1e9, sent / 1e6]
    return {"a client and round": table}
