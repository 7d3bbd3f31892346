"""Sweeps: what a person writes becomes variants × seeds; folders, resume after a kill, and the command line."""

import csv
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import protofed as pf
from protofed.errors import ProtofedError
from protofed.experiment.compare import (
    compare,
    make_grid,
    parse_axes,
    read_comparison,
    resume_comparison,
    sweep,
)
from protofed.results.archive import read_archive
from protofed.results.read import read_rows
from protofed.results.tables import setting_text
from protofed.schedules import ramp
from protofed.wire import Exchange, bank, number
from support.run_folders import FIRST_VERSION
from support.small import SMALL, blobs


def unpack(archive, folder):
    """The folders of the runs that an archive was made of."""
    folder.mkdir()
    shutil.copyfile(archive / "comparison.json", folder / "comparison.json")
    for name, run in read_archive(archive).items():
        (folder / name).mkdir()
        (folder / name / "settings.toml").write_text(run.settings)
        (folder / name / "summary.json").write_text(json.dumps(run.summary))
        for file, lines in run.lines.items():
            (folder / name / file).write_text("".join(lines))


RESULTS = Path(__file__).parent.parent / "docs" / "results"
QUICK = {"clients": 3, "rounds": 2, "shot": 4, "way": 2, "hidden": [8]}
FIXED = {"engine": "loop", "layout": "contiguous", "workers": 1, "threads": 1}  # the same bits in every run
PAIRS = [f"{key}={value}" for key, value in {**QUICK, **FIXED}.items()]


def grid(names=("fedsap",), over=None, seeds=1, config=None, **settings):
    return make_grid(names, over=over or {}, seeds=seeds, config=config, given=settings)


def labels(*args, **settings):
    return [variant.label for variant in grid(*args, **settings).variants]


def of(made, read):
    """One value of each variant's settings."""
    return [read(made.cells[variant.cell(made.seeds[0])]) for variant in made.variants]


