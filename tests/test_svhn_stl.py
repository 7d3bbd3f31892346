"""SVHN and STL-10, on tiny files written here in the official layouts; and what is said of files that are not right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from protofed.data import federate, load
from protofed.data.partitions import IID
from protofed.data.stl10 import read_pictures
from support.errors import refusal

pytestmark = pytest.mark.usefixtures("home")


# --- SVHN -------------------------------------------------------------------------------------------------------------


def write_svhn(folder: Path, part: str, n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """X [32, 32, 3, n] of bytes and y [n, 1] from 1 to 10, compressed, as the official files have them."""
    folder.mkdir(parents=True, exist_ok=True)
    x = np.random.default_rng(seed).integers(0, 256, (32, 32, 3, n)).astype(np.uint8)
    y = (np.arange(n) % 10 + 1).astype(np.uint8)[:, None]
    savemat(folder / f"{part}_32x32.mat", {"X": x, "y": y}, do_compression=True)
    return x, y


def test_svhn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = write_svhn(tmp_path / "data/svhn", "train", 30)
    write_svhn(tmp_path / "data/svhn", "test", 20, seed=1)
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path / "data"))
    data = load("svhn", standardise=False)
    assert data.x_train.shape == (30, 3, 32, 32) and data.x_test is not None and data.x_test.shape == (20, 3, 32, 32)
    assert data.y_train[:11].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1], "10 is the digit 0"
    assert data.class_names == tuple("0123456789") and data.num_classes == 10 and data.flips is False
    assert data.x_train.is_contiguous() and data.name == "svhn"
    for picture, channel, row, column in ((0, 0, 0, 0), (7, 2, 31, 4), (29, 1, 5, 30)):
        value = float(data.x_train[picture, channel, row, column]) * 255
        assert value == pytest.approx(int(x[row, column, channel, picture]), abs=1e-3)
    scaled = load("svhn", resize=16)
    assert scaled.x_train.shape == (30, 3, 16, 16) and scaled.mean is not None and scaled.mean.shape == (3,)


def test_svhn_extra_and_limits(tmp_path: Path) -> None:
    train, _ = write_svhn(tmp_path, "train", 20)
    write_svhn(tmp_path, "test", 20, seed=1)
    assert "extra_32x32.mat: no such file" in refusal(lambda: load("svhn", path=str(tmp_path), extra=True))
    extra, _ = write_svhn(tmp_path, "extra", 40, seed=2)
    data = load("svhn", path=str(tmp_path), extra="true", standardise=False)
    expected = np.concatenate([train, extra], 3).transpose(3, 2, 0, 1)
    assert np.array_equal((data.x_train * 255).round().numpy(), expected) and len(data.y_train) == 60
    whole = load("svhn", path=str(tmp_path), standardise=False)
    assert len(whole.y_train) == 20, "extra only where it is asked for"
    few = load("svhn", path=str(tmp_path), extra=True, limit_train=30, limit_test=10, standardise=False)
    assert torch.bincount(few.y_train).tolist() == [3] * 10 and few.y_test is not None and len(few.y_test) == 10
    assert torch.equal(few.x_train[:20], whole.x_train), "the first of each class"


def test_missing_svhn_says_what_where_and_how(tmp_path: Path) -> None:
    text = refusal(lambda: load("svhn"))
    for part in ("no train_32x32.mat", f"{tmp_path}/home/.cache/protofed/svhn", "download", "path="):
        assert part in text
    write_svhn(tmp_path, "train", 10)
    assert "test_32x32.mat: no such file" in refusal(lambda: load("svhn", path=str(tmp_path)))


X, Y = np.zeros((32, 32, 3, 4), np.uint8), np.arange(1, 5, dtype=np.uint8)[:, None]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"X": X}, "no 'y' in it; expected X [32, 32, 3, n] and y [n, 1]"),
        ({"images": X, "y": Y}, "no 'X' in it"),
        ({"X": X.astype(float), "y": Y}, "of bytes, got shape (32, 32, 3, 4) of float64"),
        (
            {"X": X.transpose(3, 0, 1, 2), "y": Y},
            "expected pictures X [32, 32, 3, n] of bytes, got shape (4, 32, 32, 3)",
        ),
        ({"X": X, "y": Y[:3]}, "4 pictures but labels y of shape (3, 1)"),
        ({"X": X, "y": Y - 1}, "labels run from 0 to 3; expected whole numbers from 1 to 10"),
        ({"X": X, "y": Y + 7}, "labels run from 8 to 11; expected whole numbers from 1 to 10"),
        ({"X": X, "y": Y + 0.5}, "labels run from 1.5 to 4.5; expected whole numbers"),
    ],
)
def test_svhn_files_that_do_not_fit(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    write_svhn(tmp_path, "test", 10)
    savemat(tmp_path / "train_32x32.mat", content)
    text = refusal(lambda: load("svhn", path=str(tmp_path)))
    assert text.startswith(f"{tmp_path}/train_32x32.mat: ") and message in text


def test_damaged_svhn_files_are_named(tmp_path: Path) -> None:
    write_svhn(tmp_path, "train", 20)
    write_svhn(tmp_path, "test", 10)
    file = tmp_path / "train_32x32.mat"
    whole = file.read_bytes()
    for content in (
        b"",
        b"<html>not found</html>" * 20,
        whole[: len(whole) // 2],
        whole[:200] + bytes(50) + whole[250:],
    ):
        file.write_bytes(content)
        text = refusal(lambda: load("svhn", path=str(tmp_path)))
        assert text.startswith(f"{file}: not a MATLAB file, or damaged (")


# --- STL-10 -----------------------------------------------------------------------------------------------------------


def write_stl10(folder: Path, train: int = 20, test: int = 10, without: int = 7) -> dict[str, np.ndarray]:
    """Pictures as rows × columns × channels; the files hold one channel after another, each column by column."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    pictures = {}
    for part, n in (("train", train), ("test", test), ("unlabeled", without)):
        pictures[part] = rng.integers(0, 256, (n, 96, 96, 3)).astype(np.uint8)
        with (folder / f"{part}_X.bin").open("wb") as file:
            for picture in pictures[part]:
                for channel in range(3):
                    file.write(picture[:, :, channel].tobytes(order="F"))
        if part != "unlabeled":
            (folder / f"{part}_y.bin").write_bytes(bytes(i % 10 + 1 for i in range(n)))
    return pictures


