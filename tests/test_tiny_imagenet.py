"""Tiny ImageNet in its official folder layout, made here; and the settings all images share: resize and image_channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import protofed.data.tiny_imagenet as tiny_imagenet
from protofed.data import Dataset, sources
from protofed.data.sources import load
from support.errors import refusal

IDS = ["n02124075", "n01443537", "n04067472"]  # not in alphabetical order, as in the official file
COLOURS = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]


pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / tiny_imagenet.FOLDER
    (root / "val" / "images").mkdir(parents=True)
    (root / "wnids.txt").write_text("\n".join(IDS) + "\n")
    words = ["n02124075\tEgyptian cat", "n01443537\tgoldfish, Carassius auratus", "n00000001\tsomething else"]
    (root / "words.txt").write_text("\n".join(words) + "\n")
    lines = []
    for label, name in enumerate(IDS):
        folder = root / "train" / name / "images"
        folder.mkdir(parents=True)
        (root / "train" / name / f"{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t10\t63\t58\n")
        for i in range(4):
            Image.new("RGB", (64, 64), COLOURS[label]).save(folder / f"{name}_{i}.JPEG", quality=95)
    for i, label in enumerate([2, 0, 1, 0]):
        Image.new("RGB", (64, 64), COLOURS[label]).save(root / "val" / "images" / f"val_{i}.JPEG", quality=95)
        lines.append(f"val_{i}.JPEG\t{IDS[label]}\t0\t32\t44\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return root


def read(root: Path, **options: Any) -> Dataset:
    return sources.make("tiny-imagenet", {"path": str(root), "standardise": False, **options}).load()


def test_the_official_layout(root: Path) -> None:
    data = read(root)
    assert data.x_train.shape == (12, 3, 64, 64) and data.x_test is not None and data.x_test.shape == (4, 3, 64, 64)
    assert data.y_train.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert data.y_test is not None and data.y_test.tolist() == [2, 0, 1, 0]
    assert data.class_names == ("Egyptian cat", "goldfish", "n04067472") and data.name == "tiny-imagenet"
    for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test)):
        wanted = torch.tensor(COLOURS)[y] / 255
        assert float((x.mean((2, 3)) - wanted).abs().max()) < 0.02  # JPEG is not exact


def test_the_folder_that_holds_it_and_the_usual_place(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(read(root.parent).x_train) == 12
    monkeypatch.setenv("PROTOFED_DATA", str(root.parent / "data"))
    (root.parent / "data").mkdir()
    root.rename(root.parent / "data" / "tiny-imagenet")
    assert len(sources.make("tiny-imagenet").load().x_train) == 12


def test_limits_decode_only_what_is_kept(root: Path) -> None:
    full = read(root)
    for name in IDS:
        (root / "train" / name / "images" / f"{name}_3.JPEG").write_bytes(b"damaged")
    some = read(root, limit_train=6, limit_test=3)
    assert some.y_train.tolist() == [0, 0, 1, 1, 2, 2] and some.y_test is not None
    assert torch.equal(some.x_train, full.x_train[[0, 1, 4, 5, 8, 9]]) and some.y_test.tolist() == [2, 0, 1]


def test_grey_pictures_and_other_sizes(root: Path) -> None:
    file = root / "train" / IDS[0] / "images" / f"{IDS[0]}_1.JPEG"
    Image.new("L", (64, 64), 100).save(file)
    grey = read(root).x_train[1]
    assert torch.equal(grey[0], grey[1]) and torch.equal(grey[1], grey[2])
    assert read(root, size=16).x_train.shape == (12, 3, 16, 16)
    Image.new("RGB", (64, 50)).save(file)
    assert f"{file} is 64×50 pixels" in refusal(lambda: read(root)) and len(read(root, size=8).x_train) == 12
    assert "size must be at least 1" in refusal(lambda: read(root, size=0))


def test_a_layout_that_is_not_right(root: Path) -> None:
    notes = root / "val" / "val_annotations.txt"
    right = notes.read_text()
    notes.write_text(right + "val_9.JPEG\tn99999999\t0\t0\t1\t1\n")
    assert f"{notes} line 5: expected a file name, a tab and a class id" in refusal(lambda: read(root))
    notes.write_text(right + f"val_9.JPEG\t{IDS[0]}\t0\t0\t1\t1\n")
    assert "val_9.JPEG: no such picture" in refusal(lambda: read(root))
    notes.write_text("")
    assert f"{notes}: empty" in refusal(lambda: read(root))
    notes.unlink()
    assert f"{notes}: no such file" in refusal(lambda: read(root))
    notes.write_text(right)
    picture = root / "val" / "images" / "val_0.JPEG"
    picture.write_bytes(picture.read_bytes()[:200])
    assert f"{picture}: not a picture, or damaged" in refusal(lambda: read(root))
    (root / "wnids.txt").write_text("\n".join([*IDS, "n00000009"]))
    assert "n00000009/images: no pictures" in refusal(lambda: read(root))
    (root / "wnids.txt").write_text("\n".join([*IDS, IDS[0]]))
    assert "each once" in refusal(lambda: read(root))
    (root / "words.txt").unlink()
    assert "words.txt: no such file" in refusal(lambda: read(root))
    (root / "wnids.txt").unlink()
    assert f"no folder tiny-imagenet-200 with wnids.txt in {root}" in refusal(lambda: read(root))


# --- settings of all images -------------------------------------------------------------------------------------------
def npz(tmp_path: Path, shape: tuple[int, ...], test: bool = True) -> str:
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.random((6, *shape), np.float32), "y_train": np.arange(6) % 2}
    if test:
        arrays |= {"x_test": rng.random((4, *shape), np.float32), "y_test": np.arange(4) % 2}
    np.savez(tmp_path / "d.npz", **arrays)
    return str(tmp_path / "d.npz")


def test_halving_is_the_mean_with_the_triangle_of_antialiasing(tmp_path: Path) -> None:
    path = npz(tmp_path, (1, 8, 8))
    plain, small = load(path, standardise=False), load(path, standardise=False, resize=4)
    assert small.x_train.shape == (6, 1, 4, 4) and small.x_test is not None and small.x_test.shape == (4, 1, 4, 4)
    # at half the size, bilinear with antialiasing weighs four neighbours 1, 3, 3, 1; look away from the border
    weights = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
    for i in (1, 2):
        for j in (1, 2):
            patch = plain.x_train[:, 0, 2 * i - 1 : 2 * i + 3, 2 * j - 1 : 2 * j + 3]
            naive = torch.einsum("nij,i,j->n", patch, weights, weights)
            torch.testing.assert_close(small.x_train[:, 0, i, j], naive)


def test_resized_before_it_is_standardised(tmp_path: Path) -> None:
    data = load(npz(tmp_path, (3, 9, 7), test=False), resize=16, image_channels=3)
    assert data.x_train.shape == (6, 3, 16, 16) and data.x_test is None
    assert torch.allclose(data.x_train.mean((0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(data.x_train.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-4)


def test_grey_becomes_three_equal_channels() -> None:
    grey, three = load("digits"), load("digits", image_channels="3", resize=32)
    assert three.x_train.shape == (1438, 3, 32, 32) and three.x_test is not None and three.x_test.shape[1] == 3
    assert torch.equal(three.x_train[:, 0], three.x_train[:, 2])
    same = load("digits", image_channels=3)
    torch.testing.assert_close(same.x_train[:, 1:2], grey.x_train)
    assert torch.equal(load("digits", image_channels=1, resize=8).x_train, grey.x_train)


def test_what_cannot_be_resized(tmp_path: Path) -> None:
    flat = npz(tmp_path, (5,))
    assert "resize=4 is for images; it has samples of shape [5]" in refusal(lambda: load(flat, resize=4))
    assert "image_channels=3 is for images" in refusal(lambda: load(flat, image_channels=3))
    colour = npz(tmp_path, (3, 8, 8))
    assert "image_channels=1, but its images have 3; only 1 can become 3" in refusal(
        lambda: load(colour, image_channels=1)
    )
    assert "image_channels=2, but its images have 1" in refusal(lambda: load("digits", image_channels=2))
    assert "resize must be at least 1, got 0" in refusal(lambda: load("digits", resize=0))
