"""Tables of comparisons: numbers by hand, marks, significance, and every format."""

import csv
import io
import json
import math
import random
import re
import statistics
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from protofed.errors import ProtofedError
from protofed.report.terminal import comparison_table, summary_table
from protofed.results.read import read_rows
from protofed.results.tables import (
    Row,
    comparison_cells,
    comparison_latex,
    comparison_markdown,
    default_columns,
    notes,
    own_predictions_differ,
    parse_column,
    results_csv,
    significance,
)
from support.run_folders import FIRST_VERSION

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def summary(seed, head, prototype=0.5, rounds=4, seconds=2.0, **more):
    accuracies = {"accuracy_head": head, "accuracy_prototype": prototype}
    accuracies |= {"accuracy_head_std": 0.1, "accuracy_prototype_std": 0.2, **more}
    up = {"prototypes": 6000, "weights": 0, "scalars": 1000, "framing": 1000}
    totals = {"bytes_up": up, "bytes_down": {**up, "weights": 4_000_000}, "seconds": seconds}
    return {"method": "m", "seed": seed, "rounds": rounds, "last_round": accuracies, "last_five": accuracies, **totals}


def row(label, heads, first=1, settings=None, **more):
    return Row(label, label.split()[0], settings or {}, [summary(first + i, h, **more) for i, h in enumerate(heads)])


def marks(rows, key):
    _, cells = comparison_cells(rows, [key])
    return {line[0].text: line[1].mark for line in cells}


def test_numbers_by_hand():
    rows = [row("local", [0.5, 0.6]), row("fedproto", [0.7, 0.9], seconds=10.0)]
    header, cells = comparison_cells(rows)
    costs = ["kB up / round", "kB down / round", "seconds"]
    assert header == ["method", "head", "prototype", "gain head", "gain prototype", *costs]
    assert [c.text for c in cells[0]] == ["local", "55.00 ± 7.07", "50.00 ± 0.00", "–", "–", "2.0", "1,002.0", "2.0"]
    gains = ["+25.00 ± 63.53", "+0.00 ± 0.00"]  # of 20 and 30 points: t of one degree is 12.706
    numbers = ["80.00 ± 14.14", "50.00 ± 0.00", *gains, "2.0", "1,002.0", "10.0"]
    assert [c.text for c in cells[1]] == ["fedproto", *numbers]


def test_one_seed_has_no_deviation_and_one_row_no_mark():
    _, cells = comparison_cells([row("local", [0.5])], ["head"])
    assert cells[0][1].text == "50.00" and cells[0][1].mark == ""


def test_best_and_second_and_ties():
    rows = [row("a", [0.5, 0.5]), row("b", [0.7, 0.9]), row("c", [0.9, 0.7]), row("d", [0.6, 0.6])]
    assert marks(rows, "head") == {"a": "", "b": "best", "c": "best", "d": "second"}
    assert set(marks(rows, "prototype").values()) == {"best"}
    assert set(marks(rows, "seconds").values()) == {""}


def test_lower_is_better_for_mae_alone():
    rows = [row("a", [0.5], mae_head=1.234), row("b", [0.5], mae_head=0.5), row("c", [0.5], mae_head=3.0)]
    assert marks(rows, "mae_head") == {"a": "second", "b": "best", "c": ""}
    _, cells = comparison_cells(rows, ["mae_head"])
    assert [line[1].text for line in cells] == ["1.23", "0.50", "3.00"]  # not in per cent


means = st.integers(0, 20).map(lambda n: n / 20)


@given(st.lists(st.lists(means, min_size=2, max_size=2), min_size=2, max_size=6))
def test_marks_are_those_of_a_plain_ranking(values):
    rows = [row(str(i), heads) for i, heads in enumerate(values)]
    sums = [round(20 * sum(heads)) for heads in values]
    ranks = sorted(set(sums), reverse=True)
    expected = [{0: "best", 1: "second"}.get(ranks.index(s), "") for s in sums]
    assert list(marks(rows, "head").values()) == expected


