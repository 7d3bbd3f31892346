"""What a person is told when something is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protofed.errors import ProtofedError


def refusal(call: Callable[[], object]) -> str:
    """The one line with which `call` is refused."""
    with pytest.raises(ProtofedError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text, "an error a person may see is one line"
    return text
