"""The papers' tables and figures: every preset is sound without any data; one runs through the real command line."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from protofed import methods
from protofed.errors import ProtofedError
from protofed.experiment import reproduce
from protofed.experiment.compare import make_grid
from protofed.experiment.reproduce import (
    SIZES,
    available,
    differences,
    ledger_pages,
    load_preset,
    plan,
    read_preset,
    run_plan,
)
from protofed.experiment.reproduce.ledger import folder_name
from protofed.experiment.reproduce.run import take_finished
from protofed.experiment.settings import parse_pairs
from protofed.methods.control import has_control
from protofed.results.archive import is_archive, pack
from protofed.results.read import read_rows
from support.marks import slow_but

ROOT = Path(__file__).parent.parent
NAMES = available()
TINY = ["data=digits", "data.limit_train=200", "partition=iid", "model=mlp", "hidden=8", "clients=3", "rounds=1"]
QUICK = ["engine=loop", "layout=contiguous", "threads=1", "workers=1", "snapshots=0", "silhouette=false"]


def lacking(name):
    """Methods that a preset compares and that are not here."""
    used = {row.partition("?")[0].rpartition("=")[2].strip() for row in load_preset(name).file.rows}
    return sorted(method for method in used if method not in methods.registry)


@pytest.fixture
def call(call):
    return lambda *words, command="reproduce": call(command, *words)


def settings(name, column, size, row=0):
    preset = load_preset(name)
    grid = make_grid(preset.rows(size)[row : row + 1], local=False, seeds=1, given=preset.settings(column, size))
    return next(iter(grid.cells.values()))


# --- every preset -----------------------------------------------------------------------------------------------------
def test_the_papers_tables_are_there():
    wanted = {
        "fedsap": "table1 table2 table3 table4 fig2 fig3 fig4 fig5 fig6 fig7 fig8 fig9 fig10 pretrained",
        "fedpagr": "table1 table2 pretrained cost",
        "fedapa": "table2 table3 table4 table5 fig4 fig5 fig6 fig7 fig8 few activity",
        "fedarpl": "cifar10 table1 table2 table4 table5 table6 table7 cost passes "
        "fig2 fig3 fig4 fig5a fig5b fig5c fig5d fig6 fig7",
        "protofssl": "table2 table3 table4 table7 table8 table9 fig3 fig4 fig5 algorithm2 steps quarter code distances",
    }
    assert sorted(NAMES) == sorted(f"{paper}/{table}" for paper, tables in wanted.items() for table in tables.split())


@pytest.mark.parametrize("name", slow_but(tuple(n for n in NAMES if n.endswith("/table1")), NAMES))
def test_a_preset_resolves_at_both_sizes_without_data(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no data
    preset = load_preset(name)  # shapes of rows, columns and numbers are checked here
    if preset.file.counted:
        assert plan(name).cells == 0
        return
    if lacking(name):
        pytest.skip(f"not here: {', '.join(lacking(name))}")
    first = next(iter(preset.file.columns))
    for size in SIZES:
        if size == "paper" or preset.file.laptop_rows:  # else the rows are the same ones
            assert len(plan(name, size=size, seeds=1, only=[first]).grids[first].cells) == len(preset.file.rows)
        distinct = {tuple(own.use): column for column, own in preset.file.columns.items()}  # one of each kind
        for column in distinct.values():
            assert preset.needs(column, size), "it does not say where the data comes from"
            assert settings(name, column, size).general.rounds > 0


def test_columns_differ_in_their_settings():
    for name in NAMES:
        preset = load_preset(name)
        if not preset.file.counted:
            for size in SIZES:
                given = [json.dumps(preset.settings(column, size), sort_keys=True) for column in preset.file.columns]
                doubled = len(given) - len(set(given))
                assert doubled == 0, f"{name} {size}"


def test_the_table_of_a_column_has_the_presets_measures_first():
    columns = {name: plan(name, seeds=1) for name in ("fedarpl/table1", "fedsap/fig4", "fedsap/pretrained")}
    shared, picture, usual = (next(iter(p.grids.values())).columns for p in columns.values())
    costs = ["bytes_up", "bytes_down", "seconds"]
    assert shared == ["whole_head", "accuracy_head", "accuracy_prototype", *costs]
    gains = ["gain_head", "gain_prototype"]  # where Local is among the rows
    assert picture == ["pooled_silhouette", "silhouette", "accuracy_head", "accuracy_prototype", *gains, *costs]
    assert usual is None  # the default columns have all that is measured
    assert load_preset("fedarpl/fig4").table_columns("laptop") == shared  # without what the server keeps


# --- what a table must have, whatever its paper has -------------------------------------------------------------------
TRAINED = [name for name in NAMES if not load_preset(name).file.counted]


def cells(name, size):
    """The settings of every row of a preset's first column, by label."""
    preset = load_preset(name)
    grid = make_grid(
        preset.rows(size), local=False, seeds=1, given=preset.settings(next(iter(preset.file.columns)), size)
    )
    return dict(zip(preset.labels, grid.cells.values(), strict=True))


