"""The layout of windows of channel state information, which is `[antennas, time, subcarriers]` everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import ProtofedError

AXES = ("antennas", "time", "subcarriers")


def arranged(x: np.ndarray, axes: Sequence[str], source: str) -> np.ndarray:
    """Bring windows into the one layout.

    Args:
        x: Windows, of which the first axis counts the samples.
        axes: What the other axes are: `time` and `subcarriers`, and `antennas` where there are several.
        source: Where the windows come from, for errors.

    Returns:
        `[n, antennas, time, subcarriers]`.

    >>> arranged(np.zeros((7, 30, 200)), ("subcarriers", "time"), "mine").shape
    (7, 1, 200, 30)
    """
    names = tuple(axes)
    if sorted(names) not in (sorted(AXES), sorted(AXES[1:])) or x.ndim != 1 + len(names):
        raise ProtofedError(
            f"{source}: axes are {', '.join(names) or 'empty'} and a sample has {x.ndim - 1}; "
            f"expected one name for each of {', '.join(AXES)}"
        )
    if "antennas" not in names:
        x, names = x[:, None], ("antennas", *names)
    return np.ascontiguousarray(x.transpose(0, *(1 + names.index(name) for name in AXES)))
