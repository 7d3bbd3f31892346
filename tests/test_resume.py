"""A run killed at any moment and resumed is bit-equal to one never stopped."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import protofed as pf
from protofed.errors import ProtofedError
from support.marks import slow_but
from support.small import SMALL, blobs, labels_for

KEYS = ["rounds=40", "clients=6", "shot=8", "checkpoint_every=3", "participation=0.7", "batch=4", "hidden=32"]


def command(*words):
    return [sys.executable, "-m", "protofed", *words]


def checkpoint_of(folder):
    return sorted((folder / "checkpoint").glob("round-*"))[-1]


def rounds_in(folder):
    file = folder / "rounds.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def comparable(folder: Path) -> dict[str, object]:
    """Everything a run wrote but the clock's readings."""
    rows = {}
    for name in ("metrics.jsonl", "rounds.jsonl", "clients.jsonl"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        rows[name] = [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
    summary = json.loads((folder / "summary.json").read_text())
    for clock in ("seconds", "rows", "digest"):
        summary.pop(clock)
    files = {f.name: f.read_bytes() for f in checkpoint_of(folder).iterdir() if f.name != "manifest.json"}
    return {**rows, "summary": summary, "checkpoint": files, "settings": (folder / "settings.toml").read_text()}


ENGINES = {
    "auto": [],
    "stack": ["engine=stack", "convolution=grouped", "workers=1", "threads=1"],
    "workers": ["engine=workers", "inner=loop", "layout=contiguous", "workers=2", "threads=1"],
}


UNLABELLED = ["labels=client", "labels_per_class=3", "refresh=4"]


@pytest.mark.parametrize(
    ("method", "engine", "more"),
    [
        ("fedavg", "stack", []),
        ("protofssl", "workers", UNLABELLED),
    ],
)
@pytest.mark.slow
@pytest.mark.soak
def test_kill_9_and_resume_is_bit_equal(method, engine, more, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = [method, *KEYS, *ENGINES[engine], *more]
    process = subprocess.Popen(command("run", *words, "--out", str(killed)), stdout=subprocess.DEVNULL)
    for attempt, rounds in enumerate((5, 17, 29)):
        deadline = time.monotonic() + 60
        while rounds_in(killed) < rounds and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() != 0, "the run ended before it could be killed"
        assert not (killed / "summary.json").exists()
        if attempt < 2:
            process = subprocess.Popen(command("resume", str(killed)), stdout=subprocess.DEVNULL)
    subprocess.run(command("resume", str(killed)), check=True, capture_output=True)
    same = ["--config", str(killed / "settings.toml"), "--out", str(whole)]  # with the engine that was chosen
    subprocess.run(command("run", method, *same), check=True, capture_output=True)
    assert comparable(killed) == comparable(whole)


def stop_after(round):
    def watch(record, rounds):
        if record.round == round:
            raise KeyboardInterrupt

    return watch


KEEPING = [(method, True) for method in pf.methods.available()]


@pytest.mark.parametrize(
    ("method", "keep"),
    [*slow_but((("fedavg", True), ("fedsap", True), ("fedarpl", True)), KEEPING), ("fedsap", False)],
)
def test_every_method_resumes(method, keep, tmp_path):
    data = blobs()
    keys = {**SMALL, "data": data, "rounds": 6, "checkpoint_every": 2, "keep_optimiser": keep, "optimiser": "adam"}
    keys |= labels_for(method)
    pf.run(method, out=tmp_path / "whole", **keys)
    with pytest.raises(KeyboardInterrupt):
        pf.run(method, out=tmp_path / "cut", watch=stop_after(3), **keys)
    pf.resume(tmp_path / "cut", data=data)
    assert comparable(tmp_path / "cut") == comparable(tmp_path / "whole")


SEMI = {"labels": "client", "labels_per_class": 4, "shot": 16}


@pytest.mark.parametrize("method", ["protofssl", "fixmatch-fedprox", "fedmatch", "fedrgd", "fedsap"])
@pytest.mark.slow
def test_a_run_with_unlabelled_samples_resumes(method, tmp_path):
    """Thresholds, helpers and groups are kept by server and clients; views and pseudo-labels are drawn again alike."""
    own = {
        "protofssl": {"refresh": 3, "helpers": 2, "noise": 0.1},
        "fedmatch": {"refresh": 3, "lr": 0.002, "threshold": 0.3},
        "fixmatch-fedprox": {"threshold": 0.3},
        "fedrgd": {"together": 5, "threshold": 0.3},
        "fedsap": {"supervised_rounds": 3, "unlabelled": "open"},
    }
    data = blobs(per_class=60)
    keys = {
        **SMALL,
        **SEMI,
        "data": data,
        "rounds": 6,
        "checkpoint_every": 2,
        "participation": 0.7,
        **own.get(method, {}),
    }
    pf.run(method, out=tmp_path / "whole", **keys)
    with pytest.raises(KeyboardInterrupt):
        pf.run(method, out=tmp_path / "cut", watch=stop_after(5), **keys)
    pf.resume(tmp_path / "cut", data=data)
    assert comparable(tmp_path / "cut") == comparable(tmp_path / "whole")
    measured = [row.get("measures") for row in comparable(tmp_path / "whole")["rounds.jsonl"]]
    assert any(measured) and measured[-1]["acceptance"] > 0


def test_a_kill_before_the_first_checkpoint_starts_again(tmp_path):
    data = blobs()
    keys = {**SMALL, "data": data, "rounds": 4}
    pf.run("fedproto", out=tmp_path / "whole", **keys)
    with pytest.raises(KeyboardInterrupt):
        pf.run("fedproto", out=tmp_path / "cut", watch=stop_after(2), **keys)
    pf.resume(tmp_path / "cut", data=data)
    assert comparable(tmp_path / "cut") == comparable(tmp_path / "whole")


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    data = blobs()
    pf.run("fedproto", out=tmp_path / "run", **{**SMALL, "data": data})
    before = comparable(tmp_path / "run")
    pf.resume(tmp_path / "run", data=data)
    assert comparable(tmp_path / "run") == before


@pytest.fixture
def cut(tmp_path):
    data = blobs()
    with pytest.raises(KeyboardInterrupt):
        pf.run(
            "fedproto",
            out=tmp_path / "cut",
            watch=stop_after(3),
            **{**SMALL, "data": data, "rounds": 6, "checkpoint_every": 2},
        )
    return tmp_path / "cut", data


def test_a_half_written_line_is_forgotten(cut):
    folder, data = cut
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "accu')
    assert len(pf.resume(folder, data=data).metrics) == 6


def test_settings_that_were_changed_are_refused(cut):
    folder, data = cut
    text = (folder / "settings.toml").read_text()
    (folder / "settings.toml").write_text(text.replace("embedding = 5", "embedding = 6"))
    with pytest.raises(ProtofedError, match="not what the run began with"):
        pf.resume(folder, data=data)


def test_a_checkpoint_of_another_model_is_refused(cut):
    folder, data = cut
    wide = {**SMALL, "data": data, "rounds": 2, "embedding": 6}
    pf.run("fedproto", out=folder.parent / "other", **wide)
    for place in (folder / "checkpoint").iterdir():
        shutil.rmtree(place)
    shutil.copytree(checkpoint_of(folder.parent / "other"), folder / "checkpoint" / "round-000002")
    with pytest.raises(ProtofedError, match="does not fit"):
        pf.resume(folder, data=data)


def test_other_data_is_refused(cut):
    folder, data = cut
    shuffled = replace(data, y_train=data.y_train.flip(0))
    fewer = replace(data, x_train=data.x_train[1:], y_train=data.y_train[1:])
    for other in (shuffled, fewer):
        with pytest.raises(ProtofedError, match="the data is not what the run began with"):
            pf.resume(folder, data=other)
    pf.resume(folder, data=replace(data, name="the same under another name"))


def test_data_given_in_python_must_be_given_again(cut):
    with pytest.raises(ProtofedError, match="data="):
        pf.resume(cut[0])