def refused(*args, **settings):
    with pytest.raises(ProtofedError) as error:
        grid(*args, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- the grid ---------------------------------------------------------------------------------------------------------
def test_the_product_of_axes_methods_and_seeds():
    made = grid(["fedproto", "fedsap"], {"lr": [0.1, 0.2], "way": [2, 3, 4]}, seeds=2, rounds=3)
    expected = [
        (name, lr, way, seed)
        for name in ("fedproto", "fedsap")
        for lr, way in itertools.product([0.1, 0.2], [2, 3, 4])
        for seed in (1234, 1235)
    ]
    cells = [(s.method.name, s.general.lr, s.partition.way, s.general.seed) for s in made.cells.values()]
    assert cells == expected and all(s.general.rounds == 3 for s in made.cells.values())
    assert next(iter(made.cells)) == "fedproto-lr=0.1-way=2-seed1234"
    assert made.variants[0].label == "fedproto lr=0.1 way=2" and made.variants[0].settings == {"lr": 0.1, "way": 2}


@pytest.mark.parametrize(
    ("key", "values", "read"),
    [
        ("scale", [8.0, 16.0], lambda s: s.method.scale),
        ("fedsap.scale", [8.0, 16.0], lambda s: s.method.scale),
        ("method.scale", [8.0, 16.0], lambda s: s.method.scale),
        ("lr", [0.1, 0.2], lambda s: s.general.lr),
        ("data", ["digits", "mnist"], lambda s: s.data.name),
        ("partition", ["iid", "dirichlet"], lambda s: s.partition.name),
        ("model", ["mlp", "cnn"], lambda s: s.model.name),
        ("alignment.shape", ["linear", "cosine"], lambda s: s.method.alignment.shape),
        ("proxy", [True, False], lambda s: s.method.proxy),
    ],
)
def test_any_key_can_be_an_axis(key, values, read):
    assert of(grid(over={key: values}), read) == values


def test_a_method_can_be_an_axis():
    assert labels((), {"method": ["fedproto", "FedSAP"], "lr": [0.1]}) == ["fedproto lr=0.1", "fedsap lr=0.1"]


def test_a_method_that_an_axis_does_not_speak_to_is_run_once():
    both = ["fedproto lr=0.1", "fedsap scale=8 lr=0.1", "fedsap scale=16 lr=0.1"]
    for key in ("fedsap.scale", "scale"):
        assert labels(["fedproto", "fedsap"], {key: [8, 16], "lr": [0.1]}) == both
    assert "applies to none" in refused(["fedproto"], {"fedsap.scale": [8, 16]})
    assert "unknown setting 'scale'" in refused(["fedproto"], {"scale": [8, 16]})


def test_values_of_python():
    shapes = [ramp("linear", 1, 2, 0.5), ramp("cosine", 1, 2, 0.5)]
    assert of(grid(over={"alignment": shapes}), lambda s: s.method.alignment) == shapes
    made = grid(over={"lr": np.array([0.1, 0.5]), "epochs": np.arange(1, 3)})
    assert made.variants[1].label == "fedsap lr=0.1 epochs=2"
    json.dumps(made.record().settings)
    assert of(grid("fedsap", {"model": ["mlp"], "hidden": [(4,), (4, 2)]}), lambda s: s.model.hidden) == [(4,), (4, 2)]


def test_a_choice_with_its_settings_is_a_table():
    tables = [{"name": "dirichlet", "alpha": 0.1}, {"name": "dirichlet", "alpha": 0.5}, {"name": "iid"}]
    made = grid(over={"partition": tables})
    assert [v.label for v in made.variants] == [
        "fedsap partition=dirichlet,alpha=0.1",
        "fedsap partition=dirichlet,alpha=0.5",
        "fedsap partition=iid",
    ]
    assert of(made, lambda s: getattr(s.partition, "alpha", None)) == [0.1, 0.5, None]


def test_a_setting_of_a_choice_that_is_swept_is_never_dropped():
    assert of(grid(over={"partition": ["dirichlet"]}, **{"partition.alpha": 0.7}), lambda s: s.partition.alpha) == [0.7]
    assert "alpha" in refused(over={"partition": ["dirichlet", "iid"]}, **{"partition.alpha": 0.7})


@pytest.mark.parametrize(
    ("over", "settings", "words"),
    [
        ({"lrr": [1]}, {}, ["lrr", "did you mean 'lr'"]),
        ({"fedsap.scal": [1, 2]}, {}, ["scal", "did you mean 'scale'"]),
        ({"lr": []}, {}, ["'lr'", "no values"]),
        ({"lr": 0.1}, {}, ["'lr'", "list", "0.1"]),
        ({"lr": "0.1,0.2"}, {}, ["'lr'", "list"]),
        ({"lr": [0.1, 0.1]}, {}, ["'lr'", "0.1", "twice"]),
        ({"epochs": [1, 1.0]}, {}, ["epochs=1'", "epochs=1.0'", "same settings"]),
        ({"lr": [0.1, 0.2]}, {"lr": 0.3}, ["'lr'", "setting", "axis"]),
        ({"scale": [1, 2]}, {"fedsap": {"scale": 3}}, ["'fedsap.scale'", "'scale'", "axis"]),
        ({"scale": [1, 2]}, {"method.scale": 3}, ["'method.scale'", "'scale'", "axis"]),
        ({"partition": ["iid"]}, {"partition": {"name": "iid"}}, ["'partition'", "axis"]),
        ({"partition": [{"name": "dirichlet", "alpha": 1.0}]}, {"alpha": 0.3}, ["'alpha'", "'partition'", "axis"]),
        ({"scale": [1], "fedsap.scale": [2]}, {}, ["'scale'", "'fedsap.scale'", "same"]),
        ({"seed": [1, 2]}, {}, ["seed", "--seeds"]),
        ({"method": ["fedproto"]}, {}, ["method"]),
        ({}, {"method": "fedproto"}, ["method"]),
        ({"rounds": [3, 0]}, {}, ["rounds"]),  # the last cell's mistake is known before the first runs
        ({"scale": [8, -1]}, {}, ["scale"]),
    ],
)
def test_mistakes_are_one_line(over, settings, words):
    message = refused(over=over, **settings)
    for word in words:
        assert word in message


def test_different_methods_settings_are_different_axes():
    made = grid(["fedproto", "fedsap"], {"fedproto.reduction": ["mean", "sum"], "fedsap.reduction": ["mean", "sum"]})
    assert [v.label for v in made.variants] == [
        f"{m} reduction={r}" for m in ("fedproto", "fedsap") for r in ("mean", "sum")
    ]
    one = grid(["fedproto", "fedsap"], {"fedproto.reduction": ["mean", "sum"]}, fedsap={"reduction": "sum"})
    assert of(one, lambda s: s.method.reduction) == ["mean", "sum", "sum"]


def test_no_method_and_no_seed():
    assert "no method" in refused(())
    assert "at least one seed" in refused(seeds=0)
    assert "did you mean 'fedsap'" in refused(["fedsapp"])


def test_folders_are_safe_short_and_different():
    values = ["a/b c", "a:b c", "é", "x" * 300, "A", "a"]
    made = grid(over={"data": [{"name": "npz", "path": value} for value in values]})
    names = [v.folder for v in made.variants]
    assert len({n.lower() for n in names}) == len(values)
    for name in names:
        assert len(name) <= 110 and all(c.isascii() and (c.isalnum() or c in "._=,+-") for c in name)
    again = grid(over={"data": [{"name": "npz", "path": value} for value in values]})
    assert [v.folder for v in again.variants] == names


# --- the command line's words -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("lr=0.1", [0.1]),
        ("lr=0.1, 0.2", [0.1, 0.2]),
        ("proxy=true,false", [True, False]),
        ("hidden=[64],[128,64]", [[64], [128, 64]]),
        ("models=[cnn,mlp],[mlp]", [["cnn", "mlp"], ["mlp"]]),
        ('data="a,b",c', ["a,b", "c"]),
        ('partition={name="dirichlet",alpha=0.1},iid', [{"name": "dirichlet", "alpha": 0.1}, "iid"]),
        ("data=hub:x=y", ["hub:x=y"]),
        ("lr=", []),
    ],
)
def test_axes_on_the_command_line(word, values):
    assert list(parse_axes([word]).values()) == [values]


