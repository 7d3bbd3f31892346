"""Gains over Local and over a control: numbers by an independent way, verdicts by their rule, and the words under tables."""

import csv
import io
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import protofed as pf
from protofed.errors import ProtofedError
from protofed.report.terminal import comparison_tables
from protofed.results.columns import Row, chosen_columns, parse_column
from protofed.results.gains import control_of, gain_over, gains_over_local, half_interval, local_of
from protofed.results.notes import notes
from protofed.results.read import read_rows
from protofed.results.significance import holm
from protofed.results.tables import (
    comparison_cells,
    comparison_html,
    comparison_latex,
    comparison_markdown,
    results_csv,
)
from protofed.results.verdict import best_gain, names_text, verdict
from support.small import SMALL, blobs

RESULTS = Path(__file__).parent.parent / "docs" / "results"
HEAD, PROTOTYPE = parse_column("head"), parse_column("prototype")


def run(seed, head, prototype=0.5, sites=None, names=None, prototypes=0, control=None, **more):
    """A summary; `sites` are the clients' accuracies by head."""
    figures = {"accuracy_head": head, "accuracy_prototype": prototype, **more}
    sent = {"prototypes": prototypes, "weights": 0}
    made = {"method": "m", "seed": seed, "rounds": 10, "last_round": figures, "last_five": figures}
    made |= {"bytes_up": sent, "bytes_down": sent, "seconds": 1.0}
    made |= {"per_client": {"accuracy_head": sites}} if sites else {}
    made |= {"client_names": names} if names else {}
    return made | ({"control": control} if control else {})


def row(label, heads, settings=None, method=None, **more):
    runs = [run(seed, head, **more) for seed, head in enumerate(heads, 1)]
    return Row(label, method or label.split()[0], settings or {}, runs)


# --- numbers ----------------------------------------------------------------------------------------------------------
shares = st.integers(0, 1000).map(lambda n: n / 1000)


@given(st.lists(st.tuples(shares, shares), min_size=2, max_size=6))
def test_a_gain_is_the_mean_of_paired_differences_with_the_interval_of_t(pairs):
    ours, theirs = row("fedsap", [a for a, _ in pairs]), row("local", [b for _, b in pairs])
    gain = gain_over(ours, theirs, HEAD)
    differences = [100 * (a - b) for a, b in pairs]
    mean = sum(differences) / len(differences)
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / (len(differences) - 1))
    half = stats.t.ppf(0.975, len(differences) - 1) * spread / math.sqrt(len(differences))
    assert gain.mean == pytest.approx(mean, abs=1e-6) and gain.half == pytest.approx(half, abs=1e-6)
    low, high = mean - half, mean + half
    if abs(abs(mean) - half) > 1e-6:
        assert gain.verdict == ("gains" if low > 0 else "loses" if high < 0 else "not different")
    worse = gain_over(theirs, ours, HEAD)
    assert worse.mean == pytest.approx(-mean, abs=1e-6)


def test_one_seed_has_no_interval_and_no_verdict():
    gain = gain_over(row("fedsap", [0.9]), row("local", [0.5]), HEAD)
    assert gain.half is None and gain.verdict == "undecided: one seed" and gain.text == "+40.00"
    assert half_interval([1.0]) is None


def test_pairs_are_made_by_seed_and_by_the_same_way_of_predicting():
    ours = Row("fedproto", "fedproto", {}, [run(2, 0.2, 0.8), run(1, 0.3, 0.7), run(9, 1.0, 1.0)])
    local = Row("local", "local", {}, [run(1, 0.6, 0.75), run(2, 0.6, 0.78)])
    assert gain_over(ours, local, HEAD).by_seed == {2: pytest.approx(-40), 1: pytest.approx(-30)}
    assert gain_over(ours, local, PROTOTYPE).by_seed == {2: pytest.approx(2), 1: pytest.approx(-5)}
    assert gain_over(ours, row("local", []), HEAD) is None and gain_over(ours, None, HEAD) is None


def test_where_less_is_better_a_gain_is_less():
    ours, local = row("a", [0.5, 0.5], mae_head=1.0), row("local", [0.5, 0.5], mae_head=1.5)
    assert gain_over(ours, local, parse_column("mae_head")).mean == pytest.approx(0.5)


