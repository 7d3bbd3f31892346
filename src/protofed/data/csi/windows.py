"""Windows of a stream of packets: equally many samples each, in time, and never across a gap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np


class Sample(NamedTuple):
    """The numbers `[antennas, subcarriers]` of one moment. Between two stretches there is a gap."""

    time: float
    value: np.ndarray
    stretch: int = 0


class Window(NamedTuple):
    """Consecutive samples `[antennas, time, subcarriers]` of one stretch, and the time of each."""

    value: np.ndarray
    time: np.ndarray

    @property
    def rate(self) -> float:
        """The usual number of samples a second; 0 where time does not advance."""
        step = float(np.median(np.diff(self.time))) if len(self.time) > 1 else 0.0
        return 1 / step if step > 0 else 0.0


def stretches(samples: Iterable[tuple[float, np.ndarray]], gap: float) -> Iterator[Sample]:
    """Number the stretches of a stream. A new one begins where time goes back or jumps by more than `gap` seconds.

    Args:
        samples: Times in seconds and numbers.
        gap: The longest time between two samples of one stretch.

    Returns:
        The samples with their stretch, from 0 on.
    """
    stretch, last = 0, None
    for time, value in samples:
        if last is not None and not 0 <= time - last <= gap:
            stretch += 1
        last = time
        yield Sample(time, value, stretch)


def resampled(samples: Iterable[Sample], rate: float) -> Iterator[Sample]:
    """Bring each stretch to an even rate, by straight lines between its samples.

    Args:
        samples: Samples with their stretches.
        rate: The number of samples a second.

    Returns:
        Samples 1 / rate seconds apart, from the first of each stretch on.
    """
    before: Sample | None = None
    start, number = 0.0, 0
    for sample in samples:
        if before is None or sample.stretch != before.stretch:
            start, number = sample.time, 1
            yield sample
        elif sample.time > before.time:
            while (moment := start + number / rate) <= sample.time:
                share = (moment - before.time) / (sample.time - before.time)
                yield Sample(moment, (1 - share) * before.value + share * sample.value, sample.stretch)
                number += 1
        before = sample


def cut(samples: Iterable[Sample], window: int, step: int, every: int = 1) -> Iterator[Window]:
    """Cut a stream into windows. What remains of a stretch and is too short is dropped.

    Args:
        samples: Samples with their stretches.
        window: The number of samples in a window.
        step: The number of samples from the start of a window to the next.
        every: Use every n-th sample of a stretch only.

    Returns:
        The windows, one after another. No more of the stream is held than one window.
    """
    values, times = np.empty((0, 0, 0), np.float32), np.empty(0)
    stretch: int | None = None
    number = position = 0  # in the stretch and in the window; below 0, samples are skipped before the next window
    for sample in samples:
        if sample.stretch != stretch:
            stretch, number, position = sample.stretch, 0, 0
        number += 1
        if (number - 1) % every:
            continue
        if not times.size:
            values, times = np.empty((window, *sample.value.shape), np.float32), np.empty(window)
        if position >= 0:
            values[position], times[position] = sample.value, sample.time
        position += 1
        if position == window:
            yield Window(values.transpose(1, 0, 2).copy(), times.copy())
            kept = max(window - step, 0)
            values[:kept], times[:kept] = values[step:].copy(), times[step:].copy()
            position = window - step