def sees_unlabelled(s):
    """Whether clients of a run train on samples whose labels nobody gave them."""
    feed = s.federated.feed
    return s.general.labels != "all" and feed.reads_unlabelled and getattr(feed, "after", 0) < s.general.rounds


@pytest.mark.parametrize("name", slow_but(("fedsap/table3", "fedapa/fig8", "fedarpl/fig3", "protofssl/fig4"), TRAINED))
def test_a_table_has_what_its_methods_are_compared_with(name):
    """Local and the control beside prototypes; beside unlabelled samples the labels alone, and the labels of all."""
    paper = name.partition("/")[0]
    for size in SIZES:
        rows = cells(name, size)
        alone = [s for s in rows.values() if s.general.labels == "server" and s.method.name == "server-only"]
        if any(map(sees_unlabelled, rows.values())):
            few = [s for s in rows.values() if s.general.labels == "client" and not sees_unlabelled(s)]
            assert alone or [s for s in few if s.method.name != "local"], "no row of the labels alone"
            assert any(s.general.labels == "all" for s in rows.values()), "no row of all labels"
        if any(has_control(methods.get(s.method.name)) for s in rows.values()):
            assert any(s.method.name == "local" for s in rows.values()), "no Local"
            assert any((s.method.name, s.general.control) == (paper, "own") for s in rows.values()), "no control"


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_stored_has_it_too(name):
    """Each measured column: Local, the control, labels alone and all labels, three seeds of every row, and its protocol."""
    preset, settings, kinds = load_preset(name), cells(name, "laptop"), {}
    beside_unlabelled = any(map(sees_unlabelled, settings.values()))
    for label, s in settings.items():
        alone = s.method.name in ("local", "server-only") or s.general.control == "own"
        if alone or (s.general.labels == "all" and beside_unlabelled):
            kinds.setdefault((s.method.name, s.general.control, s.general.labels), []).append(label)
    for folder in sorted((ROOT / "docs/results" / folder_name(name, "laptop")).glob("*/comparison.json")):
        stored = json.loads((folder.parent / "summaries.json").read_text(encoding="utf-8"))
        labels = {v["folder"]: v["label"] for v in json.loads(folder.read_text(encoding="utf-8"))["variants"]}
        seeds = Counter(labels[run.rpartition("-seed")[0]] for run in stored)
        assert all(number >= 3 for number in seeds.values()), f"{folder.parent}: {seeds}"
        assert set(seeds) <= set(preset.labels), f"{folder.parent}: rows that the preset has not"
        for kind, rows in kinds.items():
            assert seeds.keys() & set(rows), f"{folder.parent}: no row of {kind}: {rows}"
        table = (folder.parent / "table.md").read_text(encoding="utf-8")
        assert re.search(r"^protocol: scored on .+\((?:scope|test)=\w+\), .+\(candidates=\w+\)$", table, flags=re.M)


def test_measures_that_can_order_methods_differently_stand_beside_each_other():
    """Own classes and the whole test set, where the paper scores one model; a silhouette of each client and of all."""
    for name in TRAINED:
        measures = set(load_preset(name).file.measures)
        for one, other in (("silhouette", "pooled_silhouette"), ("last_silhouette", "last_pooled_silhouette")):
            assert (one in measures) == (other in measures), name
        if name.startswith("fedarpl/"):
            assert not measures or all(
                (m in measures) == (m.replace("accuracy", "whole") in measures)
                for m in ("accuracy_head", "last_accuracy_head")
            ), name


def test_rows_beside_those_of_a_table(tmp_path):
    shared = 'beside = ["Local=local", "A=fedavg?lr=9"]\nnotes = ["said everywhere"]\n'
    (tmp_path / "common.toml").write_text(shared)
    (tmp_path / "t.toml").write_text(GOOD, encoding="utf-8")
    preset = read_preset(tmp_path / "t.toml", "mine/t")
    assert preset.rows("laptop") == preset.rows("paper") == ("A=fedavg", "B=fedproto?weight=2", "Local=local")
    assert preset.file.notes == ("said everywhere",)
    (tmp_path / "common.toml").write_text(shared + 'laptop_beside = ["Local=local?lr=2", "A=fedavg?lr=8"]\n')
    preset = read_preset(tmp_path / "t.toml", "mine/t")
    assert preset.rows("laptop")[:2] == preset.rows("paper")[:2] == ("A=fedavg", "B=fedproto?weight=2")
    assert (preset.rows("laptop")[2:], preset.rows("paper")[2:]) == (("Local=local?lr=2",), ("Local=local",))
    (tmp_path / "common.toml").write_text(shared + 'laptop_beside = ["Loca=local"]\n')
    with pytest.raises(ProtofedError, match="expected the labels of rows"):
        read_preset(tmp_path / "t.toml", "mine/t")