@pytest.mark.parametrize("words", [["lr"], ["=1,2"], ["lr=1,,2"], ["lr=1,"], ["h=[1,2"], ["h=1]"], ["lr=1", "lr=2"]])
def test_bad_axes_on_the_command_line(words):
    with pytest.raises(ProtofedError, match="--over"):
        parse_axes(words)


values = st.one_of(st.integers(), st.booleans(), st.floats(allow_nan=False, allow_infinity=False))


@given(st.lists(st.one_of(values, st.lists(values, max_size=3)), min_size=1, max_size=4))
def test_written_axes_are_read_back(axis):
    assert parse_axes(["key=" + ",".join(map(setting_text, axis))]) == {"key": axis}


# --- files ------------------------------------------------------------------------------------------------------------
def write(path, text):
    path.write_text(text)
    return path


def test_a_file_can_be_complete(tmp_path):
    file = write(
        tmp_path / "s.toml",
        'methods = ["fedproto", "fedsap"]\nrounds = 3\n[sweep]\nlr = [0.1, 0.2]\n"fedsap.scale" = [8]\n'
        '[sweep.alignment]\nshape = ["cosine"]\n',
    )
    made = grid((), config=file)
    assert [v.label for v in made.variants] == [
        "fedproto lr=0.1",
        "fedproto lr=0.2",
        "fedsap lr=0.1 scale=8 alignment.shape=cosine",
        "fedsap lr=0.2 scale=8 alignment.shape=cosine",
    ]
    assert {s.general.rounds for s in made.cells.values()} == {3}
    assert labels(["local"], {"lr": [0.3]}, config=write(tmp_path / "t.toml", "[sweep]\nlr = [1]")) == ["local lr=0.3"]


def test_later_files_and_the_call_go_over_earlier_ones(tmp_path):
    first = write(tmp_path / "a.toml", 'lr = 0.5\nrounds = 5\n[partition]\nname = "dirichlet"\nalpha = 0.3\n')
    second = write(tmp_path / "b.toml", 'rounds = 6\npartition = "iid"\n')
    made = grid(config=[first, second], over={"lr": [0.1, 0.2]}, epochs=2)
    assert of(made, lambda s: (s.general.lr, s.general.rounds, s.general.epochs, s.partition.name)) == [
        (0.1, 6, 2, "iid"),
        (0.2, 6, 2, "iid"),
    ]
    same = grid(config=first, over={"partition": ["dirichlet", "iid"]})  # the file's choice keeps the file's settings
    assert of(same, lambda s: getattr(s.partition, "alpha", None)) == [0.3, None]
    assert "'lr'" in refused(config=write(tmp_path / "c.toml", "[sweep]\nlr = [1.0]"), lr=0.1)


def test_a_files_method_is_swept_and_its_settings_are_its_own(tmp_path):
    file = write(tmp_path / "run.toml", '[method]\nname = "FedSAP"\nscale = 16.0\n')
    assert of(grid((), {"lr": [0.1]}, config=file), lambda s: (s.method.name, s.method.scale)) == [("fedsap", 16.0)]
    both = grid(["fedproto", "fedsap"], config=file)
    assert of(both, lambda s: getattr(s.method, "scale", None)) == [None, 16.0]


