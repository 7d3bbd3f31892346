"""Sources of data, on tiny files written here in the genuine formats; and what is said of files that are not right."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import protofed.data
from protofed.data import Dataset, load, sources
from protofed.data.cifar import read_batch
from protofed.data.idx import read_idx
from protofed.data.sources import source_of
from protofed.experiment.settings import resolve
from support.errors import refusal

pytestmark = pytest.mark.usefixtures("home")


# --- what stands for a data set, and labels ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("digits", ("digits", {})),
        ("DIGITS", ("DIGITS", {})),
        ("a/b.npz", ("npz", {"path": "a/b.npz"})),
        ("A.NPZ", ("npz", {"path": "A.NPZ"})),
        (Path("a.npz"), ("npz", {"path": "a.npz"})),
        ("notes.csv", ("text", {"path": "notes.csv"})),
        ("wine.csv", ("table", {"path": "wine.csv"})),
        ("wine.parquet", ("table", {"path": "wine.parquet"})),
        ("x.npy", ("npy", {"path": "x.npy"})),
        ("sites", ("site-files", {"path": "sites"})),
        ("notes.JSONL.gz", ("text", {"path": "notes.JSONL.gz"})),
        ("hub:owner/set", ("hub", {"path": "owner/set"})),
        ("pictures", ("folder", {"path": "pictures"})),
        ("~/pictures", ("folder", {"path": "~/pictures"})),
    ],
)
def test_one_rule_for_what_stands_for_a_data_set(
    written: str | Path, meant: tuple[str, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home" / "pictures").mkdir(parents=True)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "a.csv").write_text("f,label\n")
    (tmp_path / "notes.csv").write_text("text,label\n")
    (tmp_path / "wine.csv").write_text("alcohol,label\n")
    monkeypatch.chdir(tmp_path)
    assert source_of(written) == meant
    chosen = resolve("fedavg", {"data": written}).data
    assert (chosen.name, getattr(chosen, "path", None)) == (meant[0].lower(), meant[1].get("path"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((np.zeros(4), np.zeros((4, 2))), "data is a tuple of arrays of shape (4,), (4, 2); expected x"),
        (
            [np.zeros((4, 2)), np.zeros(4)],
            "data of 'site 0' is ndarray of shape (4, 2) alone, without labels; expected",
        ),
        (np.zeros((4, 2)), "data is ndarray of shape (4, 2) alone, without labels; expected a tuple (x, y)"),
        (torch.zeros(4, 2), "data is Tensor of shape (4, 2) alone, without labels; expected a tuple (x, y)"),
        (torch.utils.data.TensorDataset(torch.zeros(4, 2)), "data is a TensorDataset of 1 tensors; expected two"),
        (torch.utils.data.DataLoader([1]), "data: item 0 is 1; expected a pair (x, y)"),
        (object(), "data is object; expected a tuple (x, y)"),
        (7, "data is 7; expected a name, a path, or data in memory"),
        (None, "data is NoneType; expected a name, a path, or data in memory"),
    ],
)
def test_data_in_another_form_is_one_line_that_says_how(given: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('data = "digits"\n')
    calls: list[Callable[[], object]] = [
        lambda: load(given),
        lambda: protofed.run("fedavg", data=given),
        lambda: protofed.run("fedavg", config=file, data=given),
        lambda: protofed.compare(["fedavg"], data=given),
        lambda: protofed.sweep(["fedavg"], over={"data": [given]}),
    ]
    for call in calls:
        text = refusal(call)
        assert text.startswith(said)


def test_a_data_frame_without_a_label_is_one_line_that_says_how() -> None:
    pandas = pytest.importorskip("pandas")
    text = refusal(lambda: protofed.run("fedavg", data=pandas.DataFrame({"a": [1.0, 2.0], "y": [0, 1]})))
    assert text == "in-memory: no column 'label'; found a, y (name the right one with label=COLUMN)"


@pytest.mark.parametrize("text", ["x" * 5000, "a/" * 3000, "~nobody-at-all/pictures", "a\0b"])
def test_a_path_that_cannot_be_one_is_one_line(text: str) -> None:
    assert "data" in refusal(lambda: load(text))


@pytest.mark.parametrize(
    ("train", "test", "said"),
    [
        (
            [1, 2, 3],
            None,
            "run from 1 to 3, which would be 4 classes, and no sample has the label 0; expected 3 classes",
        ),
        (
            [0, 1, 5],
            None,
            "run from 0 to 5, which would be 6 classes, and no sample has the label 2; expected 3 classes",
        ),
        (
            [0, 1, 10**8],
            None,
            "run from 0 to 100000000, which would be 100000001 classes, and no sample has the label 2",
        ),
        ([0, 1, 2], [0, 1, 7], "run from 0 to 7"),
        (np.array([0, 1, 2**63 + 5], np.uint64), None, "has the label 9223372036854775813"),
        (np.array([0, 1, 2**63 - 1], np.uint64), None, "which would be 9223372036854775808 classes"),
        ([0, -1, 1], None, "train labels run from -1 to 1"),
    ],
)
def test_labels_that_leave_out_a_class(train: Any, test: Any, said: str) -> None:
    more = {} if test is None else {"x_test": np.zeros((3, 2)), "y_test": np.array(test)}
    assert said in refusal(lambda: Dataset.from_arrays(np.zeros((3, 2)), np.array(train), **more, name="mine"))


def test_classes_without_samples_are_named_or_counted() -> None:
    x, y = np.zeros((3, 2)), np.array([0, 1, 3])
    assert Dataset.from_arrays(x, y, num_classes=5).num_classes == 5
    assert Dataset.from_arrays(x, y, class_names=("a", "b", "c", "d")).num_classes == 4
    assert Dataset.from_arrays(x, y, class_values=(0.0, 1.0, 2.0, 3.0)).num_classes == 4
    assert Dataset.from_arrays(x, y, x[:1], np.array([2])).num_classes == 4, "a class may be in the test part alone"


# --- digits, and what all sources share ----------------------------------------------------------------------------


def test_names() -> None:
    assert protofed.data.available() == [
        "cifar10",
        "cifar100",
        "csi",
        "csi-sim",
        "digits",
        "domains",
        "emnist",
        "fashion-mnist",
        "folder",
        "hub",
        "in-memory",
        "mimic-disposition",
        "mnist",
        "npy",
        "npz",
        "ntu-fi",
        "site-files",
        "stl10",
        "svhn",
        "table",
        "text",
        "tiny-imagenet",
        "usps",
        "ut-har",
        "widar",
    ]


def test_digits_is_the_same_every_time_and_stratified() -> None:
    data, again = load("digits", standardise=False), load("digits", standardise="false")
    assert data.x_train.shape == (1438, 1, 8, 8) and data.x_test is not None and data.x_test.shape == (359, 1, 8, 8)
    assert data.num_classes == 10 and data.class_names == tuple("0123456789") and data.name == "digits"
    assert float(data.x_train.min()) == 0 and float(data.x_train.max()) == 1
    assert torch.equal(data.x_test, again.x_test)
    assert data.y_test is not None and (torch.bincount(data.y_test) - 36).abs().max() <= 1
    # Fixed for good: another split would change every published number.
    assert data.y_test[:12].tolist() == [0, 4, 7, 5, 0, 9, 8, 8, 2, 4, 1, 1]


def test_standardised_by_the_training_part() -> None:
    data = load("digits")
    assert float(data.x_train.mean()) == pytest.approx(0, abs=1e-5)
    assert float(data.x_train.std()) == pytest.approx(1, abs=1e-3)
    assert data.x_test is not None and abs(float(data.x_test.mean())) > 1e-4


def test_limits_keep_the_first_of_each_class() -> None:
    full, some = load("digits", standardise=False), load("digits", limit_train=40, limit_test="20", standardise=False)
    assert torch.bincount(some.y_train).tolist() == [4] * 10 and some.y_test is not None
    assert torch.bincount(some.y_test).tolist() == [2] * 10
    first_threes = full.x_train[full.y_train == 3][:4]
    assert torch.equal(some.x_train[some.y_train == 3], first_threes)
    assert "limit_train must be at least 1" in refusal(lambda: load("digits", limit_train=0))


def test_unknown_names_and_settings() -> None:
    assert "unknown data set 'digitz'; did you mean 'digits'?" in refusal(lambda: load("digitz"))
    assert "did you mean 'standardise'" in refusal(lambda: load("digits", standardize=True))
    assert "'/nowhere/at/all': no such folder" in refusal(lambda: load("/nowhere/at/all"))
    assert "path is missing" in refusal(lambda: load("npz"))


def test_a_data_set_is_returned_as_it_is() -> None:
    data = Dataset.from_arrays(np.zeros((4, 3)), np.array([0, 1, 0, 1]))
    assert load(data) is data
    assert "settings limit_train do not apply" in refusal(lambda: load(data, limit_train=1))


# --- Dataset.from_arrays --------------------------------------------------------------------------------------------


def test_images_come_out_channels_first() -> None:
    y = np.array([0, 1, 1])
    colour = np.zeros((3, 8, 9, 3), np.uint8)
    colour[0, 1, 2] = (255, 0, 51)
    data = Dataset.from_arrays(colour, y)
    assert data.sample_shape == (3, 8, 9)
    assert data.x_train[0, :, 1, 2].tolist() == pytest.approx([1, 0, 0.2])
    assert Dataset.from_arrays(np.zeros((3, 8, 9), np.uint8), y).sample_shape == (1, 8, 9)
    assert Dataset.from_arrays(np.zeros((3, 3, 30, 200)), y).sample_shape == (3, 30, 200)
    assert Dataset.from_arrays(np.zeros((3, 30, 200)), y).sample_shape == (30, 200), "signals stay"


def test_text_group_ids_are_numbered_alike_in_both_parts() -> None:
    x, y = np.zeros((3, 2)), np.array([0, 1, 0])
    data = Dataset.from_arrays(x, y, x, y, group_train=np.array(["b", "a", "c"]), group_test=np.array(["c", "c", "a"]))
    assert data.group_train is not None and data.group_test is not None
    assert data.group_train.tolist() == [1, 0, 2] and data.group_test.tolist() == [2, 2, 0]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"y_train": np.array([0.0, 1.5, 1.0])},
            "y_train has the label 1.5, which is no whole number: this looks like",
        ),
        ({"y_train": np.array([0.0, np.nan, 1.0])}, "y_train: 1 of 3 labels are missing"),
        ({"y_train": np.array([[0], [1], [1]])}, "y_train must be one label for each sample, got shape (3, 1)"),
        ({"y_train": np.array([1j, 0, 0])}, "y_train must be integers or words, got complex128"),
        ({"y_train": np.array([0, 1])}, "3 train samples but labels of shape (2,)"),
        ({"y_train": np.array([0, -1, 1])}, "train labels run from -1 to 1; expected 0 to 1"),
        ({"y_train": np.array([0, 5, 1]), "num_classes": 3}, "train labels run from 0 to 5; expected 0 to 2"),
        ({"x_train": np.zeros(3)}, "x_train must be [samples, ...], got shape (3,)"),
        ({"x_train": np.array([["a"], ["b"], ["c"]])}, "x_train must be numbers"),
        ({"x_train": np.array([[1, 2], [np.nan, 0], [0, 0]])}, "NaN or infinity"),
        ({"x_train": np.zeros((0, 2)), "y_train": np.zeros(0, int)}, "at least one class is needed"),
        ({"x_test": np.zeros((1, 2))}, "x_test and y_test come together"),
        ({"x_test": np.zeros((1, 5)), "y_test": np.array([0])}, "a test sample has shape (5,), a training sample (2,)"),
        ({"group_train": np.array([0, 1])}, "group ids of shape (2,)"),
        ({"group_train": np.array([0.5, 1, 2])}, "group_train must be integers or text"),
        ({"class_names": ("a", "b", "c"), "num_classes": 2}, "3 class names for 2 classes"),
        ({"class_values": (1.0, 2.0, 3.0), "num_classes": 2}, "3 class values for 2 classes"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays: dict[str, object], message: str) -> None:
    whole: dict[str, object] = {"x_train": np.zeros((3, 2)), "y_train": np.array([0, 1, 1]), "name": "mine", **arrays}
    text = refusal(lambda: Dataset.from_arrays(**whole))  # type: ignore[arg-type]
    assert text.startswith("mine: ") and message in text


# --- idx ------------------------------------------------------------------------------------------------------------


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, stems: dict[str, np.ndarray], packed: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, array in stems.items():
        if packed:
            (folder / f"{stem}.gz").write_bytes(gzip.compress(idx_bytes(array)))
        else:
            (folder / stem).write_bytes(idx_bytes(array))


def mnist_like(n: int = 20) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "train-images-idx3-ubyte": rng.integers(0, 256, (n, 28, 28)),
        "train-labels-idx1-ubyte": np.arange(n) % 10,
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (10, 28, 28)),
        "t10k-labels-idx1-ubyte": np.arange(10),
    }


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("packed", [True, False])
def test_idx_files(tmp_path: Path, name: str, packed: bool) -> None:
    files = mnist_like()
    write_idx(tmp_path, files, packed)
    data = load(name, path=str(tmp_path), standardise=False)
    assert data.x_train.shape == (20, 1, 28, 28) and data.num_classes == 10 and len(data.class_names) == 10
    assert np.array_equal((data.x_train[:, 0] * 255).round().numpy(), files["train-images-idx3-ubyte"])
    assert data.y_test is not None and data.y_test.tolist() == list(range(10))
    assert data.flips is (name == "fashion-mnist"), "a mirrored 3 is no 3"


def test_idx_is_found_in_the_usual_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx(tmp_path / "home/.cache/protofed/mnist", mnist_like(10))
    assert len(load("mnist").y_train) == 10
    write_idx(tmp_path / "data/mnist/MNIST/raw", mnist_like(30))
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path / "data"))
    assert len(load("mnist").y_train) == 30, "a place a person named comes first"


def test_emnist_is_turned_and_letters_count_from_one(tmp_path: Path) -> None:
    image = np.zeros((1, 28, 28), np.uint8)
    image[0, 3, 20] = 255
    for split, first in (("letters", 1), ("balanced", 0)):
        stems = {}
        for part in ("train", "test"):
            stems[f"emnist-{split}-{part}-images-idx3-ubyte"] = image.repeat(26, 0)
            stems[f"emnist-{split}-{part}-labels-idx1-ubyte"] = np.arange(26) + first
        write_idx(tmp_path / "gzip", stems)
    letters = load("emnist", split="letters", path=str(tmp_path), standardise=False)
    assert letters.num_classes == 26 and letters.y_train.tolist() == list(range(26))
    assert float(letters.x_train[0, 0, 20, 3]) == 1 and float(letters.x_train[0, 0, 3, 20]) == 0
    balanced = load("emnist", path=str(tmp_path))
    assert balanced.num_classes == 47 and balanced.class_names[10] == "A" and balanced.class_names[-1] == "t"
    assert "emnist-digits-train-images" in refusal(lambda: load("emnist", split="digits", path=str(tmp_path)))
    assert "split='chinese'" in refusal(lambda: load("emnist", split="chinese"))


def test_missing_idx_files_say_what_where_and_how(tmp_path: Path) -> None:
    text = refusal(lambda: load("mnist"))
    for part in (
        "mnist: no train-images-idx3-ubyte",
        f"{tmp_path}/home/.cache/protofed/mnist",
        "path=",
        "hub:ylecun/mnist",
    ):
        assert part in text
    assert str(tmp_path / "empty") in refusal(lambda: load("mnist", path=str(tmp_path / "empty")))
    text = refusal(lambda: load("fashion-mnist", path=str(tmp_path)))
    assert "apt-get install dataset-fashion-mnist" in text
    files = mnist_like()
    del files["t10k-labels-idx1-ubyte"]
    write_idx(tmp_path, files)
    assert "mnist: t10k-labels-idx1-ubyte (or t10k-labels-idx1-ubyte.gz) is missing" in refusal(
        lambda: load("mnist", path=str(tmp_path))
    )


def test_damaged_idx_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "x-idx3-ubyte"
    good = idx_bytes(np.zeros((4, 5, 6)))
    packed = gzip.compress(good)
    for content, message in (
        (b"", "not an idx file"),
        (b"\x89PNG\r\n", "expected it to begin 000008, got '89504e'"),
        (good[:9], "cut off within its header"),
        (good[:-1], "its header promises 120 values of shape (4, 5, 6), it has 119"),
        (good + b"x", "it has 121"),
        (struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), "it has 0"),
        (packed[:-9], "damaged or unreadable"),
        (packed[:20] + bytes(5) + packed[25:], "damaged or unreadable"),
        (packed[:10], "damaged or unreadable"),
    ):
        file.write_bytes(content)
        text = refusal(lambda: read_idx(file))
        assert text.startswith(str(file)) and message in text


@pytest.mark.parametrize(
    ("stem", "array", "message"),
    [
        ("train-labels-idx1-ubyte", np.arange(19) % 10, "20 images, but train-labels-idx1-ubyte.gz has 19 labels"),
        ("train-labels-idx1-ubyte", np.arange(20), "train labels run from 0 to 19; expected 0 to 9"),
        ("train-labels-idx1-ubyte", np.zeros((20, 2)), "expected labels [n], got shape (20, 2)"),
        ("train-images-idx3-ubyte", np.zeros((20, 784)), "expected images [n, height, width], got shape (20, 784)"),
        ("t10k-images-idx3-ubyte", np.zeros((10, 27, 28)), "a test sample has shape (1, 27, 28)"),
    ],
)
def test_idx_files_that_do_not_fit(tmp_path: Path, stem: str, array: np.ndarray, message: str) -> None:
    write_idx(tmp_path, {**mnist_like(), stem: array})
    assert message in refusal(lambda: load("mnist", path=str(tmp_path)))


# --- CIFAR ----------------------------------------------------------------------------------------------------------


def python2_pickle(entries: dict[str, object]) -> bytes:
    """A pickle as Python 2 and its NumPy wrote the official files: protocol 2, byte strings, old module names."""

    def value(v: object) -> bytes:
        if isinstance(v, np.ndarray):
            n, width = v.shape
            return (
                b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
                + (b"(K\x01" + value(n) + value(width) + b"\x86")
                + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
                + (b"\x89T" + struct.pack("<I", v.size) + v.tobytes() + b"tb")
            )
        if isinstance(v, list):
            return b"](" + b"".join(map(value, v)) + b"e"
        if isinstance(v, int):
            return b"J" + struct.pack("<i", v)
        text = str(v).encode()
        return b"U" + bytes([len(text)]) + text

    return b"\x80\x02}(" + b"".join(value(k) + value(v) for k, v in entries.items()) + b"u."


def python3_pickle(entries: dict[str, object]) -> bytes:
    return pickle.dumps({k.encode(): v for k, v in entries.items()}, protocol=2)


def cifar_files(hundred: bool, write: Callable[[dict[str, object]], bytes]) -> dict[str, bytes]:
    rng = np.random.default_rng(1)
    classes, key = (100, "fine_labels") if hundred else (10, "labels")

    def batch(n: int) -> bytes:
        x = rng.integers(0, 256, (n, 3072)).astype(np.uint8)
        extra: dict[str, object] = {"coarse_labels": [0] * n} if hundred else {}
        return write({"batch_label": "training", key: [i % classes for i in range(n)], **extra, "data": x})

    if hundred:
        names: dict[str, object] = {"fine_label_names": [f"c{i}" for i in range(100)], "coarse_label_names": ["s"]}
        return {"train": batch(200), "test": batch(100), "meta": write(names)}
    parts = {f"data_batch_{i}": batch(20) for i in range(1, 6)}
    return {**parts, "test_batch": batch(10), "batches.meta": write({"label_names": [f"n{i}" for i in range(10)]})}


def write_cifar(root: Path, hundred: bool, files: dict[str, bytes], packed: bool) -> Path:
    folder = "cifar-100-python" if hundred else "cifar-10-batches-py"
    if packed:
        archive = root / ("cifar-100-python.tar.gz" if hundred else "cifar-10-python.tar.gz")
        with tarfile.open(archive, "w:gz") as tar:
            for name, content in files.items():
                info = tarfile.TarInfo(f"{folder}/{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        return archive
    (root / folder).mkdir()
    for name, content in files.items():
        (root / folder / name).write_bytes(content)
    return root / folder


@pytest.mark.parametrize("write", [python2_pickle, python3_pickle])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("hundred", [True, False])
def test_cifar(tmp_path: Path, hundred: bool, packed: bool, write: Callable[[dict[str, object]], bytes]) -> None:
    files = cifar_files(hundred, write)
    place = write_cifar(tmp_path, hundred, files, packed)
    name = "cifar100" if hundred else "cifar10"
    for path in (place, tmp_path):  # the archive or folder itself, or where it lies
        data = load(name, path=str(path), standardise=False)
        assert data.x_train.shape == ((200 if hundred else 100), 3, 32, 32)
        assert data.num_classes == (100 if hundred else 10) == len(data.class_names)
        assert data.class_names[3] == ("c3" if hundred else "n3") and data.flips is True
        assert data.y_test is not None and data.y_test.tolist() == list(range(data.num_classes))
    # the first 1,024 bytes of a row are the red channel
    rng = np.random.default_rng(1)
    first = rng.integers(0, 256, (200 if hundred else 20, 3072))[0]
    assert np.array_equal((data.x_train[0, 0] * 255).round().numpy().ravel(), first[:1024])


class Evil:
    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path(self.file),))


def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    files = cifar_files(False, python3_pickle)
    for evil in (
        pickle.dumps({b"data": Evil(str(mark))}, protocol=2),
        b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.",
        b"cbuiltins\neval\n(S'open(\"" + str(mark).encode() + b'","w")\'\ntR.',
    ):
        files["data_batch_2"] = evil
        folder = tmp_path / "cifar-10-batches-py"
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        text = refusal(lambda: load("cifar10", path=str(tmp_path)))
        assert "data_batch_2: refused: it asks for" in text
        assert not mark.exists()


def test_the_unpickler_admits_nothing_but_plain_arrays() -> None:
    for raw, message in (
        (pickle.dumps({"data": np.zeros(3, object)}, protocol=2), "refused: it asks for an array of"),
        (pickle.dumps({"data": np.zeros(3)}, protocol=2), "refused: it asks for an array of"),
        (pickle.dumps({"x": complex(1)}, protocol=2), "refused: it asks for"),
        (pickle.dumps([1, 2]), "expected a dictionary, got list"),
        (b"", "not a CIFAR file, or damaged (EOFError"),
        (b"no pickle at all", "not a CIFAR file, or damaged"),
        (python2_pickle({"a": 1})[:-2], "not a CIFAR file, or damaged"),
        (b"c_codecs\nencode\n(S'a'\nS'rot13'\ntR.", "refused: it asks for an encoding"),
    ):
        assert message in refusal(lambda raw=raw: read_batch(raw, "some/file"))


def test_a_shape_that_lies_is_found(tmp_path: Path) -> None:
    files = cifar_files(True, python2_pickle)
    honest = b"J" + struct.pack("<i", 200) + b"J" + struct.pack("<i", 3072)
    assert honest in files["train"]
    files["train"] = files["train"].replace(honest, b"J" + struct.pack("<i", 10**9) + honest[5:])
    write_cifar(tmp_path, True, files, packed=False)
    assert "cifar-100-python/train: its images are damaged" in refusal(lambda: load("cifar100", path=str(tmp_path)))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"labels": [0, 1]}, "no 'data' in it; found labels"),
        ({"data": np.zeros((2, 3072), np.uint8)}, "no 'labels' in it; found data"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]}, "expected a list of labels from 0 to 9"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, "2 images but 1 labels"),
        (
            {"data": np.zeros((2, 100), np.uint8), "labels": [0, 1]},
            "expected images [n, 3072] of bytes, got shape (2, 100)",
        ),
        ({"data": [1, 2], "labels": [0, 1]}, "expected images [n, 3072] of bytes, got list"),
    ],
)
def test_cifar_files_that_do_not_fit(tmp_path: Path, entries: dict[str, object], message: str) -> None:
    files = {**cifar_files(False, python2_pickle), "data_batch_3": python2_pickle(entries)}
    write_cifar(tmp_path, False, files, packed=False)
    text = refusal(lambda: load("cifar10", path=str(tmp_path)))
    assert "data_batch_3" in text and message in text


def test_missing_and_damaged_cifar_archives(tmp_path: Path) -> None:
    text = refusal(lambda: load("cifar10"))
    for part in (
        "cifar-10-python.tar.gz",
        "cifar-10-batches-py",
        ".cache/protofed/cifar10",
        "download https://",
        "path=",
    ):
        assert part in text
    files = cifar_files(False, python2_pickle)
    archive = write_cifar(tmp_path, False, files, packed=True)
    whole = archive.read_bytes()
    for content in (whole[: len(whole) // 2], b"<html>not found</html>", b""):
        archive.write_bytes(content)
        text = refusal(lambda: load("cifar10", path=str(archive)))
        assert str(archive) in text and ("not a tar archive, or damaged" in text or "is missing" in text)
    del files["data_batch_4"]
    write_cifar(tmp_path, False, files, packed=False)
    assert "data_batch_4 is missing" in refusal(lambda: load("cifar10", path=str(tmp_path / "cifar-10-batches-py")))


# --- npz ------------------------------------------------------------------------------------------------------------


def test_npz(tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    rng = np.random.default_rng(0)
    x, y = rng.normal(5, 3, (12, 4)), np.arange(12, dtype=np.uint8) % 3
    np.savez(file, x_train=x, y_train=y, x_test=x[:6], y_test=y[:6], group_train=y, group_test=y[:6], note="extra")
    data = load(str(file), standardise=False)
    assert torch.allclose(data.x_train, torch.from_numpy(x).float()) and data.num_classes == 3
    assert data.group_test is not None and data.group_test.tolist() == y[:6].tolist() and data.name == "mine.npz"
    scaled = load(file)
    assert torch.allclose(scaled.x_train.mean(0), torch.zeros(4), atol=1e-6)
    np.savez_compressed(file, x_train=x, y_train=y, class_names=["a", "b", "c"])
    data = load("npz", path=str(file))
    assert data.x_test is None and data.class_names == ("a", "b", "c") and data.class_values == ()
    np.savez(file, x_train=x, y_train=y, class_values=np.array([0, 2, 10]))
    assert load(file).class_values == (0.0, 2.0, 10.0)
    assert load(file).kind == "auto" and load(file, kind="csi").kind == "csi" and load(file).flips is None
    assert "kind='sound'" in refusal(lambda: load(file, kind="sound"))
    np.savez(file, x_train=x, y_train=y, group_train=np.array(["ward", "clinic", "home"])[y])
    data = load(file)
    assert data.group_train is not None and data.group_names == ("clinic", "home", "ward")
    assert [data.group_names[i] for i in data.group_train] == [["ward", "clinic", "home"][i] for i in y]


def test_npz_that_are_not_right(tmp_path: Path) -> None:
    file = tmp_path / "mine.npz"
    text = refusal(lambda: load(str(file)))
    assert f"{file}: no such file; expected an .npz file with x_train" in text
    arrays = {"x_train": np.zeros((4, 2)), "y_train": np.arange(4) % 2}
    for values in (np.array(["few", "many"]), np.zeros((2, 2))):
        np.savez(file, **arrays, class_values=values)
        assert f"{file}: class_values must be one number for each class" in refusal(lambda: load(file))
    for key, value in (("class_names", "cat"), ("class_values", 3.0), ("class_names", [["a"], ["b"]])):
        np.savez(file, **arrays, **{key: np.array(value)})
        assert f"{file}: {key} must be one" in refusal(lambda: load(file))
    np.savez(file, images=np.zeros(3), y_train=np.zeros(3))
    assert "no x_train in it; found images, y_train" in refusal(lambda: load(file))
    np.savez(file, x_train=np.array([{"a": 1}], dtype=object), y_train=np.zeros(1, int))
    assert "not an .npz file of plain arrays" in refusal(lambda: load(file))
    with file.open("wb") as stream:
        np.save(stream, np.zeros(3))
    assert "a single array, not an .npz archive" in refusal(lambda: load(file))
    np.savez(file, x_train=np.zeros((3, 2)), y_train=np.array([0, 1, 2]), x_test=np.zeros((2, 2)))
    assert "mine.npz: x_test and y_test come together" in refusal(lambda: load(file))
    np.savez(file, x_train=np.random.default_rng(0).random((50, 20)), y_train=np.zeros(50, int))
    whole = file.read_bytes()
    for content in (b"", b"hello", whole[:100], whole[:-30], whole[:300] + b"\xff" * 50 + whole[350:]):
        file.write_bytes(content)
        text = refusal(lambda: load(file))
        assert text.startswith(str(file)) and "damaged" in text


# --- image folders --------------------------------------------------------------------------------------------------


def paint(file: Path, colour: object, mode: str = "RGB", size: tuple[int, int] = (6, 4)) -> None:
    from PIL import Image

    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(file)  # type: ignore[arg-type]


def test_image_folder(tmp_path: Path) -> None:
    for name, colour in (("dog", (255, 0, 0)), ("cat", (0, 0, 255))):
        for i in range(3):
            paint(tmp_path / f"train/{name}/{i}.png", colour)
        paint(tmp_path / f"test/{name}/0.bmp", colour)
    paint(tmp_path / "train/dog/grey.PNG", 255, "L")
    (tmp_path / "train/dog/notes.txt").write_text("not an image")
    (tmp_path / "train/.hidden").mkdir()
    data = load(tmp_path, standardise=False)
    assert data.class_names == ("cat", "dog") and data.sample_shape == (3, 4, 6)
    assert data.y_train.tolist() == [0, 0, 0, 1, 1, 1, 1] and data.y_test is not None and len(data.y_test) == 2
    assert data.x_train[0, :, 0, 0].tolist() == [0, 0, 1] and data.x_train[3, :, 0, 0].tolist() == [1, 0, 0]
    assert data.x_train[6, :, 0, 0].tolist() == [1, 1, 1], "a grey image among colour ones"


def test_grey_image_folder_without_parts(tmp_path: Path) -> None:
    paint(tmp_path / "a/0.png", 51, "L")
    paint(tmp_path / "b/0.png", 1, "1")
    paint(tmp_path / "b/1.png", 65535, "I;16")
    data = load(str(tmp_path), standardise=False)
    assert data.sample_shape == (1, 4, 6) and data.x_test is None
    assert data.x_train[:, 0, 0, 0].tolist() == pytest.approx([0.2, 1, 1])


def test_image_sizes(tmp_path: Path) -> None:
    paint(tmp_path / "train/a/0.png", (0, 0, 0))
    paint(tmp_path / "train/b/0.jpg", (0, 0, 0), size=(9, 4))
    text = refusal(lambda: load(tmp_path))
    assert "b/0.jpg is 9×4 pixels" in text and "a/0.png is 6×4; set size=" in text
    assert load(tmp_path, size="8").sample_shape == (3, 8, 8)


def test_image_folders_that_are_not_right(tmp_path: Path) -> None:
    from PIL import Image

    assert "no such folder; expected images in" in refusal(lambda: load("folder", path=str(tmp_path / "none")))
    assert "no class folders" in refusal(lambda: load(tmp_path))
    (tmp_path / "train/a").mkdir(parents=True)
    assert "train/a: no images (.bmp" in refusal(lambda: load(tmp_path))
    paint(tmp_path / "train/a/0.png", (0, 0, 0))
    (tmp_path / "train/a/1.png").write_bytes(b"junk")
    assert "a/1.png: not an image, or damaged" in refusal(lambda: load(tmp_path))
    noise = np.random.default_rng(0).integers(0, 256, (4, 6, 3)).astype(np.uint8)
    Image.fromarray(noise).save(tmp_path / "train/a/1.png")
    whole = (tmp_path / "train/a/1.png").read_bytes()
    (tmp_path / "train/a/1.png").write_bytes(whole[: len(whole) // 2])
    assert "a/1.png: not an image, or damaged" in refusal(lambda: load(tmp_path))
    (tmp_path / "train/a/1.png").unlink()
    paint(tmp_path / "test/z/0.png", (0, 0, 0))
    assert "test/z: no such class in the training part; known: a" in refusal(lambda: load(tmp_path))


# --- the hub --------------------------------------------------------------------------------------------------------


def hub_set(n: int = 6, **more: object) -> object:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    features = {
        "picture": datasets.Image(),
        "kind": datasets.ClassLabel(names=["cat", "dog"]),
        "writer": datasets.Value("string"),
    }
    rows = {
        "picture": [Image.new("L", (5, 4), 51 * (i % 2)) for i in range(n)],
        "kind": [i % 2 for i in range(n)],
        "writer": [f"w{i % 3}" for i in range(n)],
    }
    for name, (feature, values) in more.items():  # type: ignore[misc]
        features[name], rows[name] = feature, values
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def test_hub_finds_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[tuple[str, object]] = []

    def load_dataset(path: str, name: str | None = None) -> object:
        asked.append((path, name))
        return datasets.DatasetDict({"train": hub_set(6), "test": hub_set(3)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load("hub:someone/animals", standardise=False, group="writer", config="small")
    assert asked == [("someone/animals", "small")]
    assert data.x_train.shape == (6, 1, 4, 5) and data.y_train.tolist() == [0, 1] * 3
    assert data.x_train[:, 0, 0, 0].tolist() == pytest.approx([0, 0.2] * 3)
    assert data.class_names == ("cat", "dog") and data.name == "hub:someone/animals"
    assert data.group_train is not None and data.group_train.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.y_test is not None and len(data.y_test) == 3
    assert "no split 'valid'; found train, test" in refusal(lambda: load("hub:a", split_test="valid"))
    assert "no column label='x'; found picture, kind, writer" in refusal(lambda: load("hub:a", label="x"))
    assert "no column group='x'" in refusal(lambda: load("hub:a", group="x"))


def test_hub_without_a_test_split_or_with_two_label_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    coarse = (datasets.ClassLabel(names=["animal"]), [0] * 6)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: datasets.DatasetDict({"train": hub_set(6, coarse=coarse)}))
    text = refusal(lambda: load("hub:a"))
    assert "several ClassLabel columns (kind, coarse)" in text and "choose one with label=" in text
    data = load("hub:a", label="coarse")
    assert data.x_test is None and data.num_classes == 1


def test_hub_copy_on_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": hub_set(4)}).save_to_disk(str(tmp_path / "copy"))
    assert len(load(f"hub:{tmp_path / 'copy'}").y_train) == 4


def test_hub_without_network_or_library(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(*_: object) -> object:
        raise ConnectionError("cannot reach the hub\nand a long story")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    text = refusal(lambda: load("hub:someone/animals"))
    assert "hub:someone/animals: could not be loaded (ConnectionError: cannot reach the hub)" in text
    assert "needs the network" in text
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'protofed[hub]'" in refusal(lambda: load("hub:someone/animals"))


def test_every_source_has_the_shared_settings() -> None:
    for name in sources:
        assert {"standardise", "limit_train", "limit_test"} <= set(sources.options(name))
