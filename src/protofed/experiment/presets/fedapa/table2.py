"""FedAPA, Table II: the parameters of its three networks, and the operations of a forward pass."""

from __future__ import annotations

from .... import models
from ....evaluate.cost import forward_flops
from .. import Counts, parameters

SHAPE, CLASSES = (1, 1000, 242), 20


def counts() -> Counts:
    """Count parameters and operations for a window of the paper's size."""
    names = ("TinyConvNet4", "MiddleConvNet4", "LargeConvNet4")
    operations = {name: forward_flops(models.build(name.lower(), SHAPE, CLASSES), SHAPE) for name in names}
    return {
        "thousand parameters": {name: [parameters(name.lower(), SHAPE, CLASSES) / 1e3] for name in names},
        "million operations of a window": {name: [number / 1e6] for name, number in operations.items()},
    }
