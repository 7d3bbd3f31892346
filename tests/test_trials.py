"""Trials that choose a setting: no sample that a table is scored on reaches them."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from protofed.data import sources

ROOT = Path(__file__).parent.parent
STRANGE = 1e6  # every value of a test sample
SITES = [f"{room}, session {session}" for room in ("large room", "small room") for session in (1, 2)]


@pytest.fixture
def trials():
    """What benchmarks/trials.py defines."""
    return runpy.run_path(str(ROOT / "benchmarks" / "trials.py"))


@pytest.fixture
def file(tmp_path):
    """A table's data: 160 training samples of 4 classes in 4 sites, each with its row as first value, and 40 for tests."""
    x = np.random.default_rng(0).normal(size=(160, 6)).astype(np.float32)
    x[:, 0] = np.arange(160)
    groups, labels = np.repeat(SITES, 40), np.tile(np.arange(4), 40)
    path = tmp_path / "data" / "csi-crowd.npz"
    path.parent.mkdir()
    tests = {"x_test": np.full((40, 6), STRANGE, np.float32), "y_test": labels[:40], "group_test": np.repeat(SITES, 10)}
    np.savez(path, x_train=x, y_train=labels, group_train=groups, class_values=np.arange(4), **tests)
    return path


def source(file, **options):
    return sources.make("npz", {"path": str(file), "standardise": "none", **options})


def rows(x):
    return set(x[:, 0].int().tolist())


def test_a_fifth_of_the_training_part_tests_and_keeps_its_sites(trials, file):
    data, text = trials["without_tests"](source(file), "central")
    assert rows(data.x_train) | rows(data.x_test) == set(range(160)) and len(data.x_test) == 32
    for x, y, groups in (
        (data.x_train, data.y_train, data.group_train),
        (data.x_test, data.y_test, data.group_test),
    ):
        names = [data.group_name(group) for group in groups.tolist()]
        assert [(n % 4, SITES[n // 40]) for n in x[:, 0].int().tolist()] == list(zip(y.tolist(), names, strict=True))
    assert "128 and 32" in text and "default_rng(5)" in text


def test_one_session_trains_and_the_other_tests_the_same_room(trials, file):
    data, _ = trials["without_tests"](source(file), "local", ("session 1", "session 2"))
    assert rows(data.x_train) == {*range(40), *range(80, 120)} and rows(data.x_test) == {
        *range(40, 80),
        *range(120, 160),
    }
    assert {data.group_name(group) for group in data.group_test.tolist()} == {SITES[0], SITES[2]}
    assert all((row < 80) == (group < 2) for row, group in zip(data.x_test[:, 0], data.group_test, strict=True))


def test_rows_of_which_clients_hold_some_out_are_not_used_either(trials, file):
    alone = file.with_name("alone.npz")
    with np.load(file) as arrays:
        np.savez(alone, **{key: arrays[key] for key in ("x_train", "y_train", "x_test", "y_test")})
    data, text = trials["without_tests"](source(alone, limit_train=40), "local")
    assert min(rows(data.x_train) | rows(data.x_test)) >= 40 and len(data.x_train) == 40 and "Nor are the 40" in text
    with pytest.raises(SystemExit, match="the tables take all of its training samples"):
        trials["without_tests"](source(alone), "local")


def test_simulated_windows_are_others(trials):
    small = {"rooms": 1, "people": 1, "windows_per_class": 2, "packets": 4, "subcarriers": 2}
    one = sources.make("csi-sim", small)
    data, text = trials["without_tests"](one, "local")
    assert (data.x_train != one.load().x_train).all() and "seed 5 in place of 0" in text


def test_the_runs_of_a_preset_get_training_samples_alone(trials, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    names = trials["main"].__globals__
    real = names["run"]
    monkeypatch.setitem(names, "run", lambda settings, **options: seen.append(settings) or real(settings, **options))
    asked = ["out.md", "fedapa/table3", "one architecture", "--rows", "Local", "--question", "Which rate?"]
    trials["main"]([*asked, "--trial", "rounds=1", "--trial", "rounds=1 lr=0.1"])
    assert [s.general.lr for s in seen] == [0.01, 0.1] and {s.general.seed for s in seen} == {77}
    assert all(x.abs().max() < 100 for s in seen for x in (s.data.x_train, s.data.x_test))
    page = (tmp_path / "out.md").read_text(encoding="utf-8")
    assert "Which rate?" in page and "The test part of csi-crowd.npz is not used." in page
    assert "| rounds=1 lr=0.1 | Local |" in page and "python benchmarks/trials.py out.md fedapa/table3" in page
    with pytest.raises(SystemExit, match="may not change which samples"):
        trials["main"]([*asked, "--trial", "data.standardise=false"])
