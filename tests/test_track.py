"""Trackers: real TensorBoard event files, a real MLflow store, and Weights & Biases offline."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest

from protofed.errors import ProtofedError
from protofed.results.track import round_values, tracker

SETTINGS = {"rounds": 2, "seed": 7, "method": {"name": "fedsap", "scale": 32.0}}
ROW = {
    "round": 1,
    "dropped": {"3": "late"},
    "loss": 1.25,
    "terms": {"ce": 1.0, "align": 0.25},
    "measures": {"acceptance": 0.5, "phase": 1},
    "up": {"prototypes": 100, "framing": 20},
    "down": {"prototypes": 300, "framing": 20},
    "seconds": 0.5,
}
METRICS = {"round": 1, "accuracy_head": 0.75, "accuracy_head@cnn": 0.5, "loss": 1.25, "bytes_up": 120, "seconds": 0.5}
SUMMARY = {"rounds": 2, "last_five": {"accuracy_head": 0.8}, "seconds": 1.0}
EXPECTED = {
    "train/loss": 1.25,
    "train/seconds": 0.5,
    "train/terms/ce": 1.0,
    "train/terms/align": 0.25,
    "train/measures/acceptance": 0.5,
    "train/measures/phase": 1.0,
    "train/bytes_up": 120.0,
    "train/bytes_down": 320.0,
    "train/dropped": 1.0,
    "evaluate/accuracy_head": 0.75,
    "evaluate/accuracy_head@cnn": 0.5,
}


def tell(name, folder):
    told = tracker(name, folder, SETTINGS)
    told.round(ROW, METRICS)
    told.round({**ROW, "round": 2, "loss": float("nan")})
    told.finish(SUMMARY)


def test_numbers_of_a_round():
    assert round_values(ROW, METRICS) == EXPECTED
    bare = round_values({"round": 1, "loss": None, "terms": {"ce": float("inf"), "x": "much", "y": True}}, None)
    assert bare == {"train/dropped": 0.0}


def test_tensorboard_writes_event_files(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tell("tensorboard", tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found["train/loss"] == [(1, 1.25)]  # a loss that does not exist is not written
    assert found["train/terms/align"] == [(1, 0.25), (2, 0.25)]
    assert found["evaluate/accuracy_head"] == [(1, 0.75)]
    assert found["summary/accuracy_head"] == [(2, pytest.approx(0.8))]
    assert set(EXPECTED) <= set(found)
    (text,) = events.Tensors("settings/text_summary")
    assert b"| method.scale | 32.0 |" in text.tensor_proto.string_val[0]


@pytest.mark.slow
def test_mlflow_has_parameters_metrics_and_status(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    mlflow = pytest.importorskip("mlflow")
    tell("mlflow", tmp_path)
    stopped = tracker("mlflow", tmp_path, SETTINGS)
    stopped.finish()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("protofed")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    assert [run.info.status for run in runs] == ["FINISHED", "KILLED"]
    run = runs[0]
    assert run.info.run_name == tmp_path.name
    assert run.data.params == {"rounds": "2", "seed": "7", "method.name": "fedsap", "method.scale": "32.0"}
    steps = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/terms/ce")]
    assert steps == [(1, 1.0), (2, 1.0)]
    assert run.data.metrics["evaluate/accuracy_head.cnn"] == 0.5
    assert run.data.metrics["summary/accuracy_head"] == 0.8
    assert not (tmp_path.parent / "mlruns").exists()


def test_wandb_is_called_as_it_wants(tmp_path, monkeypatch):
    """A stand-in for the package: the calls and what is in them."""
    calls = []

    class Run:
        summary = SimpleNamespace(update=lambda values: calls.append(("summary", values)))

        def log(self, values, step):
            calls.append(("log", step, values))

        def finish(self, exit_code):
            calls.append(("finish", exit_code))

    def init(**given):
        calls.append(("init", given))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    tell("wandb", tmp_path)
    (_, given), first, second, summary, finish = calls
    assert given["project"] == "protofed" and given["name"] == tmp_path.name and given["dir"] == str(tmp_path)
    assert given["config"]["method.scale"] == "32.0"
    assert first == ("log", 1, EXPECTED)
    assert second[1] == 2 and "train/loss" not in second[2]
    assert summary == ("summary", {"summary/accuracy_head": 0.8}) and finish == ("finish", 0)
    calls.clear()
    tracker("wandb", tmp_path, SETTINGS).finish()
    assert calls[-1] == ("finish", 1)


@pytest.mark.slow
def test_wandb_offline_writes_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    pytest.importorskip("wandb")
    tell("wandb", tmp_path)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    names = (b"train/terms/align", b"evaluate/accuracy_head", b"summary/accuracy_head", b"method.scale")
    deadline = time.monotonic() + 30  # its own process writes the file, and may be a little behind
    while not all(name in file.read_bytes() for name in names) and time.monotonic() < deadline:
        time.sleep(0.2)
    stored = file.read_bytes()
    assert [name for name in names if name not in stored] == []


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_named_with_its_pip_line(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ProtofedError, match=f"track={name}: .*pip install {name}$"):
        tracker(name, tmp_path, SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_tracker_is_named(tmp_path):
    with pytest.raises(ProtofedError, match="unknown tracker 'tensorbord'; did you mean 'tensorboard'"):
        tracker("tensorbord", tmp_path, SETTINGS)
