"""`protofed advise` on small data: it never sees a test row, keeps to its budget, and goes on where it was stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import protofed as pf
from protofed.data import Dataset
from protofed.data.federate import federate, without_test_rows
from protofed.errors import Stopped
from protofed.experiment.advise import read_advice
from protofed.experiment.advise.plan import (
    chosen_methods,
    divide,
    entries_of,
    fitting_methods,
    parse_budget,
    sends_weights,
)
from protofed.experiment.advise.run import Pace, fitting_length
from protofed.experiment.advise.words import sentences, table
from protofed.experiment.run import load, resume, run
from protofed.experiment.settings import read_toml, resolve
from protofed.results.read import is_run, read_run
from support.small import SMALL

SITES = ("Aachen", "Bonn", "Celle")
TINY = {"rounds": 3, "model": "mlp", "embedding": 5, "hidden": [7], "batch": 4}
QUICK = [f"{k}={','.join(map(str, v)) if isinstance(v, list) else v}" for k, v in TINY.items()]


def sites(seed=0, per_site=24, classes=2, test=False):
    """Three sites of points around their classes' centres."""
    rng = np.random.default_rng(seed)
    y = np.tile(np.arange(classes), per_site * 3 // classes)
    x = rng.normal(size=(len(y), 4)) + 3 * np.eye(4)[y]
    group = np.repeat(SITES, per_site)
    parts = {"x_train": x, "y_train": y, "group_train": group}
    if test:
        parts |= {"x_test": x[::3] + 0.1, "y_test": y[::3].copy(), "group_test": group[::3]}
    return parts


@pytest.fixture(autouse=True)
def few_seeds(monkeypatch):
    monkeypatch.setattr("protofed.experiment.advise.run.MOST_SEEDS", 3)


@pytest.fixture
def mine(tmp_path):
    np.savez(tmp_path / "mine.npz", **sites())
    return tmp_path / "mine.npz"


def race_rows(folder):
    return {p.name: (p / "clients.jsonl").read_bytes() for p in sorted((folder / "race").iterdir()) if is_run(p)}


# --- the data of the race ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("test", ["central", "local"])
@pytest.mark.parametrize("partition", ["natural", "dirichlet"])
@pytest.mark.parametrize("part", [False, True])
def test_the_view_has_every_row_but_those_that_would_be_tested(test, partition, part):
    parts = sites(test=part)
    parts["x_train"][:, 0] = np.arange(len(parts["y_train"]))  # the row's number
    data = Dataset.from_arrays(**parts)
    clients = None if partition == "natural" else 3
    view = without_test_rows(data, partition, clients, seed=5, test=test)
    whole = federate(data, partition, clients, seed=5, test=test)
    tested = {int(v) for c in whole.clients for v in c.test.take()[0][:, 0] if not part or v == int(v)}
    trained = {int(v) for c in whole.clients for v in c.labelled.take()[0][:, 0]}
    seen = [int(v) for v in view.x_train[:, 0]]
    assert view.x_test is None and view.y_test is None and view.group_test is None
    assert len(seen) == len(set(seen))
    if not part:
        assert set(seen).isdisjoint(tested) and set(seen) >= trained and len(seen) + len(tested) == len(data.y_train)
    assert set(seen) == trained


def test_the_race_is_on_validation_rows_of_the_view_alone(mine):
    division = divide({"data": str(mine), **TINY}, ["fedavg"])
    assert division.natural and division.sites == SITES and division.base.general.test == "local"
    raced = division.raced(division.base, 7)
    assert raced.data is division.view and raced.general.test == "local" and raced.general.test_share == 0.2
    n = len(division.view.y_train)
    assert n == 3 * 24 - 3 * 5 and sum(division.samples) < n / 2  # a fifth of each site's rows is for testing


def test_permuted_test_labels_change_nothing_of_the_choice(tmp_path):
    answers = []
    for name, permute in (("a", False), ("b", True)):
        parts = sites(test=True)
        if permute:
            parts["y_test"] = np.random.default_rng(3).permutation(parts["y_test"])
        out = tmp_path / name
        data = Dataset.from_arrays(**parts)
        advice = pf.advise(data, budget="5m", out=out, methods=["fedavg"], jobs=1, seed=3, lr=0.05, **TINY)
        answers.append((advice, race_rows(out)))
    (one, rows), (other, other_rows) = answers
    assert rows == other_rows and len(rows) >= 6
    same = ("advised", "contender", "local", "gain", "close", "site_gains", "certainty", "cost", "seeds")
    assert all(one.record[key] == other.record[key] for key in same)
    assert one.record["test"] != other.record["test"]
    assert other.settings.read_text().split("[method]")[1] == one.settings.read_text().split("[method]")[1]


# --- what is raced ----------------------------------------------------------------------------------------------------
def test_methods_that_cannot_be_raced_are_left_out_with_a_reason():
    names, left_out = chosen_methods([], True, "all", {})
    assert names[:2] == ["local", "fedavg"] and set(names) | set(left_out) == set(pf.methods.available())
    assert left_out["semifl"] == "it needs labels at the server" and "without labels" in left_out["fixmatch-fedavg"]
    assert "--methods fedprox" in left_out["fedprox"]
    private, reasons = chosen_methods([], False, "all", {})
    assert "fedavg" not in private and reasons["fedavg"] == "weights would travel"
    assert all(not sends_weights(pf.methods.get(name)) for name in private) and "fedproto" in private
    assert chosen_methods(["fedprox"], True, "all", {})[0] == ["local", "fedprox"]
    assert "protofssl" in chosen_methods([], True, "client", {})[0]


def test_a_method_that_compares_samples_is_raced_where_they_can_be_compared():
    """Not on tokens, and not where only a network's features count."""
    names = ["local", "constellation", "fedproto"]
    numbers = Dataset.from_arrays(**sites())
    assert fitting_methods(names, divide({"data": numbers}, names)) == (names, {})
    kept, left_out = fitting_methods(names, divide({"data": numbers, "train": "head"}, names))
    assert kept == ["local", "fedproto"] and "train=head" in left_out["constellation"]
    tokens = replace(numbers, x_train=torch.ones(72, 4, dtype=torch.int64))
    assert "tokens are no numbers" in fitting_methods(names, divide({"data": tokens}, names))[1]["constellation"]
    with pytest.raises(pf.ProtofedError, match="nothing is left to race against Local"):
        fitting_methods(names[:2], divide({"data": tokens}, names))
    advice = pf.advise(numbers, budget="60s", methods=["constellation"], jobs=1, lr=0.01, **TINY)
    assert advice.record["contender"]["method"] == "constellation"
    assert advice.record["contender"]["by"] in ("head", "prototype", "mix") and advice.record["control"]


def test_entries_are_defaults_then_rates_then_weights_and_a_key_that_is_given_is_not_varied():
    given = {"data": "digits", "partition": "iid", "clients": 3}
    labels = [e.label for e in entries_of(["local", "fedavg", "fedproto"], given, 90, 0.01)]
    assert labels == [
        *("local", "fedavg", "fedproto", "local lr=0.05", "fedavg lr=0.05", "fedproto lr=0.05", "fedproto weight=10")
    ]
    fixed = entries_of(["local", "fedproto"], {**given, "lr": 0.1, "fedproto.weight": 2}, 90, 0.1)
    assert [e.label for e in fixed] == ["local", "fedproto"] and fixed[1].settings.method.weight == 2
    sap = entries_of(["local", "fedsap"], given, 90, 0.01)[1]
    assert (sap.settings.method.alignment.start, sap.settings.method.alignment.end, sap.ripe) == (10, 30, 30)
    plain = entries_of(["local", "fedsap"], {**given, "alignment": 0.5}, 90, 0.01)
    assert [e.settings.method.alignment for e in plain if e.method == "fedsap"] == [0.5, 0.5]
    assert all(e.settings.general.rounds == 90 for e in fixed)


def test_several_networks_are_raced_as_they_are_given(mine, tmp_path):
    given = {k: v for k, v in TINY.items() if k in ("rounds", "batch")}
    models = ["mlp?hidden=7&embedding=5", "mlp?hidden=5&embedding=5"]
    out = tmp_path / "out"
    advice = pf.advise(
        str(mine), budget="5m", out=out, methods=["fedproto"], jobs=1, models=models, weight=1, lr=0.05, dim=5, **given
    )
    assert [row["label"] for row in advice.table if row["rounds"]] and read_toml(advice.settings)["models"] == models


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("1h30m", 5400), (20, 20), (0.5, 0.5)]
)
def test_a_budget_is_read(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["abc", "", "10", "-3m", "0s", "5m!", "m", 0, -1, float("nan"), True])
def test_a_budget_that_is_none_is_one_line(text):
    with pytest.raises(pf.ProtofedError, match="expected a time such as 90s, 10m or 1h30m"):
        parse_budget(text)


