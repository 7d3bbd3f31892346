"""The data source of captures: windows of a signal, labelled by a manifest."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import ProtofedError
from ..sources import DataSource, register
from ..types import Dataset
from .labels import Capture, classes_of, held_captures, last_windows, read_manifest
from .packets import Bandwidth, Chip, Damaged, Packet, Tally
from .read import Shapes, Wanted, packets
from .signal import Amplitude, Scale, Signal, Step, parse_steps, scaled
from .windows import Sample, Window, cut, resampled, stretches

log = logging.getLogger("protofed")

OUTSIDE = "before the start or after the end"  # of the part of a capture that a row of the manifest names


class Stage(NamedTuple):
    """What a window looks like after one setting of the chain."""

    setting: str
    window: np.ndarray


@dataclass
class Account:
    """What became of one capture: its packets, gaps and windows, and the damage, if any."""

    name: str
    tally: Tally = field(default_factory=Tally)
    shape: tuple[int, int] = (0, 0)
    gaps: int = 0
    windows: int = 0
    damage: str = ""

    def text(self) -> str:
        """One line: how many packets and windows there are, and what was left out and why."""
        antennas, tones = self.shape
        gaps = f", {self.gaps:,} gaps" if self.gaps else ""
        damage = f"; {self.damage}" if self.damage else ""
        return f"{self.name}: {self.tally.text()}; {antennas} × {tones}{gaps}, {self.windows:,} windows{damage}"


@register("csi")
@dataclass(frozen=True, kw_only=True)
class CSI(DataSource):
    """Captures named in a manifest (columns `file`, `room` and `people`, or those that `group` and `label` name).

    A sample is a window `[antennas, time, subcarriers]` of consecutive packets. A file is a capture of Nexmon (`.pcap`),
    the Intel 5300 or the Atheros CSI Tool (`.dat`), an ESP32 (`.csv`), PicoScenes or FeitCSI (`.csi`).
    """

    manifest: str
    label: str = "people"
    """The column of the classes. Whole numbers are counts, anything else is a name."""
    group: tuple[str, ...] = ("room",)
    """The columns that say whose a capture is; the natural partition makes a client of each."""
    window: int = 1000
    """The number of packets in a sample."""
    step: int | None = None
    """The number of packets from the start of a window to the next; by default windows do not overlap."""
    every: int = 1
    """Keep every n-th packet."""
    rate: float | None = None
    """The number of samples a second to which packets are brought by their time stamps; by default they stay as they are."""
    gap: float = 1.0
    """The longest time in seconds between two packets of a window."""
    scale: Scale = "none"
    """`packet`, `rssi` and `snr` undo the receiver's gain control in three ways."""
    signal: Signal = Amplitude()
    """What is made of the complex channel: `amplitude`, `phase` or `ratio`."""
    steps: tuple[str, ...] = ()
    """What is done to a window: `hampel`, `lowpass?cutoff=20`, `pca`, `dynamic`, `summary`, in this order."""
    sender: str | None = None
    """The address of the transmitter whose packets count; by default all do."""
    shapes: Shapes = "majority"
    """Which packets are left out where they have several numbers of antennas or subcarriers."""
    chip: Chip | None = None
    """The chip of Nexmon captures; by default it is read from the packets."""
    bandwidth: Bandwidth | None = None
    """The bandwidth of Nexmon captures in MHz; other packets are left out."""
    damaged: Literal["error", "keep"] = "error"
    """`keep` uses the packets before the damage, with a warning."""
    test_by: str | None = None
    """What divides training and test part: a column (`session`, `subject`), `capture` or `time`; by default nothing."""
    test_values: tuple[str, ...] = ()
    """The values of that column that are the test part; by default the last ones."""
    test_part: float = 0.2
    """The share that is the test part, where `test_values` does not say."""
    test_session: str | int | None = None
    """The session that is the test part: short for `test_by=session` with this value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, value in (("window", self.window), ("step", self.step), ("every", self.every)):
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, got {value}")
        for key, number in (("rate", self.rate), ("gap", self.gap)):
            if number is not None and not 0 < number <= 1e6:
                raise ValueError(f"{key} must be above 0 and at most a million, got {number}")
        if not 0 < self.test_part < 1:
            raise ValueError(f"test_part must be between 0 and 1, got {self.test_part}")
        if self.test_session is not None and self.test_by not in (None, "session"):
            raise ValueError(f"test_session={self.test_session} is test_by=session, and test_by is {self.test_by}")
        if self.rate is not None and self.every > 1:
            raise ValueError(f"rate={self.rate:g} and every={self.every} both say which packets count; give one")
        parse_steps(self.steps)

    @property
    def wanted(self) -> Wanted:
        """Which packets of a capture are wanted."""
        return Wanted(self.chip, self.bandwidth, self.sender, self.shapes)

    @property
    def chain(self) -> tuple[Step, ...]:
        """The steps that act on a window."""
        return parse_steps(self.steps)

    @property
    def overlap(self) -> int:
        """How many windows before a window share samples with it."""
        return math.ceil(self.window / (self.step or self.window)) - 1

    def read(self) -> Dataset:
        path = Path(self.manifest).expanduser()
        captures = read_manifest(path, self.label, self.group)
        labels = classes_of(captures)
        by = "session" if self.test_session is not None else self.test_by
        values = (str(self.test_session),) if self.test_session is not None else self.test_values
        is_test = held_captures(captures, path, by, values, self.test_part)
        parts: dict[bool, list[np.ndarray]] = {False: [], True: []}
        rows: dict[bool, list[tuple[int, str, int]]] = {False: [], True: []}  # class, group, capture of each window
        reference: Account | None = None
        for number, capture in enumerate(captures):
            account = Account(capture.name)
            windows = self.windows(capture, account)
            unusual = account.damage or account.tally.left_out.keys() - {OUTSIDE} or not windows
            log.log(logging.WARNING if unusual else logging.INFO, "%s", account.text())
            if not windows:
                continue
            reference = reference or account
            _check_alike(account, reference)
            kept = {is_test[number]: np.arange(len(windows))}
            if by == "time":
                kept = dict(zip((False, True), last_windows(len(windows), self.test_part, self.overlap), strict=True))
            for test, chosen in kept.items():
                parts[test] += [windows[row] for row in chosen]
                rows[test] += [(labels.classes[number], capture.group, number)] * len(chosen)
        for test, part in ((False, "training"), (True, "test")):
            if not parts[test] and (not test or by is not None):
                raise ProtofedError(f"{path}: no window of {self.window} packets for the {part} part")
        y, group, sequence = ({test: [row[i] for row in rows[test]] for test in rows} for i in range(3))
        has_test = bool(parts[True])
        return Dataset.from_arrays(
            _gathered(parts[False]),
            np.array(y[False]),
            _gathered(parts[True]) if has_test else None,
            np.array(y[True]) if has_test else None,
            num_classes=len(labels.names),
            group_train=np.array(group[False]),
            group_test=np.array(group[True]) if has_test else None,
            class_names=labels.names,
            class_values=labels.values,
            name=path.name,
            kind="csi",
            sequence_train=np.array(sequence[False]),
        )

    def windows(self, capture: Capture | Path, account: Account | None = None) -> list[np.ndarray]:
        """The windows of one capture.

        Args:
            capture: A row of a manifest, or a file.
            account: Is filled with what became of the capture.

        Returns:
            Windows `[antennas, time, subcarriers]`, of 32-bit numbers.
        """
        row = capture if isinstance(capture, Capture) else Capture(capture, "", "", {})
        account = account or Account(row.name)
        windows: list[np.ndarray] = []
        try:
            for window in self.cut(row, account):
                windows.append(self.processed(window, row.name))
        except Damaged as damage:
            if self.damaged == "error":
                raise ProtofedError(f"{row.name}: {damage}; damaged=keep takes what comes before") from None
            account.damage = f"{damage}; kept {len(windows)} windows from before it"
        account.windows = len(windows)
        if not windows and self.damaged == "error":
            size = f"{self.window} × every={self.every}" + (f" at rate={self.rate:g}" if self.rate else "")
            raise ProtofedError(
                f"{row.name}: fewer packets than one window takes ({size}) without a gap of more than {self.gap:g} s "
                f"({account.tally.text()})"
            )
        return windows

    def cut(self, capture: Capture, account: Account) -> Iterator[Window]:
        """The windows of a capture before the steps, while it is read."""
        return self.stream(self._packets(capture, account), account)

    def stream(self, found: Iterable[Packet], account: Account, step: int | None = None) -> Iterator[Window]:
        """The windows of a stream of packets before the steps, each as soon as its last packet has come.

        Args:
            found: Packets of one shape.
            account: Is filled with what becomes of them.
            step: The samples from one window's start to the next; by default the setting's.
        """
        counted = _counted(stretches(self._samples(found, account), self.gap), account)
        even = counted if self.rate is None else resampled(counted, self.rate)
        return cut(even, self.window, step or self.step or self.window, self.every)

    def _packets(self, capture: Capture, account: Account) -> Iterator[Packet]:
        """The packets of a capture, or of a part of it."""
        first: float | None = None
        for packet in packets(capture.file, self.wanted, account.tally):
            first = packet.time if first is None else first
            if capture.start <= packet.time - first < capture.end:
                yield packet
            else:
                account.tally.given -= 1
                account.tally.leave_out(OUTSIDE)

    def _samples(self, found: Iterable[Packet], account: Account) -> Iterator[tuple[float, np.ndarray]]:
        """The time and the numbers `[antennas, subcarriers]` of each packet, scaled and made real."""
        for packet in found:
            try:
                value = self.value(packet)
            except ProtofedError as error:
                raise ProtofedError(f"{account.name}: {error}") from None
            if not np.isfinite(value).all():
                account.tally.given -= 1
                account.tally.leave_out("with numbers that are not finite")
                continue
            account.shape = packet.shape
            yield packet.time, value

    def value(self, packet: Packet) -> np.ndarray:
        """The numbers of a packet: its channel, scaled and made real."""
        with np.errstate(all="ignore"):
            return self.signal.of(scaled(packet.decode(), packet, self.scale), packet.tones).astype(np.float32)

    def processed(self, window: Window, name: str) -> np.ndarray:
        """A window after all steps; `name` is what it was cut from, for errors."""
        value = window.value
        for step in self.chain:
            try:
                value = step.on(value, self.rate or window.rate)
            except ProtofedError as error:
                raise ProtofedError(f"{name}: {error}") from None
        return np.ascontiguousarray(value, np.float32)

    def stages(self, capture: Capture) -> list[Stage]:
        """The first window of a capture after each setting of the chain, beginning with the amplitudes as recorded."""
        plain = CSI(
            manifest=self.manifest,
            **{key: getattr(self, key) for key in ("sender", "shapes", "chip", "bandwidth", "damaged", "gap", "every")},
        )
        settings: list[tuple[str, dict[str, object]]] = [(f"scale={self.scale}", {"scale": self.scale})]
        settings.append((f"signal={self.signal.name}", {"signal": self.signal}))
        if self.rate is not None:
            settings.append((f"rate={self.rate:g}", {"rate": self.rate}))
        settings += [(entry, {"steps": self.steps[: i + 1]}) for i, entry in enumerate(self.steps)]
        given: dict[str, object] = {"window": self.window, "step": self.step}
        stages = []
        for name, change in (("amplitude", {}), *settings):
            given |= change
            source = _replaced(plain, given)
            window = next(source.cut(capture, Account(capture.name)), None)
            if window is None:
                raise ProtofedError(f"{capture.name}: fewer packets than one window takes ({self.window})")
            stages.append(Stage(name, source.processed(window, capture.name)))
        return [
            stage for i, stage in enumerate(stages) if not i or stage.setting not in ("scale=none", "signal=amplitude")
        ]

    def accounts(self) -> list[Account]:
        """What becomes of each capture of the manifest."""
        captures = read_manifest(Path(self.manifest).expanduser(), self.label, self.group)
        accounts = [Account(capture.name) for capture in captures]
        for capture, account in zip(captures, accounts, strict=True):
            self.windows(capture, account)
        return accounts


def _replaced(source: CSI, changes: dict[str, object]) -> CSI:
    return replace(source, **changes)  # type: ignore[arg-type]


def _counted(samples: Iterator[Sample], account: Account) -> Iterator[Sample]:
    for sample in samples:
        account.gaps = sample.stretch
        yield sample


def _check_alike(account: Account, other: Account) -> None:
    for what, number, expected in zip(("antennas", "subcarriers"), account.shape, other.shape, strict=True):
        if number != expected:
            raise ProtofedError(
                f"{account.name}: {number} {what}, {other.name} has {expected}; "
                "captures of one data set must have equally many"
            )


def _gathered(windows: list[np.ndarray]) -> Tensor:
    """One tensor `[n, antennas, time, subcarriers]`. The list is emptied meanwhile, so that no window is in memory twice."""
    x = torch.empty((len(windows), *windows[0].shape))
    for row in reversed(range(len(windows))):
        x[row] = torch.from_numpy(windows.pop())
    return x
