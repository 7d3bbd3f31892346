"""Tables of results: the cells, the best of each column and its significance, and the texts in Markdown, LaTeX and CSV.

Only like is compared with like: a column holds one kind of prediction, and the best is marked within its column.
"""

from __future__ import annotations

import csv
import io
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import unknown
from ..evaluate.confusion import PREDICTIONS
from .rows import DIRECTIONS, FIGURE

MISSING, FAILED = "–", "failed"
EMPTY_ROUND = "†"  # follows the label of a variant that had rounds in which no client returned anything usable
SEEDS_FOR_A_TEST = 3
CLIENTS_FOR_A_TEST = 6  # with fewer that differ, the p of a signed-rank test cannot be below 0.03


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
    def empty_rounds(self) -> int:
        """The number of rounds in which no client returned anything usable."""
        return sum(run.get("empty_rounds", 0) for run in self.runs)

    @property
    def title(self) -> str:
        """The label, marked where rounds were empty."""
        return f"{self.label} {EMPTY_ROUND}" if self.empty_rounds else self.label


def caption(rows: Sequence[Row]) -> str:
    """The sentence that says what a table's numbers are. Runs of format 1 have means of five evaluations, not rounds."""
    early = any(run.get("format", 1) < 2 for row in rows for run in row.runs)
    seeds = max((len(row.runs) for row in rows), default=0)
    return (
        f"Mean over clients, mean of the last five {'evaluations' if early else 'rounds'}, mean ± standard deviation "
        f"over seeds ({seeds} seed{'' if seeds == 1 else 's'}); accuracy and F1 in %. Best bold, second underlined."
    )


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
    """

    key: str
    title: str
    scale: float = 1.0
    digits: int = 2
    better: Literal["higher", "lower", "neither"] = "neither"
    deviation: bool = True

    def value(self, summary: Mapping[str, Any]) -> float | None:
        """The number of a run as the table shows it; None where the run did not measure it."""
        value = measured(summary, self.key)
        return None if value is None else self.scale * value

    def by_seed(self, row: Row) -> dict[int, float]:
        """The numbers of a row's usable runs, by seed."""
        values = {run["seed"]: self.value(run) for run in row.usable}
        return {seed: value for seed, value in values.items() if value is not None}


COSTS = {
    "bytes_up": Column("bytes_up", "kB up / round", 1 / 1000, 1, deviation=False),
    "bytes_down": Column("bytes_down", "kB down / round", 1 / 1000, 1, deviation=False),
    "seconds": Column("seconds", "seconds", 1, 1, deviation=False),
}
EPSILON = "epsilon"  # of differential privacy, where a run has it
MEASURES = {"accuracy": "", "weighted": "weighted ", "f1": "F1 ", "mae": "MAE ", "ensemble": "ensemble "}
OWN = "accuracy"  # by the prediction of the method's paper: by head or by prototype
LAST_ROUND = "last_"  # prefix of a column's name: the number of the last round in place of the mean of the last five
BEST_ROUND = "best_"  # the same for the round that was best on validation
SILHOUETTE = "silhouette"  # of the embedding space, from −1 to 1
NAME = re.compile(rf"({'|'.join(MEASURES)})_({'|'.join(PREDICTIONS)})(@[^@]+)?")


def measured(summary: Mapping[str, Any], key: str) -> float | None:
    """A number of a run, without scale.

    Args:
        summary: The summary of the run.
        key: A figure, `bytes_up` or `bytes_down` (of a round, over all kinds and clients), `seconds`, or `epsilon`.

    Returns:
        The number; None where the run did not measure it.
    """
    value: float | None
    if key in DIRECTIONS:
        value = sum(summary[key].values()) / summary["rounds"]
    elif key == EPSILON:
        value = summary.get("privacy", {}).get(EPSILON)
    elif key.startswith(LAST_ROUND):
        value = summary["last_round"].get(key.removeprefix(LAST_ROUND))
    elif key.startswith(BEST_ROUND):
        value = summary.get("best_on_validation", {}).get(key.removeprefix(BEST_ROUND))
    else:
        value = summary["seconds"] if key == "seconds" else summary[FIGURE].get(key)
    return value