def test_the_length_of_a_run_follows_from_the_time():
    pace = Pace(0.5, 0.01)
    assert fitting_length(pace, 15, 3600, 2) == 300
    assert fitting_length(pace, 15, 60, 2) in (30, 100) and fitting_length(pace, 15, 1, 2) == 30
    pace.note("fedavg", 2.0, 20)
    assert pace.cost("fedavg lr=0.05", "fedavg", 10) == pytest.approx(1.5) and pace.cost("x", "x", 0) == 0


# --- pausing ----------------------------------------------------------------------------------------------------------
def test_a_run_that_pauses_and_goes_on_is_the_one_that_does_not(tmp_path, tiny):
    given = {**SMALL, "rounds": 5, "data": tiny}
    whole = run("fedproto", out=tmp_path / "whole", **given)
    paused = run("fedproto", out=tmp_path / "paused", until=2, **given)
    assert [row["round"] for row in paused.metrics] == [1, 2] and not (tmp_path / "paused" / "summary.json").exists()
    with pytest.raises(pf.ProtofedError, match="has not finished"):
        load(tmp_path / "paused", data=tiny)
    again = resume(tmp_path / "paused", data=tiny, until=4)
    assert again.metrics[-1]["round"] == 4
    assert resume(tmp_path / "paused", data=tiny, until=3).metrics[-1]["round"] == 4  # nothing was left
    done = resume(tmp_path / "paused", data=tiny)
    assert done.summary["last_five"] == whole.summary["last_five"]
    assert (tmp_path / "paused/clients.jsonl").read_bytes() == (tmp_path / "whole/clients.jsonl").read_bytes()
    memory = run("fedproto", until=1, **given)
    assert [row["round"] for row in memory.metrics] == [1]


