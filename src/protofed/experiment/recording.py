"""The rows and the summary of a run folder, made from the rounds of a federation."""

from __future__ import annotations

import dataclasses
import io
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .. import wire
from ..data.types import FederatedData
from ..evaluate.accuracy import QUALITIES
from ..evaluate.confusion import PREDICTIONS
from ..evaluate.embedding import EMBEDDING, POOLED, POOLED_SILHOUETTE
from ..federation import Federation, Record
from ..parts.attacks import Attackers
from ..privacy.mechanism import mechanisms
from ..registry import parse_part
from ..results.folder import History
from ..results.protocol import KEY, protocol_of
from ..results.rows import FORMAT, LAST, ClientsRow, EvaluationRow, RoundRow
from ..version import __version__
from .settings import Settings

OF_CLIENTS = ("accuracy", *QUALITIES)  # measures of each client by itself
MEASURES = (
    "accuracy",
    "silhouette",
    *(f"{name}_" for name in ("weighted", "f1", "mae", "ensemble", "unseen", "whole", *QUALITIES, "worst", "decile")),
    *EMBEDDING,
    *POOLED,
    POOLED_SILHOUETTE,
    "attack_success",
)
MOST_CLIENTS = 1000  # whose accuracies a summary lists


def rows_of(record: Record, history: History) -> tuple[RoundRow, EvaluationRow | None, ClientsRow | None]:
    """Make the rows of a round.

    Args:
        record: The record of the round.
        history: The rows of the rounds before it.

    Returns:
        The row of the round, and the two rows of its evaluation, which are None where it was not evaluated.
    """
    row = round_row(record)
    if record.board is None:
        return row, None, None
    last_evaluation = history.evaluations[-1]["round"] if history.evaluations else 0
    dropped = sum(len(r["dropped"]) for r in history.rounds if r["round"] > last_evaluation) + len(record.dropped)
    return row, evaluation_row(record, dropped), clients_row(record)


def round_row(record: Record) -> RoundRow:
    """The row of a round in `rounds.jsonl`."""
    row: RoundRow = {
        "round": record.round,
        "participants": record.participants,
        "dropped": {str(client): reason for client, reason in record.dropped.items()},
        "loss": record.loss,
        "terms": dict(record.terms),
        "up": _by_kind([record.up]),
        "down": _by_kind([record.down]),
        "seconds": round(record.seconds, 4),
    }
    if record.measures:
        row["measures"] = dict(record.measures)
    if record.notes:
        row["notes"] = list(record.notes)
    return row


def evaluation_row(record: Record, dropped: int) -> EvaluationRow:
    """The row of an evaluation in `metrics.jsonl`.

    Args:
        record: The record of the round, whose bytes and seconds the row has.
        dropped: The number of client rounds that were dropped since the evaluation before.

    Returns:
        The row.
    """
    row: Any = {
        "round": record.round,
        **record.metrics,
        "loss": record.loss,
        "bytes_up": sum(record.up.values()),
        "bytes_down": sum(record.down.values()),
        "seconds": round(record.seconds, 4),
        "dropped_clients": dropped,
    }
    return row


def clients_row(record: Record) -> ClientsRow:
    """The row of an evaluation in `clients.jsonl`: the accuracies of each client, and what else is measured of it."""
    board = record.board
    assert board is not None
    clients = range(len(board) + len(record.absent))
    keys = [*(f"{measure}_{kind}" for measure in OF_CLIENTS for kind in PREDICTIONS), *EMBEDDING]
    keys = [key for key in keys if key in record.metrics]
    columns = {key: dict(zip(board, board.column(key), strict=True)) for key in keys}
    samples = dict(zip(board, board.by_head.samples.tolist(), strict=True))
    row: Any = {
        "round": record.round,
        **{key: [column.get(c) for c in clients] for key, column in columns.items()},
        "samples": [samples.get(c, 0) for c in clients],
    }
    return row


def confusions(record: Record, data: FederatedData) -> dict[str, Any]:
    """The content of `confusion.json`: which class each client took for which at this evaluation."""
    names = data.names
    rows = {
        names[c]: {k: getattr(s, f"by_{k}").rows.tolist() for k in PREDICTIONS if f"accuracy_{k}" in record.metrics}
        for c, s in (record.board or {}).items()
    }
    return {
        "round": record.round,
        "classes": list(data.class_names),
        "values": list(data.class_values),
        "rows": ["true", "predicted", "count"],
        "clients": rows,
    }


def snapshot_of(record: Record) -> bytes | None:
    """The content of a snapshot, an `.npz` file; None where the round has none.

    It holds embeddings `z [n, d]` of some clients with class `y` and `client`, and the prototypes they are compared with:
    one bank, or several stacked.
    """
    details = record.board.details if record.board is not None else {}
    snapshots = [(c, d["snapshot"]) for c, d in details.items() if "snapshot" in d]
    if not snapshots:
        return None
    banks = [s for _, s in snapshots]
    if all(np.array_equal(s.prototypes, banks[0].prototypes) for s in banks):
        banks = banks[:1]
    prototypes, known = banks[0].prototypes, banks[0].known
    if (
        len({s.known.shape for s in banks}) > 1
    ):  # clients that predict by their own bank beside those of several helpers
        prototypes = np.concatenate([s.prototypes.reshape(-1, *prototypes.shape[-2:]) for s in banks])
        known = np.concatenate([s.known.reshape(-1, known.shape[-1]) for s in banks])
    elif len(banks) > 1:
        prototypes, known = np.stack([s.prototypes for s in banks]), np.stack([s.known for s in banks])
    content: dict[str, Any] = {
        "z": np.concatenate([s.z for _, s in snapshots]),
        "y": np.concatenate([s.y for _, s in snapshots]),
        "client": np.concatenate([np.full(len(s.y), c) for c, s in snapshots]),
        "prototypes": prototypes,
        "known": known,
    }
    memory = io.BytesIO()
    np.savez_compressed(memory, **content)
    return memory.getvalue()