def test_sites_are_means_over_seeds_of_their_own_differences():
    ours = [run(1, 0.5, sites=[0.9, 0.5, None], names=["north", "south", "east"])]
    ours += [run(2, 0.5, sites=[0.8, 0.4, 0.3], names=["north", "south", "east"])]
    theirs = [run(1, 0.5, sites=[0.8, 0.6, 0.1]), run(2, 0.5, sites=[0.6, 0.6, 0.2])]
    gain = gain_over(Row("a", "a", {}, ours), Row("local", "local", {}, theirs), HEAD)
    assert gain.by_site == {"north": pytest.approx(15), "south": pytest.approx(-15), "east": pytest.approx(10)}
    other = Row("local", "local", {}, [run(1, 0.5, sites=[0.8]), run(2, 0.5, sites=[0.6])])
    assert gain_over(Row("a", "a", {}, ours), other, HEAD).by_site == {}, "other clients"


def test_the_local_of_a_sweep_has_the_same_settings():
    rows = [row(f"local lr={lr}", [0.5], {"lr": lr}) for lr in (1, 2)]
    rows += [row("fedsap", [0.6], {"lr": 2, "scale": 8}), row("fedavg", [0.6], {"lr": 3})]
    assert local_of(rows[2], rows) is rows[1] and local_of(rows[3], rows) is None and local_of(rows[0], rows) is None
    plain = row("local", [0.5])
    assert local_of(rows[3], [*rows, plain]) is plain and local_of(rows[2], [*rows, plain]) is rows[1]


def test_the_only_local_of_a_table_is_compared_with():
    """Presets give Local a network of its own, where the method has none that Local could train."""
    rows = [row("local", [0.5], {"model.name": "resnet9"}), row("fedsap", [0.6]), row("fedavg", [0.6], {"epochs": 2})]
    assert [local_of(one, rows) for one in rows] == [None, rows[0], rows[0]]


def test_a_control_is_the_same_method_and_settings():
    method, own = row("fedapa", [0.7], {"lr": 1}), row("fedapa control=own", [0.6], {"lr": 1, "control": "own"})
    other = row("fedapa control=own lr=2", [0.6], {"lr": 2, "control": "own"})
    shuffled = row("x", [0.6], {"lr": 1}, method="fedapa", control="shuffled")
    rows = [other, shuffled, own, method]
    assert control_of(method, rows) is own and control_of(own, rows) is None
    assert control_of(method, rows, "shuffled") is shuffled and (own.control, method.control) == ("own", None)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=6))
def test_holm_against_its_definition(chances):
    known = sorted(p for p in chances if p is not None)
    for p, corrected in zip(chances, holm(chances), strict=True):
        if p is None:
            assert corrected is None
            continue
        before = [min(1.0, (len(known) - i) * q) for i, q in enumerate(known) if q <= p]
        assert corrected == pytest.approx(max(before)) or known.count(p) > 1
        assert p <= corrected <= 1


# --- columns ----------------------------------------------------------------------------------------------------------
def test_the_gain_is_a_column_wherever_local_is():
    rows = [row("local", [0.5, 0.5, 0.5]), row("fedsap", [0.6, 0.61, 0.62])]
    assert [c.name for c in chosen_columns(rows)[2:4]] == ["gain_accuracy_head", "gain_accuracy_prototype"]
    header, cells = comparison_cells(rows)
    assert header[3:5] == ["gain head", "gain prototype"]
    assert [c.text for c in cells[1][3:5]] == ["+11.00 ± 2.48", "+0.00 ± 0.00"]
    assert [c.text for c in cells[0][3:5]] == ["–", "–"] and cells[1][3].mark == ""
    for text in (comparison_markdown(rows), comparison_latex(rows)):
        assert "gain head" in text and "+11.00" in text
        assert "gain head, over local: fedsap gains (95 % interval over 3 seeds)" in text
        assert "gain prototype, over local: fedsap is not different" in text
    lost = comparison_latex([row("local", [0.5]), row("fedsap", [0.25])], ["gain_head"])
    assert r"fedsap & $-$25.00 \\" in lost
    alone = [row("fedsap", [0.6])]
    assert [c.over for c in chosen_columns(alone)] == [""] * 5
    assert notes(alone)[0].startswith("Local is not among the variants, so no gain over it is shown")
    assert notes(alone, ["head"]) == [] and notes([row("local", [0.5])]) == []