# --- the whole --------------------------------------------------------------------------------------------------------
def test_the_answer_is_that_of_its_runs_and_cells_are_run_once(mine, tmp_path):
    out = tmp_path / "out"
    stages: list[str] = []

    def watch(moment):
        stages.append(moment.stage)

    given = {"methods": ["fedavg", "fedproto"], "jobs": 1, "lr": 0.05, **TINY}
    advice = pf.advise(str(mine), budget="5m", out=out, watch=watch, **given)
    assert advice.folder == out and advice.settings == out / "settings.toml" and not advice.stopped
    assert not advice.partial and advice.record == read_advice(out)
    record = advice.record
    assert [site["name"] for site in advice.sites] == list(SITES) and record["sites_are_assumed"] is False
    contender = next(row for row in advice.table if row["label"] == record["contender"]["label"])
    runs = {s: read_run(out / "race" / f"{contender['label'].replace(' ', '-')}-seed{s}") for s in record["seeds"]}
    by = f"accuracy_{contender['by']}"
    mean = np.mean([np.mean([row[by] for row in runs[s].clients]) for s in record["seeds"] if runs[s].clients])
    assert contender["accuracy"] == pytest.approx(mean)  # of three rounds, all are among the last five
    local = {
        s: read_run(out / "race" / f"local-seed{s}") for s in record["seeds"] if is_run(out / "race" / f"local-seed{s}")
    }
    pairs = [
        np.mean(np.mean([row[by] for row in runs[s].clients], 0))
        - np.mean(np.mean([row[f"accuracy_{record['local']['by']}"] for row in local[s].clients], 0))
        for s in local
        if runs[s].clients
    ]
    assert record["gain"]["mean"] == pytest.approx(np.mean(pairs))
    up = sum(sum(row["up"].values()) for row in runs[record["seeds"][0]].rounds)
    assert record["cost"]["up"] == pytest.approx(up)
    # the settings file gives the very run that was tested
    config = read_toml(advice.settings)
    assert config["partition"] == {"name": "natural"} and record["command"].endswith(f"--config {out}/settings.toml")
    tested = read_run(out / "final" / advice.best.folder)
    same = run(advice.best.method, config=advice.settings)
    assert same.summary["per_client"] == tested.summary["per_client"]
    # nothing is run again
    before = {p: p.stat().st_mtime_ns for p in (out / "race").rglob("*.jsonl")}
    stages.clear()
    again = pf.advise(str(mine), budget="5m", out=out, watch=watch, **given)
    assert stages == [] and again.record["gain"] == record["gain"] and again.record["test"]["looks"] == 1
    assert before == {p: p.stat().st_mtime_ns for p in (out / "race").rglob("*.jsonl")}
    # another race cannot be mixed with it
    for change, word in (({"rounds": 4}, "rounds=3"), ({"seed": 9}, "seed=1234"), ({"batch": 8}, "batch=4")):
        with pytest.raises(pf.ProtofedError, match=f"was begun with {word}"):
            pf.advise(str(mine), budget="5m", out=out, **{**given, **change})
    np.savez(mine, **sites(seed=1))
    with pytest.raises(pf.ProtofedError, match="begun with other data"):
        pf.advise(str(mine), budget="5m", out=out, **given)