def test_default_columns_grow_with_what_was_measured():
    plain = summary(1, 0.5)
    costs = ["bytes_up", "bytes_down", "seconds"]
    both = ["accuracy_head", "accuracy_prototype"]
    more = {f"{m}_{k}": 0.5 for m in ("weighted", "f1") for k in ("head", "prototype")}
    assert default_columns([plain]) == both + costs
    assert default_columns([summary(1, 0.5, **more)]) == both + costs  # F1 is shown where MAE is
    ensemble = summary(1, 0.5, ensemble_head=0.1, ensemble_prototype=0.2)
    assert default_columns([plain, ensemble]) == [*both, "ensemble_head", "ensemble_prototype", *costs]
    numbers = summary(1, 0.5, **more, mae_head=1.0, mae_prototype=2.0)
    assert default_columns([numbers]) == [*both, "f1_head", "f1_prototype", "mae_head", "mae_prototype", *costs]


def by_head(seed, head, prototype, **more):
    return summary(seed, head, prototype, accuracy=head, **more)


def by_prototype(seed, head, prototype, **more):
    return summary(seed, head, prototype, accuracy=prototype, **more)


def without_head(seed, prototype):
    """As a method that trains no head leaves it: the keys are missing."""
    made = by_prototype(seed, 0.0, prototype)
    for part in ("last_round", "last_five"):
        made[part] = {key: value for key, value in made[part].items() if "head" not in key}
    return made


@pytest.mark.parametrize(
    ("runs", "shown"),
    [
        ([by_head(1, 0.5, 0.6), by_head(1, 0.7, 0.6)], False),
        ([by_prototype(1, 0.5, 0.6), by_prototype(1, 0.7, 0.6)], False),
        ([by_head(1, 0.5, 0.6), by_prototype(1, 0.7, 0.6)], True),
        ([by_head(1, 0.5, 0.5), by_prototype(1, 0.7, 0.6)], False),  # both are equal there: the column says nothing new
        ([by_head(1, 0.5, 0.6), summary(1, 0.7, 0.6)], False),  # an older run
        ([summary(1, 0.7, 0.6), summary(1, 0.7, 0.6)], False),
        ([by_head(1, 0.5, 0.6), summary(1, 0.7, 0.6, accuracy=None)], False),
        ([by_head(1, 0.5, 0.6), without_head(1, 0.6)], True),
        ([without_head(1, 0.5), without_head(1, 0.6)], False),
        ([summary(1, 0.5, 0.6, accuracy=0.9)], True),  # a way that neither column shows
        ([], False),
    ],
)
def test_own_ways_that_differ_are_noticed_and_are_no_column_by_default(runs, shown):
    assert own_predictions_differ([Row(str(k), "m", {}, [run]) for k, run in enumerate(runs)]) == shown
    assert default_columns(runs)[:2] == ["accuracy_head", "accuracy_prototype"]
    assert "accuracy" not in default_columns(runs)


def test_a_table_of_different_own_ways():
    """Asked for, the column says by what each method predicts, and marks none: it does not compare like with like."""
    head = Row("fedavg", "fedavg", {}, [by_head(1, 0.75, 0.5), by_head(2, 0.5, 0.25)])
    other = Row("fedpagr", "fedpagr", {}, [by_prototype(1, 0.25, 0.5), by_prototype(2, 0.25, 0.5)])
    bare = Row("protofssl", "protofssl", {}, [without_head(1, 0.75), without_head(2, 0.75)])
    names = ["accuracy", "head", "prototype"]
    header, cells = comparison_cells([head, other, bare], names)
    assert header == ["method", "accuracy", "head", "prototype"]
    assert [[(c.text, c.mark) for c in line[1:]] for line in cells] == [
        [("62.50 ± 17.68 (head)", ""), ("62.50 ± 17.68", "best"), ("37.50 ± 17.68", "")],
        [("50.00 ± 0.00 (prototype)", ""), ("25.00 ± 0.00", "second"), ("50.00 ± 0.00", "second")],
        [("75.00 ± 0.00 (prototype)", ""), ("–", ""), ("75.00 ± 0.00", "best")],
    ]
    [note] = notes([head, other, bare], names)
    assert note.startswith("accuracy: by head or by prototype") and "none is marked" in note
    assert comparison_cells([head, other, bare])[0][:3] == ["method", "head", "prototype"]
    assert "| protofssl | – | **75.00 ± 0.00** |" in comparison_markdown([head, other, bare])
    assert r"protofssl & -- & \textbf{75.00 $\pm$ 0.00} &" in comparison_latex([head, other, bare])


def test_one_own_way_for_all_is_ranked():
    one = Row("a", "a", {}, [by_prototype(1, 0.25, 0.5)])
    other = Row("b", "b", {}, [by_prototype(1, 0.25, 0.75)])
    assert marks([one, other], "accuracy") == {"a": "second", "b": "best"}