def parse_column(name: str) -> Column:
    """Read the name of a column.

    Args:
        name: `weighted_prototype`, `accuracy_head@cnn`, `bytes_up`, `last_accuracy_head`, `best_accuracy_head` and so
            on; `head` and `prototype` are short for the accuracies.

    Returns:
        The column. An unknown name is an error that lists the columns.

    >>> parse_column("weighted_prototype").title
    'weighted prototype'
    """
    if name in COSTS:
        return COSTS[name]
    if name.startswith(LAST_ROUND):
        column = parse_column(name.removeprefix(LAST_ROUND))
        return replace(column, key=LAST_ROUND + column.key, title=f"{column.title}, last round")
    if name.startswith(BEST_ROUND):
        column = parse_column(name.removeprefix(BEST_ROUND))
        return replace(column, key=BEST_ROUND + column.key, title=f"{column.title}, best round on validation")
    if name == OWN:
        return Column(OWN, OWN, 100, better="higher")
    if name == SILHOUETTE:
        return Column(SILHOUETTE, SILHOUETTE, 1, 3, better="higher")
    if name == EPSILON:
        return Column(EPSILON, "ε", deviation=False)
    match = NAME.fullmatch(f"accuracy_{name}" if name.partition("@")[0] in PREDICTIONS else name)
    if match is None:
        raise unknown(
            "column",
            name,
            [OWN, SILHOUETTE, EPSILON, *(f"{m}_{kind}" for m in MEASURES for kind in PREDICTIONS), *COSTS],
        )
    measure, kind, architecture = match.groups()
    title = MEASURES[measure] + kind + (architecture or "").replace("@", " @ ")
    if measure == "mae":
        return Column(match[0], title, better="lower")
    return Column(match[0], title, 100, better="higher")