def test_columns_of_sites_and_of_the_whole_run():
    sites = [0.1 * k for k in range(1, 21)]
    made = row("a", [0.5], sites=sites, prototypes=1_500_000)
    shown = {name: comparison_cells([made], [name])[1][0][1].text for name in SITE_NAMES}
    assert shown == {"worst_head": "10.00", "decile_head": "15.00", "total_bytes_up": "1.5", "worst_prototype": "–"}
    written = row("a", [0.5], sites=sites, worst_head=0.25)
    assert comparison_cells([written], ["worst_head"])[1][0][1].text == "25.00", "what a run wrote comes first"
    titles = [parse_column(n).title for n in ("worst_head", "decile_prototype", "total_bytes_down", "gain_worst_head")]
    assert titles == ["worst client head", "worst tenth prototype", "MB down", "gain worst client head"]


SITE_NAMES = ("worst_head", "decile_head", "total_bytes_up", "worst_prototype")


@pytest.mark.parametrize("name", ["gain_seconds", "gain_accuracy", "gain_gain_head", "exchange_bytes_up", "gain_"])
def test_what_has_no_gain_is_one_line(name):
    with pytest.raises(ProtofedError) as error:
        parse_column(name)
    assert "\n" not in str(error.value) and "column" in str(error.value)


def test_a_chosen_gain_that_cannot_be_shown_is_said():
    lines = notes([row("fedsap", [0.5, 0.6])], ["gain_head", "exchange_head"])
    assert "gain_accuracy_head: there is no local to compare with, or no run has measured it" in lines
    assert "exchange_accuracy_head: there is no control to compare with, or no run has measured it" in lines


def test_the_csv_has_gains_where_they_are_asked_for_alone():
    rows = [row("local", [0.5, 0.25]), row("fedsap", [0.75, 0.75])]
    assert "gain" not in results_csv(rows)
    lines = list(csv.DictReader(io.StringIO(results_csv(rows, ["head", "gain_head"]))))
    assert [line["gain_accuracy_head"] for line in lines] == ["", "", "0.25", "0.5"]


def test_no_cell_is_cut_on_a_terminal():
    rows, _ = read_rows(RESULTS / "fedapa-csi-crowd")
    header, _ = comparison_cells(rows)
    for width in (60, 80, 120):
        parts = comparison_tables(rows, None, width)
        shown = [column for part in parts for column in part.columns[1:]]
        assert len(shown) == len(header) - 1 and len(parts) > 1
        for part in parts:
            texts = [[str(cell) for cell in (column.header, *column.cells)] for column in part.columns]
            assert sum(max(len(line) for text in t for line in text.split("\n")) + 3 for t in texts) < width
    (digits,) = comparison_tables(read_rows(RESULTS / "digits")[0], None, 120)
    assert len(digits.columns) == 8


def test_gains_are_chosen_on_the_command_line(call):
    words = ["--columns", "head,gain_head,worst_head,total_bytes_up", "--format"]
    code, out, _ = call("table", RESULTS / "digits", *words, "markdown")
    assert code == 0 and "| variant | head | gain head | worst client head | MB up |" in out
    assert "| fedavg | 95.93 ± 0.89 | −1.66 ± 2.32 | 88.75 ± 2.82 | 139.1 |" in out.replace("**", "")
    header = call("table", RESULTS / "digits", *words, "csv")[1].splitlines()[0]
    assert header == "label,method,control,seed,accuracy_head,gain_accuracy_head,worst_head,total_bytes_up"


# --- words ------------------------------------------------------------------------------------------------------------
def compared():
    return [
        row("local", [0.50, 0.51, 0.52]),
        row("fedsap", [0.60, 0.611, 0.62], prototypes=10, sites=None),
        row("fedavg", [0.40, 0.411, 0.42]),
        row("fedproto", [0.50, 0.515, 0.515], prototypes=10),
    ]


def test_the_words_under_a_table_follow_from_the_numbers():
    lines = notes(compared())
    words = "fedsap gains; fedavg loses; fedproto is not different"
    assert lines[0] == f"gain head, over local: {words} (95 % interval over 3 seeds)"
    assert "no control was run for fedsap and fedproto: `--controls` adds it" in lines[2]
    (line,) = [line for line in lines if line.startswith("head, against local")]
    p = [stats.ttest_1samp([100 * (a - b) for a, b in zip(x, y, strict=True)], 0).pvalue for x, y in PAIRED]
    expected = holm(p)
    assert f"fedproto p = {expected[2]:.2g} over seeds" in line and "corrected by Holm for 3 variants" in line
    assert all(c < 0.001 for c in expected[:2]) and "fedsap p < 0.001 over seeds; fedavg p < 0.001 over seeds" in line