@pytest.mark.parametrize("text", ["sweep = 3", "methods = 'fedsap'", "[sweep]\nlr = 0.1", "method = 3"])
def test_wrong_files_are_named(text, tmp_path):
    assert "s.toml" in refused((), config=write(tmp_path / "s.toml", text))


# --- running, and going on --------------------------------------------------------------------------------------------
def test_sweep_in_python_runs_and_writes_everything(tmp_path):
    made = sweep(["fedproto"], over={"weight": [0.1, 1.0]}, seeds=2, out=tmp_path / "s", jobs=1, **QUICK, **FIXED)
    assert list(made.results) == ["fedproto weight=0.1", "fedproto weight=1.0"]
    alone = pf.run("fedproto", weight=1.0, seed=1235, **QUICK, **FIXED)
    assert made.results["fedproto weight=1.0"][1].summary["last_five"] == alone.summary["last_five"]
    names = {p.name for p in (tmp_path / "s").iterdir()}
    cells = {f"fedproto-weight={w}-seed{s}" for w in (0.1, 1.0) for s in (1234, 1235)}
    assert names == {".lock", "comparison.json", "results.csv", "table.md", "table.tex", *cells}
    record = json.loads((tmp_path / "s" / "comparison.json").read_text())
    assert record["variants"][0] == {
        "label": "fedproto weight=0.1",
        "method": "fedproto",
        "settings": {"weight": 0.1},
        "folder": "fedproto-weight=0.1",
    }
    assert record["seeds"] == [1234, 1235] and set(record["settings"]) == cells
    lines = list(csv.DictReader((tmp_path / "s" / "results.csv").read_text().splitlines()))
    assert [(r["label"], r["weight"], r["seed"]) for r in lines] == [
        (f"fedproto weight={w}", str(w), str(s)) for w in (0.1, 1.0) for s in (1234, 1235)
    ]
    assert float(lines[3]["accuracy_prototype"]) == alone.accuracy_prototype
    assert "local" not in (tmp_path / "s" / "table.md").read_text()


def test_data_in_memory_can_be_an_axis(tmp_path):
    first, second = blobs(), blobs(seed=1)
    with pytest.raises(ProtofedError, match="twice"):
        sweep(["local"], over={"data": [first, second]}, **SMALL)
    made = sweep(["local"], over={"data": [first, replace(second, name="others")]}, seeds=1, jobs=1, **SMALL)
    assert list(made.results) == ["local data=blobs", "local data=others"]


def test_a_cell_that_cannot_run_is_named(tmp_path):
    with pytest.raises(ProtofedError, match=r"^local-shot=5000-seed1234: .*5000"):
        sweep(["local"], over={"shot": [5000]}, seeds=1, jobs=1, clients=3, **FIXED)


def wait_for(what, process):
    deadline = time.monotonic() + 60
    while not what():
        assert process.poll() is None, "the sweep ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.soak
def test_kill_9_and_resume_gives_the_same_bytes(tmp_path):
    """Killed with two cells under way: finished cells are kept, orphans end, the results are those of one never killed."""
    settings = {**QUICK, **FIXED, "rounds": 40, "checkpoint_every": 4, "evaluate_every": 5, "limit_test": 60}
    over = {"epochs": [1, 4]}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = [*(f"{k}={v}" for k, v in settings.items()), "--over", "epochs=1,4", "--seeds", "2", "--jobs", "2"]
    command = [sys.executable, "-m", "protofed", "sweep", "fedproto", *words, "--out", str(killed)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(list(killed.glob("*/rounds.jsonl"))) > len(list(killed.glob("*/summary.json"))) > 0, process)
    file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    orphans = [int(pid) for pid in file.read_text().split()] if file.exists() else []
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while any(map(is_running, orphans)):
        assert time.monotonic() < deadline, "a worker outlived the sweep"
        time.sleep(0.05)
    finished = {f: f.stat().st_mtime_ns for f in killed.glob("*/summary.json")}
    assert 1 <= len(finished) < 4 and not (killed / "results.csv").exists()
    rows, _ = read_rows(killed)
    assert sum(len(r.runs) for r in rows) == len(finished)  # a table of what there is
    resume_comparison(killed, jobs=1)
    assert all(f.stat().st_mtime_ns == before for f, before in finished.items())
    sweep(["fedproto"], over=over, seeds=2, jobs=1, out=whole, **settings)
    assert (killed / "results.csv").read_bytes() == (whole / "results.csv").read_bytes()
    assert (killed / "comparison.json").read_bytes() == (whole / "comparison.json").read_bytes()