def default_columns(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the columns that a table has unless others are chosen.

    These are the accuracies, ensembles where they were measured, F1 and MAE where classes are numbers, and the costs. The
    accuracy by each method's own prediction is not among them: it would compare one method's head with another's
    prototypes.
    """
    runs = list(runs)
    measures = {key for run in runs for key in run[FIGURE]}
    privacy = [EPSILON] if any("privacy" in run for run in runs) else []
    ensembles = [f"ensemble_{kind}" for kind in PREDICTIONS if f"ensemble_{kind}" in measures]
    numbers = [f"{measure}_{kind}" for measure in ("f1", "mae") for kind in PREDICTIONS if f"mae_{kind}" in measures]
    return [*(f"accuracy_{kind}" for kind in PREDICTIONS), *ensembles, *numbers, *privacy, *COSTS]


def own_predictions(figures: Mapping[str, Any]) -> set[str]:
    """The kinds of prediction, `head` or `prototype`, that give a run's own accuracy; both where they are equal."""
    own = figures.get(OWN)
    by = {kind: figures.get(f"accuracy_{kind}") for kind in PREDICTIONS}
    return {kind for kind, value in by.items() if value is not None and own is not None and abs(value - own) < 1e-9}


def own_predictions_differ(rows: Sequence[Row]) -> bool:
    """Whether the methods' own predictions have no kind, head or prototype, in common."""
    kinds = [own_predictions(run[FIGURE]) for row in rows for run in row.usable if run[FIGURE].get(OWN) is not None]
    return bool(kinds) and not set.intersection(*kinds)


def _chosen(rows: Sequence[Row], columns: Sequence[str] | None) -> list[Column]:
    return [parse_column(name) for name in columns or default_columns(run for row in rows for run in row.runs)]


@dataclass(frozen=True)
class Cell:
    """The text of a table's cell, and whether it is the best or the second of its column."""

    text: str
    mark: Literal["", "best", "second"] = ""


def mean_and_deviation(values: Sequence[float], digits: int = 2) -> str:
    """The mean and the standard deviation as text; one value has no deviation.

    >>> mean_and_deviation([90.0, 92.0])
    '91.00 ± 1.41'
    """
    text = f"{statistics.fmean(values):,.{digits}f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):,.{digits}f}"


def _ranking(rows: Sequence[Row], column: Column) -> list[tuple[str, float]]:
    """Labels and means, best first. Rows that lack a seed are left out: their means are not comparable."""
    measured = {row.label: column.by_seed(row) for row in rows}
    most = max((len(values) for values in measured.values()), default=0)
    means = {label: statistics.fmean(v.values()) for label, v in measured.items() if v and len(v) == most}
    if column.better == "neither" or len(means) < 2 or (column.key == OWN and own_predictions_differ(rows)):
        return []
    return sorted(means.items(), key=lambda item: item[1], reverse=column.better == "higher")


def _marks(rows: Sequence[Row], column: Column) -> dict[str, Literal["best", "second"]]:
    """By label, which means are the best and the second of a column. Equal means share their mark."""
    ranking = _ranking(rows, column)
    marks: dict[str, Literal["best", "second"]] = {}
    second: float | None = None
    for label, mean in ranking:
        if abs(mean - ranking[0][1]) < 1e-9:
            marks[label] = "best"
        elif second is None or abs(mean - second) < 1e-9:
            second = mean
            marks[label] = "second"
    return marks


def comparison_cells(rows: Sequence[Row], columns: Sequence[str] | None = None) -> tuple[list[str], list[list[Cell]]]:
    """The cells of a table. In each column where higher or lower is better, the best and the second mean are marked.

    Args:
        rows: The variants.
        columns: The names of the columns; None takes those of `default_columns`.

    Returns:
        The header, and for each row its cells.
    """
    chosen = _chosen(rows, columns)
    first = "variant" if any(row.settings or row.label != row.method for row in rows) else "method"
    cells = [[Cell(row.title)] for row in rows]
    for column in chosen:
        marks = _marks(rows, column)
        for row, line in zip(rows, cells, strict=True):
            line.append(Cell(_cell_text(row, column, rows), marks.get(row.label, "")))
    return [first, *(column.title for column in chosen)], cells


def _cell_text(row: Row, column: Column, rows: Sequence[Row]) -> str:
    values = list(column.by_seed(row).values())
    if not values:
        return FAILED if row.reasons() and not row.usable else MISSING
    if not column.deviation:
        return f"{statistics.fmean(values):,.{column.digits}f}"
    text = mean_and_deviation(values, column.digits)
    if column.key != OWN or not own_predictions_differ(rows):
        return text
    kinds = set.intersection(*(own_predictions(run[FIGURE]) for run in row.usable if OWN in run[FIGURE]))
    return f"{text} ({' or '.join(kind for kind in PREDICTIONS if kind in kinds) or 'mixed'})"


def significance(rows: Sequence[Row], columns: Sequence[str] | None = None) -> list[str]:
    """Test the best against the second of each column.

    Over seeds, where there are at least three, this is a paired t-test; for accuracies there is also a signed-rank test
    over the clients of all seeds. The latter is weaker evidence, because the clients of a run share their server and are
    not independent repetitions.

    Args:
        rows: The variants.
        columns: The names of the columns; None takes those of `default_columns`.

    Returns:
        A line for each column that can be tested.
    """
    lines = []
    for column in _chosen(rows, columns):
        marks = _marks(rows, column)
        by_label = {row.label: column.by_seed(row) for row in rows}
        best = next((label for label, mark in marks.items() if mark == "best"), None)
        second = next((label for label, mark in marks.items() if mark == "second"), None)
        if best is None or second is None:
            continue
        seeds = sorted(by_label[best].keys() & by_label[second].keys())
        differences = [by_label[best][seed] - by_label[second][seed] for seed in seeds]
        tests = []
        spread = max(differences, default=0.0) - min(differences, default=0.0)
        if len(seeds) >= SEEDS_FOR_A_TEST and spread > 1e-9:
            from scipy import stats  # here, because it is slow to load and most tables need none of it

            p = float(stats.ttest_1samp(differences, 0.0).pvalue)
            tests.append(f"paired t-test over {len(seeds)} seeds: {_chance(p)}")
        row_of = {row.label: row for row in rows}
        pairs = _client_pairs(row_of[best], row_of[second], column.key)
        differing = [a - b for a, b in pairs if abs(a - b) > 1e-9]
        if len(differing) >= CLIENTS_FOR_A_TEST:
            from scipy import stats

            p = float(stats.wilcoxon(differing).pvalue)
            better, worse = sum(d > 0 for d in differing), sum(d < 0 for d in differing)
            tests.append(
                f"better for {better} and worse for {worse} of {len(pairs)} clients "
                f"(all seeds), signed-rank test: {_chance(p)}"
            )
        if tests:
            lines.append(f"{column.title}: {best} vs {second}, {'; '.join(tests)}")
    return lines


def _chance(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def _client_pairs(one: Row, other: Row, key: str) -> list[tuple[float, float]]:
    """Each client's two values, for every seed that both rows have: a seed gives a client the same data in both."""
    first, second = (
        {run["seed"]: run.get("per_client", {}).get(key, []) for run in row.usable} for row in (one, other)
    )
    both = [(first[seed], second[seed]) for seed in first.keys() & second.keys()]
    return [pair for a, b in both if len(a) == len(b) for pair in zip(a, b, strict=True) if None not in pair]


def notes(rows: Sequence[Row], columns: Sequence[str] | None = None) -> list[str]:
    """The lines under a table: significance, failures, dropped clients, and what was not measured."""
    lines = significance(rows, columns)
    most = max((len(row.usable) + len(row.reasons()) for row in rows), default=0)
    incomplete = [
        f"{row.label} ({len(row.usable)} of {most})"
        for row in rows
        if len(row.usable) < most and (row.usable or not row.reasons())
    ]
    if incomplete:
        lines.append(f"fewer seeds than the others, and not ranked: {', '.join(incomplete)}")
    lines += losses_of(rows)
    lines += privacy_of(rows)
    for column in _chosen(rows, columns):
        if not any(column.by_seed(row) for row in rows) and any(row.usable for row in rows):
            lines.append(f"{column.key}: no run has measured it")
        elif column.key == OWN and own_predictions_differ(rows):
            lines.append(
                "accuracy: by head or by prototype, as each method's paper predicts; these are two ways of predicting, so "
                "none is marked as the best"
            )
    return lines


def losses_of(rows: Sequence[Row]) -> list[str]:
    """The lines of what was lost: runs that failed and why, client rounds and states that were dropped, and attackers."""
    return [
        line
        for row in rows
        for line in (*_failure_lines(row), _dropped_line(row), *_round_lines(row), _attacked_line(row))
        if line
    ]


def privacy_text(guarantee: Mapping[str, Any]) -> str:
    """Whose presence a run's differential privacy hides, by whose noise, with which δ.

    Args:
        guarantee: `privacy` of a run's summary.
    """
    whose = "the server, which sees what clients send," if guarantee["placement"] == "central" else "each client"
    return (
        f"ε with δ = {guarantee['delta']:g} hides the presence of one {guarantee['unit']} in what clients send in "
        f"training; {whose} adds the noise; accuracies are outside it"
    )


def privacy_of(rows: Sequence[Row]) -> list[str]:
    """A line for each differential privacy that runs have."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        for guarantee in [run["privacy"] for run in row.usable if "privacy" in run][:1]:
            lines.setdefault(privacy_text(guarantee), []).append(row.label)
    return [f"{text} ({', '.join(labels)})" for text, labels in lines.items()]


def _failure_lines(row: Row) -> list[str]:
    """A line for each reason, with the seeds that failed because of it."""
    reasons, lines = row.reasons(), []
    for reason in dict.fromkeys(reasons.values()):
        seeds = [str(seed) for seed, why in sorted(reasons.items()) if why == reason]
        lines.append(f"failed: {row.label}, seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}: {reason}")
    return lines


def _attacked_line(row: Row) -> str:
    """How many clients of a run attacked; the attackers of other seeds are others."""
    attacked = [run for run in row.runs if run.get("attackers")]
    if not attacked:
        return ""
    number, clients = len(attacked[0]["attackers"]), attacked[0]["clients"]
    return f"attacked: {row.title}, {number} of {clients} clients are attackers; figures are those of the others"


def _dropped_line(row: Row) -> str:
    dropped = sum(run.get("dropped_clients", 0) for run in row.runs)
    if not dropped:
        return ""
    asked = sum(run.get("client_rounds", 0) for run in row.runs)
    text = f"dropped: {row.title}, {dropped:,}{f' of {asked:,}' if asked else ''} client rounds"
    if row.empty_rounds:
        text += f"; in {row.empty_rounds:,} rounds no client returned anything usable, and the server kept its state"
    return text


def _round_lines(row: Row) -> list[str]:
    """Of each run, what the server did beside the method's equations: the first such round, and how many there were."""
    noted = [(run["seed"], lines) for run in row.runs if (lines := run.get("round_notes"))]
    more = {seed: f" (and {len(lines) - 1:,} more)" if len(lines) > 1 else "" for seed, lines in noted}
    return [f"noted: {row.title}, seed {seed}, {lines[0]}{more[seed]}" for seed, lines in noted]


def comparison_markdown(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Write the table in Markdown, with the notes below it; the best is bold and the second underlined."""
    header, cells = comparison_cells(rows, columns)
    around = {"": "{}", "best": "**{}**", "second": "<u>{}</u>"}
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    for row in cells:
        texts = [around[cell.mark].format(cell.text.replace("|", "\\|")) for cell in row]
        lines.append("| " + " | ".join(texts) + " |")
    for note in notes(rows, columns):
        lines += ["", note]
    return "\n".join(lines) + "\n"


LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--"}
LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"}


def comparison_latex(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Write the table in LaTeX, a `tabular` for the package booktabs. The notes are comments below it."""
    header, cells = comparison_cells(rows, columns)
    around = {"": "{}", "best": r"\textbf{{{}}}", "second": r"\underline{{{}}}"}

    def line(texts: Iterable[str]) -> str:
        return " & ".join(texts) + r" \\"

    lines = [f"\\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}", r"\toprule", line(map(_latex, header)), r"\midrule"]
    lines += [line(around[cell.mark].format(_latex(cell.text)) for cell in row) for row in cells]
    lines += [r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in notes(rows, columns))]
    return "\n".join(lines) + "\n"


def _latex(text: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in text)


def results_csv(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Write one line per variant and seed, with the numbers as measured (shares, bytes).

    Args:
        rows: The variants.
        columns: The names of the numbers; None takes every figure of the summaries and the bytes. Seconds are not among
            these, so that the same runs give the same text.

    Returns:
        The table as CSV. Where clients were dropped or runs failed, two more columns say how many client rounds and why; a
        run that failed has no numbers.
    """
    axes = list(dict.fromkeys(key for row in rows for key in row.settings))
    keys = [*dict.fromkeys(key for row in rows for run in row.runs for key in run[FIGURE]), *DIRECTIONS]
    if columns is not None:
        keys = [parse_column(name).key for name in columns]
    titles = [f"{key}_per_round" if key in DIRECTIONS else key for key in keys]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    losses = ["dropped_clients", "failure"] if losses_of(rows) else []
    writer.writerow(["label", "method", *axes, "seed", *titles, *losses])
    for row in rows:
        values = [setting_text(row.settings[key]) if key in row.settings else "" for key in axes]
        reasons, dropped = row.reasons(), {run["seed"]: run.get("dropped_clients", 0) for run in row.runs}
        numbers = {run["seed"]: [measured(run, key) for key in keys] for run in row.usable}
        for seed in dict.fromkeys((*(run["seed"] for run in row.runs), *reasons)):
            lost = [dropped.get(seed), reasons.get(seed)] if losses else []
            writer.writerow([row.label, row.method, *values, seed, *numbers.get(seed, [None] * len(keys)), *lost])
    return text.getvalue()


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The texts of settings by their whole keys.

    Args:
        settings: Settings, which may hold settings in turn.
        prefix: What every key begins with.

    Returns:
        A text for each value that is no mapping.

    >>> flat({"method": {"name": "fedsap", "alignment": {"shape": "linear"}}})
    {'method.name': 'fedsap', 'method.alignment.shape': 'linear'}
    """
    lines: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            lines |= flat(value, f"{prefix}{key}.")
        else:
            lines[prefix + str(key)] = setting_text(value)
    return lines


def setting_text(value: Any) -> str:
    """The value of a setting as labels, folders' names and tables show it: a choice begins with its name.

    It is for reading. `grammar.write_value` is the text that can be parsed again, with quotes where it needs them.

    >>> setting_text({"name": "dirichlet", "alpha": 0.1})
    'dirichlet,alpha=0.1'
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        name = [str(value["name"])] if "name" in value else []
        return ",".join(name + [f"{key}={setting_text(v)}" for key, v in value.items() if key != "name"])
    if isinstance(value, list | tuple):
        return "[" + ",".join(setting_text(v) for v in value) + "]"
    return str(value)