def test_numbers_by_the_name_of_another_measure(tmp_path):
    file = tmp_path / "t.toml"
    two = GOOD.replace('["accuracy_head"]', '["accuracy_head", "whole_head"]')
    file.write_text(
        two.replace("[numbers.acc", '[numbers]\nwhole_head = "accuracy_head"\n[numbers.acc'), encoding="utf-8"
    )
    assert read_preset(file, "mine/t").paper("whole_head", "A", "two") == "2.0 ± 0.1"
    file.write_text(two.replace("[numbers.acc", '[numbers]\nwhole_head = "head"\n[numbers.acc'), encoding="utf-8")
    with pytest.raises(ProtofedError, match="whole_head"):
        read_preset(file, "mine/t")


# --- the papers' settings ---------------------------------------------------------------------------------------------
def general(s, *keys):
    return tuple(getattr(s.general, key) for key in keys)


def test_fedsaps_settings():
    s = settings("fedsap/table1", "CIFAR-100 n=20", "paper", row=4)
    assert general(s, "clients", "participation", "rounds", "epochs", "batch") == (20, 1.0, 100, 1, 8)
    assert general(s, "optimiser", "lr", "momentum", "evaluate_every") == ("sgd", 0.01, 0.5, 5)
    assert (s.data.name, s.partition.way, s.partition.shot, s.partition.spread) == ("cifar100", 20, 50, 6)
    ramp = s.method.alignment
    assert (ramp.shape, ramp.start, ramp.end, ramp.maximum, s.method.scale) == ("linear", 20, 100, 0.7, 32)
    assert (s.model.name, s.model.pretrained) == ("resnet18", "data/resnet18-imagenet.pth")
    table5 = {"FEMNIST n=3": (3, 100, 1), "FEMNIST n=5": (5, 100, 2), "CIFAR-10 n=4": (4, 100, 1)}
    for column, expected in table5.items():
        partition = settings("fedsap/table1", column, "paper").partition
        assert (partition.way, partition.shot, partition.spread) == expected
    assert plan("fedsap/table1", size="paper", only=["FEMNIST n=3"]).grids["FEMNIST n=3"].seeds == [1234, 1235, 1236]


@pytest.mark.parametrize(("column", "labels", "unlabelled"), [("FEMNIST U=600", 240, 600), ("CIFAR-10 k=25", 75, 600)])
def test_fedsaps_pools(column, labels, unlabelled):
    before, after = (settings("fedsap/table3", column, "paper", row) for row in (0, 1))
    assert (before.general.rounds, after.general.rounds, after.method.supervised_rounds) == (100, 150, 100)
    way = int(after.partition.way)
    assert way * after.general.labels_per_class == labels
    assert way * (after.partition.shot - after.general.labels_per_class) == unlabelled


def test_fedpagrs_settings():
    s = settings("fedpagr/table1", "CIFAR-100", "paper", row=4)
    assert general(s, "clients", "participation", "rounds", "batch", "momentum") == (20, 0.5, 400, 32, 0.9)
    assert general(s, "dim", "models") == (512, ("cnn", "mlp", "resnet18", "googlenet", "mobilenetv2"))
    assert (s.partition.alpha, s.method.margin, s.method.refine_steps) == (0.1, 0.1, 3)
    text = settings("fedpagr/table1", "MIMIC-IV", "paper", row=4)
    assert general(text, "rounds", "lr", "batch", "participation", "dim") == (100, 2e-5, 8, 0.2, 128)
    assert text.method.temperature == 0.5 and text.data.name == "mimic-disposition"


def test_fedapas_settings():
    s = settings("fedapa/table3", "one architecture", "paper", row=4)
    assert general(s, "clients", "epochs", "batch", "lr", "momentum", "weight_decay") == (6, 1, 16, 0.01, 0.5, 1e-5)
    assert (s.method.temperature, s.method.warm_up.end, s.method.warm_up.shape) == (0.5, 50, "cosine")
    assert (s.model.name, s.model.embedding, s.data.window) == ("largeconvnet4", 256, 1000)
    ends = [settings("fedapa/fig7", "one architecture", "paper", row).method.warm_up.end for row in (3, 4, 5)]
    assert ends == [25, 50, 100]


def test_fedarpls_settings():
    row = load_preset("fedarpl/table1").labels.index("Fed-ARPL")
    s = settings("fedarpl/table1", "CIFAR-100 2500, Dir 0.5", "paper", row)
    assert general(s, "clients", "participation", "rounds", "epochs", "batch") == (100, 0.1, 800, 5, 10)
    assert general(s, "lr", "momentum", "weight_decay", "server_labels") == (0.03, 0.9, 5e-4, 2500)
    assert (s.model.depth, s.model.widen, s.model.norm, s.partition.alpha) == (28, 2, "static", 0.5)
    assert (s.method.client_weight, s.method.teacher_share, s.method.prototype_momentum) == (10.0, 0.7, 0.7)
    assert settings("fedarpl/table1", "SVHN 250, IID", "paper", row).general.rounds == 400