PAIRED = [
    ([0.60, 0.611, 0.62], [0.50, 0.51, 0.52]),
    ([0.40, 0.411, 0.42], [0.50, 0.51, 0.52]),
    ([0.50, 0.515, 0.515], [0.50, 0.51, 0.52]),
]


def test_a_control_says_what_the_exchange_is_worth():
    rows = [*compared(), row("fedsap control=own", [0.599, 0.61, 0.622], {"control": "own"})]
    lines = notes(rows)
    (line,) = [line for line in lines if line.startswith("head, over its own control")]
    assert "nothing exchanged: fedsap is not different (+0.00 ± 0.43)" in line
    assert any("no control was run for fedproto:" in line for line in lines)
    header, cells = comparison_cells(rows, ["exchange_head"])
    assert header[1] == "exchange head"
    assert [bool(line[1].text != "–") for line in cells] == [False, True, False, False, False]
    assert best_gain(rows).label == "fedsap"


def test_the_verdict_of_a_comparison():
    first, *rest = verdict(compared())
    assert first == "fedsap gains over Local: 61.03 % by head, +10.03 ± 0.14 points."
    assert any(s.startswith("By head, over Local: fedsap (+10.03 ± 0.14) gains; fedavg (") for s in rest)
    assert any("fedsap sends 0.0 MB up" in s for s in rest)
    assert verdict([row("local", [0.5, 0.5]), row("a", [0.5, 0.51])])[0] == "No method is different from Local."
    assert verdict([row("local", [0.5]), row("a", [0.9])])[0].startswith("Undecided: with one seed")
    assert verdict([row("local", [0.5, 0.5]), row("a", [0.4, 0.4])])[0] == "No method gains over Local."
    assert verdict([row("a", [0.4])])[0].startswith("Local is not among") and verdict([row("a", [])]) == []


def test_a_gain_that_stays_below_locals_other_way_is_said_so():
    local = row("local", [0.9, 0.9], prototype=0.2)
    ours = Row("a", "a", {}, [run(1, 0.1, 0.7), run(2, 0.1, 0.7)])
    first = verdict([local, ours])[0]
    assert first == "a gains over Local: 70.00 % by prototype, +50.00 ± 0.00 points. But Local by head has 90.00 %."


def test_the_verdict_on_sites():
    local = row("local", [0.5, 0.5], sites=[0.5, 0.5, 0.5], names=["x", "y", "z"])
    ours = row("a", [0.6, 0.61], sites=[0.9, 0.5, 0.4], names=["x", "y", "z"])
    text = "Site by site, a by head is better than Local at 1 and worse at 1 of 3 sites; the worst is z (−10.00)."
    assert text in verdict([local, ours])


def test_many_names_are_counted():
    assert names_text(list("abcdefghij")) == "a, b, c, d, e, f, g and 3 more" and names_text(["a"]) == "a"


def test_the_committed_digits_are_not_different():
    rows, _ = read_rows(RESULTS / "digits")
    for kind in ("head", "prototype"):
        for gain in gains_over_local(rows, parse_column(kind)):
            ours, theirs = _pair(rows, gain.label, kind)
            assert gain.mean == pytest.approx(statistics.fmean(ours[s] - theirs[s] for s in ours))
            assert gain.verdict == "not different" and len(gain.by_site) == 20
    assert verdict(rows)[0] == "No method is different from Local."


def _pair(rows, label, kind):
    values = {line.label: {r["seed"]: 100 * r["last_five"][f"accuracy_{kind}"] for r in line.runs} for line in rows}
    return values[label], values["local"]


# --- in a notebook ----------------------------------------------------------------------------------------------------
def test_a_comparison_shows_its_table_in_a_notebook(tmp_path):
    place = pf.compare(["fedproto"], seeds=2, jobs=1, data=blobs(), **{**SMALL, "rounds": 2})
    shown, text = place._repr_html_(), repr(place)
    assert shown.startswith("<div") and shown.count("<tr>") == 3 and "gain head" in shown and "<p" in shown
    assert text == str(place) and text.splitlines()[0].split()[:3] == ["method", "head", "prototype"]
    assert "over local: fedproto" in text and "over local: fedproto" in shown
    assert place.verdict()[0].endswith(".") and place.plot_gains(by="head").axes
    one = place.results["fedproto"][0]
    assert "last round" in one._repr_html_() and one._repr_html_().count("<tr>") == 3
    evil = [Row("<b>x</b>", "x", {}, [run(1, 0.5)])]
    assert "<b>x</b>" not in comparison_html(evil, ["head"])
