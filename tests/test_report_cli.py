"""From a run to its page, figures and trackers, as a person does it."""

import importlib
import json
import re
import signal
import subprocess
import sys
import urllib.request
from functools import partial

import numpy as np
import pytest

import protofed as pf
from protofed import cli
from support.small import SMALL, blobs

KEYS = ["data=digits", "clients=4", "shot=6", "rounds=4", "evaluate_every=2", "engine=loop", "threads=1", "workers=1"]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    place = tmp_path_factory.mktemp("report") / "c"
    words = ["compare", "fedproto", *KEYS, "layout=contiguous", "--seeds", "2", "--jobs", "1", "--out", str(place)]
    subprocess.run([sys.executable, "-m", "protofed", *words], check=True, capture_output=True)
    return place


def test_a_run_keeps_snapshots_spread_over_its_rounds(tmp_path):
    result = pf.run("fedproto", out=tmp_path / "r", **{**SMALL, "data": blobs(), "rounds": 6, "snapshots": 3})
    names = sorted(file.name for file in (tmp_path / "r" / "snapshots").iterdir())
    assert names == ["round-000001.npz", "round-000003.npz", "round-000006.npz"] and result.metrics
    with np.load(tmp_path / "r" / "snapshots" / names[-1]) as held:
        n = len(held["y"])
        assert held["z"].shape == (n, 5) and held["client"].shape == (n,) and held["client"].max() <= 5
        assert held["prototypes"].shape == (4, 5) and held["known"].shape == (4,)
    assert not (tmp_path / "none").exists()
    pf.run("fedproto", out=tmp_path / "none", **{**SMALL, "data": blobs(), "rounds": 2, "snapshots": 0})
    assert not (tmp_path / "none" / "snapshots").exists()


@pytest.mark.slow
def test_report_and_figures_of_a_comparison(comparison, monkeypatch, capsys):
    for words, wanted in (
        (["report", str(comparison)], "report.html"),
        (["figures", str(comparison)], "accuracy-head.pdf"),
    ):
        monkeypatch.setattr(sys, "argv", ["protofed", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code and wanted in capsys.readouterr().out.replace("\n", "")
    page = (comparison / "report.html").read_text(encoding="utf-8")
    assert "fedproto" in page and not re.search(r'(src|href)="https?://', page)


def test_a_folder_that_is_none_gives_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["protofed", "report", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and "nowhere" in capsys.readouterr().err


@pytest.mark.slow
def test_watch_serves_the_page_until_it_is_interrupted(comparison):
    words = [sys.executable, "-m", "protofed", "watch", str(comparison), "--port", "0"]
    # a shell that starts tests in the background has them ignore Ctrl-C, and their children would too
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=listen)
    try:
        line = process.stdout.readline()
        address = re.search(r"http://[\d.]+:\d+/?", line)[0].rstrip("/")
        assert "fedproto" in urllib.request.urlopen(f"{address}/", timeout=60).read().decode()
        assert json.loads(urllib.request.urlopen(f"{address}/content.json", timeout=60).read())
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()


def test_a_run_that_is_tracked(tmp_path):
    tracked = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    keys = {**SMALL, "data": blobs(), "rounds": 3, "track": "tensorboard"}
    result = pf.run("fedproto", out=tmp_path / "r", **keys)
    files = list((tmp_path / "r" / "tensorboard").rglob("events.*"))
    assert len(files) == 1
    events = tracked.EventAccumulator(str(files[0].parent))
    events.Reload()
    tag = next(name for name in events.Tags()["scalars"] if name.endswith("accuracy_prototype"))
    values = [event.value for event in events.Scalars(tag)]
    assert values[:3] == pytest.approx([row["accuracy_prototype"] for row in result.metrics])


def test_a_tracker_is_told_when_a_run_breaks_off(tmp_path, monkeypatch):
    told = []

    class Witness:
        def round(self, row, metrics):
            told.append(row["round"])

        def finish(self, summary=None):
            told.append(summary)

    monkeypatch.setattr(importlib.import_module("protofed.experiment.run"), "tracker", lambda *_: Witness())

    def stop(record, rounds):
        raise KeyboardInterrupt

    keys = {**SMALL, "data": blobs(), "rounds": 3, "track": "mlflow"}
    with pytest.raises(KeyboardInterrupt):
        pf.run("fedproto", out=tmp_path / "r", watch=stop, **keys)
    assert told == [1, None]


def test_a_result_draws_itself(tmp_path):
    keys = {**SMALL, "data": blobs(), "rounds": 2}
    result = pf.run("fedproto", out=tmp_path / "r", **keys)
    for name in ("accuracy", "loss", "clients", "confusion", "embedding"):
        assert getattr(result, f"plot_{name}")().axes, name
    unsaved = pf.run("fedproto", **keys)
    assert unsaved.plot_accuracy().axes and unsaved.plot_loss().axes
    with pytest.raises(pf.ProtofedError):
        unsaved.plot_clients()
