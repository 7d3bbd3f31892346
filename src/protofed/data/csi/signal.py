"""The signal chain: from the complex channel of a packet to the numbers of a window.

A packet is scaled, then a `Signal` makes real numbers of its channel. Packets are brought to an even rate where one is
asked for (`windows.py`), and `Step`s act on each window `[antennas, time, subcarriers]` by itself, so that what a window
holds never depends on another window, and a live stream gives what a recorded one gives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np

from ...errors import ProtofedError
from ...registry import Registry, parse_part
from .packets import Packet

Scale = Literal["none", "packet", "rssi", "snr"]
_QUIET = -127  # what the Intel 5300 writes for a noise that it did not measure
_USUAL = -92  # dBm, in its place


def scaled(csi: np.ndarray, packet: Packet, scale: Scale) -> np.ndarray:
    """Undo what the receiver's gain did to a packet.

    Args:
        csi: The channel, complex `[antennas, subcarriers]`.
        packet: The packet, whose power and noise count.
        scale: `packet`: mean square 1 over antennas and subcarriers. `rssi`: mean square the received power in mW, for
            which the gain of the receiver counts where the format has it. `snr`: that over the noise, thermal and of
            the 8-bit numbers, as the Intel 5300's tool computes it.

    Returns:
        The scaled channel.
    """
    if scale == "none":
        return csi
    power = float(np.mean(np.abs(csi) ** 2))
    if not power > 0:
        return csi
    if scale == "packet":
        return csi / np.sqrt(power)
    if not np.isfinite(packet.rssi):
        raise ProtofedError(
            f"scale={scale} needs the received power, and this capture has none; scale=packet needs none"
        )
    received = 10 ** (packet.rssi / 10)
    if scale == "rssi":
        return csi * np.sqrt(received / power)
    if not np.isfinite(packet.noise):
        raise ProtofedError("scale=snr needs the noise, and this capture has none; scale=rssi needs none")
    gain = received / (power * len(csi))  # the power of a subcarrier over all antennas
    noise = 10 ** ((_USUAL if packet.noise == _QUIET else packet.noise) / 10) + gain * len(csi)
    return csi * np.sqrt(gain / noise)


@dataclass(frozen=True)
class Signal:
    """Which real numbers are made of a packet's channel."""

    registry: ClassVar[Registry[Signal]] = Registry("signal")
    name: ClassVar[str]

    def of(self, csi: np.ndarray, tones: np.ndarray) -> np.ndarray:
        """Real numbers of a packet.

        Args:
            csi: The channel, complex `[antennas, subcarriers]`.
            tones: The numbers of the subcarriers, counted from the centre.

        Returns:
            `[channels, subcarriers]`, where channels are antennas, or what is made of them.
        """
        raise NotImplementedError

    def antennas(self, channels: int) -> int:
        """The number of antennas of which so many channels are made."""
        return channels


@Signal.registry.register("amplitude")
@dataclass(frozen=True)
class Amplitude(Signal):
    """|H| of each antenna."""

    def of(self, csi: np.ndarray, tones: np.ndarray) -> np.ndarray:
        return np.abs(csi)


@Signal.registry.register("phase")
@dataclass(frozen=True)
class Phase(Signal):
    """The phase of each antenna without its line over the subcarriers, which is the clocks' offset and not the room's."""

    def of(self, csi: np.ndarray, tones: np.ndarray) -> np.ndarray:
        phase = np.unwrap(np.angle(csi), axis=-1)
        centred = tones - tones.mean()
        spread = float(np.sum(centred**2)) or 1.0
        level = phase.mean(axis=-1, keepdims=True)
        slope = ((phase - level) @ centred / spread)[:, None]
        return phase - level - slope * centred