def test_protofssls_settings():
    labels = load_preset("protofssl/table3").labels
    s = settings("protofssl/table3", "CIFAR-10 Non-IID", "paper", labels.index("ProtoFSSL-FedProx"))
    assert general(s, "clients", "participation", "rounds", "epochs") == (100, 0.05, 300, 10)
    assert general(s, "optimiser", "lr", "weight_decay", "unlabelled_limit") == ("rmsprop", 1e-3, 1e-4, 490)
    m = s.method
    assert (m.shots, m.queries, m.unlabelled_queries, m.helpers, m.unlabelled_weight, m.mu) == (1, 2, 100, 5, 0.3, 0.01)
    assert (s.model.name, s.model.norm, s.partition.name) == ("resnet8", "none", "circulant")


def test_differences_between_the_sizes():
    found = {key: (laptop, paper, where) for key, laptop, paper, where in differences(load_preset("fedpagr/table2"))}
    assert found["rounds"] == ("20", "400", "all") and "seeds" not in found
    assert found["data.name"] == ("npz", "cifar10", "all") and "lr" not in found
    some = [line for line in differences(load_preset("protofssl/table8")) if line[0] == "participation"]
    assert [line[1:] for line in some] == [("0.2", "0.05", "5 active clients"), ("0.4", "0.2", "20 active clients")]


# --- counted ----------------------------------------------------------------------------------------------------------
def test_counts():
    fedsap = run_plan(plan("fedsap/table2")).values["thousands of numbers"]
    assert fedsap["FedSAP"] == [[3.0], [30.72], [102.4]] and fedsap["FedAvg"][0] == [849.492]
    assert fedsap["FedMPS"][0] == [20 * 3 * (50 + 64) / 1000]
    fedapa = run_plan(plan("fedapa/table5")).values["kB of a client and round"]
    assert (fedapa["FedAPA"], fedapa["FedAvg"]) == ([[150.528]], [[3709.984]])
    assert run_plan(plan("fedpagr/cost")).values["kB of a client and round"]["FedPAGR"] == [[20.48], [20.48]]
    phases = run_plan(plan("fedarpl/cost")).values["a client and round"]
    assert round(phases["phase 3"][1][0], 2) == 0.87 and phases["phase 1"][1] == [0.0]
    protofssl = run_plan(plan("protofssl/table2")).values["a client and round"]
    assert [round(protofssl[row][0][0]) for row in load_preset("protofssl/table2").labels] == [782, 1526, 448]


def test_a_counted_table_has_a_number_for_every_one_of_the_papers():
    for name in ("fedsap/table2", "fedpagr/cost", "fedapa/table5", "fedarpl/cost"):
        preset, result = load_preset(name), run_plan(plan(name))
        for measure in preset.file.measures:
            assert set(result.values[measure]) == set(preset.labels)
            assert all(len(line) == len(preset.file.columns) for line in result.values[measure].values())


def test_a_counted_table_takes_no_settings():
    with pytest.raises(ProtofedError, match="counted, not trained"):
        plan("fedapa/table5", given={"rounds": 3})