def test_a_finished_comparison_of_the_first_version_resumes_to_its_table(tmp_path):
    before = (FIRST_VERSION / "table.md").read_text().splitlines()
    unpack(FIRST_VERSION, tmp_path / "c")
    record = json.loads((tmp_path / "c" / "comparison.json").read_text())
    if "variants" in record:
        record["methods"] = [v["label"] for v in record.pop("variants")]
        (tmp_path / "c" / "comparison.json").write_text(json.dumps(record))
    made = resume_comparison(tmp_path / "c", jobs=1)
    assert list(made.results) == record["methods"]
    numbers = lambda line: line.replace("**", "").replace("<u>", "").replace("</u>", "")  # noqa: E731
    after = (tmp_path / "c" / "table.md").read_text().splitlines()
    table = len(record["methods"]) + 2
    assert [numbers(line) for line in after[:table]] == [numbers(line) for line in before[:table]]


@pytest.mark.slow
def test_a_begun_comparison_of_the_first_version_is_finished(tmp_path):
    whole = compare(["fedproto"], seeds=2, jobs=1, out=tmp_path / "c", **QUICK, **FIXED)
    record = json.loads((tmp_path / "c" / "comparison.json").read_text())
    old = {"methods": ["local", "fedproto"], "seeds": record["seeds"], "settings": record["settings"]}
    (tmp_path / "c" / "comparison.json").write_text(json.dumps(old))
    results = (tmp_path / "c" / "results.csv").read_bytes()
    shutil.rmtree(tmp_path / "c" / "fedproto-seed1235")
    (tmp_path / "c" / "local-seed1234" / "summary.json").unlink()
    seen = []
    made = resume_comparison(tmp_path / "c", jobs=1, watch=seen.append)
    assert {p.cell for p in seen if p.round == p.rounds} == set(record["settings"])  # each is seen to finish
    assert list(made.results) == list(whole.results) == ["local", "fedproto"]
    assert (tmp_path / "c" / "results.csv").read_bytes() == results


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"variants": [{}], "seeds": [1], "settings": {}}', '{"methods": ["x"], "seeds": [1]}']
)
def test_a_broken_record_is_one_line(text, tmp_path):
    write(tmp_path / "comparison.json", text)
    for read in (read_comparison, read_rows):
        with pytest.raises(ProtofedError, match=r"comparison\.json: not readable"):
            read(tmp_path)


# --- the command line -------------------------------------------------------------------------------------------------


def test_sweep_and_table_on_the_command_line(call, tmp_path):
    write(tmp_path / "a.toml", "rounds = 5\nlr = 0.5\n")
    write(tmp_path / "b.toml", 'methods = ["fedproto"]\n[sweep]\nweight = [0.1, 1.0]\n')
    words = ["--config", "a.toml", "--config", "b.toml", "--over", "lr=0.01,0.02", "--seeds", "1", "--jobs", "1"]
    code, out, _ = call("sweep", *PAIRS, *words, "--out", "s", "--columns", "prototype,seconds")
    assert code == 0 and "[4/4] fedproto-weight=1.0-lr=0.02-seed1234" in out and "run folders: s" in out
    assert "fedproto weight=0.1 lr=0.01" in out and "│ prototype │ seconds │" in out.replace("┃", "│")
    header = (tmp_path / "s/table.md").read_text().splitlines()[0]
    assert header == "| variant | prototype | seconds |"
    assert r"\toprule" in (tmp_path / "s/table.tex").read_text()

    assert call("table", "s", "--format", "csv")[1] == (tmp_path / "s/results.csv").read_text()
    assert call("table", "s", "--format", "markdown")[1] == (tmp_path / "s/table.md").read_text()
    assert call("table", "s", "--format", "latex")[1] == (tmp_path / "s/table.tex").read_text()
    code, out, _ = call("table", "s", "--columns", "head,bytes_up")
    assert code == 0 and "kB up / round" in out and "seconds" not in out

    for cell in ("fedproto-weight=0.1-lr=0.01-seed1234", "fedproto-weight=1.0-lr=0.02-seed1234"):
        shutil.rmtree(tmp_path / "s" / cell)
    code, out, _ = call("table", "s", "--format", "markdown")  # partly finished
    assert code == 0 and "| fedproto weight=0.1 lr=0.01 | – | – |" in out and "(0 of 1)" in out
    assert call("resume", "s", "--jobs", "1")[0] == 0
    assert (tmp_path / "s/table.md").read_text().splitlines()[0] == header  # with the columns it was begun with


