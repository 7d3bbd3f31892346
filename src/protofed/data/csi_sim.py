"""Simulated Wi-Fi channel state information: people counted by what they do to a radio channel, in six rooms.

The channel of subcarrier frequency f at time t is a sum over paths (docs/wifi-csi.md has every symbol),

    H(f, t) = Σ_l a_l · exp(−j2πf τ_l) + Σ_p Σ_i a_pi(t) · exp(−j2πf τ_pi(t)) + noise,

where the first sum is over static paths (direct path, walls, furniture), and the second over people and the paths from
a person to the receiver. The receiver's gain control then scales each packet; the data set holds amplitudes, as
captures do. Each window has random streams of its own, so another number of windows, rooms or people does not change
the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..seeds import numpy_stream
from .sources import DataSource, register
from .types import Dataset

LIGHT = 299_792_458.0  # m/s
CARRIER = 5.21e9  # Hz: channel 42 of the 5 GHz band
SPACING = 312.5e3  # Hz between neighbouring subcarriers
EDGE = 122  # the outermost of the 242 used subcarriers of 80 MHz
BODY = 0.12  # m: the scattering amplitude of a person, for a cross-section of about 0.18 m²
SHADOW = 0.5  # m: the width by which a person blocks a path
JITTER = 0.01  # relative deviation of the gain from packet to packet


class Room(NamedTuple):
    """The properties of a room that matter for radio. Lengths are in metres, from one corner."""

    name: str
    size: tuple[float, float]
    sender: tuple[float, float]
    receiver: tuple[float, float]
    reflectivity: float
    """The share of the amplitude that the walls reflect."""
    scatterers: int
    """The number of pieces of furniture."""
    speed: float
    """The mean speed of the people in m/s."""
    noise: float
    """The noise in dB above the setting `noise`."""
    gain: float
    people: tuple[int, int]
    """The smallest and the largest number of people."""


ROOMS = (
    Room("hotel-room", (5.0, 4.0), (0.3, 0.4), (4.7, 3.5), 0.55, 6, 0.5, 0.0, 1.0, (0, 4)),
    Room("living-room", (6.5, 4.5), (0.4, 2.2), (6.0, 4.1), 0.45, 10, 0.6, 2.0, 0.8, (0, 6)),
    Room("office", (8.0, 6.0), (0.5, 5.5), (7.6, 0.6), 0.5, 16, 0.7, 1.0, 1.3, (0, 8)),
    Room("conference-room", (10.0, 6.0), (5.0, 0.3), (5.4, 5.7), 0.6, 12, 0.4, 0.0, 0.9, (0, 12)),
    Room("bus", (12.0, 2.6), (0.5, 1.3), (11.4, 2.3), 0.8, 20, 0.35, 3.0, 1.6, (4, 20)),
    Room("classroom", (12.0, 9.0), (0.6, 0.6), (11.5, 4.8), 0.5, 24, 0.8, 1.0, 1.1, (0, 20)),
)


@register("csi-sim")
@dataclass(frozen=True, kw_only=True)
class CSISimulation(DataSource):
    """Windows of simulated amplitudes `[1, packets, subcarriers]`; the class is the number of people, the group the room.

    Rooms hold different numbers of people (`ROOMS`). There is no test part: each client holds out its own.
    """

    rooms: int = 6
    """The number of rooms, at most six; the first ones are used."""
    people: int = 20
    """The largest number of people in any room."""
    windows_per_class: int = 16
    packets: int = 200
    """The number of packets in a window."""
    subcarriers: int = 64
    """The number of subcarriers, evenly spread over 80 MHz."""
    rate: float = 100.0
    """The number of packets per second."""
    noise: float = -30.0
    """The power of the noise in dB, relative to the power of the empty room's channel."""
    seed: int = 0
    """The seed of the simulation alone, so that runs with different seeds share their data."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, value, low, high in (
            ("rooms", self.rooms, 1, len(ROOMS)),
            ("people", self.people, 1, 20),
            ("windows_per_class", self.windows_per_class, 1, 10_000),
            ("packets", self.packets, 2, 10_000),
            ("subcarriers", self.subcarriers, 1, 242),
            ("seed", self.seed, 0, 2**63 - 1),
        ):
            if not low <= value <= high:
                raise ValueError(f"{key} must be from {low} to {high}, got {value}")
        if not 0 < self.rate < float("inf"):
            raise ValueError(f"rate must be above 0, got {self.rate}")
        if not abs(self.noise) < float("inf"):
            raise ValueError(f"noise must be a number of dB, got {self.noise}")

    def read(self) -> Dataset:
        x, y, group = [], [], []
        for index, room in enumerate(ROOMS[: self.rooms]):
            low, high = (min(bound, self.people) for bound in room.people)
            for people in range(low, high + 1):
                x.append(self.windows(index, people))
                y += [people] * self.windows_per_class
                group += [index] * self.windows_per_class
        return Dataset(
            torch.from_numpy(np.concatenate(x)[:, None]),
            torch.tensor(y),
            num_classes=self.people + 1,
            group_train=torch.tensor(group),
            class_names=tuple(map(str, range(self.people + 1))),
            name=self.name,
            class_values=tuple(map(float, range(self.people + 1))),
            group_names=tuple(room.name for room in ROOMS[: self.rooms]),
            kind="csi",
        )

    @property
    def frequencies(self) -> np.ndarray:
        """The frequencies of the subcarriers in Hz."""
        return CARRIER + np.linspace(-EDGE, EDGE, self.subcarriers) * SPACING

    def windows(self, index: int, people: int) -> np.ndarray:
        """Amplitudes `[windows_per_class, packets, subcarriers]` of one room with a number of people in it."""
        room = ROOMS[index]
        static = self.still(index, people)
        power = np.mean(np.abs(self.still(index, 0)) ** 2)
        deviation = np.sqrt(power / 2) * 10 ** ((self.noise + room.noise) / 20)
        shape = (self.packets, self.subcarriers)
        windows = []
        for window in range(self.windows_per_class):
            motion, air = (
                numpy_stream(self.seed, self.name, purpose, index, people, window) for purpose in ("walk", "air")
            )
            channel = np.broadcast_to(static, shape)
            if people:
                body = BODY * motion.uniform(0.8, 1.2, people)
                paths = scattered(room, self.walk(room, people, motion), body)
                channel = channel + response(*shadowed(room, people, *paths), self.frequencies)
            channel = channel + deviation * (air.normal(size=shape) + 1j * air.normal(size=shape))
            windows.append(controlled(np.abs(channel), room.gain, air))
        return np.stack(windows).astype(np.float32)

    def still(self, index: int, people: int) -> np.ndarray:
        """The static part of the channel `[subcarriers]`: direct path, one reflection off each wall, furniture."""
        room = ROOMS[index]
        rng = numpy_stream(self.seed, self.name, "room", index)
        positions = rng.uniform(0.05, 0.95, (room.scatterers, 1, 2)) * room.size
        sizes = rng.uniform(0.1, 0.4, room.scatterers)
        amplitude, delay = scattered(room, positions, sizes)
        sender, ends = np.array(room.sender), images(room)
        distance = np.linalg.norm(ends - sender, axis=-1)
        amplitude = np.concatenate([amplitude, (returned(room) / distance)[:, None]])
        delay = np.concatenate([delay, (distance / LIGHT)[:, None]])
        return response(*shadowed(room, people, amplitude, delay), self.frequencies)[0]

    def walk(self, room: Room, people: int, rng: np.random.Generator) -> np.ndarray:
        """The positions of people `[people, packets, 2]`: each walks at its own speed and turns at random."""
        start = rng.uniform(size=(people, 1, 2)) * room.size
        pace = room.speed * rng.uniform(0.6, 1.4, (people, 1))
        turns = np.cumsum(rng.normal(size=(people, self.packets)), axis=1) / np.sqrt(self.rate)
        heading = rng.uniform(0, 2 * np.pi, (people, 1)) + turns
        steps = (pace / self.rate)[..., None] * np.stack([np.cos(heading), np.sin(heading)], axis=-1)
        size = np.array(room.size)
        return size - np.abs((start + np.cumsum(steps, axis=1)) % (2 * size) - size)


def images(room: Room) -> np.ndarray:
    """The receiver and its four mirror images in the walls `[5, 2]`."""
    (width, depth), (x, y) = room.size, room.receiver
    return np.array([(x, y), (-x, y), (2 * width - x, y), (x, -y), (x, 2 * depth - y)])


def returned(room: Room) -> np.ndarray:
    """The share of the amplitude that remains on the path to each of `images`."""
    return np.array([1.0, *[room.reflectivity] * 4])


def scattered(room: Room, positions: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Paths by way of objects.

    Args:
        room: The room.
        positions: The objects' positions `[n, time, 2]`.
        sizes: The scattering amplitude of each object.

    Returns:
        The amplitudes and delays `[5n, time]` of the paths from each object to the receiver and to its mirror images.
    """
    ends = images(room)[:, None, None]
    outbound = np.linalg.norm(positions - np.array(room.sender), axis=-1)
    onward = np.linalg.norm(positions - ends, axis=-1)
    near = 0.5  # m: the smallest distance of a person to an antenna
    amplitude = returned(room)[:, None, None] * sizes[:, None] / np.maximum(outbound, near) / np.maximum(onward, near)
    delay = (outbound + onward) / LIGHT
    return amplitude.reshape(-1, positions.shape[1]), delay.reshape(-1, positions.shape[1])


