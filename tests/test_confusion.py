"""Confusion matrices of a run folder, as a table and as a picture."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import rc_context
from matplotlib.axes import Axes
from rich.console import Console
from sklearn.metrics import accuracy_score, f1_score, mean_absolute_error

import protofed as pf
from protofed.errors import ProtofedError
from protofed.evaluate import Confusion
from protofed.report.confusion import confusion_table, draw_confusions, most_frequent
from protofed.results.confusions import Confusions, read_confusions
from support.small import SMALL, blobs

# by head: 3 of 4 cats right, one taken for a dog; 1 of 3 dogs right, two taken for a fox. By prototype all is right.
PETS = {"head": [[0, 0, 3], [0, 1, 1], [1, 1, 1], [1, 2, 2]], "prototype": [[0, 0, 4], [1, 1, 3]]}
STORED = {
    "round": 7,
    "classes": ["cat", "dog", "fox"],
    "values": [],
    "rows": ["true", "predicted", "count"],
    "clients": {"farm": PETS, "city": {"head": [[2, 2, 5]], "prototype": [[2, 0, 5]]}},
}


def folder_with(place: Path, stored: object) -> Path:
    place.mkdir(exist_ok=True)
    (place / "settings.toml").write_text("rounds = 7\n")
    (place / "confusion.json").write_text(stored if isinstance(stored, str) else json.dumps(stored))
    return place


def cells(confusions: Confusions) -> list[list[str]]:
    """The table's rows as printed, without the lines around them."""
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(confusion_table(confusions))
    lines = console.export_text().splitlines()
    return [[cell.strip() for cell in line.strip("│┃").split("│")] for line in lines if line.startswith("│")]


# --- the table --------------------------------------------------------------------------------------------------------
def test_the_table_has_these_numbers(tmp_path):
    folder = folder_with(tmp_path, STORED)
    # F1 of farm: cat 2·3/(4+3), dog 2·1/(3+2), fox 0
    f1 = f"{100 * (6 / 7 + 2 / 5) / 3:.2f}"
    assert cells(read_confusions(folder)) == [
        ["farm", "7", "57.14", f1, "dog taken for fox: 2 of 3"],
        ["city", "5", "100.00", "100.00", "–"],
    ]
    assert cells(read_confusions(folder, "prototype")) == [
        ["farm", "7", "100.00", "100.00", "–"],
        ["city", "5", "0.00", "0.00", "fox taken for cat: 5 of 5"],
    ]


def test_classes_that_are_numbers_have_an_error_and_classes_without_names_their_index(tmp_path):
    folder = folder_with(tmp_path, {**STORED, "classes": [], "values": [0.0, 2.0, 10.0]})
    farm, city = cells(read_confusions(folder))
    assert farm[4:] == [f"{(1 * 2 + 2 * 8) / 7:.2f}", "1 taken for 2: 2 of 3"] and city[4:] == ["0.00", "–"]


def test_a_file_from_before_values_is_read(tmp_path):
    folder = folder_with(tmp_path, {key: value for key, value in STORED.items() if key != "values"})
    assert read_confusions(folder).values == [] and len(cells(read_confusions(folder))[0]) == 5


def test_names_are_printed_as_they_are(tmp_path):
    clients = {"[bold]x": {"head": [[0, 1, 1]], "prototype": [[0, 0, 1]]}}
    folder = folder_with(tmp_path, {**STORED, "classes": ["[red]a", "b[/]", "c"], "clients": clients})
    assert cells(read_confusions(folder))[0][::4] == ["[bold]x", "[red]a taken for b[/]: 1 of 1"]


def test_of_equally_frequent_confusions_the_larger_share_counts_then_the_first():
    assert most_frequent(Confusion(np.array([[0, 0, 9], [0, 1, 2], [1, 0, 2]]))) == (1, 0, 2, 2)
    assert most_frequent(Confusion(np.array([[0, 2, 1], [0, 1, 1], [1, 0, 2]]))) == (1, 0, 2, 2)
    assert most_frequent(Confusion(np.array([[3, 2, 1], [3, 1, 1], [1, 1, 5]]))) == (3, 1, 1, 2)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=60))
