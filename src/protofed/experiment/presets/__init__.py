"""The presets of the papers' tables and figures, one folder a paper; `experiment/reproduce` reads and runs them.

Where a table is counted and not trained, a module beside its file has the arithmetic: `fedsap/table2.py` for
`fedsap/table2.toml`. Its function `counts()` returns `Counts`. This module has what several of them need.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import models, wire
from ...bank import PrototypeBank

Counts = dict[str, dict[str, list[float]]]  # by measure and row, one number for each column
NUMBER_BYTES = 4  # a float32 on the wire


def parameters(model: str, shape: tuple[int, ...], classes: int, **options: Any) -> int:
    """The number of a model's parameters.

    Args:
        model: The model's name, as the setting `model` takes it.
        shape: The shape of one sample.
        classes: The number of classes.
        **options: The model's settings.

    Returns:
        The number of parameters.
    """
    with torch.device("meta"):
        return models.parameter_count(models.build(model, shape, classes, **options))


def prototype_bytes(classes: int, dim: int) -> int:
    """The bytes of the prototypes in a bank that knows all its classes, as our counters measure them.

    Class numbers, counts and framing are counted apart.

    >>> prototype_bytes(classes=10, dim=512)
    20480
    """
    bank = PrototypeBank(torch.zeros(classes, dim), torch.ones(classes))
    return wire.sizes(wire.encode(wire.Bundle(bank=bank)))["prototypes"]
