import sys

import pytest
import torch

from protofed import cli, methods
from protofed.data import Dataset


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def blobs(classes=4, per_class=40, features=6, seed=0, test_per_class=10):
    """A small, learnable data set: Gaussian blobs."""
    g = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(classes, features, generator=g)

    def draw(n):
        y = torch.arange(classes).repeat_interleave(n)
        return centres[y] + torch.randn(len(y), features, generator=g), y

    (x_train, y_train), (x_test, y_test) = draw(per_class), draw(test_per_class)
    return Dataset.from_arrays(x_train, y_train, x_test, y_test, num_classes=classes, name="blobs")


@pytest.fixture
def tiny():
    return blobs()


SMALL = {
    "clients": 5,
    "rounds": 3,
    "partition": "n-way",
    "way": 2,
    "shot": 8,
    "model": "mlp",
    "embedding": 5,
    "hidden": [7],
    "batch": 4,
    "engine": "loop",
    "layout": "contiguous",
    "threads": 1,
    "workers": 1,
}


AT_SERVER = [name for name in methods.available() if methods.get(name).teacher is not None]


def labels_for(method):
    """Settings without which a method whose server trains on samples has none."""
    return {"labels": "server", "server_labels": 12} if method in AT_SERVER else {}


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """`call("run", "fedsap")` → exit code, standard output, standard error; in an empty working folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["protofed", *map(str, words)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run
