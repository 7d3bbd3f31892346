"""Several domains side by side, a domain that nobody holds, and the files of USPS."""

from __future__ import annotations

import bz2
import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import protofed as pf
from protofed.data import Dataset, federate, load
from protofed.data.domains import Domains
from protofed.data.unseen import without_group
from protofed.errors import ProtofedError
from protofed.experiment.build import prepare_data
from protofed.experiment.run import reopen
from protofed.experiment.settings import resolve
from protofed.models.skeleton import Skeleton

NAMES = np.array(["cat", "dog", "owl"])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three domains of one task, of different sizes and channels."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, side, order, shape in (
        ("photo", 10, NAMES, (10, 10, 3)),
        ("sketch", 8, NAMES[::-1], (8, 8)),
        ("clip", 6, NAMES, (6, 6)),
    ):
        y, y_test = (np.repeat(np.arange(3), n) for n in (20, 8))
        values = {"cat": 40, "dog": 120, "owl": 200}
        x, x_test = (
            np.stack([np.full(shape, values[order[c]] + side) for c in labels])
            + rng.integers(0, 20, (len(labels), *shape))
            for labels in (y, y_test)
        )
        tests = {"x_test": x_test.astype(np.uint8), "y_test": y_test} if name != "clip" else {}
        np.savez(f"{name}.npz", x_train=x.astype(np.uint8), y_train=y, class_names=order, **tests)
    return tmp_path


THREE = ("photo.npz", "sketch.npz", "clip.npz")


def test_domains_become_one_data_set(place: Path) -> None:
    data = load("domains", of=THREE, standardise=False)
    assert data.sample_shape == (3, 10, 10) and data.group_names == ("photo", "sketch", "clip")
    assert data.class_names == ("cat", "dog", "owl") and data.name == "photo+sketch+clip"
    assert data.group_train.tolist() == [0] * 60 + [1] * 60 + [2] * 48, "clip gives a fifth for testing"
    assert data.group_test.tolist() == [0] * 24 + [1] * 24 + [2] * 12
    brightness = data.x_train.mean((1, 2, 3))
    for c in range(3):  # sketch counts its classes backwards; its owls are as bright as those of others
        for group in range(3):
            rows = (data.y_train == c) & (data.group_train == group)
            assert brightness[rows].mean() == pytest.approx((40 + 80 * c + 17) / 255, abs=0.03)
    own = load("photo.npz", standardise=False)
    assert torch.equal(data.x_train[:60], own.x_train), "the largest keep their pixels"
    small = load("domains", of=THREE, resize=4, limit_train=9, standardise=False)
    assert small.sample_shape == (3, 4, 4) and torch.bincount(small.group_train).tolist() == [9, 9, 9]
    scaled = load("domains", of=THREE)
    assert scaled.x_train.mean((0, 2, 3)).abs().max() < 1e-5 and scaled.mean is not None