@Signal.registry.register("ratio")
@dataclass(frozen=True)
class Ratio(Signal):
    """The quotient of each antenna's channel and the reference's: both have the same offsets, which cancel."""

    reference: int = 0
    """The antenna that the others are divided by."""
    part: Literal["complex", "amplitude", "phase"] = "complex"
    """`complex` gives the real and the imaginary part, as channels of their own."""

    def of(self, csi: np.ndarray, tones: np.ndarray) -> np.ndarray:
        if not 0 <= self.reference < len(csi) or len(csi) < 2:
            raise ProtofedError(
                f"signal=ratio?reference={self.reference} needs that antenna and another; this capture has {len(csi)}"
            )
        below = csi[self.reference]
        quiet = np.abs(below) < 1e-9 * max(float(np.abs(csi).max()), 1e-30)
        ratio = np.where(quiet, 0, np.delete(csi, self.reference, axis=0) / np.where(quiet, 1, below))
        if self.part == "complex":
            return np.concatenate([ratio.real, ratio.imag])
        return np.abs(ratio) if self.part == "amplitude" else np.angle(ratio)

    def antennas(self, channels: int) -> int:
        return 1 + (channels // 2 if self.part == "complex" else channels)


@dataclass(frozen=True)
class Step:
    """What is done to a window."""

    registry: ClassVar[Registry[Step]] = Registry("step")
    name: ClassVar[str]

    def on(self, window: np.ndarray, rate: float) -> np.ndarray:
        """A changed window.

        Args:
            window: `[antennas, time, subcarriers]`.
            rate: The number of samples a second.

        Returns:
            The window, of the same number of antennas and subcarriers.
        """
        raise NotImplementedError


@lru_cache
def comparisons(size: int) -> tuple[tuple[int, int], ...]:
    """The comparisons of Batcher's odd-even merge sort (Knuth, Algorithm 5.2.2M) that the middle of `size` values needs.

    A comparison `(i, j)` leaves the smaller value at `i` and the larger at `j`.
    """
    top = 1 << max(size - 1, 1).bit_length() - 1
    pairs: list[tuple[int, int]] = []
    part = top
    while part:
        reach, kept_bits, distance = top, 0, part
        while True:
            pairs += [(i, i + distance) for i in range(size - distance) if i & part == kept_bits]
            if reach == part:
                break
            distance, reach, kept_bits = reach - part, reach // 2, part
        part //= 2
    needed, kept = {size // 2}, []
    for i, j in reversed(pairs):
        if needed & {i, j}:
            needed |= {i, j}
            kept.append((i, j))
    return tuple(reversed(kept))


def median_of(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """The median of an odd number of arrays, element by element.

    It is the same as `np.median` over them, and several times as fast for a few large arrays, because each comparison
    takes all elements at once.
    """
    values = list(arrays)
    for i, j in comparisons(len(values)):
        values[i], values[j] = np.minimum(values[i], values[j]), np.maximum(values[i], values[j])
    return values[len(values) // 2]


@Step.registry.register("hampel")
@dataclass(frozen=True)
class Hampel(Step):
    """Outliers in time become the median around them."""

    width: int = 5
    """The number of samples on each side that the median is of."""
    threshold: float = 3.0
    """An outlier is farther from the median than so many deviations, estimated by the median of the distances."""

    def __post_init__(self) -> None:
        if self.width < 1 or self.threshold < 0:
            raise ValueError(f"width must be at least 1 and threshold 0 or more, got {self.width} and {self.threshold}")

    def on(self, window: np.ndarray, rate: float) -> np.ndarray:
        padded = np.pad(window, [(0, 0), (self.width, self.width), (0, 0)], mode="symmetric")
        around = [padded[:, shift : shift + window.shape[1]] for shift in range(2 * self.width + 1)]
        median = median_of(around)
        deviation = 1.4826 * median_of([np.abs(shifted - median) for shifted in around])
        return np.where(np.abs(window - median) > self.threshold * deviation, median, window)


@Step.registry.register("lowpass")
@dataclass(frozen=True)
class LowPass(Step):
    """A Butterworth filter in time, forwards and backwards, so that nothing is delayed."""

    cutoff: float
    """The frequency in Hz above which the signal is noise; people move below about 60 Hz."""
    order: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.cutoff < float("inf") or not 1 <= self.order <= 10:
            raise ValueError(f"cutoff must be above 0 and order from 1 to 10, got {self.cutoff} and {self.order}")

    def on(self, window: np.ndarray, rate: float) -> np.ndarray:
        from scipy.signal import butter, sosfiltfilt

        if not self.cutoff < rate / 2:
            raise ProtofedError(
                f"steps: lowpass?cutoff={self.cutoff:g} must be below half the rate, which is {rate:g} packets a second; "
                "a rate= of your own makes it even"
            )
        padding = min(3 * (2 * self.order + 1), window.shape[1] - 1)
        return sosfiltfilt(butter(self.order, self.cutoff, fs=rate, output="sos"), window, axis=1, padlen=padding)


@Step.registry.register("pca")
@dataclass(frozen=True)
class PCA(Step):
    """The window's first principal components over all antennas and subcarriers; what remains is taken for noise."""

    components: int = 6
    skip: int = 0
    """So many components are left out before the first, such as one for what all subcarriers do together."""

    def __post_init__(self) -> None:
        if self.components < 1 or self.skip < 0:
            raise ValueError(f"components must be at least 1 and skip 0 or more, got {self.components} and {self.skip}")

    def on(self, window: np.ndarray, rate: float) -> np.ndarray:
        antennas, time, tones = window.shape
        flat = window.transpose(1, 0, 2).reshape(time, antennas * tones)
        mean = flat.mean(0)
        left, strength, right = np.linalg.svd(flat - mean, full_matrices=False)
        kept = slice(self.skip, self.skip + self.components)
        out = (left[:, kept] * strength[kept]) @ right[kept] + mean
        return out.reshape(time, antennas, tones).transpose(1, 0, 2)


@Step.registry.register("dynamic")
@dataclass(frozen=True)
class Dynamic(Step):
    """What moves: each subcarrier without its mean over the window, which is the room's."""

    def on(self, window: np.ndarray, rate: float) -> np.ndarray:
        return window - window.mean(axis=1, keepdims=True)


@Step.registry.register("summary")
@dataclass(frozen=True)
class Summary(Step):
    """Three numbers of each antenna and subcarrier in place of time: mean, deviation, and mean change between samples."""

    def on(self, window: np.ndarray, rate: float) -> np.ndarray:
        change = np.abs(np.diff(window, axis=1)).mean(axis=1) if window.shape[1] > 1 else np.zeros_like(window[:, 0])
        return np.stack([window.mean(axis=1), window.std(axis=1), change], axis=1)


def parse_steps(entries: Iterable[str]) -> tuple[Step, ...]:
    """The steps of a setting: `parse_steps(["hampel", "lowpass?cutoff=20"])`."""
    return tuple(parse_part(Step.registry, entry) for entry in entries)
