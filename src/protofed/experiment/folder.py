"""The run folder: `settings.toml`, `metrics.jsonl`, `rounds.jsonl`, `clients.jsonl`, `confusion.json`, `snapshots/`,
`summary.json`, `checkpoint/`.

| file | one object per | what is in it |
| --- | --- | --- |
| `metrics.jsonl` | evaluated round | accuracies (mean, deviation over clients), loss, bytes, seconds, dropped clients |
| `rounds.jsonl` | round | who took part, who was dropped and why, loss terms, bytes by direction and kind |
| `clients.jsonl` | evaluated round | each client's accuracy by head and by prototype, and its number of test samples |
| `confusion.json` | run | at the last evaluation, how often each client took which class for which |
| `snapshots/round-N.npz` | pictured round | some clients' test embeddings, and the prototypes they are compared with |
| `summary.json` | run | last round, mean of the last five evaluations, best on validation where there is one, totals |
"""

from __future__ import annotations

import io
import json
import math
import platform
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import wire
from ..data.types import FederatedData
from ..errors import ProtofedError
from ..evaluate.accuracy import KINDS
from ..federation import Federation, Record
from ..federation.checkpoint import write_atomically
from .settings import Settings, read_toml

MEASURES = ("accuracy", "silhouette", "weighted_", "f1_", "mae_", "ensemble_")
LAST = 5
MOST_CLIENTS = 1000  # whose accuracies a summary lists


def make_folder(path: Path, files: dict[str, str]) -> None:
    """A new folder that has its first files from the moment it is there: a kill leaves all of it or nothing."""
    RunFolder.check_free(path)
    work = path.with_name(f".{path.name}.tmp")
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        for name, text in files.items():
            write_atomically(work / name, text.encode())
        work.rename(path)
    except OSError as error:
        raise ProtofedError(f"{path}: cannot make the folder ({error.strerror})") from None


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @classmethod
    def create(cls, path: Path, settings: Settings) -> RunFolder:
        """A new folder; one that exists already is an error, so that no run overwrites another."""
        make_folder(path, {"settings.toml": settings.to_toml()})
        return cls(path)

    @staticmethod
    def check_free(path: Path) -> None:
        if path.exists():
            raise ProtofedError(
                f"{path}: this run folder exists already; `protofed resume {path}` continues it, or choose another --out"
            )

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        if not path.is_dir():
            raise ProtofedError(f"{path}: no such run folder")
        if not (path / "settings.toml").is_file():
            raise ProtofedError(f"{path}: not a run folder (it has no settings.toml)")
        return cls(path)

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint"

    def settings(self) -> dict[str, Any]:
        return read_toml(self.path / "settings.toml")

    def rows(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """The whole lines of a .jsonl file; a last line that a kill cut off is left out."""
        file = self.path / name
        if not file.exists():
            return []
        rows = []
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
            except ValueError:
                if number == len(lines):
                    break
                raise ProtofedError(f"{file}: line {number} is not JSON") from None
        return rows

    def summary(self) -> dict[str, Any]:
        try:
            return json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ProtofedError(f"{self.path}: the run has not finished; `protofed resume {self.path}`") from None
        except ValueError as error:
            raise ProtofedError(f"{self.path / 'summary.json'}: not readable ({error})") from None

    def append(self, history: History, record: Record) -> None:
        """Write the round that `history` took in last."""
        self._append("rounds.jsonl", history.rounds[-1])
        if record.scores is not None:
            self._append("metrics.jsonl", history.metrics[-1])
            self._append("clients.jsonl", history.clients[-1])
            self._write_snapshot(record)

    def write_confusions(self, record: Record, data: FederatedData) -> None:
        write_atomically(self.path / "confusion.json", json.dumps(confusions(record, data)).encode())

    def _write_snapshot(self, record: Record) -> None:
        """Embeddings `z [n, d]` with class `y` and `client`, and their prototypes: one bank, or several stacked."""
        taken = [(c, s.snapshot) for c, s in enumerate(record.scores or []) if s.snapshot is not None]
        if not taken:
            return
        banks = [s for _, s in taken]
        if all(np.array_equal(s.prototypes, banks[0].prototypes) for s in banks):
            banks = banks[:1]
        prototypes = np.stack([s.prototypes for s in banks]) if len(banks) > 1 else banks[0].prototypes
        known = np.stack([s.known for s in banks]) if len(banks) > 1 else banks[0].known
        content: dict[str, Any] = {
            "z": np.concatenate([s.z for _, s in taken]),
            "y": np.concatenate([s.y for _, s in taken]),
            "client": np.concatenate([np.full(len(s.y), c) for c, s in taken]),
            "prototypes": prototypes,
            "known": known,
        }
        memory = io.BytesIO()
        np.savez_compressed(memory, **content)
        (self.path / "snapshots").mkdir(exist_ok=True)
        write_atomically(self.path / "snapshots" / f"round-{record.round:06d}.npz", memory.getvalue())

    def _append(self, name: str, row: dict[str, Any]) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(row)) + "\n")

    def rewind(self, round: int) -> History:
        """Forget what was written after the checkpoint's round: it is about to be run again."""
        for name in ("metrics.jsonl", "rounds.jsonl", "clients.jsonl"):
            kept = [row for row in self.rows(name) if row["round"] <= round]
            write_atomically(self.path / name, "".join(json.dumps(row) + "\n" for row in kept).encode())
        for file in (self.path / "snapshots").glob("round-*.npz"):
            if int(file.stem.removeprefix("round-")) > round:
                file.unlink()
        return History(self.rows("rounds.jsonl"), self.rows("metrics.jsonl"), self.rows("clients.jsonl")[-LAST:])

    def finish(self, summary: dict[str, Any]) -> None:
        write_atomically(self.path / "summary.json", (json.dumps(_finite(summary), indent=1) + "\n").encode())