def test_a_wide_table_is_not_cut_in_a_pipe(call, tmp_path):
    long = {f"fedproto.{key}": [v] for key, v in (("weight", 0.123456789),)} | {
        key: [value]
        for key, value in (("momentum", 0.123456789), ("weight_decay", 0.000123456789), ("lr", 0.0123456789))
    }
    sweep(["fedproto"], over=long, seeds=1, jobs=1, out=tmp_path / "s", **QUICK, **FIXED)
    _, out, _ = call("table", "s")
    label = "fedproto weight=0.123456789 momentum=0.123456789 weight_decay=0.000123456789 lr=0.0123456789"
    assert label in out and "…" not in out


BAD = {
    "no method": (["sweep", "--over", "lr=0.1"], ["no method"]),
    "no such key": (["sweep", "fedsap", "--over", "scal=1,2"], ["did you mean 'scale'"]),
    "empty axis": (["sweep", "fedsap", "--over", "lr="], ["'lr'", "no values"]),
    "not an axis": (["sweep", "fedsap", "--over", "lr"], ["--over", "key=value"]),
    "twice": (["sweep", "fedsap", "--over", "lr=1,1"], ["twice"]),
    "axis and setting": (["sweep", "fedsap", "lr=1", "--over", "lr=1,2"], ["'lr'", "axis"]),
    "the last cell": (["sweep", "fedsap", "--over", "rounds=1,2,x", "--out", "s"], ["rounds"]),
    "columns of a sweep": (["sweep", "fedsap", "--columns", "haed", "--out", "s"], ["haed", "did you mean"]),
    "columns of a comparison": (["compare", "fedsap", "--columns", "haed", "--out", "s"], ["haed"]),
    "no columns": (["compare", "fedsap", "--columns", ",", "--out", "s"], ["--columns"]),
    "table of nothing": (["table", "nowhere"], ["nowhere", "comparison.json"]),
    "table of a run": (["table", "run"], ["run", "comparison.json"]),
    "method twice": (["compare", "fedsap", "method=fedproto"], ["method"]),
    "sweep table for compare": (["compare", "fedsap", "--config", "s.toml"], ["sweep.lr"]),
    "a file's method": (["compare", "fedsap", "--config", "three.toml"], ["three.toml", "method=3"]),
    "missing second file": (["sweep", "fedsap", "--config", "s.toml", "--config", "no.toml"], ["no.toml"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line_and_nothing_is_begun(case, call, tmp_path):
    (tmp_path / "run").mkdir()
    write(tmp_path / "s.toml", "[sweep]\nlr = [0.1]\n")
    write(tmp_path / "three.toml", "method = 3\n")
    words, expected = BAD[case]
    code, _, err = call(*words)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    for word in expected:
        assert word in err
    assert not (tmp_path / "s").exists() and not (tmp_path / "runs").exists()


def test_table_before_the_first_run_has_finished(call, tmp_path):
    sweep(["local"], seeds=1, jobs=1, out=tmp_path / "s", **QUICK, **FIXED)
    (tmp_path / "s/local-seed1234/summary.json").unlink()
    code, _, err = call("table", "s")
    assert code == 2 and "no run" in err and "protofed resume s" in err


@pytest.mark.usefixtures("own_names")
def test_what_travels_may_depend_on_a_methods_settings(call):
    @dataclass(frozen=True)
    class Sends(pf.methods.Method):
        """Sends what it is told to."""

        what: str = "bank"
        exchange = property(lambda self: Exchange(up=(bank(self.what), number("told"))))

    pf.methods.register("sends")(Sends)
    code, out, _ = call("methods")
    assert code == 0 and "up: bank, told" in out


def test_run_takes_several_files(call, tmp_path):
    write(tmp_path / "a.toml", "rounds = 5\nlr = 0.5\n")
    write(tmp_path / "b.toml", "rounds = 1\n")
    pairs = [p for p in PAIRS if not p.startswith("rounds")]
    assert call("run", "local", *pairs, "--config", "a.toml", "--config", "b.toml", "--out", "r")[0] == 0
    text = (tmp_path / "r/settings.toml").read_text()
    assert "rounds = 1\n" in text and "lr = 0.5\n" in text
    assert call("data", "show", *pairs, "-c", "a.toml", "-c", "b.toml", "--picture", "p.png")[0] == 0