def test_a_domain_may_be_named_and_have_settings(place: Path) -> None:
    data = load("domains", of=("a=digits?limit_train=50", "b=digits?limit_train=20&limit_test=10"))
    assert data.group_names == ("a", "b") and torch.bincount(data.group_train).tolist() == [50, 20]
    assert data.sample_shape == (1, 8, 8) and data.flips is False


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (("digits",), "of must name at least two data sets, got digits"),
        (("digits", "digits"), "'digits' is named twice; write NAME=DATA"),
        (("digits", "domains?of=[digits,mnist]"), "is no data set but several"),
        (("digits", "digitz"), "did you mean 'digits'"),
        (("digits", "photo.npz"), "digits and photo have different classes: '0' is a class of only one of them"),
        (("digits", "flat.npz"), "digits and flat have different classes: they have 10 and 3 classes"),
        (
            ("photo.npz", "flat.npz"),
            r"photo has shape \[3, 10, 10\], one of flat \[4\]; domains need samples of one shape",
        ),
    ],
)
def test_domains_that_do_not_fit_are_one_line(place: Path, of: tuple[str, ...], message: str) -> None:
    np.savez("flat.npz", x_train=np.zeros((9, 4), np.float32), y_train=np.arange(9) % 3)
    with pytest.raises(ProtofedError, match=message):
        load("domains", of=of)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(12, 40), min_size=1, max_size=5), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_each_client_has_one_domain(sizes: list[int], clients: int, seed: int) -> None:
    groups = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)) * 3, sizes))
    labels = np.arange(len(groups)) % 2
    split = lambda s: Domains().split(labels, clients, np.random.default_rng(s), groups)  # noqa: E731
    if clients < len(sizes):
        with pytest.raises(ProtofedError, match=f"clients={clients}, but there are {len(sizes)} domains"):
            split(seed)
        return
    rows = split(seed)
    together = np.concatenate(rows)
    assert len(rows) == clients and len(np.unique(together)) == len(together) == len(labels)
    owners = [set(groups[r]) for r in rows]
    assert all(len(owner) == 1 for owner in owners)
    numbers = np.bincount([owner.pop() // 3 for owner in owners], minlength=len(sizes))
    assert numbers.max() - numbers.min() <= 1 and (np.diff(numbers) <= 0).all()
    assert all(np.array_equal(a, b) for a, b in zip(rows, split(seed), strict=True))


def test_a_partition_inside_each_domain() -> None:
    groups, labels = np.repeat([0, 1], 60), np.tile(np.arange(3), 40)
    rows = Domains("n-way?way=2&shot=4&spread=0").split(labels, 6, np.random.default_rng(0), groups)
    assert [np.bincount(labels[r]).max() for r in rows] == [4] * 6 and {len(r) for r in rows} == {8}
    with pytest.raises(ProtofedError, match="needs domains: data=domains, or data with group ids"):
        Domains().split(labels, 6, np.random.default_rng(0))
    for inside, message in (
        ("natural", "divides by groups again"),
        ("domains", "divides by groups again"),
        ("nway?shoot=3", "did you mean 'shot'"),
        ("triage", "unknown partition 'triage'"),
    ):
        with pytest.raises(ProtofedError, match=message):
            pf.data.partitions.make("domains", {"inside": inside})


def test_clients_are_tested_on_their_own_domain_and_named_after_it(place: Path) -> None:
    dataset = load("domains", of=THREE)
    data = federate(dataset, "domains", 7, seed=1)
    assert data.client_names == ("photo 1", "photo 2", "photo 3", "sketch 1", "sketch 2", "clip 1", "clip 2")
    for client, domain in zip(data.clients, (0, 0, 0, 1, 1, 2, 2), strict=True):
        assert set(dataset.group_train[client.labelled.index].tolist()) == {domain}
        expected = (dataset.group_test == domain) & client.classes[dataset.y_test]
        assert torch.equal(client.test.index, expected.nonzero().flatten()) and client.test.x is dataset.x_test
    assert federate(dataset, "domains", seed=1).client_names == ("photo", "sketch", "clip")
    untested = Dataset.from_arrays(dataset.x_train, dataset.y_train, group_train=dataset.group_train)
    for client in federate(untested, "domains", 3, seed=1).clients:
        assert len(set(dataset.group_train[torch.cat([client.labelled.index, client.test.index])].tolist())) == 1


def test_an_unseen_domain_is_nobodys_and_not_in_the_scaling(place: Path) -> None:
    raw, scaled = load("domains", of=THREE, standardise=False), load("domains", of=THREE)
    rest, unseen = without_group(scaled, "sketch")
    left = raw.group_train != 1
    mean, std = raw.x_train[left].mean((0, 2, 3)), raw.x_train[left].std((0, 2, 3), correction=0)
    for found, rows in (
        (rest.x_train, raw.x_train[left]),
        (rest.x_test, raw.x_test[raw.group_test != 1]),
        (unseen.take()[0], raw.x_test[raw.group_test == 1]),
    ):
        assert torch.allclose(found, (rows - mean[:, None, None]) / std[:, None, None], atol=1e-4)
    assert torch.allclose(rest.mean, mean, atol=1e-5) and torch.allclose(rest.std, std, atol=1e-5)
    assert torch.equal(rest.y_train, raw.y_train[left]) and torch.equal(unseen.labels, raw.y_test[raw.group_test == 1])
    assert 1 not in rest.group_train and 1 not in rest.group_test
    plain, samples = without_group(raw, "clip")
    assert torch.equal(plain.x_train, raw.x_train[raw.group_train != 2]) and plain.mean is None and len(samples) == 12


def test_natural_groups_can_be_unseen_too() -> None:
    x, y = np.arange(24.0, dtype=np.float32).reshape(12, 2), np.arange(12) % 2
    data = Dataset.from_arrays(x, y, group_train=np.arange(12) // 4)
    rest, unseen = without_group(data, "1")
    assert unseen.take()[0].tolist() == x[4:8].tolist() and len(rest.y_train) == 8 and rest.x_test is None
    with pytest.raises(ProtofedError, match="unknown unseen group '7'"):
        without_group(data, "7")
    with pytest.raises(ProtofedError, match="unseen=0: no other group has training samples"):
        without_group(Dataset.from_arrays(x, y, group_train=np.zeros(12, int)), "0")
    with pytest.raises(ProtofedError, match="unseen=a needs domains or natural groups, and in-memory has no group ids"):
        without_group(Dataset.from_arrays(x, y), "a")


@pytest.mark.parametrize("engine", ["loop", "stack"])
def test_unseen_accuracies_are_those_of_the_clients_models(place: Path, engine: str) -> None:
    common = {"data": {"name": "domains", "of": THREE}, "partition": "domains", "clients": 4, "unseen": "clip"}
    run = pf.run(
        "fedproto",
        **common,
        model="mlp",
        rounds=2,
        lr=0.1,
        silhouette=False,
        snapshots=0,
        engine=engine,
        out=place / "run",
    )
    _, federation = reopen(place / "run")
    data = prepare_data(resolve("fedproto", common))
    engine_of_run = federation.engine
    accuracies = []
    for number, client in enumerate(data.clients):
        x, y = client.unseen.take()
        assert len(y) == 12
        skeleton: Skeleton = engine_of_run.skeleton
        logits = skeleton.outputs(x, engine_of_run.state(number).weights).logits
        accuracies.append((logits.argmax(1) == y).float().mean().item())
    assert run.metrics[-1]["unseen_head"] == pytest.approx(np.mean(accuracies), abs=0.03)
    assert 0 <= run.metrics[-1]["unseen_prototype"] <= 1
    assert run.summary["last_round"]["unseen_head"] == run.metrics[-1]["unseen_head"]


@pytest.mark.slow
def test_the_real_command_line(place: Path, call) -> None:
    words = ["data=domains", f"of={','.join(THREE)}", "partition=domains", "clients=4", "unseen=sketch", "model=mlp"]
    for file in THREE:
        (Path.cwd() / file).write_bytes((place / file).read_bytes())
    code, out, err = call("compare", "local", "fedavg", *words, "rounds=1", "--seeds", "1", "--out", "both")
    assert code == 0 and "unseen" in out, err
    code, out, err = call("data", "show", *words, "--picture", "p.png")
    assert code == 0 and "samples: p-samples.png" in out, err
    code, _, err = call("run", "local", *words[:-2], "unseen=sketchy")
    assert code != 0 and "did you mean 'sketch'" in err


# --- USPS -------------------------------------------------------------------------------------------------------------
def digits(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    return rng.integers(0, 256, (n, 256)), np.arange(n) % 10


def libsvm(x: np.ndarray, y: np.ndarray) -> bytes:
    values = 2 * x / 255 - 1
    rows = (
        f"{label + 1} " + " ".join(f"{i + 1}:{v:.4f}" for i, v in enumerate(row) if v != 0)
        for row, label in zip(values, y, strict=True)
    )
    return ("\n".join(rows) + "\n").encode()


def zipped(x: np.ndarray, y: np.ndarray) -> bytes:
    rows = (f"{label:.4f} " + " ".join(f"{v:.4f}" for v in row) for row, label in zip(2 * x / 255 - 1, y, strict=True))
    return ("\n".join(rows) + "\n").encode()


@pytest.mark.parametrize("form", ["libsvm", "libsvm plain", "zip", "h5"])
def test_usps_is_read_in_its_published_forms(form: str, tmp_path: Path) -> None:
    train, test = digits(30), digits(20)
    for part, content in (("train", train), ("test", test)):
        stem = {"train": "usps", "test": "usps.t"}[part]
        if form == "libsvm":
            (tmp_path / f"{stem}.bz2").write_bytes(bz2.compress(libsvm(*content)))
        elif form == "libsvm plain":
            (tmp_path / stem).write_bytes(libsvm(*content))
        elif form == "zip":
            (tmp_path / f"zip.{part}.gz").write_bytes(gzip.compress(zipped(*content)))
    if form == "h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(tmp_path / "usps.h5", "w") as file:
            for part, (x, y) in (("train", train), ("test", test)):
                file.create_group(part).update({"data": x / 255, "target": y})
    data = load("usps", path=str(tmp_path), standardise=False)
    assert data.sample_shape == (1, 16, 16) and data.num_classes == 10 and data.class_names == tuple("0123456789")
    for (x, y), (found, labels) in ((train, (data.x_train, data.y_train)), (test, (data.x_test, data.y_test))):
        assert torch.allclose(found.flatten(1), torch.tensor(x / 255, dtype=torch.float32), atol=1e-6)
        assert labels.tolist() == y.tolist()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no usps.bz2, zip.train.gz or usps.h5 in .*; put LIBSVM's usps.bz2 and usps.t.bz2 there"),
        ({"usps.bz2": b"x"}, "usps.bz2 is there and its test part usps.t is not"),
        ({"usps.bz2": b"x", "usps.t.bz2": b"x"}, "usps.bz2: damaged or unreadable"),
        (
            {"usps": b"1 999:0.5\n", "usps.t": b""},
            "usps: not a file of USPS digits .value number 999; expected 1 to 256",
        ),
        ({"zip.train": b"1 2 3\n", "zip.test": b"1"}, r"zip.train: expected a label and 256 values in each line"),
        ({"usps": b"3 1:7\n", "usps.t": b""}, "usps: pixels run from 0 to 7; expected -1 to 1"),
        ({"usps": b"12 1:0.5\n", "usps.t": b""}, "usps: labels run from 11 to 11 where 0 to 9 are the digits"),
    ],
)
def test_other_files_are_refused_in_a_line(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ProtofedError, match=message):
        load("usps", path=str(tmp_path))
