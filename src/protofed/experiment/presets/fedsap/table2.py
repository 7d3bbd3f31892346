"""FedSAP, Table 2: thousands of numbers that go up in a round."""

from __future__ import annotations

from ....models.base import LOW
from .. import NUMBER_BYTES, Counts, parameters, prototype_bytes

CLIENTS = 20
CLASSES_AND_DIMS = [(3, 50), (3, 512), (10, 512)]  # classes of a client and width, of FEMNIST, CIFAR-10 and CIFAR-100


def counts() -> Counts:
    """Count the prototypes of all clients, and for FedAvg one copy of the model, as the paper does."""
    networks = [
        parameters("cnn", (1, 128, 128), 62),
        parameters("resnet18", (3, 32, 32), 10, stem="imagenet"),
        parameters("resnet18", (3, 32, 32), 100, stem="imagenet"),
    ]
    prototypes = [_thousands_up(classes, dim) for classes, dim in CLASSES_AND_DIMS]
    two_banks = [_thousands_up(classes, dim + LOW) for classes, dim in CLASSES_AND_DIMS]
    model = [number / 1000 for number in networks]
    return {
        "thousands of numbers": {"FedAvg": model, "FedMPS": two_banks, "FedProto": prototypes, "FedSAP": prototypes}
    }


def _thousands_up(classes: int, dim: int) -> float:
    return CLIENTS * prototype_bytes(classes, dim) / NUMBER_BYTES / 1000
