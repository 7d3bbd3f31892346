"""Trackers, which send the numbers of a run to TensorBoard, MLflow or Weights & Biases while it goes on.

The run folder is the record of the run; a tracker gets the same numbers under the same names. The numbers of a round begin
with `train/`, those of an evaluation with `evaluate/`, and the summary's figures with `summary/`.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ..errors import ProtofedError, unknown
from .rows import FIGURE
from .tables import flat

LONGEST = 500  # characters of a setting: the shortest limit of the trackers


class Tracker(Protocol):
    """The receiver of a run's numbers: it is called at the start, after every round and at the end."""

    def start(self, settings: Mapping[str, Any]) -> None:
        """Record the settings of the run."""

    def round(self, row: Mapping[str, Any], metrics: Mapping[str, Any] | None = None) -> None:
        """Record a round: its row of rounds.jsonl, and its row of metrics.jsonl where it was evaluated."""

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        """Record the summary and close; None means that the run was stopped."""


def tracker(name: str, folder: str | Path, settings: Mapping[str, Any]) -> Tracker:
    """Make a tracker and start it.

    Args:
        name: `tensorboard`, `mlflow` or `wandb`.
        folder: The run folder, in which a tracker that writes files has a folder of its own.
        settings: The settings of the run.

    Returns:
        The tracker, which has recorded the settings.
    """
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    started = TRACKERS[name](Path(folder))
    started.start(settings)
    return started


def round_values(row: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Every finite number of a round by its name: `train/terms/ce`, `train/bytes_up`, `evaluate/accuracy_head`."""
    values: dict[str, Any] = {f"train/{key}": row.get(key) for key in ("loss", "seconds")}
    for inner in ("terms", "measures"):
        values |= {f"train/{inner}/{name}": value for name, value in (row.get(inner) or {}).items()}
    for direction in ("up", "down"):
        if row.get(direction):
            values[f"train/bytes_{direction}"] = sum(row[direction].values())
    values["train/dropped"] = len(row.get("dropped") or ())
    cost = ("round", "loss", "seconds", "bytes_up", "bytes_down", "dropped_clients")  # these are numbers of the round
    values |= {f"evaluate/{key}": value for key, value in (metrics or {}).items() if key not in cost}
    return {key: float(value) for key, value in values.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _figures(summary: Mapping[str, Any] | None) -> dict[str, float]:
    figures = (summary or {}).get(FIGURE, {})
    return {f"summary/{key}": float(value) for key, value in figures.items() if _is_number(value)}


def _package(name: str, module: str | None = None) -> Any:
    try:
        return importlib.import_module(module or name)
    except ImportError as error:
        raise ProtofedError(f"track={name}: {error}; pip install {name}") from None


class TensorBoard:
    """A tracker that writes event files to `FOLDER/tensorboard`."""

    def __init__(self, folder: Path) -> None:
        _package("tensorboard")
        writer = _package("tensorboard", "torch.utils.tensorboard").SummaryWriter
        self._writer = writer(log_dir=str(folder / "tensorboard"))

    def start(self, settings: Mapping[str, Any]) -> None:
        """Record the settings of the run."""
        lines = (f"| {key} | {value} |" for key, value in flat(settings).items())
        self._writer.add_text("settings", "\n".join(["| setting | value |", "| --- | --- |", *lines]), 0)

    def round(self, row: Mapping[str, Any], metrics: Mapping[str, Any] | None = None) -> None:
        """Record a round, and its evaluation where it had one."""
        for name, value in round_values(row, metrics).items():
            self._writer.add_scalar(name, value, row["round"])
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        """Record the summary and close; None means that the run was stopped."""
        for name, value in _figures(summary).items():
            self._writer.add_scalar(name, value, summary["rounds"] if summary else 0)
        self._writer.close()


class MLflow:
    """A run in the experiment `protofed`, on the server that `MLFLOW_TRACKING_URI` names, or in `FOLDER/mlflow`."""

    def __init__(self, folder: Path) -> None:
        mlflow = _package("mlflow")
        uri, artifacts = mlflow.get_tracking_uri(), None
        if not mlflow.is_tracking_uri_set():
            store = folder.resolve() / "mlflow"
            store.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{store / 'mlflow.db'}", store.as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name("protofed")
        experiment = known.experiment_id if known else self._client.create_experiment("protofed", artifacts)
        self._run = self._client.create_run(experiment, run_name=folder.resolve().name).info.run_id
        self._entities = mlflow.entities

    def start(self, settings: Mapping[str, Any]) -> None:
        """Record the settings of the run."""
        parameters = [self._entities.Param(key, value[:LONGEST]) for key, value in flat(settings).items()]
        for begin in range(0, len(parameters), 100):  # as many as one call may hold
            self._client.log_batch(self._run, params=parameters[begin : begin + 100])

    def round(self, row: Mapping[str, Any], metrics: Mapping[str, Any] | None = None) -> None:
        """Record a round, and its evaluation where it had one."""
        self._log(round_values(row, metrics), row["round"])

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        """Record the summary and close; None means that the run was stopped."""
        self._log(_figures(summary), summary["rounds"] if summary else 0)
        self._client.set_terminated(self._run, "FINISHED" if summary else "KILLED")

    def _log(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(name.replace("@", "."), value, now, step) for name, value in values.items()]
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)


class WandB:
    """A run of the project `protofed`; `WANDB_MODE` and `wandb login` say where it is sent, if anywhere."""

    def __init__(self, folder: Path) -> None:
        self._wandb = _package("wandb")
        self._folder = folder
        self._run: Any = None

    def start(self, settings: Mapping[str, Any]) -> None:
        """Record the settings of the run."""
        destination = {"dir": str(self._folder), "name": self._folder.resolve().name}
        self._run = self._wandb.init(project="protofed", config=flat(settings), **destination)

    def round(self, row: Mapping[str, Any], metrics: Mapping[str, Any] | None = None) -> None:
        """Record a round, and its evaluation where it had one."""
        self._run.log(round_values(row, metrics), step=row["round"])

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        """Record the summary and close; None means that the run was stopped."""
        self._run.summary.update(_figures(summary))
        self._run.finish(exit_code=0 if summary else 1)


TRACKERS: dict[str, type[TensorBoard] | type[MLflow] | type[WandB]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}