def summarise(history: History, settings: Settings, federation: Federation) -> dict[str, Any]:
    """Make the summary of a finished run.

    It has the figures of the last round, the mean of the last five rounds, and those of the round that was best on
    validation, but never those of the round that was best on the test set.

    Args:
        history: The rows of the run.
        settings: The settings of the run.
        federation: The federation after its last round.

    Returns:
        The content of `summary.json`.
    """
    rows: list[Any] = list(history.evaluations)
    rounds = history.rounds
    last = [row for row in rows if row["round"] > federation.rounds - LAST]
    latest: dict[str, Any] = rows[-1] if rows else {}
    measures = [k for k in latest if k.startswith(MEASURES)]
    summary: dict[str, Any] = {
        "format": FORMAT,
        "method": settings.method.name,
        **({"control": settings.general.control} if settings.general.control else {}),
        "seed": settings.general.seed,
        "rounds": federation.round,
        "clients": len(federation.data.clients),
        KEY: protocol_of(dataclasses.asdict(settings.general)),
        "failure": failure_of(rounds) or (None if rows else "no client could be evaluated in any round"),
        "last_round": {k: latest[k] for k in measures},
        "last_five": {k: sum(v) / len(v) for k in measures if (v := [r[k] for r in last if k in r])},
    }
    if rows and len(federation.data.clients) <= MOST_CLIENTS:
        summary["per_client"] = _per_client(history)
    if "validation" in latest:
        best = max((row for row in rows if "validation" in row), key=lambda r: r["validation"])
        validation = [k for k in best if k.startswith("validation")]
        summary["best_on_validation"] = {k: best[k] for k in ("round", *validation, *measures) if k in best}
    measured = [row["measures"] for row in rounds[-LAST:] if "measures" in row]
    if measured:
        summary["measures"] = dict(measured[-1])
    if settings.general.privacy:
        mechanism = parse_part(mechanisms, settings.general.privacy)
        spent = rounds[-1].get("measures", {}).get("epsilon") if rounds else None
        guarantee = {"unit": mechanism.name, "placement": mechanism.placement, "noise": mechanism.noise}
        summary["privacy"] = {"epsilon": spent, "delta": mechanism.delta, **guarantee}
    round_notes = [f"round {row['round']}: {note}" for row in rounds for note in row.get("notes", ())]
    if round_notes:
        summary["round_notes"] = round_notes
    if federation.data.client_names:
        summary["client_names"] = list(federation.data.client_names)
    if federation.data.remarks:
        summary["remarks"] = list(federation.data.remarks)
    note = federation.method.describe(federation.state, federation.round).note
    notes = [*(f.note for f in federation.filters if isinstance(f, Attackers)), *([note] if note else [])]
    if notes:
        summary["notes"] = notes
    if federation.attackers:
        summary["attackers"] = sorted(federation.attackers)
    return {**summary, **_costs(rounds), **_about(federation)}


def _per_client(history: History) -> dict[str, list[float | None]]:
    """Each client's accuracies and other measures, as means over the evaluations of the last five rounds."""
    rows: list[Any] = list(history.clients)
    kinds = [k for k in rows[-1] if k not in ("round", "samples")]
    columns = {k: zip(*(row[k] for row in rows if k in row), strict=True) for k in kinds}
    return {k: [_mean(v) for v in columns[k]] for k in kinds}


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of a client's accuracies; None where it was never evaluated."""
    present = [value for value in values if value is not None]
    return round(sum(present) / len(present), 6) if present else None


def _costs(rounds: list[RoundRow]) -> dict[str, Any]:
    """The bytes and seconds of a run, and the number of client rounds that were lost."""
    costs: dict[str, Any] = {
        "bytes_up": _by_kind([row["up"] for row in rounds]),
        "bytes_down": _by_kind([row["down"] for row in rounds]),
        "seconds": round(sum(row["seconds"] for row in rounds), 3),
        "dropped_clients": sum(len(row["dropped"]) for row in rounds),
        "client_rounds": sum(len(row["participants"]) for row in rounds),
        "empty_rounds": sum(_is_empty(row) for row in rounds),
    }
    return costs


def _by_kind(counted: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The bytes of some rounds, added up by kind; bytes of secure sums appear where there are any."""
    kinds = dict.fromkeys([*wire.BYTE_KINDS, *(kind for counts in counted for kind in counts)])
    return {kind: sum(counts.get(kind, 0) for counts in counted) for kind in kinds}


def _is_empty(row: RoundRow) -> bool:
    """Whether clients took part in a round and none returned anything usable."""
    return bool(row["participants"]) and len(row["dropped"]) == len(row["participants"])


def failure_of(rounds: list[RoundRow]) -> str | None:
    """Why a run has no usable figures: no client returned anything usable up to the last round. None where one did."""
    empty_rounds = 0
    for row in reversed(rounds):
        if not _is_empty(row):
            break
        empty_rounds += 1
    if empty_rounds == 0:
        return None
    first = rounds[-empty_rounds]
    return (
        f"from round {first['round']} to the last no client returned anything usable "
        f"({next(iter(first['dropped'].values()))})"
    )


def _about(federation: Federation) -> dict[str, Any]:
    """The sizes of the models, and the versions of the libraries that computed the figures."""
    engine = federation.engine
    names = dict(zip(engine.owner, federation.architectures, strict=True))
    return {
        "model_parameters": {names[k]: number for k, number in enumerate(engine.parameters)},
        "versions": {
            "protofed": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }
