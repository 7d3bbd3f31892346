"""The rows and columns of a table: what a variant's runs have measured, under which name, and what is better.

Only like is compared with like: a column holds one kind of prediction.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import ProtofedError, unknown
from ..evaluate.confusion import PREDICTIONS
from ..evaluate.confusion import SINGLE as ALWAYS
from ..evaluate.embedding import EMBEDDING, POOLED, POOLED_SILHOUETTE
from .rows import DIRECTIONS, FIGURE

LOCAL = "local"  # the method without federation, which others must beat
EMPTY_ROUND = "†"  # follows the label of a variant that had rounds in which no client returned anything usable


@dataclass(frozen=True)
class Row:
    """The line of one variant in a table.

    A run in which no client returned anything usable up to the last round has finished and counts as failed.

    Attributes:
        label: What the table calls it.
        method: The method's name.
        settings: The settings that differ between the variants.
        runs: The summaries of its finished runs.
        failures: By seed, why runs gave no summary.
    """

    label: str
    method: str
    settings: Mapping[str, Any]
    runs: Sequence[Mapping[str, Any]]
    failures: Mapping[int, str] = field(default_factory=dict)

    @property
    def usable(self) -> list[Mapping[str, Any]]:
        """The summaries of the runs that have figures to show."""
        return [run for run in self.runs if not run.get("failure")]

    def reasons(self) -> dict[int, str]:
        """The reasons why runs failed, by seed."""
        return {**{run["seed"]: str(run["failure"]) for run in self.runs if run.get("failure")}, **self.failures}

    @property
    def is_local(self) -> bool:
        """Whether each client learns alone."""
        return self.method == LOCAL

    @property
    def control(self) -> str | None:
        """The control that this variant is, such as `own` for the same loss without exchange; None where it is none."""
        said = (*(run.get("control") for run in self.runs[:1]), self.settings.get("control"))
        return next((str(value) for value in said if value not in (None, "", "none")), None)

    @property
    def exchanges_prototypes(self) -> bool:
        """Whether prototypes travelled in both directions in its runs."""
        return any(all(run[way].get("prototypes") for way in DIRECTIONS) for run in self.usable)

    @property
    def empty_rounds(self) -> int:
        """The number of rounds in which no client returned anything usable."""
        return sum(run.get("empty_rounds", 0) for run in self.runs)

    @property
    def title(self) -> str:
        """The label, marked where rounds were empty."""
        return f"{self.label} {EMPTY_ROUND}" if self.empty_rounds else self.label


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        key: The name of the number in a summary.
        title: The heading.
        scale: The factor from the number to what the table shows.
        digits: The digits after the point.
        better: Which numbers are better, if either.
        deviation: Whether the deviation over seeds is shown.
        over: What the number is a gain over: Local, or the variant's own control; empty where it is no gain.
    """

    key: str
    title: str
    scale: float = 1.0
    digits: int = 2
    better: Literal["higher", "lower", "neither"] = "neither"
    deviation: bool = True
    over: Literal["", "local", "control"] = ""

    @property
    def name(self) -> str:
        """The name by which the column is chosen."""
        return {"": "", "local": GAIN, "control": EXCHANGE}[self.over] + self.key

    def value(self, summary: Mapping[str, Any]) -> float | None:
        """The number of a run as the table shows it; None where the run did not measure it."""
        value = measured(summary, self.key)
        return None if value is None else self.scale * value

    def by_seed(self, row: Row) -> dict[int, float]:
        """The numbers of a row's usable runs, by seed."""
        values = {run["seed"]: self.value(run) for run in row.usable}
        return {seed: value for seed, value in values.items() if value is not None}


def _embedding_title(name: str) -> str:
    """The heading of a measure of the embedding: `recall@5`, `pooled mAP`, `1-shot`."""
    title = name.replace("pooled_", "pooled ").replace("map", "mAP").replace("recall", "recall@")
    return f"{name.removeprefix('shot')}-shot" if name.startswith("shot") else title


GAIN = "gain_"  # prefix of a column's name: the gain over Local
EXCHANGE = "exchange_"  # the same over the variant's own control: what the exchange itself is worth
COSTS = {
    "bytes_up": Column("bytes_up", "kB up / round", 1 / 1000, 1, deviation=False),
    "bytes_down": Column("bytes_down", "kB down / round", 1 / 1000, 1, deviation=False),
    "seconds": Column("seconds", "seconds", 1, 1, deviation=False),
}
TOTAL = "total_"  # prefix of a direction: the bytes of the whole run in place of a round's
TOTALS = {
    f"{TOTAL}{key}": Column(f"{TOTAL}{key}", f"MB {key.removeprefix('bytes_')}", 1e-6, 1, deviation=False)
    for key in DIRECTIONS
}
EPSILON = "epsilon"  # of differential privacy, where a run has it
MEASURES = {
    "accuracy": "",
    "weighted": "weighted ",
    "f1": "F1 ",
    "mae": "MAE ",
    "ensemble": "ensemble ",
    "unseen": "unseen ",
    "whole": "whole test set ",
    "balanced": "balanced ",
    "auroc": "AUROC ",
    "ece": "calibration error ",
    "worst": "worst client ",
    "decile": "worst tenth ",
}
SITES = ("worst", "decile")  # measures that follow from the clients' accuracies, where a run did not write them
OWN = "accuracy"  # by the prediction of the method's paper: by head or by prototype
LAST_ROUND = "last_"  # prefix of a column's name: the number of the last round in place of the mean of the last five
BEST_ROUND = "best_"  # the same for the round that was best on validation
SILHOUETTE = "silhouette"  # of the embedding space, from −1 to 1
SINGLE = {
    OWN: Column(OWN, OWN, 100, better="higher"),
    SILHOUETTE: Column(SILHOUETTE, SILHOUETTE, 1, 3, better="higher"),
    POOLED_SILHOUETTE: Column(POOLED_SILHOUETTE, "pooled silhouette", 1, 3, better="higher"),
    EPSILON: Column(EPSILON, "ε", deviation=False),
    **{name: Column(name, _embedding_title(name), 100, better="higher") for name in (*EMBEDDING, *POOLED)},
}
NEW = re.compile(rf"new(local)?(\d+)_({'|'.join(PREDICTIONS)})")  # of clients that join after the last round
NAME = re.compile(rf"({'|'.join(MEASURES)})_({'|'.join(PREDICTIONS)})(@[^@]+)?")


def measured(summary: Mapping[str, Any], key: str) -> float | None:
    """A number of a run, without scale.

    Args:
        summary: The summary of the run.
        key: A figure, `bytes_up` or `bytes_down` (of a round, over all kinds and clients), `total_bytes_up` or
            `total_bytes_down` (of the whole run), `seconds`, `epsilon`, or one of clients that joined after the last
            round: `new5_head` after 5 epochs, `newlocal5_head` of Local from scratch.

    Returns:
        The number; None where the run did not measure it.
    """
    value: float | None
    if key in DIRECTIONS:
        value = sum(summary[key].values()) / summary["rounds"]
    elif key in TOTALS:
        value = sum(summary[key.removeprefix(TOTAL)].values())
    elif match := NEW.fullmatch(key):
        joined = summary.get("new_clients", {})
        values = (joined.get("local", {}) if match[1] else joined).get(match[3], [])
        value = dict(zip(joined.get("epochs", []), values, strict=False)).get(int(match[2]))
    elif key == EPSILON:
        value = summary.get("privacy", {}).get(EPSILON)
    elif key.startswith(LAST_ROUND):
        value = summary["last_round"].get(key.removeprefix(LAST_ROUND))
    elif key.startswith(BEST_ROUND):
        value = summary.get("best_on_validation", {}).get(key.removeprefix(BEST_ROUND))
    else:
        value = summary["seconds"] if key == "seconds" else summary[FIGURE].get(key)
        if value is None and key.startswith(SITES):
            value = _of_worst_sites(summary, key)
    return value


def _of_worst_sites(summary: Mapping[str, Any], key: str) -> float | None:
    """The accuracy of the worst client, or the mean of the worst tenth of the clients."""
    measure, _, kind = key.partition("_")
    values = sorted(v for v in summary.get("per_client", {}).get(f"accuracy_{kind}", ()) if v is not None)
    most = 1 if measure == "worst" else math.ceil(len(values) / 10)
    return statistics.fmean(values[:most]) if values else None


def parse_column(name: str) -> Column:
    """Read the name of a column.

    Args:
        name: `weighted_prototype`, `accuracy_head@cnn`, `bytes_up`, `last_accuracy_head`, `best_accuracy_head`,
            `gain_head`, `exchange_head` and so on; `head` and `prototype` are short for the accuracies.

    Returns:
        The column. An unknown name is an error that lists the columns.

    >>> parse_column("weighted_prototype").title
    'weighted prototype'
    """
    if name in (*COSTS, *TOTALS):
        return {**COSTS, **TOTALS}[name]
    if name.startswith((GAIN, EXCHANGE)):
        return _gain_column(name)
    if name.startswith(LAST_ROUND):
        column = parse_column(name.removeprefix(LAST_ROUND))
        return replace(column, key=LAST_ROUND + column.key, title=f"{column.title}, last round")
    if name.startswith(BEST_ROUND):
        column = parse_column(name.removeprefix(BEST_ROUND))
        return replace(column, key=BEST_ROUND + column.key, title=f"{column.title}, best round on validation")
    if match := NEW.fullmatch(name):
        title = f"{'Local' if match[1] else 'new'} {match[3]} after {match[2]}"  # epochs
        return Column(name, title, 100, better="neither" if match[1] else "higher")
    if name in SINGLE:
        return SINGLE[name]
    match = NAME.fullmatch(f"accuracy_{name}" if name.partition("@")[0] in PREDICTIONS else name)
    if match is None:
        raise unknown(
            "column",
            name,
            [
                *SINGLE,
                *(f"{m}_{kind}" for m in MEASURES for kind in PREDICTIONS),
                *(f"{over}{kind}" for over in (GAIN, EXCHANGE) for kind in PREDICTIONS),
                *(*COSTS, *TOTALS),
            ],
        )
    measure, kind, architecture = match.groups()
    title = MEASURES[measure] + kind + (architecture or "").replace("@", " @ ")
    if measure == "mae":
        return Column(match[0], title, better="lower")
    return Column(match[0], title, 100, better="lower" if measure == "ece" else "higher")


def _gain_column(name: str) -> Column:
    over, word = ("local", GAIN) if name.startswith(GAIN) else ("control", EXCHANGE)
    column = parse_column(name.removeprefix(word))
    if column.over or column.better == "neither" or column.key == OWN:
        raise ProtofedError(
            f"column {name!r}: expected a measure by head or by prototype after {word!r}, got {column.name!r}"
        )
    return replace(column, title=f"{word.removesuffix('_')} {column.title}", over=over)  # type: ignore[arg-type]


def default_columns(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the columns that a table has unless others are chosen.

    These are the accuracies (by head and prototypes together only where a method mixes them), ensembles where they were
    measured, F1 and MAE where classes are numbers, and the costs. The accuracy by each method's own prediction is not among
    them: it would compare one method's head with another's prototypes.
    """
    runs = list(runs)
    measures = {key for run in runs for key in run[FIGURE]}
    privacy = [EPSILON] if any("privacy" in run for run in runs) else []
    ensembles = [f"ensemble_{kind}" for kind in PREDICTIONS if f"ensemble_{kind}" in measures]
    unseen = [f"unseen_{kind}" for kind in PREDICTIONS if f"unseen_{kind}" in measures]
    numbers = [f"{measure}_{kind}" for measure in ("f1", "mae") for kind in PREDICTIONS if f"mae_{kind}" in measures]
    mixed = [kind for kind in PREDICTIONS if kind not in ALWAYS and f"accuracy_{kind}" in measures]
    return [*(f"accuracy_{kind}" for kind in (*ALWAYS, *mixed)), *ensembles, *unseen, *numbers, *privacy, *COSTS]


def new_client_columns(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the columns of clients that joined after the last round; none where no run has such clients."""
    found = [run["new_clients"] for run in runs if "new_clients" in run]
    epochs = dict.fromkeys(number for joined in found for number in joined["epochs"])
    return [f"new{n}_{kind}" for kind in PREDICTIONS for n in epochs if any(kind in joined for joined in found)]


def own_predictions(figures: Mapping[str, Any]) -> set[str]:
    """The kinds of prediction, `head` or `prototype`, that give a run's own accuracy; both where they are equal."""
    own = figures.get(OWN)
    by = {kind: figures.get(f"accuracy_{kind}") for kind in PREDICTIONS}
    return {kind for kind, value in by.items() if value is not None and own is not None and abs(value - own) < 1e-9}


def own_predictions_differ(rows: Sequence[Row]) -> bool:
    """Whether the methods' own predictions have no kind, head or prototype, in common."""
    kinds = [own_predictions(run[FIGURE]) for row in rows for run in row.usable if run[FIGURE].get(OWN) is not None]
    return bool(kinds) and not set.intersection(*kinds)


def chosen_columns(rows: Sequence[Row], columns: Sequence[str] | None = None) -> list[Column]:
    """The columns of a table: those that were chosen by name, or the default ones.

    Where Local is among the variants, the default columns have the gain over it after the accuracies.
    """
    if columns:
        return [parse_column(name) for name in columns]
    names = default_columns(run for row in rows for run in row.runs)
    if any(row.is_local for row in rows) and not all(row.is_local for row in rows):
        place = sum(name.startswith("accuracy_") for name in names)
        names[place:place] = [GAIN + kind for kind in ALWAYS]
    return [parse_column(name) for name in names]