# --- a file that is wrong ---------------------------------------------------------------------------------------------
GOOD = """
title = "A table"
measures = ["accuracy_head"]
rows = ["A=fedavg", "B=fedproto?weight=2"]
[columns.one]
[columns.two]
[numbers.accuracy_head]
A = [1, "2.0 ± 0.1"]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title", "tittle", "title is missing|tittle"),
        ('A = [1, "2.0 ± 0.1"]', "A = [1]", "numbers.accuracy_head.A: 1 numbers for 2 columns"),
        ('"2.0 ± 0.1"', '"two"', "'two'; expected a number"),
        ("A = [1", "C = [1", "unknown row 'C'"),
        ("[numbers.accuracy_head]", "[numbers.accuracy]", "expected one of the measures"),
        ('["accuracy_head"]', '["acuracy"]', "unknown column 'acuracy'"),
        ('"B=fedproto?weight=2"', '"A=fedproto"', "each with a label of its own"),
        ("[columns.two]", '[columns."One "]', "whose folders differ"),
        ("[columns.two]", '[columns.two]\nuse = ["CIFAR"]', "unknown group 'CIFAR'"),
        (
            'title = "A table"',
            'title = "A"\ncounted = true',
            "counted = true: expected the arithmetic in t.py beside this file",
        ),
        ('title = "A table"', 'title = "A"\nlaptop_rows = ["A=fedavg"]', "expected the labels of rows"),
        ('title = "A table"', 'title = "A"\nlaptop_columns = ["three"]', "laptop_columns: unknown column 'three'"),
    ],
)
def test_a_wrong_file_is_said_in_one_line(tmp_path, old, new, message):
    file = tmp_path / "t.toml"
    file.write_text(GOOD, encoding="utf-8")
    assert read_preset(file, "mine/t").labels == ["A", "B"]
    assert old in GOOD
    file.write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(ProtofedError, match=message) as error:
        read_preset(file, "mine/t")
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_column_by_a_word_of_its_name():
    assert plan("protofssl/table3", seeds=1, only=["IID"]).columns == ["CIFAR-10 IID", "SVHN IID"]
    assert plan("protofssl/table3", seeds=1, only=["Non-IID"]).columns == ["CIFAR-10 Non-IID", "SVHN Non-IID"]


def test_columns_of_a_size_and_those_asked_for():
    some = ["FEMNIST n=3", "FEMNIST n=5", "CIFAR-10 n=3", "CIFAR-10 n=5"]
    assert plan("fedsap/table1", seeds=1).columns == some
    every = list(load_preset("fedsap/table1").file.columns)
    assert plan("fedsap/table1", size="paper", seeds=1).columns == every and set(some) < set(every)
    ten = ["CIFAR-10 n=3", "CIFAR-10 n=4", "CIFAR-10 n=5"]
    assert plan("fedsap/table1", seeds=1, only=["cifar-10"]).columns == ten, "not CIFAR-100"
    assert plan("fedsap/table1", seeds=1, only=["n=4", "cifar-100 n=30"]).columns == [*every[1:5:3], every[-1]]
    assert plan("fedsap/table1", seeds=1, only=["MNI"]).columns == every[:3], "a part of a word where it is none"


def test_rows_that_are_asked_for():
    def labels(*rows):
        planned = plan("protofssl/table3", seeds=1, only=["CIFAR-10 IID"], rows=rows)
        return [variant.label for variant in planned.grids["CIFAR-10 IID"].variants]

    assert labels("fedavg") == ["FedAvg"], "not FixMatch-FedAvg, as there is a row of just that name"
    assert labels("FedMatch", "Local") == ["FedMatch", "Local"]
    assert [label for label in labels("as published") if "as published" not in label] == []
    with pytest.raises(ProtofedError, match="--rows nothing: no name has that; there are FedAvg-SL"):
        labels("nothing")


def test_layers_of_settings(tmp_path):
    (tmp_path / "common.toml").write_text(
        "settings = { rounds = 1, lr = 0.1, data = { name = 'npz', path = 'x.npz' } }\n"
        "[groups.g]\nsettings = { rounds = 2, data = 'digits' }\nlaptop = { batch = 4 }\nneeds = { laptop = 'x' }\n"
    )
    file = tmp_path / "t.toml"
    file.write_text(
        GOOD.replace("[columns.two]", "[columns.two]\nuse = ['g']\npaper = { rounds = 4 }"), encoding="utf-8"
    )
    preset = read_preset(file, "mine/t")
    assert preset.settings("one", "paper") == {"rounds": 1, "lr": 0.1, "data.name": "npz", "data.path": "x.npz"}
    assert preset.settings("two", "laptop") == {"rounds": 2, "lr": 0.1, "data": "digits", "batch": 4}
    assert preset.settings("two", "paper") == {"rounds": 4, "lr": 0.1, "data": "digits"}
    assert preset.paper("accuracy_head", "A", "two") == "2.0 ± 0.1" and preset.paper("accuracy_head", "B", "two") == "–"


# --- the command line -------------------------------------------------------------------------------------------------
def test_the_list(call):
    code, out, _ = call()
    assert code == 0
    assert all(name in out for name in NAMES) and "data/cifar10.npz" in out


def test_an_unknown_preset(call):
    code, _, err = call("fedsap/tabel1")
    assert code == 2 and "unknown preset 'fedsap/tabel1'; did you mean 'fedsap/table1'?" in err
    code, _, err = call("fedsap/table1", "--only", "MNIST-100")
    assert code == 2 and "--only MNIST-100: no name has that; there are FEMNIST n=3" in err
    code, _, err = call("fedsap/table4", "lern=1")
    assert code == 2 and "lern" in err


def test_a_method_that_is_not_there(call, monkeypatch):
    monkeypatch.delitem(methods.registry._entries, "fedmps")
    code, _, err = call("fedsap/fig5")
    assert code == 2 and "fedsap/fig5 compares fedmps, which is not among the methods here" in err


def test_missing_data_is_said_in_one_line_before_anything_runs(call, tmp_path):
    code, _, err = call("fedsap/fig9", "--out", "here")
    assert code == 2 and len(err.splitlines()) == 1
    assert "data/cifar10-mobilenetv2.npz: no such file" in err and "benchmarks/features.py makes it" in err
    assert not (tmp_path / "here").exists(), "a folder is left behind in which nothing was run"
    code, _, err = call("fedapa/fig5", "--size", "paper", "--out", "there")
    assert code == 2 and "data/crowd/manifest.csv" in err and len(err.splitlines()) == 1
    code, _, err = call("fedsap/fig9", "--size", "paper", "data=digits", "--out", "weights")
    assert code == 2 and "data/resnet18-imagenet.pth: no such file of pretrained weights" in err
    code, _, err = call("fedsap/fig9")
    assert code == 2 and len(err.splitlines()) == 1 and "no such file" in err
    assert not list(tmp_path.iterdir())


def numbers(folder):
    text = (folder / "reproduction.md").read_text(encoding="utf-8")
    return text, re.findall(r"^\| (.+?) \| (.+) \|$", text.split("## Settings")[0], flags=re.M)


def test_a_preset_from_end_to_end(call, tmp_path):
    words = ["fedsap/table4", *TINY, *QUICK, "--out", "here", "--jobs", 1]
    code, out, err = call(*words, "--seeds", 1)
    assert code == 0, err
    text, table = numbers(tmp_path / "here")
    assert "both" in out and "79.91" in out
    cells = dict(table[-6:])  # accuracy by head
    assert list(cells) == ["neither", "curriculum", "proxy", "both", "Local", "own prototypes"]
    run = json.loads((tmp_path / "here/cifar-100-n-10/both-seed1234/summary.json").read_text())
    head = 100 * run["last_five"]["accuracy_head"]
    assert cells["both"] == f"{head:.2f} / 87.59 / {head - 87.59:+.2f}".replace("-", "−")
    assert "| rounds | 20 | 100 | all |" in text and "data=digits" in text and "n=10 (ours: digits)" in text
    # again: nothing is run; one more seed: only that
    done = {p: p.stat().st_mtime_ns for p in (tmp_path / "here").rglob("summary.json")}
    code, _, err = call(*words, "--seeds", 2)
    assert code == 0, err
    after = {p: p.stat().st_mtime_ns for p in (tmp_path / "here").rglob("summary.json")}
    assert len(done) == 6 and len(after) == 12 and all(after[p] == when for p, when in done.items())
    assert " ± " in numbers(tmp_path / "here")[0].split("## Notes")[0]
    # other settings do not go into the same folder
    code, _, err = call(*words[:-4], "rounds=2", "--out", "here")
    assert code == 2 and "made with given" in err and "choose another --out" in err
    code, _, err = call("fedsap/fig9", *TINY, "--out", "here")
    assert code == 2 and "made with preset 'fedsap/table4'" in err
    (tmp_path / "plain").mkdir()
    code, _, err = call("fedsap/fig9", *TINY, "--out", "plain")
    assert code == 2 and "no folder of `protofed reproduce`" in err


def test_some_rows_of_a_column_that_the_size_does_not_have(call, tmp_path):
    """They alone are run, with the optimiser that clients share however many cores a run may have, and resumed as such."""
    shared = "FedAvg, as published"
    assert "STL-10" not in load_preset("protofssl/table3").columns("laptop")
    small = [*TINY, "engine=auto", "workers=0", "embedding=8", "labels_per_class=1"]
    words = ["--only", "STL-10", "--rows", shared, "--out", "here", "--jobs", 1, "--seeds", 1]
    code, _, err = call("protofssl/table3", *small, *words)
    assert code == 0, err
    assert [p.parent.name for p in (tmp_path / "here").rglob("summary.json")] == ["FedAvg_-as-published-seed1234"]
    code, out, err = call("here", "--jobs", 1, command="resume")
    assert code == 0 and shared in out, err
    # the table keeps a column that another command ran
    assert call("protofssl/table3", *small, *[w if w != "STL-10" else "SVHN IID" for w in words])[0] == 0
    text = (tmp_path / "here/reproduction.md").read_text(encoding="utf-8")
    assert "| SVHN IID" in text and "| STL-10" in text and len(list((tmp_path / "here").rglob("summary.json"))) == 2
    # and rows that another command ran, which are not run again
    run = tmp_path / "here/stl-10/FedAvg_-as-published-seed1234/summary.json"
    before = run.stat().st_mtime_ns
    assert call("protofssl/table3", *small, *[w if w != shared else "FedAvg" for w in words])[0] == 0
    table = numbers(tmp_path / "here")[1]
    measured = {row for row, cells in table if any(cell.strip()[:1].isdigit() for cell in cells.split("|"))}
    assert sorted(measured) == ["FedAvg", shared] and run.stat().st_mtime_ns == before
    record = json.loads((tmp_path / "here/stl-10/comparison.json").read_text())
    assert [variant["label"] for variant in record["variants"]] == ["FedAvg", shared]
    text = (tmp_path / "here/stl-10/table.md").read_text(encoding="utf-8")
    assert "| FedAvg |" in text and f"| {shared} |" in text
    # a row that was begun with other settings than the preset's now does not stand beside others
    record["settings"]["FedAvg_-as-published-seed1234"]["lr"] = 5.0
    (tmp_path / "here/stl-10/comparison.json").write_text(json.dumps(record))
    code, _, err = call("protofssl/table3", *small, *[w if w != shared else "FedProx" for w in words])
    assert code == 2 and "begun with lr=5.0" in err


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder in which `fedsap/table4` was run."""
    folder = tmp_path_factory.mktemp("finished") / "here"
    run_plan(plan("fedsap/table4", given=parse_pairs([*TINY, *QUICK])), out=folder, jobs=1)
    return folder