@pytest.mark.slow
def test_a_frame_and_a_mapping_of_sites_can_be_raced(tmp_path):
    pandas = pytest.importorskip("pandas")
    parts = sites()
    frame = pandas.DataFrame(parts["x_train"], columns=list("abcd"))
    frame = frame.assign(tree=np.array(["ash", "fir"])[parts["y_train"]], ward=parts["group_train"])
    given = {"budget": "5m", "methods": ["fedproto"], "jobs": 1, "lr": 0.1, "weight": 1.0, **TINY}
    advice = pf.advise(frame, label="tree", site="ward", out=tmp_path / "out", **given)
    assert [row["name"] for row in advice.sites] == list(SITES)
    command = advice.record["command"]
    assert command.endswith("data=…, label='tree', site='ward')")
    same = eval(command.replace("…", "frame"), {"pf": pf, "frame": frame})
    assert tuple(same.clients) == SITES and same.model("Bonn").classes == ("ash", "fir")
    places = {name: (frame[list("abcd")][frame.ward == name], frame.tree[frame.ward == name]) for name in SITES}
    with pytest.raises(pf.ProtofedError, match="nothing is left to race against Local"):
        pf.advise(places, methods=["local"])
    with pytest.raises(pf.ProtofedError, match="one site only \\(Bonn\\)"):
        pf.advise({"Bonn": places["Bonn"]}, methods=["fedproto"])


def test_the_page_and_a_notebook_show_the_answer_with_whatever_a_site_is_called(tmp_path):
    parts = sites()
    parts["group_train"] = np.repeat(["<b>A</b>", "a & b", "c"], 24)
    advice = pf.advise(
        Dataset.from_arrays(**parts, name="<i>"),
        budget="5m",
        out=tmp_path / "out",
        methods=["fedproto"],
        jobs=1,
        **TINY,
    )
    page = (tmp_path / "out" / "advice.html").read_text()
    assert "&lt;b&gt;A&lt;/b&gt;" in page and "<b>A</b>" not in page and "<i>" not in page
    assert "http://" not in page and "https://" not in page and "<script" not in page
    for sentence in (*advice.sentences, *advice.not_tried):
        assert sentence.split("'")[0].split("<")[0].split("&")[0].split('"')[0] in page
    shown = advice._repr_html_()
    assert "<table>" in shown and "&lt;b&gt;A" in shown
    assert "pf.run(config='" in advice.record["command"] and "data" not in read_toml(advice.settings)
    nothing = pf.advise(Dataset.from_arrays(**parts), budget="5m", methods=["fedproto"], jobs=1, lr=0.1, **TINY)
    assert nothing.folder is None and nothing.settings is None and "Advice(" in repr(nothing)


def test_ctrl_c_leaves_a_partial_answer_and_the_same_call_goes_on(mine, tmp_path):
    out = tmp_path / "out"
    given = {"methods": ["fedavg"], "jobs": 1, "lr": 0.05, **TINY}

    def stop_at(stage):
        def watch(moment):
            if moment.stage.startswith(stage) and moment.cell is not None:
                raise KeyboardInterrupt

        return watch

    with pytest.raises(Stopped, match=r"the same command with --out .*out goes on"):
        pf.advise(str(mine), budget="5m", out=out, watch=stop_at("1 of 3"), **given)
    early = pf.advise(str(mine), budget="5m", out=out, watch=stop_at("3 of 3"), **given)
    assert early.partial and early.stopped == 130 and early.record["judged_after"] == 1 and early.record["test"] is None
    assert "only, and so with caution" in early.sentences[0]
    later = pf.advise(str(mine), budget="5m", out=out, watch=stop_at("test"), **given)
    assert later.partial and later.sentences[0].startswith("The race was stopped")
    done = pf.advise(str(mine), budget="5m", out=out, **given)
    fresh = pf.advise(str(mine), budget="5m", out=tmp_path / "fresh", **given)
    assert not done.partial and done.record["gain"] == fresh.record["gain"]
    assert race_rows(out) == race_rows(tmp_path / "fresh")