def test_a_run_that_failed_to_the_end_has_no_figures_and_says_so():
    good = Row("local", "local", {}, [summary(1, 0.5), summary(2, 0.6)])
    broken = [
        summary(seed, 0.88)
        | {
            "failure": "from round 1 to the last no client returned anything usable (NaN)",
            "dropped_clients": 30,
            "client_rounds": 30,
            "empty_rounds": 10,
        }
        for seed in (1, 2)
    ]
    bad = Row("fedavg", "fedavg", {}, broken)
    _, cells = comparison_cells([good, bad], ["head", "seconds"])
    assert [cell.text for cell in cells[1]] == ["fedavg †", "failed", "failed"]
    assert cells[0][1].mark == ""  # nothing is best where there is nothing to compare with
    lines = notes([good, bad], ["head"])
    assert "failed: fedavg, seeds 1, 2: from round 1 to the last no client returned anything usable (NaN)" in lines
    assert any(line.startswith("dropped: fedavg †, 60 of 60 client rounds; in 20 rounds") for line in lines)
    for text in (comparison_markdown([good, bad]), comparison_latex([good, bad])):
        assert "failed" in text and "60 of 60" in text and "88.00" not in text


def test_a_seed_that_failed_leaves_the_others_shown_but_unranked():
    good = Row("local", "local", {}, [summary(1, 0.5), summary(2, 0.6)])
    half = Row("fedavg", "fedavg", {}, [summary(1, 0.9)], {2: "it diverged"})
    assert marks([good, half], "head") == {"local": "", "fedavg": ""}
    lines = notes([good, half], ["head"])
    assert "fewer seeds than the others, and not ranked: fedavg (1 of 2)" in lines
    assert "failed: fedavg, seed 2: it diverged" in lines


def test_the_csv_says_who_was_dropped_and_what_failed():
    broken = summary(2, 0.88) | {"failure": "nobody returned anything", "dropped_clients": 30, "client_rounds": 30}
    rows = [Row("a", "a", {}, [summary(1, 0.5), broken], {3: "it diverged"})]
    lines = list(csv.DictReader(io.StringIO(results_csv(rows))))
    assert [line["seed"] for line in lines] == ["1", "2", "3"]
    assert [line["accuracy_head"] for line in lines] == ["0.5", "", ""]
    assert [line["dropped_clients"] for line in lines] == ["0", "30", ""]
    assert [line["failure"] for line in lines] == ["", "nobody returned anything", "it diverged"]
    assert "failure" not in results_csv([Row("a", "a", {}, [summary(1, 0.5)])])


def test_dropped_clients_are_named_under_the_table():
    some = Row(
        "fedavg", "fedavg", {}, [summary(1, 0.5) | {"dropped_clients": 3, "client_rounds": 40, "empty_rounds": 0}]
    )
    assert "dropped: fedavg, 3 of 40 client rounds" in notes([some], ["head"])


def test_a_head_that_is_missing_is_neither_ranked_nor_tested():
    bare = Row("bare", "bare", {}, [without_head(seed, 0.9 + seed / 100) for seed in (1, 2, 3)])
    one = Row("one", "one", {}, [by_head(seed, 0.5 + seed / 10, 0.5) for seed in (1, 2, 3)])
    assert marks([bare, one], "head") == {"bare": "", "one": ""}  # one alone has no rank
    assert significance([bare, one], ["head"]) == []
    two = Row("two", "two", {}, [by_head(seed, 0.4 + seed / 20, 0.5) for seed in (1, 2, 3)])
    assert marks([bare, one, two], "head") == {"bare": "", "one": "best", "two": "second"}
    assert [line.split(",")[0] for line in significance([bare, one, two], ["head"])] == ["head: one vs two"]
    assert notes([bare], ["head"]) == ["accuracy_head: no run has measured it"]


def test_csv_and_a_runs_table_without_a_head():
    rows = [Row("bare", "bare", {}, [without_head(1, 0.75)]), Row("one", "one", {}, [by_head(1, 0.5, 0.25)])]
    lines = list(csv.DictReader(io.StringIO(results_csv(rows))))
    assert [(r["accuracy"], r["accuracy_head"], r["accuracy_prototype"]) for r in lines] == [
        ("0.75", "", "0.75"),
        ("0.5", "0.5", "0.25"),
    ]
    text = plain(summary_table(without_head(1, 0.75)))
    assert "–" in text and "75.00 ± 20.00" in text