@pytest.mark.slow
def test_the_table_of_a_folder(call, tmp_path, finished):
    """All columns side by side, of one measure with its deviation or of several without, in every format but csv."""

    def table(*words):
        code, out, err = call(finished, *words, command="table")
        assert code == 0, err
        return out

    runs = {
        label: [
            json.loads(p.read_text())["last_five"] for p in finished.glob(f"cifar-100-n-10/{label}-seed*/summary.json")
        ]
        for label in ("neither", "both", "Local")
    }
    header, line, *rows = table("--columns", "head,prototype", "--format", "markdown").splitlines()
    assert header == "| head / prototype | CIFAR-100 n=10 (ours: digits) |" and set(line) <= set("|-: ")
    cells = dict(re.findall(r"^\| (.+?) \| (.+) \|$", "\n".join(rows), flags=re.M))
    for label, own in runs.items():
        means = [100 * statistics.fmean(seed[f"accuracy_{by}"] for seed in own) for by in ("head", "prototype")]
        assert cells[label] == f"{means[0]:.1f} / {means[1]:.1f}"
    heads = [100 * seed["accuracy_head"] for seed in runs["both"]]
    alone = f"{statistics.fmean(heads):.2f} ± {statistics.stdev(heads):.2f}"
    for words in (["--columns", "head"], ["--columns", "head", "--format", "markdown"]):
        assert alone in table(*words)
    assert alone.replace("±", r"$\pm$") in table("--columns", "head", "--format", "latex")
    file = tmp_path / "t.md"
    assert table("--columns", "head", "--out", file) == ""
    assert file.read_text() == table("--columns", "head", "--format", "markdown")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "csv"], "name the folder of one of its columns"),
        (["--columns", "gain_head"], "a gain is in the table of one column"),
        (["--columns", "haed"], "haed"),
        (["--out", "t.txt"], "by its ending (.md, .tex, .csv)"),
        (["--out", "t.md", "--format", "terminal"], "by its ending (.md, .tex, .csv)"),
        (["--out", "nowhere/t.md"], "cannot be written"),
    ],
)
def test_a_table_that_cannot_be_made(call, words, message, tmp_path, finished):
    code, out, err = call(finished, *words, command="table")
    assert code == 2 and message in err and out == "" and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_changed_preset_does_not_continue_old_runs(call, tmp_path, finished):
    shutil.copytree(finished, tmp_path / "here")
    file = tmp_path / "here/cifar-100-n-10/comparison.json"
    record = json.loads(file.read_text())
    record["settings"]["both-seed1234"]["lr"] = 5.0
    file.write_text(json.dumps(record))
    code, _, err = call("fedsap/table4", *TINY, *QUICK, "--out", "here", "--jobs", 1)
    assert code == 2 and "both-seed1234: begun with lr=5.0, now it is 0.01" in err


