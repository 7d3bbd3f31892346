"""Public sets of Wi-Fi sensing in the files that the SenseFi benchmark publishes: UT-HAR, NTU-Fi and Widar 3.0.

Samples are windows `[antennas, time, subcarriers]`, as everywhere. Nothing is downloaded; docs/wifi-csi.md says where the
files come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ..errors import ProtofedError
from .rows import balanced
from .sources import DataSource, first_line, listed, places, register
from .types import Dataset

PUBLISHED = "the processed data that https://github.com/xyanchen/WiFi-CSI-Sensing-Benchmark links to"


def _found(name: str, path: str | None, inner: Sequence[str], sign: str) -> Path:
    """The folder of a set: one of the usual ones, or a folder inside it, that holds `sign`."""
    roots = places(name, path)
    for root in roots:
        for folder in (root, *(root / part for part in inner)):
            if (folder / sign).exists():
                return folder
    raise ProtofedError(f"{name}: no {sign} in {listed(roots)}; {PUBLISHED} has it: name its folder with path=")


@register("ut-har")
@dataclass(frozen=True, kw_only=True)
class UTHAR(DataSource):
    """UT-HAR: seven activities, 3,977 training and 996 test windows of 3 antennas × 250 packets × 30 subcarriers.

    `path` names the folder `UT_HAR`. As in the benchmark, the validation files belong to the test part.
    """

    path: str | None = None

    def read(self) -> Dataset:
        folder = _found(self.name, self.path, ("UT_HAR",), "data/X_train.csv")
        parts = {part: _ut_har(folder, part) for part in ("train", "val", "test")}
        test = [np.concatenate([parts["val"][i], parts["test"][i]]) for i in range(2)]
        names = ("lie down", "fall", "walk", "pick up", "run", "sit down", "stand up")
        return Dataset.from_arrays(*parts["train"], *test, class_names=names, name=self.name, kind="csi")


def _ut_har(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """The windows and labels of one part. Its files end in .csv and are arrays of NumPy."""
    found = []
    for file in (folder / "data" / f"X_{part}.csv", folder / "label" / f"y_{part}.csv"):
        try:
            with file.open("rb") as stream:
                found.append(np.load(stream, allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise ProtofedError(f"{file}: not an array of NumPy, or damaged ({first_line(error)})") from None
    x, y = found
    if x.ndim != 3 or x.shape[1:] != (250, 90) or x.dtype.kind not in "fiu":
        raise ProtofedError(f"{folder / 'data'}: X_{part} has shape {x.shape}; expected windows [n, 250, 90]")
    if y.shape != (len(x),) or not np.isin(y, range(7)).all():
        raise ProtofedError(f"{folder / 'label'}: y_{part} of {len(x)} windows must be labels from 0 to 6")
    windows = x.reshape(-1, 250, 3, 30).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(windows, np.float32), y.astype(np.int64)


@register("ntu-fi")
@dataclass(frozen=True, kw_only=True)
class NTUFi(DataSource):
    """NTU-Fi: amplitudes of 3 antennas × 500 packets × 114 subcarriers; six activities, or the gaits of fourteen people.

    `path` names the folder that has `NTU-Fi_HAR` or `NTU-Fi-HumanID`.
    """

    path: str | None = None
    task: Literal["har", "humanid"] = "har"
    """`humanid`: who walks. As in the benchmark, the files of its folder `test_amp` are the training part."""
    every: int = 4
    """Keep every n-th of a window's 2,000 packets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.every <= 2000:
            raise ValueError(f"every must be from 1 to 2000, got {self.every}")

    def read(self) -> Dataset:
        name = "NTU-Fi_HAR" if self.task == "har" else "NTU-Fi-HumanID"
        folder = _found(self.name, self.path, (name,), "train_amp")
        train, test = ("train_amp", "test_amp") if self.task == "har" else ("test_amp", "train_amp")
        return _of_folders(self, folder / train, folder / test, ".mat", self.window)

    def window(self, file: Path) -> np.ndarray:
        """One window of a MATLAB file, whose rows are antennas and subcarriers."""
        from scipy.io import loadmat

        try:
            stored = loadmat(file, variable_names=("CSIamp",))
        except Exception as error:  # a damaged or foreign file may fail in any way
            raise ProtofedError(f"{file}: not a MATLAB file, or damaged ({first_line(error)})") from None
        x = stored.get("CSIamp")
        if x is None or x.shape != (342, 2000) or x.dtype.kind not in "fiu":
            shape = "none" if x is None else x.shape
            raise ProtofedError(f"{file}: expected amplitudes CSIamp [342, 2000], got {shape}")
        return x[:, :: self.every].reshape(3, 114, -1).swapaxes(1, 2)


@register("widar")
@dataclass(frozen=True, kw_only=True)
class Widar(DataSource):
    """Widar 3.0: 22 gestures as body-coordinate velocity profiles, 22 moments × 20 × 20 velocities, as 1 × 22 × 400.

    `path` names the folder `Widardata`. Where the files' names begin with a user, the users are the natural clients.
    """

    path: str | None = None

    def read(self) -> Dataset:
        folder = _found(self.name, self.path, ("Widardata",), "train")
        return _of_folders(self, folder / "train", folder / "test", ".csv", _profile)


def _profile(file: Path) -> np.ndarray:
    try:
        x = np.loadtxt(file, delimiter=",", dtype=np.float32, ndmin=2)
    except (OSError, ValueError) as error:
        raise ProtofedError(f"{file}: not a table of numbers ({first_line(error)})") from None
    if x.shape != (22, 400):
        raise ProtofedError(f"{file}: a table of shape {x.shape}; expected 22 moments × 400 velocities")
    return x[None]


def _of_folders(
    source: DataSource, train: Path, test: Path, ending: str, window: Callable[[Path], np.ndarray]
) -> Dataset:
    """Files in a folder for each class. Those beyond the limits are not opened."""
    names = tuple(sorted(p.name for p in train.iterdir() if p.is_dir() and not p.name.startswith(".")))
    if not names:
        raise ProtofedError(f"{train}: no folder for each class; expected {train}/CLASS/*{ending}")
    parts, groups = [], []
    for folder, limit in ((train, source.limit_train), (test, source.limit_test)):
        files = [
            (file, label) for label, name in enumerate(names) for file in sorted((folder / name).glob(f"*{ending}"))
        ]
        if not files:
            raise ProtofedError(f"{folder}: no file CLASS/*{ending} of the classes {listed(names)}")
        labels = np.array([label for _, label in files])
        chosen = np.arange(len(files)) if limit is None else np.flatnonzero(balanced(labels, min(limit, len(files))))
        parts += [np.stack([window(files[row][0]) for row in chosen]).astype(np.float32), labels[chosen]]
        groups.append(np.array([files[row][0].name.partition("-")[0] for row in chosen]))
    has_users = all(str(user).startswith("user") for user in np.concatenate(groups))
    return Dataset.from_arrays(
        *parts,
        class_names=names,
        name=source.name,
        kind="csi",
        group_train=groups[0] if has_users else None,
        group_test=groups[1] if has_users else None,
    )