def test_a_label_makes_it_a_table_of_variants():
    assert comparison_cells([Row("upper bound", "fedavg", {}, [summary(1, 0.5)])], ["head"])[0][0] == "variant"
    assert comparison_cells([Row("fedavg", "fedavg", {"lr": 1}, [summary(1, 0.5)])], ["head"])[0][0] == "variant"
    assert comparison_cells([Row("fedavg", "fedavg", {}, [summary(1, 0.5)])], ["head"])[0][0] == "method"


def test_runs_that_did_not_measure_a_column_are_passed_over():
    old, new = row("old", [0.5, 0.6]), row("new", [0.5, 0.6], weighted_head=0.25)
    null = row("null", [0.5, 0.6], weighted_head=None)
    _, cells = comparison_cells([old, new, null], ["weighted_head"])
    assert [line[1].text for line in cells] == ["–", "25.00 ± 0.00", "–"]
    assert notes([old, new], ["weighted_head"]) == []
    assert notes([old, null], ["weighted_head"]) == ["weighted_head: no run has measured it"]


@pytest.mark.parametrize(
    ("name", "key", "title"),
    [
        ("accuracy", "accuracy", "accuracy"),
        ("head", "accuracy_head", "head"),
        ("prototype@cnn", "accuracy_prototype@cnn", "prototype @ cnn"),
        ("accuracy_head@mlp?embedding=32", "accuracy_head@mlp?embedding=32", "head @ mlp?embedding=32"),
        ("weighted_prototype", "weighted_prototype", "weighted prototype"),
        ("f1_head", "f1_head", "F1 head"),
        ("mae_prototype", "mae_prototype", "MAE prototype"),
        ("ensemble_head", "ensemble_head", "ensemble head"),
        ("bytes_up", "bytes_up", "kB up / round"),
    ],
)
def test_names_of_columns(name, key, title):
    column = parse_column(name)
    assert (column.key, column.title) == (key, title)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("weigthed_head", "did you mean 'weighted_head'"),
        ("", "Known: accuracy, accuracy_head"),
        ("f1", "f1_head"),
        ("head@", ""),
    ],
)
def test_a_wrong_column_is_one_line(name, hint):
    with pytest.raises(ProtofedError) as error:
        parse_column(name)
    assert hint in str(error.value) and "unknown column" in str(error.value) and "\n" not in str(error.value)


def t_test(differences):
    """Two-sided p of Student's t with n − 1 degrees of freedom, the density summed up by hand."""
    n = len(differences)
    t = abs(statistics.fmean(differences)) / (statistics.stdev(differences) / math.sqrt(n))
    f = n - 1
    scale = math.gamma((f + 1) / 2) / (math.sqrt(f * math.pi) * math.gamma(f / 2))
    steps = 20_000
    inside = sum(scale * (1 + ((i + 0.5) * t / steps) ** 2 / f) ** (-(f + 1) / 2) * t / steps for i in range(steps))
    return 1 - 2 * inside


@pytest.mark.parametrize("seeds", [3, 4, 7])
def test_significance_is_the_paired_t_test(seeds):
    draw = random.Random(seeds)
    first = [0.7 + 0.1 * draw.random() for _ in range(seeds)]
    second = [value - 0.03 * draw.random() for value in first]
    rows = [row("low", [0.1] * seeds), row("second", second), row("first", first)]
    p = t_test([100 * (a - b) for a, b in zip(first, second, strict=True)])
    text = "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
    assert significance(rows, ["head"]) == [f"head: first vs second, paired t-test over {seeds} seeds: {text}"]


def test_pairs_are_made_by_seed_not_by_place():
    a, b = row("a", [0.9, 0.8, 0.71]), row("b", [0.88, 0.77, 0.70])
    turned = Row("b", "b", {}, list(reversed(b.runs)))
    assert significance([a, b], ["head"]) == significance([a, turned], ["head"]) != []


