"""A digest of a federation's data: the samples, their labels, and who holds which of them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .types import FederatedData

ADDED = ("unseen", "newcomers", "newcomer_names")  # without them, digests are as they were before there were any
DERIVED = (
    "augmentation",
    "name",
    "triggered",
    "site_mean",
    "site_std",
    "columns",
    "remarks",
)  # they follow from settings and data


def fingerprint(data: FederatedData) -> str:
    """The SHA-256 of everything that clients, tests and the server hold. It differs for other data or another partition.

    Tensors that several clients share are read once.

    Args:
        data: The data of a federation.

    Returns:
        The digest in hexadecimal. `fingerprint(data) == fingerprint(data)`
    """
    digest = hashlib.sha256()
    digests: dict[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype], bytes] = {}

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            key = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
            if key not in digests:
                digests[key] = hashlib.sha256(np.ascontiguousarray(value.detach().cpu().numpy()).data).digest()
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode() + digests[key])
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                entry = getattr(value, field.name)
                absent = not isinstance(entry, Tensor) and not entry and field.name in ADDED
                if field.name not in DERIVED and not absent:
                    digest.update(field.name.encode())
                    add(entry)
        elif isinstance(value, Mapping):
            for name, entry in value.items():
                add(name)
                add(entry)
        elif isinstance(value, list | tuple):
            digest.update(f"[{len(value)}]".encode())
            for entry in value:
                add(entry)
        else:
            digest.update(repr(value).encode())

    add(data)
    return digest.hexdigest()
