"""The accountant: what a number of Gaussian releases costs in (ε, δ), and how much noise a budget asks for.

A release adds Gaussian noise to something whose norm changes by at most its sensitivity when one protected unit (a
client, or a sample) is added or removed. The noise multiplier is the noise's standard deviation divided by the
sensitivity. n releases with multiplier z cost what one release with z/√n costs (the privacy loss is Gaussian, and
Gaussians add up), so nothing is lost by composition. The numbers are those of Google's `dp-accounting`.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from ..errors import ProtofedError


def _library() -> Any:
    try:
        import dp_accounting
    except ImportError:
        raise ProtofedError("privacy needs the package dp-accounting: pip install 'protofed[privacy]'") from None
    return dp_accounting


@functools.lru_cache(maxsize=4096)
def epsilon(noise: float, releases: int, delta: float) -> float:
    """The ε that a number of Gaussian releases costs.

    Args:
        noise: the noise multiplier.
        releases: how many releases one unit had a part in.
        delta: δ.

    Returns:
        the smallest ε for which the releases together are (ε, δ)-differentially private; infinite without noise.

    >>> round(epsilon(1.0, 1, 1e-5), 2)
    4.38
    """
    if releases == 0:
        return 0.0
    if noise == 0:
        return math.inf
    return float(_library().get_epsilon_gaussian(noise / math.sqrt(releases), delta))


@functools.lru_cache(maxsize=256)
def noise_for(budget: float, releases: int, delta: float) -> float:
    """The least noise multiplier with which a number of releases keeps within a budget.

    Args:
        budget: the ε that may be spent.
        releases: how many releases one unit has a part in.
        delta: δ.

    Returns:
        the noise multiplier.

    >>> round(noise_for(4.0, 100, 1e-5) / noise_for(4.0, 1, 1e-5), 6)
    10.0
    """
    noise = float(_library().get_sigma_gaussian(budget, delta)) * math.sqrt(max(releases, 1))
    while epsilon(noise, max(releases, 1), delta) > budget:  # the last digit of a numerical solution
        noise *= 1 + 1e-9
    return noise


def releases_within(budget: float, noise: float, delta: float, most: int) -> int:
    """How many releases a budget allows.

    Args:
        budget: the ε that may be spent.
        noise: the noise multiplier.
        delta: δ.
        most: the answer is at most this.

    >>> releases_within(4.0, noise_for(4.0, 12, 1e-5), 1e-5, most=100)
    12
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if epsilon(noise, middle, delta) <= budget else (low, middle - 1)
    return low
