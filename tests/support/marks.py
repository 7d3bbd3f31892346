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
    quick = quick if isinstance(quick, tuple) else (quick,)
    values = list(values)
    assert set(quick) <= set(values), f"{quick} are not all among the parameters {values}"
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