@pytest.mark.slow
@pytest.mark.soak
def test_killed_at_any_moment_it_goes_on(mine, tmp_path):
    words = [sys.executable, "-m", "protofed", "advise", str(mine), "rounds=20", *QUICK[1:], "lr=0.05"]
    words += ["--methods", "fedavg", "--out", "out", "--budget", "2m"]
    started = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL)
    race = tmp_path / "out" / "race"
    while not (race.is_dir() and any(is_run(p) and read_run(p).last for p in race.iterdir())):
        assert started.poll() is None
        time.sleep(0.02)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    assert not (tmp_path / "out" / "advice.json").exists()
    begun = {p.name for p in race.iterdir() if is_run(p)}
    given = {**TINY, "rounds": 20, "lr": 0.05, "methods": ["fedavg"], "budget": "5m"}
    done = pf.advise(str(mine), out=tmp_path / "out", jobs=2, **given)
    assert begun <= {p.name for p in race.iterdir()} and not done.partial
    name = next(iter(begun))
    data = divide({"data": str(mine), **TINY, "rounds": 20, "lr": 0.05}, []).view
    fresh = run(resolve(None, {**read_toml(race / name / "settings.toml"), "data": data}), out=tmp_path / "fresh")
    assert fresh.summary["per_client"] == read_run(race / name).summary["per_client"]


@pytest.mark.slow
@pytest.mark.soak
def test_a_budget_is_kept_and_what_did_not_fit_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("protofed.experiment.advise.conduct.measured_pace", lambda settings: Pace(0.2, 0.005))
    x = np.random.default_rng(0).normal(size=(150, 20))
    data = Dataset.from_arrays(x, (x[:, 0] > 0).astype(int), group_train=np.repeat(np.arange(3), 50))
    budget = 6
    given = {"jobs": 1, "rounds": 30, "out": tmp_path / "out"}
    began = time.monotonic()
    advice = pf.advise(data, budget=budget, **given)
    assert time.monotonic() - began < 10 * budget  # a busy machine may take longer; how much is no matter of a test
    assert any(sentence.startswith("There was no time for") for sentence in advice.not_tried)
    assert {row["fate"].split()[0] for row in advice.table} >= {"to", "no"}
    more = pf.advise(data, budget=1.2 * budget, **given)
    assert sum(row["rounds"] for row in more.table) >= sum(row["rounds"] for row in advice.table)


def test_a_method_that_cannot_run_is_named_and_the_others_go_on(mine, tmp_path):
    advice = pf.advise(
        str(mine),
        budget="5m",
        out=tmp_path / "o",
        methods=["fedmps", "fedproto"],
        jobs=1,
        lr=0.1,
        labels="client",
        **TINY,
    )
    failed = [row for row in advice.table if row["fate"].startswith("failed")]
    assert all(any(row["label"] in sentence for sentence in advice.not_tried) for row in failed)
    assert advice.record["contender"]["label"] not in [row["label"] for row in failed]


def test_the_control_of_the_contender_says_what_the_exchange_gives(mine, tmp_path):
    advice = pf.advise(str(mine), budget="5m", out=tmp_path / "o", methods=["fedproto"], jobs=1, lr=0.1, **TINY)
    control = advice.record["control"]
    gain = control["by_loss"]["mean"] + control["by_exchange"]["mean"]
    assert gain == pytest.approx(advice.record["gain"]["mean"])
    assert any("nothing exchanged" in sentence for sentence in advice.sentences)


# --- the command line -------------------------------------------------------------------------------------------------
def test_the_command_answers_and_the_next_command_runs(call, mine):
    code, out, err = call(
        "advise", mine, *QUICK, "lr=0.05", "--methods", "fedproto", "--jobs", 1, "-o", "a", "--no-weights"
    )
    assert code == 0 and "Traceback" not in err
    assert "Go on with" in out and "Not tried:" in out and "page: a/advice.html" in out
    command = out.split("go on with: ")[1].splitlines()[0].split()
    assert command[:2] == ["protofed", "run"] and call(*command[1:], "--out", "run")[0] == 0
    assert (Path("run") / "summary.json").is_file()


