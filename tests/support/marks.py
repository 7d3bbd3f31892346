"""Which of a test's parameters are run by `make check`, and which by `make test` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: object, values: Iterable[Any]) -> list[Any]:
    """Parameters of which all but `quick` (one, or a tuple of some) are marked as slow.

    Example:
        `@pytest.mark.parametrize("engine", slow_but("stack", ENGINES))`
    """
    fast = quick if isinstance(quick, tuple) else (quick,)
    every = list(values)
    assert set(fast) <= set(every), f"{fast} are not all among the parameters {every}"
    return [value if value in fast else _slow(value) for value in every]


def _slow(value: Any) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