def test_the_table_equals_scikit_learns_measures(tmp_path_factory, pairs):
    y, predicted = zip(*pairs, strict=True)
    rows = [[t, p, n] for (t, p), n in sorted(Counter(pairs).items())]
    values = [0.0, 1.0, 3.0, 4.5, 10.0, 11.0]
    stored = {**STORED, "classes": [], "values": values, "clients": {"a": {"head": rows, "prototype": rows}}}
    ((_, samples, accuracy, f1, mae, said),) = cells(read_confusions(folder_with(tmp_path_factory.mktemp("r"), stored)))
    assert int(samples) == len(pairs) and accuracy == f"{100 * accuracy_score(y, predicted):.2f}"
    assert float(f1) == pytest.approx(100 * f1_score(y, predicted, average="macro", zero_division=0), abs=0.0051)
    numbers = [[values[c] for c in those] for those in (y, predicted)]
    assert float(mae) == pytest.approx(mean_absolute_error(*numbers), abs=0.0051)
    wrong = Counter((t, p) for t, p in pairs if t != p)
    if not wrong:
        assert said == "–"
        return
    t, p = (int(word) for word in said.split(":")[0].split(" taken for "))
    assert wrong[t, p] == max(wrong.values())
    assert said == f"{t} taken for {p}: {wrong[t, p]} of {y.count(t)}"


# --- bad input --------------------------------------------------------------------------------------------------------
def damaged(**changes: object) -> dict[str, object]:
    return {**STORED, **changes}


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ('{"round": 7,', "Invalid JSON"),
        ("[]", "should be an object"),
        ({"round": 7, "classes": []}, "clients is missing"),
        (damaged(clients={}), "clients={}"),
        (damaged(clients={"a": {}}), "neither head nor prototype is present"),
        (damaged(clients={"a": {"head": [[0, 0]], "prototype": [[0, 0, 1]]}}), "clients.a.head.0.2 is missing"),
        (damaged(clients={"a": {"head": [[0, -1, 1]], "prototype": [[0, 0, 1]]}}), "clients.a.head.0.1=-1"),
        (damaged(clients={"a": {"head": [[0, 0, 0]], "prototype": [[0, 0, 1]]}}), "clients.a.head.0.2=0"),
        (damaged(clients={"a": {"head": [], "prototype": [[0, 0, 1]]}}), "clients.a.head=[]"),
        (damaged(classes=["cat", "dog"]), "classes has 2 entries, and a row names class 2"),
        (damaged(values=[1.0]), "values has 1 entries, and a row names class 2"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path, stored, said):
    folder = folder_with(tmp_path / "r", stored)
    with pytest.raises(ProtofedError) as caught:
        read_confusions(folder)
    assert str(caught.value).startswith(f"{folder / 'confusion.json'}: not readable (") and said in str(caught.value)


def test_folders_that_have_no_confusions(tmp_path):
    def refusal(folder: Path) -> str:
        with pytest.raises(ProtofedError) as caught:
            read_confusions(folder)
        return str(caught.value)

    assert refusal(tmp_path / "none") == f"{tmp_path / 'none'}: no such run folder"
    assert refusal(tmp_path) == f"{tmp_path}: not a run folder (it has no settings.toml)"
    (tmp_path / "settings.toml").write_text("rounds = 1\n")
    assert "has no confusion.json; the run has not come to a checkpoint yet, or an earlier" in refusal(tmp_path)
    (tmp_path / "confusion.json").mkdir()
    assert "has no confusion.json" in refusal(tmp_path)
    comparison = tmp_path / "c"
    comparison.mkdir()
    (comparison / "comparison.json").write_text("{}")
    assert refusal(comparison) == f"{comparison}: this is a comparison; name one of its runs"
    folder_with(comparison / "local-seed2", STORED)
    folder_with(comparison / "local-seed1", STORED)
    assert refusal(comparison).endswith(f"name one of its runs, for instance {comparison / 'local-seed1'}")