def test_clients_of_all_seeds_are_paired_where_their_accuracies_are_there():
    def with_clients(label, values):
        """`values[seed][client]`; the row's own figures are their means."""
        made = row(label, [statistics.fmean(own) for own in values])
        runs = [{**run, "per_client": {"accuracy_head": own}} for run, own in zip(made.runs, values, strict=True)]
        return Row(label, label, {}, runs)

    a = with_clients("a", [[0.9, 0.8, 0.7, 0.6], [0.9, 0.8, 0.7, 0.65]])
    b = with_clients("b", [[0.8, 0.78, 0.73, 0.59], [0.81, 0.8, 0.66, 0.6]])
    # differences in hundredths: 10, 2, −3, 1, 9, 0, 4, 5; |d| ranks 7, 2, 3, 1, 6, –, 4, 5: the rank sum of the minus is 3
    sums = Counter(
        sum(r for r, on in zip(range(1, 8), signs, strict=True) if on) for signs in product((0, 1), repeat=7)
    )
    p = 2 * sum(n for total, n in sums.items() if total <= 3) / 2**7
    expected = f"better for 6 and worse for 1 of 8 clients (all seeds), signed-rank test: p = {p:.2g}"
    assert significance([a, b], ["head"]) == [f"head: a vs b, {expected}"]
    turned = Row("b", "b", {}, list(reversed(b.runs)))
    assert significance([a, turned], ["head"]) == significance([a, b], ["head"]), "pairs by seed, not by place"
    assert significance([a, with_clients("c", [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]])], ["head"]) == [], "other clients"
    three = [with_clients(x, [[v + 0.01 * k for v in (0.9, 0.8)] for k in (0, 1, s)]) for x, s in (("a", 3), ("b", 1))]
    assert "signed-rank" not in "".join(significance(three, ["head"])), "too few that differ"


def test_no_test_where_there_is_nothing_to_test():
    assert significance([row("a", [0.9, 0.8]), row("b", [0.5, 0.6])], ["head"]) == []  # two seeds
    assert significance([row("a", [0.9, 0.8, 0.7]), row("b", [0.9, 0.8, 0.7])], ["head"]) == []  # the same
    assert significance([row("a", [0.9, 0.8, 0.7]), row("b", [0.8, 0.7, 0.6])], ["head"]) == []  # no spread
    assert significance([row("a", [0.9, 0.8, 0.7])], ["head"]) == []
    rows = [row("a", [0.9, 0.8, 0.7]), row("b", [0.5, 0.7, 0.6])]
    assert significance(rows, ["seconds"]) == []


def test_bold_is_tested_against_underlined_where_the_best_are_equal():
    rows = [row("a", [0.9, 0.8, 0.7]), row("b", [0.7, 0.8, 0.9]), row("c", [0.5, 0.7, 0.6])]
    assert significance(rows, ["head"])[0].startswith("head: a vs c, paired t-test over 3 seeds: p = ")


def test_a_row_with_fewer_seeds_is_shown_but_not_ranked():
    rows = [row("a", [0.5, 0.6]), row("b", [0.9]), row("c", [0.6, 0.7]), row("d", [])]
    assert marks(rows, "head") == {"a": "second", "b": "", "c": "best", "d": ""}
    _, cells = comparison_cells(rows, ["head"])
    assert [line[1].text for line in cells] == ["55.00 ± 7.07", "90.00", "65.00 ± 7.07", "–"]
    assert notes(rows, ["head"]) == ["fewer seeds than the others, and not ranked: b (1 of 2), d (0 of 2)"]


def test_markdown():
    rows = [row("a x=1|2", [0.5], settings={"x": "1|2"}), row("b", [0.75]), row("c", [0.625])]
    lines = comparison_markdown(rows, ["head"]).splitlines()
    assert lines == [
        "| variant | head |",
        "| --- | ---: |",
        "| a x=1\\|2 | 50.00 |",
        "| b | **75.00** |",
        "| c | <u>62.50</u> |",
    ]


def test_markdown_has_the_test_under_the_table_as_paragraphs():
    rows = [row("a", [0.9, 0.8, 0.7]), row("b", [0.5, 0.7, 0.6])]
    text = comparison_markdown(rows, ["head"])
    assert re.search(r"\|\n\nhead: a vs b, paired t-test over 3 seeds: p = 0\.\d+\n$", text)


