"""Trackers: a run told to TensorBoard, MLflow or Weights & Biases while it goes on.

The run folder stays the truth; a tracker gets the same numbers under the same names. Rounds are `train/…`, evaluations
`evaluate/…`, the summary's figures `summary/…`.
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
    """Told of a run: once at the start, after every round, once at the end."""

    def start(self, settings: Mapping[str, Any]) -> None: ...

    def round(self, row: Mapping[str, Any], metrics: Mapping[str, Any] | None = None) -> None:
        """`row` as in rounds.jsonl; `metrics` as in metrics.jsonl where this round was evaluated."""

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        """With the summary; without it the run was stopped."""


def tracker(name: str, folder: str | Path, settings: Mapping[str, Any]) -> Tracker:
    """The tracker of that name, started. It writes beside the run folder's own files."""
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    made = TRACKERS[name](Path(folder))
    made.start(settings)
    return made


def numbers(row: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Every finite number of a round by its name: `train/terms/ce`, `train/bytes_up`, `evaluate/accuracy_head`."""
    found: dict[str, Any] = {f"train/{key}": row.get(key) for key in ("loss", "seconds")}
    for inner in ("terms", "measures"):
        found |= {f"train/{inner}/{name}": value for name, value in (row.get(inner) or {}).items()}
    for direction in ("up", "down"):
        if row.get(direction):
            found[f"train/bytes_{direction}"] = sum(row[direction].values())
    found["train/dropped"] = len(row.get("dropped") or ())
    cost = ("round", "loss", "seconds", "bytes_up", "bytes_down", "dropped_clients")  # these are of the round
    found |= {f"evaluate/{key}": value for key, value in (metrics or {}).items() if key not in cost}
    return {key: float(value) for key, value in found.items() if _is_number(value)}


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
    """Event files in `FOLDER/tensorboard`."""

    def __init__(self, folder: Path) -> None:
        _package("tensorboard")
        writer = _package("tensorboard", "torch.utils.tensorboard").SummaryWriter
        self._writer = writer(log_dir=str(folder / "tensorboard"))

    def start(self, settings: Mapping[str, Any]) -> None:
        lines = (f"| {key} | {value} |" for key, value in flat(settings).items())
        self._writer.add_text("settings", "\n".join(["| setting | value |", "| --- | --- |", *lines]), 0)

    def round(self, row: Mapping[str, Any], metrics: Mapping[str, Any] | None = None) -> None:
        for name, value in numbers(row, metrics).items():
            self._writer.add_scalar(name, value, row["round"])
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        for name, value in _figures(summary).items():
            self._writer.add_scalar(name, value, summary["rounds"] if summary else 0)
        self._writer.close()


class MLflow:
    """A run in the experiment `protofed`, on the server that `MLFLOW_TRACKING_URI` names, or in `FOLDER/mlflow`."""

    def __init__(self, folder: Path) -> None:
        mlflow = _package("mlflow")
        uri, artifacts = mlflow.get_tracking_uri(), None
        if not mlflow.is_tracking_uri_set():
            place = folder.resolve() / "mlflow"
            place.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{place / 'mlflow.db'}", place.as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name("protofed")
        experiment = known.experiment_id if known else self._client.create_experiment("protofed", artifacts)
        self._run = self._client.create_run(experiment, run_name=folder.resolve().name).info.run_id
        self._entities = mlflow.entities

    def start(self, settings: Mapping[str, Any]) -> None:
        parameters = [self._entities.Param(key, value[:LONGEST]) for key, value in flat(settings).items()]
        for begin in range(0, len(parameters), 100):  # as many as one call may hold
            self._client.log_batch(self._run, params=parameters[begin : begin + 100])

    def round(self, row: Mapping[str, Any], metrics: Mapping[str, Any] | None = None) -> None:
        self._log(numbers(row, metrics), row["round"])

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        self._log(_figures(summary), summary["rounds"] if summary else 0)
        self._client.set_terminated(self._run, "FINISHED" if summary else "KILLED")

    def _log(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._entities.Metric(name.replace("@", "."), value, now, step) for name, value in values.items()]
        if metrics:
            self._client.log_batch(self._run, metrics=metrics)


class WandB:
    """A run of the project `protofed`; where it is sent, if anywhere, is for `WANDB_MODE` and `wandb login` to say."""

    def __init__(self, folder: Path) -> None:
        self._wandb = _package("wandb")
        self._folder = folder
        self._run: Any = None

    def start(self, settings: Mapping[str, Any]) -> None:
        place = {"dir": str(self._folder), "name": self._folder.resolve().name}
        self._run = self._wandb.init(project="protofed", config=flat(settings), **place)

    def round(self, row: Mapping[str, Any], metrics: Mapping[str, Any] | None = None) -> None:
        self._run.log(numbers(row, metrics), step=row["round"])

    def finish(self, summary: Mapping[str, Any] | None = None) -> None:
        self._run.summary.update(_figures(summary))
        self._run.finish(exit_code=0 if summary else 1)


TRACKERS: dict[str, type[TensorBoard] | type[MLflow] | type[WandB]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}