# --- the picture ------------------------------------------------------------------------------------------------------
def words(confusions: Confusions, place: Path) -> str:
    """The picture as SVG whose text is text."""
    with rc_context({"svg.fonttype": "none"}):
        draw_confusions(confusions, place / "words.svg")
    return (place / "words.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89")]
)
@pytest.mark.slow
def test_every_kind_of_picture_and_the_same_bytes_twice(tmp_path, suffix, start):
    confusions = read_confusions(folder_with(tmp_path, STORED))
    first, second = tmp_path / "new" / f"a.{suffix}", tmp_path / f"b.{suffix}"
    draw_confusions(confusions, first)
    draw_confusions(confusions, second)
    assert first.read_bytes().startswith(start) and first.read_bytes() == second.read_bytes()


def test_panels_hold_the_shares_of_each_row_of_the_classes_that_occur(tmp_path, monkeypatch):
    drawn = []
    show = Axes.imshow

    def record(self, image, **how):
        drawn.append(np.ma.filled(image, 0.0))
        return show(self, image, **how)

    monkeypatch.setattr(Axes, "imshow", record)
    rows = [[4, 4, 1], [4, 9, 3], [7, 4, 2], [7, 7, 2]]
    clients = {"a": Confusion(np.array(rows)), "b": Confusion(np.array([[2, 2, 6]]))}
    draw_confusions(Confusions(1, "head", [], [], clients), tmp_path / "p.png")
    # classes 4, 7 and 9; nothing was a 9 in truth
    assert drawn[0] == pytest.approx(np.array([[0.25, 0, 0.75], [0.5, 0.5, 0], [0, 0, 0]]))
    assert drawn[1].tolist() == [[1.0]] and len(drawn) == 2


def test_a_picture_says_names_counts_and_shares(tmp_path):
    names = ["$\\frac{", "<b>&", "a name that is much longer than its room"]
    clients = {"the $x$ hospital": Confusion(np.array([[0, 0, 1234], [0, 1, 56], [2, 2, 10]]))}
    text = words(Confusions(9, "prototype", names, [], clients), tmp_path)
    assert "What each client takes for what, by prototype" in text and "1 client, round 9;" in text
    for said in ("the $x$ hospital", "$\\frac{", "&lt;b&gt;&amp;", "a name that i…", ">1,234<", ">56<", ">10<"):
        assert said in text
    assert "95.7 % of 1,300 right" in text


@pytest.mark.slow
def test_twelve_panels_at_most_and_it_is_said(tmp_path):
    one = Confusion(np.array([[0, 0, 1], [1, 0, 1]]))
    text = words(Confusions(1, "head", [], [], {f"client {c}": one for c in range(13)}), tmp_path)
    assert "the first 12 of 13 clients" in text and ">client 11<" in text and ">client 12<" not in text
    text = words(Confusions(1, "head", [], [], {f"client {c}": one for c in range(12)}), tmp_path)
    assert "12 clients, round 1" in text and "the first" not in text


def test_counts_are_left_out_where_they_do_not_fit(tmp_path):
    many = np.array([[c, c, 98765] for c in range(60)])
    text = words(Confusions(1, "head", [], [], {"all": Confusion(many)}), tmp_path)
    assert "98,765" not in text and "100.0 % of 5,925,900 right" in text
    few = words(Confusions(1, "head", [], [], {"all": Confusion(many[:5])}), tmp_path)
    assert few.count(">98,765<") == 5


def test_a_picture_of_an_unknown_kind(tmp_path):
    confusions = read_confusions(folder_with(tmp_path, STORED))
    with pytest.raises(ProtofedError, match=r"p\.gif: expected a file name ending in \.png, \.svg or \.pdf"):
        draw_confusions(confusions, tmp_path / "p.gif")