def _finite(value: Any) -> Any:
    """JSON has no NaN: a loss that does not exist is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return value


@dataclass
class History:
    """The rows of a run so far: one per round, one per evaluated round, and the clients' of the last evaluations."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    clients: list[dict[str, Any]] = field(default_factory=list)

    def take(self, record: Record) -> None:
        self.rounds.append(round_row(record))
        if record.scores is not None:
            evaluated = self.metrics[-1]["round"] if self.metrics else 0
            dropped = sum(len(row["dropped"]) for row in self.rounds if row["round"] > evaluated)
            self.metrics.append(metrics_row(record, dropped))
            self.clients = [*self.clients[1 - LAST :], client_row(record)]


def round_row(record: Record) -> dict[str, Any]:
    return {
        "round": record.round,
        "participants": record.participants,
        "dropped": {str(client): why for client, why in record.dropped.items()},
        "loss": record.loss,
        "terms": record.terms,
        **({"measures": record.measures} if record.measures else {}),
        "up": {kind: record.up[kind] for kind in wire.BYTE_KINDS},
        "down": {kind: record.down[kind] for kind in wire.BYTE_KINDS},
        "seconds": round(record.seconds, 4),
    }


def metrics_row(record: Record, dropped: int) -> dict[str, Any]:
    """Bytes and seconds are those of this round; dropped clients those since the evaluation before."""
    return {
        "round": record.round,
        **record.metrics,
        "loss": record.loss,
        "bytes_up": sum(record.up.values()),
        "bytes_down": sum(record.down.values()),
        "seconds": round(record.seconds, 4),
        "dropped_clients": dropped,
    }


def client_row(record: Record) -> dict[str, Any]:
    scores = record.scores or []
    ways = [f"accuracy_{kind}" for kind in KINDS if f"accuracy_{kind}" in record.metrics]
    return {
        "round": record.round,
        **{way: [getattr(s, way) for s in scores] for way in ways},
        "samples": [s.samples for s in scores],
    }


def confusions(record: Record, data: FederatedData) -> dict[str, Any]:
    """Who was taken for whom at the last evaluation, client by client."""
    names = data.client_names or tuple(f"client {c}" for c in range(len(data.clients)))
    rows = {
        name: {k: getattr(s, f"by_{k}").rows.tolist() for k in KINDS if f"accuracy_{k}" in record.metrics}
        for name, s in zip(names, record.scores or [], strict=True)
    }
    return {
        "round": record.round,
        "classes": list(data.class_names),
        "values": list(data.class_values),
        "rows": ["true", "predicted", "count"],
        "clients": rows,
    }


def summarise(history: History, settings: Settings, federation: Federation) -> dict[str, Any]:
    """The last round, the mean of the last five evaluations, and best on validation. Never best on test."""
    rows, rounds = history.metrics, history.rounds
    last = rows[-LAST:]
    measured = [k for k in rows[-1] if k.startswith(MEASURES)]
    summary: dict[str, Any] = {
        "method": settings.method.name,
        "seed": settings.general.seed,
        "rounds": federation.round,
        "clients": len(federation.data.clients),
        "last_round": {k: rows[-1][k] for k in measured},
        "last_five": {k: sum(v) / len(v) for k in measured if (v := [r[k] for r in last if k in r])},
    }
    if len(federation.data.clients) <= MOST_CLIENTS:
        kinds = [k for k in history.clients[-1] if k.startswith("accuracy_")]
        columns = {k: zip(*(row[k] for row in history.clients if k in row), strict=True) for k in kinds}
        summary["per_client"] = {k: [round(sum(v) / len(v), 6) for v in columns[k]] for k in kinds}
    if "validation" in rows[-1]:
        best = max(rows, key=lambda r: r["validation"])
        kept = [k for k in best if k.startswith("validation")]
        summary["best_on_validation"] = {k: best[k] for k in ("round", *kept, *measured)}
    measures = [row["measures"] for row in rounds[-LAST:] if "measures" in row]
    if measures:
        summary["measures"] = {k: measures[-1][k] for k in measures[-1]}
    note = settings.method.describe(federation.state, federation.round).note
    if note:
        summary["notes"] = [note]
    for direction in ("up", "down"):
        summary[f"bytes_{direction}"] = {k: sum(row[direction][k] for row in rounds) for k in wire.BYTE_KINDS}
    summary["seconds"] = round(sum(row["seconds"] for row in rounds), 3)
    summary["dropped_clients"] = sum(len(row["dropped"]) for row in rounds)
    engine = federation.engine
    names = dict(zip(engine.owner, federation.architectures, strict=True))
    summary["model_parameters"] = {names[k]: number for k, number in enumerate(engine.parameters)}
    summary["versions"] = {
        "protofed": _version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    return summary


def _version() -> str:
    from .. import __version__

    return __version__