@pytest.mark.slow
def test_a_folder_of_a_version_that_had_fewer_settings(call, tmp_path, finished):
    """A setting that was not there then had its default: at the default the folder is continued, otherwise refused."""
    shutil.copytree(finished, tmp_path / "here")
    file = tmp_path / "here/cifar-100-n-10/comparison.json"
    record = json.loads(file.read_text())
    for settings in record["settings"].values():
        del settings["classes_appear"]
    file.write_text(json.dumps(record))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "here").rglob("summary.json")}
    code, _, err = call("fedsap/table4", *TINY, *QUICK, "--out", "here", "--jobs", 1)
    assert code == 0, err
    assert before and before == {path: path.stat().st_mtime_ns for path in (tmp_path / "here").rglob("summary.json")}
    del record["settings"]["both-seed1234"]["rounds"]
    file.write_text(json.dumps(record))
    code, _, err = call("fedsap/table4", *TINY, *QUICK, "--out", "here", "--jobs", 1)
    assert code == 2 and "both-seed1234: begun with rounds=" in err


@pytest.mark.slow
def test_columns_that_are_archives(call, tmp_path, finished):
    """The table is written from archives as from runs. An archive that lacks a run is unpacked, and only that is run."""
    words = ["fedsap/table4", *TINY, *QUICK, "--out", "here", "--jobs", 1]
    column = "cifar-100-n-10"
    shutil.copytree(finished, tmp_path / "here")
    shutil.move(tmp_path / "here" / column, tmp_path / "runs")
    pack(tmp_path / "runs", tmp_path / "here" / column)
    before = numbers(finished)[0]
    (tmp_path / "here/reproduction.md").unlink()
    code, _, err = call(*words)
    assert code == 0 and numbers(tmp_path / "here")[0] == before, err
    assert is_archive(tmp_path / "here" / column)
    rows = read_rows(finished / column)[0]
    code, _, err = call(*words, "--seeds", "1234,9", "--rows", "both")
    assert code == 0 and not is_archive(tmp_path / "here" / column), err
    assert not (tmp_path / "here" / column / "neither-seed9").exists()
    after = {row.label: row for row in read_rows(tmp_path / "here" / column)[0]}
    assert [run["seed"] for run in after["both"].runs] == [1234, 9]
    assert all(after[row.label].runs[0] == row.runs[0] for row in rows)


