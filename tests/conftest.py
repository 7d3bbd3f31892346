"""Fixtures of all test files. Functions and constants that they share are in `support/`."""

from __future__ import annotations

import os
import signal
import sys

# Before torch and NumPy are loaded: the cores are for several tests at a time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from protofed import cli
from support.registries import registries_restored, registries_unchanged
from support.small import blobs

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A script that starts the tests in the background makes them deaf to Ctrl-C, and all commands that they start with them.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Federations over FLARE wait more than they compute: they begin first, and the other tests fill their time."""
    items.sort(key=lambda item: item.path.name != "test_over_flare.py")


@pytest.fixture(autouse=True)
def the_same_in_every_run():
    """One thread, and random draws that do not depend on which tests ran before."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_entry_left_behind():
    """A test that leaves an entry in a registry fails, and no other test sees the entry."""
    with registries_unchanged():
        yield


@pytest.fixture
def own_names():
    """What a test registers is forgotten after it."""
    with registries_restored():
        yield


@pytest.fixture
def seeded():
    """Random draws that are the same in every run, and that no other test sees."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home folder: no data and no cache of whoever runs the tests is seen."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PROTOFED_DATA", raising=False)
    return tmp_path / "home"


@pytest.fixture
def tiny():
    return blobs()


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