# --- the command ------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_command_agrees_with_the_run(call, tmp_path):
    data = blobs()
    data = replace(
        data,
        group_train=torch.arange(len(data.y_train)) % 3,
        group_names=("attic", "barn", "cellar"),
        class_values=(0.0, 1.0, 2.0, 5.0),
    )
    keys = {k: v for k, v in SMALL.items() if k not in ("clients", "way", "shot", "partition")}
    result = pf.run("fedproto", **keys, data=data, partition="natural", test="local", out=tmp_path / "r")
    assert json.loads((tmp_path / "r/confusion.json").read_text())["values"] == [0.0, 1.0, 2.0, 5.0]
    for kind in ("head", "prototype"):
        code, out, _ = call("confusion", "r", "--by", kind)
        assert code == 0 and f"by {kind}, round 3" in out and f"picture: r/confusion-{kind}.png (3 clients)" in out
        assert (tmp_path / f"r/confusion-{kind}.png").read_bytes().startswith(b"\x89PNG")
        shown = cells(read_confusions(tmp_path / "r", kind))
        assert [row[0] for row in shown] == ["attic", "barn", "cellar"]
        last = result.summary["last_round"]
        for column, (measure, scale) in enumerate([("accuracy", 100), ("f1", 100), ("mae", 1)], 2):
            mean = np.mean([float(row[column]) for row in shown])
            assert mean == pytest.approx(scale * last[f"{measure}_{kind}"], abs=0.0051)


def test_the_picture_goes_where_it_is_told(call, tmp_path):
    folder_with(tmp_path / "r", STORED)
    code, out, _ = call("confusion", "r", "--picture", "here/p.svg")
    assert code == 0 and "dog taken for fox: 2 of 3" in out and (tmp_path / "here/p.svg").is_file()
    assert not (tmp_path / "r/confusion-head.png").exists()


def test_mistakes_on_the_command_line_are_one_line(call, tmp_path):
    folder_with(tmp_path / "r", STORED)
    (tmp_path / "file").write_text("")
    for given_words, said in (
        (["none"], "none: no such run folder"),
        (["r", "--picture", "p.gif"], "p.gif: expected a file name ending in"),
        (["r", "--picture", "file/p.png"], "--picture file/p.png: cannot be written (File exists)"),
    ):
        code, _, err = call("confusion", *given_words)
        assert code == 2 and said in err and len(err.splitlines()) == 1, given_words
    code, _, err = call("confusion", "r", "--by", "tail")
    assert code == 2 and "tail" in err


# --- a method without a head ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("there", "missing"), [("prototype", "head"), ("head", "prototype")])
def test_a_run_without_a_head_or_without_prototypes_shows_what_is_there(call, tmp_path, there, missing):
    clients = {name: {there: rows[there]} for name, rows in STORED["clients"].items()}
    folder = folder_with(tmp_path / "half", {**STORED, "clients": clients})
    assert read_confusions(folder).by == there
    assert cells(read_confusions(folder)) == cells(read_confusions(folder, there))
    code, out, _ = call("confusion", folder)
    assert code == 0 and f"by {there}" in out and (folder / f"confusion-{there}.png").is_file()
    code, _, err = call("confusion", folder, "--by", missing)
    assert code != 0 and len(err.strip().splitlines()) == 1
    assert f"half: no predictions by {missing}, as this method has none; use --by {there}" in err


def test_a_file_without_predictions_is_refused(tmp_path):
    clients = {name: {} for name in STORED["clients"]}
    with pytest.raises(ProtofedError, match="neither head nor prototype"):
        read_confusions(folder_with(tmp_path / "none", {**STORED, "clients": clients}))
    first, *others = STORED["clients"]
    mixed = {first: {"head": STORED["clients"][first]["head"]}}
    mixed |= {name: {"prototype": STORED["clients"][name]["prototype"]} for name in others}
    with pytest.raises(ProtofedError, match="neither head nor prototype is present for all clients"):
        read_confusions(folder_with(tmp_path / "mixed", {**STORED, "clients": mixed}))