@pytest.mark.slow
@pytest.mark.soak
def test_killed_and_resumed(call, tmp_path):
    """A kill in the middle of a cell; `protofed resume` ends it, finished cells untouched, as if it never was."""
    slow = [word for word in TINY if not word.startswith("rounds")] + ["rounds=8", "checkpoint_every=1"]
    words = ["fedsap/table4", *slow, *QUICK, "--jobs", "1", "--seeds", "1"]
    here, command = tmp_path / "here", [sys.executable, "-m", "protofed", "reproduce"]
    cells = here / "cifar-100-n-10"
    process = subprocess.Popen([*command, *words, "--out", "here"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        while not (cells / "curriculum-seed1234/checkpoint").is_dir():
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert not (cells / "both-seed1234").exists()
    first = (cells / "neither-seed1234/summary.json").stat().st_mtime_ns
    code, out, err = call("here", "--jobs", 1, command="resume")
    assert code == 0 and "82.81" in out, err
    assert (cells / "neither-seed1234/summary.json").stat().st_mtime_ns == first
    assert call(*words, "--out", "whole")[0] == 0
    assert numbers(here) == numbers(tmp_path / "whole")


@pytest.mark.slow
def test_runs_that_another_table_has_are_taken_from_it(tmp_path):
    """FedAPA's figure of curves has runs of its table. Unfinished ones, and those of other settings, are not taken."""
    given = parse_pairs([*TINY, *QUICK])
    figure, table, other = (
        plan(f"fedapa/{name}", seeds=1, only=["one architecture"], given=given | more)
        for name, more in (("fig5", {}), ("table3", {}), ("table3", {"lr": 0.5}))
    )
    run_plan(figure, out=tmp_path / "figure", jobs=1)
    grids = [p.grids["one architecture"] for p in (figure, table, other)]
    here = tmp_path / "table/one-architecture"
    assert take_finished("fedapa/fig5", grids[0], here) == 0, "a preset that is run again is run"
    assert take_finished("fedapa/table3", grids[2], here) == 0, "it has another learning rate"
    (tmp_path / "figure/one-architecture/Local-seed1234/summary.json").unlink()
    shutil.copytree(tmp_path / "figure", tmp_path / "broken")
    (tmp_path / "broken/reproduction.json").write_text("{")
    run_plan(table, out=tmp_path / "table", jobs=1)
    ends = {file.parent.name: json.loads(file.read_text())["seconds"] for file in here.glob("*/summary.json")}
    assert set(ends) == set(grids[1].cells)
    for cell in grids[0].cells:
        file = tmp_path / "figure/one-architecture" / cell / "summary.json"
        assert cell == "Local-seed1234" or json.loads(file.read_text())["seconds"] == ends[cell]


# --- the ledger -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_ledger_reads_what_is_measured(call, tmp_path, finished):
    results = tmp_path / "results"
    results.mkdir()
    assert "`protofed reproduce fedsap/fig9`" in ledger_pages(results)["fedsap"]
    shutil.copytree(finished, results / "fedsap-table4-laptop")
    page = ledger_pages(results)["fedsap"]
    _, table = numbers(results / "fedsap-table4-laptop")
    for row, cell in table[-6:]:  # the preset's heading stands in the ledger, the data that was given in the folder
        assert f"| {row} | {cell} |" in page
    assert "`fedsap-table4-laptop/cifar-100-n-10`: digits, 1 rounds, seeds 1234" in page
    code, out, _ = call("--ledger", results)
    assert code == 0 and (results / "ledger/fedsap.md").read_text(encoding="utf-8") == page
    assert "fedarpl.md" in out
    code, _, err = call("--ledger", tmp_path / "nowhere")
    assert code == 2 and "no such folder of results" in err


def test_rows_are_found_by_label_or_by_what_they_are(tmp_path):
    for name in ("fedapa-csi-crowd", "fedapa-csi-crowd-ablation"):
        shutil.copytree(ROOT / "docs/results" / name, tmp_path / name)
    page = ledger_pages(tmp_path)["fedapa"]
    rows = (tmp_path / "fedapa-csi-crowd/table.md").read_text(encoding="utf-8")
    ours = re.search(r"^\| fedapa \| \**(?:<u>)?([0-9.]+ ± [0-9.]+)", rows, flags=re.M)
    assert ours is not None and f"| FedAPA | {ours[1]} / 87.25 / " in page


def test_the_ledger_in_the_documentation_is_of_today():
    for paper, text in ledger_pages(ROOT / "docs/results").items():
        there = (ROOT / f"docs/results/ledger/{paper}.md").read_text(encoding="utf-8")
        assert there == text, "run: protofed reproduce --ledger docs/results"
        assert f'--8<-- "docs/results/ledger/{paper}.md"' in (ROOT / "docs/ledger.md").read_text(encoding="utf-8")


def test_every_preset_is_package_data():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"experiment/presets/*/*.toml"' in text
    assert all(file.parent.parent == reproduce.PRESETS for file in reproduce.PRESETS.rglob("*.toml"))
    assert all((file.parent / "__init__.py").is_file() for file in reproduce.PRESETS.rglob("*.py"))
