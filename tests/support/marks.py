"""Which of a test's parameters are run by `make check`, which by `make test` alone, and which by `make soak`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: object, values: Iterable[Any]) -> list[Any]:
    """Parameters of which all but `quick` (one, or a tuple of some) are marked as slow.

    Example:
        `@pytest.mark.parametrize("engine", slow_but("stack", ENGINES))`
    """
    return _marked_but(quick, values, pytest.mark.slow)


def soak_but(short: object, values: Iterable[Any]) -> list[Any]:
    """Parameters of which all but `short` (one, or a tuple of some) are left to `make soak`."""
    return _marked_but(short, values, pytest.mark.soak)


def _marked_but(spared: object, values: Iterable[Any], mark: pytest.MarkDecorator) -> list[Any]:
    some = spared if isinstance(spared, tuple) else (spared,)
    every = list(values)
    assert set(some) <= set(every), f"{some} are not all among the parameters {every}"
    return [v if v in some else pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=mark) for v in every]