def test_stl10(tmp_path: Path) -> None:
    pictures = write_stl10(tmp_path / "stl10_binary")
    for path in (tmp_path, tmp_path / "stl10_binary"):
        data = load("stl10", path=str(path), standardise=False)
        assert data.x_test is not None and data.x_unlabelled is not None
        for x, part in ((data.x_train, "train"), (data.x_test, "test"), (data.x_unlabelled, "unlabeled")):
            assert np.array_equal((x * 255).round().numpy(), pictures[part].transpose(0, 3, 1, 2))
        assert data.y_train.tolist() == [i % 10 for i in range(20)] and data.num_classes == 10
        assert data.class_names[0] == "airplane" and data.class_names[9] == "truck" and data.flips is True
    few = load("stl-10", path=str(tmp_path), limit_train=10, limit_unlabelled=3, standardise=False)
    assert few.x_unlabelled is not None and torch.equal(few.x_unlabelled, data.x_unlabelled[:3])
    assert torch.equal(few.x_train, data.x_train[:10])
    assert "limit_unlabelled must be at least 0" in refusal(lambda: load("stl10", limit_unlabelled=-1))


def test_stl10_becomes_smaller_as_it_is_read(tmp_path: Path) -> None:
    write_stl10(tmp_path)
    large = load("stl10", path=str(tmp_path), standardise=False)
    small = load("stl10", path=str(tmp_path), resize=24, standardise=False)
    for a, b in ((small.x_train, large.x_train), (small.x_unlabelled, large.x_unlabelled)):
        assert a is not None and b is not None and a.shape[1:] == (3, 24, 24)
        expected = torch.nn.functional.interpolate(b, (24, 24), mode="bilinear", antialias=True)
        assert torch.allclose(a, expected, atol=1e-6)
    scaled = load("stl10", path=str(tmp_path), resize=24)
    assert scaled.mean is not None and scaled.std is not None and scaled.x_unlabelled is not None
    back = scaled.x_unlabelled * scaled.std[:, None, None] + scaled.mean[:, None, None]
    assert small.x_unlabelled is not None and torch.allclose(back, small.x_unlabelled, atol=1e-5)


def test_more_pictures_than_are_read_at_a_time(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, (1030, 3)).astype(np.uint8)
    (tmp_path / "x.bin").write_bytes(np.repeat(values, 96 * 96).tobytes())  # each channel of one colour
    x = read_pictures(tmp_path / "x.bin", 2)
    expected = (torch.from_numpy(values.astype(np.float32)) / 255)[:, :, None, None].expand(-1, -1, 2, 2)
    assert torch.allclose(x, expected, atol=1e-6)


def test_stl10s_unlabelled_pictures_go_to_the_clients(tmp_path: Path) -> None:
    write_stl10(tmp_path)
    dataset = load("stl10", path=str(tmp_path), resize=8)
    data = federate(dataset, IID(), 2, seed=0, labels="client", labels_per_class=1)
    pools = [client.unlabelled for client in data.clients]
    assert pools[0] is not None and pools[1] is not None and dataset.x_unlabelled is not None
    assert [int((truth == -1).sum()) for truth in data.held_back if truth is not None] == [4, 3]
    together = torch.cat([pool.index[pool.index >= 20] for pool in pools if pool is not None]).sort().values
    assert together.tolist() == list(range(20, 27))
    assert torch.equal(pools[0].x[together], dataset.x_unlabelled)


def test_stl10_without_its_unlabelled_file(tmp_path: Path) -> None:
    write_stl10(tmp_path)
    (tmp_path / "unlabeled_X.bin").unlink()
    text = refusal(lambda: load("stl10", path=str(tmp_path)))
    assert text.startswith(f"{tmp_path}/unlabeled_X.bin: no such file") and "limit_unlabelled=0" in text
    data = load("stl10", path=str(tmp_path), limit_unlabelled=0, resize=8)
    assert data.x_unlabelled is None and len(data.y_train) == 20


def test_missing_stl10_says_what_where_and_how(tmp_path: Path) -> None:
    text = refusal(lambda: load("stl10"))
    for part in ("no folder stl10_binary", f"{tmp_path}/home/.cache/protofed/stl10", "stl10_binary.tar.gz", "path="):
        assert part in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train_X.bin", bytes(27648 * 20 - 1), "552,959 bytes; expected 27,648 (3×96×96) for each picture"),
        ("train_X.bin", b"", "empty"),
        ("test_X.bin", bytes(27648 * 9), "9 pictures, but test_y.bin has 10 labels"),
        ("unlabeled_X.bin", bytes(100), "100 bytes; expected 27,648"),
        ("train_y.bin", bytes(20), "labels run from 0 to 0; expected 1 to 10"),
        ("train_y.bin", bytes([11] * 20), "labels run from 11 to 11; expected 1 to 10"),
        ("test_y.bin", None, "no such file; stl10_binary has one"),
    ],
)
def test_stl10_files_that_are_not_right(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    write_stl10(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    text = refusal(lambda: load("stl10", path=str(tmp_path), resize=8))
    assert text.startswith(f"{tmp_path}/{name}: ") and message in text
