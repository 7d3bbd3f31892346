"""The subcarriers of newer Intel cards, which measure all tones of a packet; at pilot tones the numbers are of no use."""

from __future__ import annotations

import numpy as np

from .packets import sides

_TONES = {
    (False, 52): (sides(1, 26), [7, 21]),
    (False, 56): (sides(1, 28), [7, 21]),
    (False, 114): (sides(2, 58), [11, 25, 53]),
    (False, 242): (sides(2, 122), [11, 39, 75, 103]),
    (False, 484): (np.setdiff1d(sides(6, 250), [*sides(127, 129)]), [25, 53, 89, 117, 139, 167, 203, 231]),
    (True, 242): (sides(2, 122), [22, 48, 90, 116]),
    (True, 484): (sides(3, 244), [10, 36, 78, 104, 144, 170, 212, 238]),
    (True, 996): (sides(3, 500), [24, 92, 158, 226, 266, 334, 400, 468]),
    (True, 1992): (
        np.setdiff1d(sides(12, 1012), [*sides(510, 514)]),
        [44, 112, 178, 246, 286, 354, 420, 488, 536, 604, 670, 738, 778, 846, 912, 980],
    ),
}
"""By whether a packet is of 802.11ax and its number of tones: their numbers, and the pilots on each side."""


def data_tones(efficient: bool, count: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The tones of a packet that carry data.

    Args:
        efficient: Whether the packet is of 802.11ax (high efficiency).
        count: The number of tones that were measured.

    Returns:
        Their places among the measured ones and their numbers, or None where there is no packet of so many tones.
        `data_tones(False, 56)` has 52 places.
    """
    if (efficient, count) not in _TONES:
        return None
    tones, pilots = _TONES[efficient, count]
    places = np.flatnonzero(~np.isin(np.abs(tones), pilots))
    return places, tones[places]