BAD = {
    "no such data": (["nowhere"], "unknown data set 'nowhere'"),
    "no such file": (["nowhere.npz"], "nowhere.npz"),
    "budget": (["mine.npz", "--budget", "abc"], "budget 'abc': expected a time"),
    "too small a budget": (["mine.npz", "rounds=5000", "--budget", "2s"], "takes about"),
    "no such method": (["mine.npz", "--methods", "fedx"], "unknown method 'fedx'"),
    "a method as a setting": (["mine.npz", "method=fedavg"], "--methods"),
    "only local": (["mine.npz", "--methods", "local"], "nothing is left to race against Local"),
    "weights": (["mine.npz", "--methods", "fedavg", "--no-weights"], "weights would travel"),
    "server labels": (["mine.npz", "labels=server", "server_labels=4"], "no site has labels"),
    "open pools": (["mine.npz", "labels=client", "unlabelled=open"], "unlabelled=open"),
    "an unseen group": (["mine.npz", "unseen=Bonn"], "unseen: advise chooses for the sites that train"),
    "one site": (["one.npz"], "one site only"),
    "one class": (["flat.npz"], "one class only"),
    "no labels": (["unlabelled.npz"], "y_train"),
    "a site of one row": (["short.npz"], "Celle has 1 sample"),
    "an unknown key": (["mine.npz", "roundz=3"], "unknown setting 'roundz'"),
    "a folder of something else": (["mine.npz", "--out", "full"], "exists already"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, call, mine, tmp_path):
    parts = sites()
    np.savez(tmp_path / "one.npz", **{**parts, "group_train": np.zeros(72, int)})
    np.savez(tmp_path / "flat.npz", **{**parts, "y_train": np.zeros(72, int)})
    np.savez(tmp_path / "unlabelled.npz", x_train=parts["x_train"])
    np.savez(tmp_path / "short.npz", **{k: v[:49] for k, v in parts.items()})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    words, line = BAD[case]
    code, _, err = call("advise", *words, *([] if "--out" in words else ["--out", "out"]))
    assert code == 2 and len(err.splitlines()) == 1 and line in err, err
    assert not (tmp_path / "out").exists()


def test_sites_that_are_assumed_are_said_to_be(call, tmp_path):
    parts = sites()
    del parts["group_train"]
    np.savez(tmp_path / "plain.npz", **parts)
    division = divide({"data": str(tmp_path / "plain.npz"), "clients": 4}, [])
    assert not division.natural and "so 4 were assumed" in division.notes[0] and "alpha=0.5" in division.notes[0]
    assert divide({"data": str(tmp_path / "plain.npz"), "alpha": 2, "clients": 4}, []).base.partition.alpha == 2
    asked = divide({"data": str(tmp_path / "plain.npz"), "partition": "iid", "clients": 4}, [])
    assert asked.base.general.test == "local" and asked.notes[0].startswith("The sites are assumed, as your settings")
    assert any(
        "fewer than 5 validation samples" in note for note in divide({"data": "digits", "clients": 200}, []).notes
    )


def test_a_record_of_another_version_is_refused(tmp_path):
    (tmp_path / "advice.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(pf.ProtofedError, match="another version"):
        read_advice(tmp_path)
    with pytest.raises(pf.ProtofedError, match="not readable"):
        read_advice(tmp_path / "nothing")


def test_what_is_written_is_read_by_resolve(mine, tmp_path):
    settings = resolve(
        "fedsap", {"data": str(mine), "partition": "natural", "alignment.end": 70, "filters": ["clip?norm=1"]}
    )
    from protofed.experiment.advise.conduct import settings_text

    text = settings_text(settings, {"advised": {"label": "x", "by": "head"}, "command": "…"})
    (tmp_path / "s.toml").write_text(text)
    assert resolve(None, read_toml(tmp_path / "s.toml")).to_dict() == settings.to_dict()
    assert torch.is_tensor(settings.data.load().x_train)


def test_a_test_that_is_not_by_site_is_said_to_be_another_question(tmp_path):
    parts = sites(test=True)
    assert divide({"data": Dataset.from_arrays(**parts)}, []).base.general.test == "local"
    del parts["group_test"]
    division = divide({"data": Dataset.from_arrays(**parts)}, [])
    assert division.base.general.test == "central" and "the two need not agree" in division.notes[-1]


def test_the_example_of_the_documentation_is_what_its_numbers_say():
    place = Path(__file__).parent.parent / "docs" / "results" / "advise"
    record = json.loads((place / "digits.json").read_text(encoding="utf-8"))
    shown = (place / "digits.txt").read_text(encoding="utf-8")
    assert sentences(record) == record["sentences"] and all(sentence in shown for sentence in record["sentences"])
    assert all(cell in shown for row in table(record)[1] for cell in row)