def shadowed(room: Room, people: int, amplitude: np.ndarray, delay: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Paths that people block, long ones more often: the average over the positions where people may stand."""
    area = room.size[0] * room.size[1]
    return amplitude * np.exp(-people * SHADOW * LIGHT * delay / area), delay


def response(amplitude: np.ndarray, delay: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """The channel Σ a · exp(−j2πfτ) for evenly spaced frequencies.

    Args:
        amplitude: The amplitudes a `[paths, time]`.
        delay: The delays τ `[paths, time]`.
        frequencies: The frequencies f.

    Returns:
        The channel `[time, frequencies]`.
    """
    # From one subcarrier to the next a path's phase turns by the same angle, so a product replaces the exponential.
    rotation = np.exp(-2j * np.pi * delay * (frequencies[1] - frequencies[0] if len(frequencies) > 1 else 0))
    term = amplitude * np.exp(-2j * np.pi * delay * frequencies[0])
    result = np.empty((delay.shape[1], len(frequencies)), complex)
    for k in range(len(frequencies)):
        result[:, k] = term.sum(0)
        term *= rotation
    return result


def controlled(amplitude: np.ndarray, gain: float, rng: np.random.Generator) -> np.ndarray:
    """Automatic gain control: each packet `[time, subcarriers]` gets nearly the same strength."""
    strength = np.sqrt(np.mean(amplitude**2, axis=1, keepdims=True))
    return gain * (1 + JITTER * rng.normal(size=strength.shape)) * amplitude / strength
