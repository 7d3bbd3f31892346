"""Public sets of Wi-Fi sensing in files of the published form, and the benchmark's networks for them."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat
from torch import nn
from torch.nn import functional as F

from protofed import models
from protofed.data import federate, load
from support.errors import refusal
from support.networks import assert_stack_equals_loop, count

pytestmark = pytest.mark.usefixtures("seeded")


# --- the sets ---------------------------------------------------------------------------------------------------------
def ut_har(root: Path) -> dict[str, np.ndarray]:
    """Files that end in .csv and are arrays of NumPy, as the benchmark has them."""
    rng = np.random.default_rng(0)
    written = {}
    for folder in ("data", "label"):
        (root / "UT_HAR" / folder).mkdir(parents=True)
    for part, n in (("train", 14), ("val", 7), ("test", 7)):
        arrays = {f"data/X_{part}": rng.normal(size=(n, 250, 90)), f"label/y_{part}": np.arange(n) % 7}
        for name, array in arrays.items():
            written[name] = array
            with (root / "UT_HAR" / f"{name}.csv").open("wb") as stream:
                np.save(stream, array)
    return written


def test_ut_har(tmp_path: Path) -> None:
    written = ut_har(tmp_path)
    for path in (tmp_path, tmp_path / "UT_HAR"):
        data = load("ut-har", path=str(path), standardise=False)
        assert data.x_train.shape == (14, 3, 250, 30) and data.kind == "csi" and data.num_classes == 7
    assert data.y_test is not None and data.y_test.tolist() == [*range(7), *range(7)]
    assert data.class_names[2] == "walk"
    raw = written["data/X_train"]
    for antenna, time, tone in ((0, 0, 0), (1, 7, 4), (2, 249, 29)):
        assert float(data.x_train[5, antenna, time, tone]) == pytest.approx(raw[5, time, 30 * antenna + tone], rel=1e-6)
    assert data.x_test is not None
    np.testing.assert_allclose(data.x_test[7, 0], written["data/X_test"][0, :, :30], rtol=1e-6)


def test_ut_har_that_is_not_right(tmp_path: Path) -> None:
    assert "no data/X_train.csv in" in refusal(lambda: load("ut-har", path=str(tmp_path)))
    ut_har(tmp_path)
    file = tmp_path / "UT_HAR" / "data" / "X_val.csv"
    file.write_text("1,2,3\n", encoding="utf-8")
    assert "X_val.csv: not an array of NumPy" in refusal(lambda: load("ut-har", path=str(tmp_path)))
    with file.open("wb") as stream:
        np.save(stream, np.zeros((7, 250, 80)))
    assert "X_val has shape (7, 250, 80)" in refusal(lambda: load("ut-har", path=str(tmp_path)))
    with file.open("wb") as stream:
        np.save(stream, np.zeros((6, 250, 90)))
    assert "y_val of 6 windows" in refusal(lambda: load("ut-har", path=str(tmp_path)))


def ntu_fi(root: Path, name: str = "NTU-Fi_HAR", number: int = 2) -> np.ndarray:
    rng = np.random.default_rng(0)
    last = np.empty(0)
    for part in ("train_amp", "test_amp"):
        for label in ("box", "circle", "walk"):
            (root / name / part / label).mkdir(parents=True)
            for i in range(number):
                last = rng.normal(42, 5, (342, 2000))
                savemat(root / name / part / label / f"{label}{i}.mat", {"CSIamp": last})
    return last


def test_ntu_fi(tmp_path: Path) -> None:
    last = ntu_fi(tmp_path)
    data = load("ntu-fi", path=str(tmp_path), standardise=False)
    assert data.x_train.shape == (6, 3, 500, 114) and data.class_names == ("box", "circle", "walk")
    assert data.x_test is not None and data.y_train.tolist() == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(data.x_test[5, 2, 9, 100], last[2 * 114 + 100, 4 * 9], rtol=1e-6)
    assert load("ntu-fi", path=str(tmp_path), every=20, limit_train=3).x_train.shape == (3, 3, 100, 114)
    assert "no train_amp in" in refusal(lambda: load("ntu-fi", path=str(tmp_path), task="humanid"))
    ntu_fi(tmp_path, "NTU-Fi-HumanID", number=1)
    swapped = load("ntu-fi", path=str(tmp_path), task="humanid", every=100)
    assert len(swapped.y_train) == 3
    bad = tmp_path / "NTU-Fi_HAR" / "train_amp" / "box" / "box0.mat"
    savemat(bad, {"CSIphase": np.zeros((342, 2000))})
    assert "box0.mat: expected amplitudes CSIamp [342, 2000], got none" in refusal(
        lambda: load("ntu-fi", path=str(tmp_path))
    )
    bad.write_bytes(b"no matlab")
    assert "box0.mat: not a MATLAB file" in refusal(lambda: load("ntu-fi", path=str(tmp_path)))
    assert "every must be from 1 to 2000" in refusal(lambda: load("ntu-fi", every=0))


def widar(root: Path, name: str = "user{}-1-1-1.csv") -> np.ndarray:
    rng = np.random.default_rng(0)
    last = np.empty(0)
    for part in ("train", "test"):
        for label in ("1-Push&Pull", "2-Sweep"):
            (root / "Widardata" / part / label).mkdir(parents=True)
            for user in (1, 2, 3):
                last = rng.random((22, 400))
                np.savetxt(root / "Widardata" / part / label / name.format(user), last, delimiter=",")
    return last


def test_widar(tmp_path: Path) -> None:
    last = widar(tmp_path)
    data = load("widar", path=str(tmp_path), standardise=False)
    assert data.x_train.shape == (6, 1, 22, 400) and data.group_names == ("user1", "user2", "user3")
    assert data.x_test is not None
    np.testing.assert_allclose(data.x_test[5, 0], last, rtol=1e-6)
    assert len(federate(data, "natural", seed=0, test="local").clients) == 3
    file = tmp_path / "Widardata" / "test" / "2-Sweep" / "user1-1-1-1.csv"
    file.write_text("1,2\n", encoding="utf-8")
    assert "user1-1-1-1.csv: a table of shape (1, 2)" in refusal(lambda: load("widar", path=str(tmp_path)))
    file.write_text("a,b\n", encoding="utf-8")
    assert "not a table of numbers" in refusal(lambda: load("widar", path=str(tmp_path)))


def test_widar_without_users_and_without_files(tmp_path: Path) -> None:
    widar(tmp_path, "sample{}.csv")
    assert load("widar", path=str(tmp_path)).group_train is None
    for file in (tmp_path / "Widardata" / "test").rglob("*.csv"):
        file.unlink()
    assert "test: no file CLASS/*.csv" in refusal(lambda: load("widar", path=str(tmp_path)))


# --- the networks -----------------------------------------------------------------------------------------------------
UT, NTU, WIDAR = (3, 250, 30), (3, 500, 114), (1, 22, 400)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "expected"),
    [
        ("lenet", UT, 7, 1600 + 41_024 + 55_392 + 196_736 + 903),
        ("lenet", NTU, 6, 3 * 32 * 345 + 32 + 18_496 + 64 * 96 * 21 + 96 + 2304 * 128 + 128 + 774),
        ("lenet", WIDAR, 22, 22 * 32 * 36 + 32 + 18_496 + 55_392 + 1536 * 128 + 128 + 129 * 22),
        ("gru", UT, 7, 3 * (90 * 64 + 64 * 64 + 128) + 455),
        ("gru", NTU, 6, 3 * (342 * 64 + 64 * 64 + 128) + 390),
        ("gru", WIDAR, 22, 3 * (400 * 64 + 64 * 64 + 128) + 65 * 22),
        ("bilstm", UT, 7, 8 * (90 * 64 + 64 * 64 + 128) + 455),
        ("vit", UT, 7, 10_575_007),
        ("vit", NTU, 6, 225 * 226 * 5 + 225 * (760 + 2) + 6 * 225 + 225 * 901 + 900 * 226 - 225 + 226 * 6),
        ("vit", WIDAR, 22, None),
    ],
)
def test_the_benchmarks_networks_have_its_parameters(
    name: str, shape: tuple[int, ...], classes: int, expected: int | None
) -> None:
    found = count(name, shape, classes)
    if name == "vit":  # patch, class token, positions, one block of width d, normalisation, head
        d, patches = {UT: (900, 25), NTU: (225, 760), WIDAR: (80, 110)}[shape]
        block = 2 * 2 * d + (d + 1) * 3 * d + (d + 1) * d + (d + 1) * 4 * d + (4 * d + 1) * d
        expected = (d + 1) * d + d + (patches + 1) * d + block + 2 * d + (d + 1) * classes
    assert found == expected


def test_the_vision_transformer_of_ut_har_has_ten_million_parameters() -> None:
    assert count("vit", UT, 7) == 10_575_007


@pytest.mark.parametrize("name", ["lenet", "gru", "bilstm", "vit"])
def test_the_published_form_is_the_same_network(name: str) -> None:
    """Antennas beside each other, and time as channels, are brought into our layout."""
    for ours, theirs in ((UT, (1, 250, 90)), (WIDAR, (22, 20, 20))):
        torch.manual_seed(1)
        one = models.build(name, ours, 4).eval()
        torch.manual_seed(1)
        other = models.build(name, theirs, 4).eval()
        x = torch.randn(2, *ours)
        same = x.transpose(1, 2).reshape(2, 1, 250, 90) if ours == UT else x.reshape(2, 22, 20, 20)
        torch.testing.assert_close(one(x).logits, other(same).logits)


def test_lenet_of_ntu_fi_is_the_published_one_turned() -> None:
    model = models.build("lenet", NTU, 6)
    kernels = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    biases = [m.bias for m in model.modules() if isinstance(m, nn.Conv2d)]
    x = torch.randn(2, *NTU)
    h = x.transpose(2, 3)  # [antennas, subcarriers, time]
    for kernel, bias, stride in zip(kernels, biases, ((9, 9), (1, 3), (1, 3)), strict=True):
        h = F.relu(F.conv2d(h, kernel.transpose(2, 3), bias, stride))
    assert h.shape == (2, 96, 4, 6)
    linear = next(m for m in model.encoder if isinstance(m, nn.Linear))
    z = F.relu(linear(h.transpose(2, 3).flatten(1)))
    torch.testing.assert_close(model(x).embedding, z, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["lenet", "gru", "bilstm", "vit"])
@pytest.mark.parametrize("shape", [(3, 20, 10), (1, 7, 5), (2, 100, 70)])
def test_windows_of_any_size(name: str, shape: tuple[int, ...]) -> None:
    model = models.build(name, shape, 4).eval()
    out = model(torch.randn(3, *shape))
    assert out.embedding.shape == (3, model.dim) and out.logits.shape == (3, 4)


@pytest.mark.parametrize(
    ("name", "options"), [("lenet", {}), ("gru", {"embedding": 8}), ("bilstm", {"embedding": 8}), ("vit", {"depth": 2})]
)
def test_a_stack_of_clients(name: str, options: dict[str, int]) -> None:
    shape = (2, 20, 15)
    nets = [models.build(name, shape, 3, **options).double() for _ in range(2)]
    x, y = torch.randn(2, 4, *shape, dtype=torch.float64), torch.randint(0, 3, (2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_stack_equals_loop(nets, x, y, atol=1e-7, rtol=1e-5)


def test_networks_that_do_not_fit() -> None:
    assert "needs images" in refusal(lambda: models.build("gru", (64,), 3))
    said = refusal(lambda: models.build("vit", (1, 20, 10), 3, patch=(3, 5)))
    assert "patch=[3, 5] does not divide windows of 20 moments × 10 columns" in said
    assert "embedding=0" in refusal(lambda: models.build("lenet", UT, 3, embedding=0))


def test_attention_by_loops() -> None:
    model = models.build("vit", (1, 10, 10), 3, patch=(5, 5), heads=5).double().eval()
    block = model.encoder[1]
    x = torch.randn(1, 5, 25, dtype=torch.float64)
    q, k, v = (part.reshape(5, 5, 5) for part in block.qkv(block.norm1(x))[0].reshape(5, 3, 25).unbind(1))
    rows = []
    for token in range(5):
        heads = []
        for head in range(5):
            scores = torch.stack([q[token, head] @ k[other, head] for other in range(5)]) / 5**0.5
            heads.append(sum(w * v[other, head] for other, w in enumerate(scores.softmax(0))))
        rows.append(torch.cat(heads))
    inner = x[0] + block.project(torch.stack(rows))
    torch.testing.assert_close(block(x)[0], inner + block.feed(block.norm2(inner)))