def test_latex_is_escaped_and_has_booktabs_rules():
    label = "a weight_decay=50% & {x} \\ #$~^"
    rows = [row(label, [0.5, 0.6], settings={"weight_decay": 1}), row("b", [0.7, 0.8]), row("c", [0.1, 0.2])]
    lines = comparison_latex(rows, ["head", "bytes_up"]).splitlines()
    assert lines[0] == r"\begin{tabular}{lrr}" and lines[-1] == r"\end{tabular}"
    assert [line for line in lines if line.endswith("rule")] == [r"\toprule", r"\midrule", r"\bottomrule"]
    escaped = r"a weight\_decay=50\% \& \{x\} \textbackslash{} \#\$\textasciitilde{}\textasciicircum{}"
    assert lines[4] == escaped + r" & \underline{55.00 $\pm$ 7.07} & 2.0 \\"
    assert lines[5] == r"b & \textbf{75.00 $\pm$ 7.07} & 2.0 \\"


def test_csv_holds_every_number_as_measured_and_no_clock():
    rows = [
        row("a x=1,2", [1 / 3, 0.5], settings={"x": [1, 2], "y": True}, mae_head=2.0),
        row("b", [0.25], settings={"z": {"name": "dirichlet", "alpha": 0.1}}, seconds=99.0),
    ]
    lines = list(csv.DictReader(io.StringIO(results_csv(rows))))
    assert [(r["label"], r["x"], r["y"], r["z"], r["seed"]) for r in lines] == [
        ("a x=1,2", "[1,2]", "true", "", "1"),
        ("a x=1,2", "[1,2]", "true", "", "2"),
        ("b", "", "", "dirichlet,alpha=0.1", "1"),
    ]
    assert float(lines[0]["accuracy_head"]) == 1 / 3 and lines[0]["accuracy_head_std"] == "0.1"
    assert [r["mae_head"] for r in lines] == ["2.0", "2.0", ""]
    assert (lines[0]["bytes_up_per_round"], lines[0]["bytes_down_per_round"]) == ("2000.0", "1002000.0")
    assert "seconds" not in lines[0]
    assert results_csv(rows, ["head", "seconds"]).splitlines()[0] == "label,method,x,y,z,seed,accuracy_head,seconds"


def plain(renderable):
    console = Console(width=200, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


def test_the_terminals_table_shows_brackets_and_styles():
    rows = [row("a hidden=[64,32]", [0.5, 0.6], settings={"hidden": [64, 32]}), row("b", [0.7, 0.8])]
    table = comparison_table(rows, ["head", "f1_head"])
    text = plain(table)
    assert "hidden=[64,32]" in text and "2 seeds" in text and "accuracy and F1 in %" in text
    styles = [str(cell.style) for cell in table.columns[1].cells if cell.plain != "head"]
    assert styles == ["underline", "bold"]


def test_one_runs_table_shows_what_was_measured():
    text = plain(summary_table(summary(1, 0.5, mae_head=1.5, mae_prototype=2.5, f1_head=0.25, f1_prototype=0.3)))
    assert "50.00 ± 10.00" in text and "50.00 ± 20.00" in text and "25.00" in text and "2.50" in text
    assert "MAE head" in text and "MAE" not in plain(summary_table(summary(1, 0.5)))


@pytest.mark.parametrize("folder", [RESULTS / "digits", FIRST_VERSION], ids=["today", "first version"])
def test_stored_comparisons_are_readable(folder):
    rows, columns = read_rows(folder)
    record = json.loads((folder / "comparison.json").read_text())
    stored = json.loads((folder / "summaries.json").read_text())
    assert columns is None and [r.label for r in rows] == record.get("methods", [r.label for r in rows])
    for r in rows:
        heads = []
        for seed in record["seeds"]:
            name = r.label.replace(" ", "-")
            heads.append(100 * stored[f"{name}-seed{seed}"]["last_five"]["accuracy_head"])
        expected = f"{statistics.fmean(heads):.2f} ± {statistics.stdev(heads):.2f}"
        assert expected in next(line for line in comparison_markdown(rows).splitlines() if f"| {r.label} |" in line)


def test_a_column_of_the_round_that_was_best_on_validation():
    summary = {"rounds": 3, "last_round": {"accuracy": 0.1}, "last_five": {"accuracy": 0.2}}
    column = parse_column("best_accuracy")
    assert column.title == "accuracy, best round on validation" and column.value(summary) is None
    best = {"round": 2, "validation": 0.9, "accuracy": 0.3}
    assert column.value({**summary, "best_on_validation": best}) == pytest.approx(30.0)
    assert parse_column("last_accuracy").value(summary) == pytest.approx(10.0)
