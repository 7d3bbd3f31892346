"""Comparisons of variants: `[LABEL=]METHOD[?key=value&…]` on the command line, in Python and in files."""

import csv
import importlib
import json
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import protofed as pf
from protofed import disk
from protofed.errors import ProtofedError
from protofed.experiment.compare import (
    Progress,
    Variant,
    make_grid,
    parse_entries,
    parse_words,
    resume_comparison,
)
from protofed.results.read import read_rows
from support.small import SMALL, blobs

QUICK = {"clients": 3, "rounds": 2, "shot": 4, "way": 2, "hidden": [8]}
FIXED = {"engine": "loop", "layout": "contiguous", "workers": 1, "threads": 1}  # the same bits in every run
PAIRS = [f"{key}={value}" for key, value in {**QUICK, **FIXED}.items()]


def grid(*names, seeds=1, config=None, local=True, **settings):
    return make_grid(names, local=local, seeds=seeds, config=config, given=settings)


def labels(made):
    return [variant.label for variant in made.variants]


def of(made, read):
    return [read(made.cells[variant.cell(made.seeds[0])]) for variant in made.variants]


def refused(*names, **settings):
    with pytest.raises(ProtofedError) as error:
        grid(*names, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def write(path, text):
    path.write_text(text)
    return path


# --- what an entry is -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "variant"),
    [
        ("fedavg", Variant("fedavg", "fedavg", {}, "fedavg")),
        ("FedAvg", Variant("fedavg", "fedavg", {}, "fedavg")),
        ("fedavg?lr=0.5", Variant("fedavg", "fedavg", {"lr": 0.5}, "fedavg")),
        (
            "upper bound=fedavg?labels=all&lr=1",
            Variant("upper bound", "fedavg", {"labels": "all", "lr": 1}, "upper-bound"),
        ),
        (" a  b = fedavg ? lr = 1 & epochs = 2 ", Variant("a b", "fedavg", {"lr": 1, "epochs": 2}, "a-b")),
        ("m=0.1=fedpagr?margin=0.1", Variant("m=0.1", "fedpagr", {"margin": 0.1}, "m_0.1")),
        ("x=local?models=cnn,mlp?hidden=8", Variant("x", "local", {"models": ["cnn", "mlp?hidden=8"]}, "x")),
        ('x=local?models="mlp?hidden=8&embedding=4,cnn"&lr=1', Variant("x", "local", {"lr": 1}, "x")),
        (
            'x=local?partition={name="dirichlet",alpha=0.1}',
            Variant("x", "local", {"partition": {"name": "dirichlet", "alpha": 0.1}}, "x"),
        ),
        ("x=local?models=", Variant("x", "local", {"models": ""}, "x")),
        ("ß/é: 50%=fedavg", Variant("ß/é: 50%", "fedavg", {}, "____-50_")),
        ("..=fedavg", Variant("..", "fedavg", {}, "_.")),
    ],
)
def test_an_entry(text, variant):
    [read] = parse_entries([text], local=False)
    if '"mlp' in text:
        assert read.settings.pop("models") == "mlp?hidden=8&embedding=4,cnn"
    assert read == variant


names = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="?"), min_size=1, max_size=130)


@given(st.lists(names.filter(lambda t: t.split()), min_size=1, max_size=5, unique_by=lambda t: " ".join(t.split())))
@pytest.mark.slow
def test_any_label_gives_a_safe_folder_of_its_own(texts):
    made = grid(*(f"{text}=fedavg?lr={i + 1}" for i, text in enumerate(texts)), local=False)
    assert labels(made) == [" ".join(text.split()) for text in texts]
    folders = [v.folder for v in made.variants]
    assert len({folder.lower() for folder in folders}) == len(texts) == len(made.cells)
    for folder in folders:
        assert len(folder) < 110 and folder[0] not in ".-"
        assert all(c.isascii() and (c.isalnum() or c in "-_.") for c in folder)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["fedavg?lr=1"], ["fedavg"]),
        (["fedavg", "fedavg?lr=1"], ["fedavg", "fedavg?lr=1"]),
        (["FedAvg?lr=1", "fedavg?lr=2"], ["fedavg?lr=1", "fedavg?lr=2"]),
        (["fedavg", "upper=fedavg?lr=1"], ["fedavg", "upper"]),
        (["fedavg=fedprox", "fedavg?lr=1"], ["fedavg", "fedavg?lr=1"]),
        (["fedavg", "fedproto", "FedAvg"], ["fedavg", "fedproto"]),
        (["a=fedavg?lr=1", "a=fedavg?lr=1"], ["a"]),
    ],
)
def test_labels_of_entries(texts, expected):
    assert [v.label for v in parse_entries(texts, local=False)] == expected


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["fedavg"], ["local", "fedavg"]),
        (["fedavg", "local"], ["local", "fedavg"]),
        (["fedavg", "local?lr=1"], ["local", "fedavg", "local?lr=1"]),
        (["fedavg", "alone=local"], ["fedavg", "alone"]),
        (["fedavg", "alone=local?lr=1"], ["local", "fedavg", "alone"]),
    ],
)
def test_local_is_beside_them_once(texts, expected):
    assert [v.label for v in parse_entries(texts, local=True)] == expected


def test_where_clients_have_no_labels_the_server_alone_is_beside_them():
    assert labels(grid("semifl", labels="server", server_labels=50)) == ["server-only", "semifl"]
    assert labels(grid("semifl", "server-only", labels="server", server_labels=50)) == ["server-only", "semifl"]
    assert labels(grid("semifl", labels="server", server_labels=50, local=False)) == ["semifl"]


def test_local_can_be_left_out():
    assert labels(grid("fedavg", local=False)) == ["fedavg"]
    assert labels(grid("fedavg", "local", local=False)) == ["fedavg", "local"]


# --- its settings -----------------------------------------------------------------------------------------------------
def test_plain_names_are_as_they_were():
    made = grid("FedProto", "fedsap", seeds=2, scale=8)
    assert made.variants == [Variant(name, name, {}, name) for name in ("local", "fedproto", "fedsap")]
    assert list(made.cells) == [f"{name}-seed{s}" for name in ("local", "fedproto", "fedsap") for s in (1234, 1235)]


@pytest.mark.parametrize(
    ("query", "read", "common", "own"),
    [
        ("lr=0.5", lambda s: s.general.lr, 0.25, 0.5),
        ("labels=all", lambda s: s.general.labels, "client", "all"),
        ("weight=2", lambda s: s.method.weight, 0.75, 2.0),
        ("fedproto.weight=2", lambda s: s.method.weight, 0.75, 2.0),
        ("method.weight=2", lambda s: s.method.weight, 0.75, 2.0),
        ("FedProto.weight=2", lambda s: s.method.weight, 0.75, 2.0),
        ("data=mnist", lambda s: s.data.name, "digits", "mnist"),
        ("model=cnn", lambda s: s.model.name, "mlp", "cnn"),
        ("model=cnn&embedding=7", lambda s: s.model.embedding, 64, 7),
        ("partition=iid", lambda s: s.partition.name, "dirichlet", "iid"),
        ("partition.name=iid", lambda s: s.partition.name, "dirichlet", "iid"),
        ("alpha=0.5", lambda s: s.partition.alpha, 0.125, 0.5),
        ("models=cnn,mlp", lambda s: s.general.models, (), ("cnn", "mlp")),
    ],
)
def test_any_key_speaks_to_its_entry_alone(query, read, common, own, tmp_path):
    file = write(
        tmp_path / "x.toml",
        'lr = 0.25\nlabels = "client"\n[partition]\nname = "dirichlet"\nalpha = 0.125\n[fedproto]\nweight = 0.1\n',
    )
    base = {"weight": 0.75}  # another spelling of the file's, and it comes later
    base |= {} if "models" in query else {"model": "mlp"}
    made = grid("fedproto", f"mine=fedproto?{query}", "other=fedproto?epochs=9", config=file, local=False, **base)
    assert of(made, read) == [common, own, common]


def test_the_keys_of_another_compared_method_may_still_stand_outside_entries():
    made = grid("fedproto?lr=1", "fedsap?scale=4", scale=8, lr=2)
    assert of(made, lambda s: (s.general.lr, getattr(s.method, "scale", None))) == [
        (2.0, None),
        (1.0, None),
        (2.0, 4.0),
    ]


def test_two_entries_may_come_to_the_same_settings():
    made = grid("fedavg", "upper=fedavg?labels=all", "again=fedavg")
    first, *rest = of(made, lambda s: s.to_dict())[1:]
    assert rest == [first, first] and len(made.cells) == 4
    with pytest.raises(ProtofedError, match=r"'x epochs=1' and 'x epochs=1\.0' are the same settings"):
        make_grid(["x=fedavg?lr=1"], over={"epochs": [1, 1.0]}, seeds=1, given={})


def test_data_in_memory_stays():
    data = blobs()
    made = grid("fedavg", "x=fedavg?lr=0.5", data=data)
    assert of(made, lambda s: s.data is data) == [True, True, True]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["x=fedavg?labls=all"], ["'x'", "unknown setting 'labls'", "did you mean 'labels'"]),
        (["fedavg?labls=all"], ["'fedavg'", "'labls'"]),
        (["fedsap", "x=fedavg?scale=8"], ["'x'", "unknown setting 'scale'"]),  # FedSAP's, and it says nothing here
        (["fedsap", "x=fedavg?fedsap.scale=8"], ["'x'", "unknown setting 'fedsap.scale'"]),
        (["x=fedavg?fedsap.scale=8"], ["'x'", "unknown setting 'fedsap.scale'"]),
        (["x=fedsap?fedsap.scal=8"], ["'x'", "'scal'", "did you mean 'scale'"]),
        (["x=fedavg?rounds=0"], ["'x'", "rounds=0"]),
        (["x=fedavg?model=resnet0"], ["'x'", "resnet0"]),
        (["x=fedavgg?lr=1"], ["'x=fedavgg?lr=1'", "did you mean 'fedavg'"]),
        (["x=fedavgg"], ["'x=fedavgg'", "did you mean 'fedavg'"]),
        (["fedavgg"], ["unknown method 'fedavgg'; did you mean 'fedavg'"]),
        (["fedavg?"], ["'fedavg?'", "key=value"]),
        (["fedavg?lr"], ["'fedavg?lr'", "key=value", "'lr'"]),
        (["x=fedavg?=1"], ["'x'", "key=value"]),
        (["x=fedavg?lr=1&"], ["'x'", "'&'"]),
        (["x=fedavg?lr=1&&epochs=2"], ["'x'", "'&'"]),
        (["x=fedavg?lr=1&lr=2"], ["'x'", "'lr'", "twice"]),
        (["x=fedavg?hidden=[1"], ["'x'", "not closed"]),
        (["x=fedavg?method=fedsap"], ["'x'", "'method'"]),
        (["x=fedavg?method.name=fedsap"], ["'x'", "'method'"]),
        (["x=fedavg?seed=3"], ["'x'", "'seed'", "--seeds"]),
        (["=fedavg"], ["'=fedavg'", "label"]),
        ([" =fedavg"], ["label"]),
        (["x=fedavg", "x=fedprox"], ["two variants are called 'x'"]),
        (["local=fedavg"], ["two variants are called 'local'"]),
        ([], ["no method given"]),
    ],
)
def test_mistakes_are_one_line_that_names_the_entry(names, words):
    message = refused(*names)
    for word in words:
        assert word in message


# --- the command line's words -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("word", "is_entry"),
    [
        ("fedavg", True),
        ("fedavg?labels=all", True),
        ("upper bound=fedavg?labels=all", True),
        ("upper=fedavg", True),
        ("v1.5=FedAvg", True),
        ("fedsap=fedavg", True),
        ("=fedavg", True),
        ("lr=0.1", False),
        ("lrr=0.1", False),
        ("method=fedavg", False),
        ("methods=fedavg", False),
        ("data=local", False),  # a folder that is called like a method
        ("path=local", False),
        ("fedsap.scale=fedavg", False),
        ("scale=fedavg", False),
        ("model=mlp?hidden=8", False),
        ("models=cnn,mlp?hidden=8", False),
        ("data=hub:x=local", False),
    ],
)
def test_entries_and_settings_are_told_apart(word, is_entry):
    entries, settings = parse_words([word])
    assert (entries == [word], bool(settings)) == (is_entry, not is_entry)


@pytest.mark.parametrize("word", ["upper=fedavgg?labels=all", "upper bound=fedavgg", "modell=mlp?hidden=8"])
def test_a_word_that_may_be_either_names_both(word):
    with pytest.raises(ProtofedError, match=r"no setting is called '(upper|upper bound|modell)', and unknown method"):
        parse_words([word])


# --- files and sweeps -------------------------------------------------------------------------------------------------
def test_a_file_lists_the_methods(tmp_path):
    file = write(tmp_path / "x.toml", 'methods = ["fedavg", "upper bound=fedavg?labels=all"]\nlabels = "client"\n')
    made = grid(config=file)
    assert labels(made) == ["local", "fedavg", "upper bound"]
    assert of(made, lambda s: s.general.labels) == ["client", "client", "all"]
    assert labels(grid("fedprox", config=file)) == ["local", "fedprox"]  # the call goes over the file
    assert labels(grid(config=file, local=False)) == ["fedavg", "upper bound"]
    one = write(tmp_path / "y.toml", 'method = "fedsap"\n')
    assert labels(grid(config=one)) == ["local", "fedsap"]
    assert "y.toml" in refused(config=write(tmp_path / "y.toml", "methods = 3"))
    assert "y.toml" in refused(config=write(tmp_path / "y.toml", 'methods = ["fedavg"]\nmethod = "fedsap"'))
    assert "'x': unknown setting 'labls'" in refused(
        config=write(tmp_path / "y.toml", 'methods = ["x=fedavg?labls=all"]\n')
    )


def test_a_sweep_of_entries():
    made = make_grid(
        ["fedavg", "upper bound=fedavg?labels=all", "fedsap?epochs=2"],
        over={"lr": [0.1, 0.2], "scale": [8]},
        seeds=1,
        given={"labels": "client"},
    )
    assert [(v.label, v.folder, v.settings) for v in made.variants] == [
        ("fedavg lr=0.1", "fedavg-lr=0.1", {"lr": 0.1}),
        ("fedavg lr=0.2", "fedavg-lr=0.2", {"lr": 0.2}),
        ("upper bound lr=0.1", "upper-bound-lr=0.1", {"labels": "all", "lr": 0.1}),
        ("upper bound lr=0.2", "upper-bound-lr=0.2", {"labels": "all", "lr": 0.2}),
        ("fedsap lr=0.1 scale=8", "fedsap-lr=0.1-scale=8", {"epochs": 2, "lr": 0.1, "scale": 8}),
        ("fedsap lr=0.2 scale=8", "fedsap-lr=0.2-scale=8", {"epochs": 2, "lr": 0.2, "scale": 8}),
    ]
    assert of(made, lambda s: (s.general.labels, s.general.lr, s.general.epochs)) == [
        (labels, lr, epochs) for labels, epochs in (("client", 1), ("all", 1), ("client", 2)) for lr in (0.1, 0.2)
    ]


@pytest.mark.parametrize("key", ["lr", "scale", "method.scale", "fedsap.scale"])
def test_a_key_of_an_entry_cannot_be_an_axis_too(key):
    with pytest.raises(ProtofedError, match=f"^'x': '{key}' is given as a setting, and '[a-z.]+' as an axis"):
        make_grid(["fedsap", f"x=fedsap?{key}=1"], over={"lr": [0.1], "fedsap.scale": [8]}, seeds=1, given={})


def test_a_label_that_an_axis_makes_too():
    with pytest.raises(ProtofedError, match="two variants are called 'fedsap scale=8'"):
        make_grid(["fedsap", "fedsap scale=8=fedavg"], over={"fedsap.scale": [8]}, seeds=1, given={})


# --- running, and going on --------------------------------------------------------------------------------------------
ENTRIES = ["fedproto", "half=fedproto?weight=0.5&epochs=2"]


def test_a_comparison_in_python_runs_resumes_and_writes_everything(tmp_path):
    made = pf.compare(ENTRIES, seeds=2, out=tmp_path / "c", jobs=1, **QUICK, **FIXED)
    assert list(made.results) == ["local", "fedproto", "half"]
    alone = pf.run("fedproto", weight=0.5, epochs=2, seed=1235, **QUICK, **FIXED)
    assert made.results["half"][1].summary["last_five"] == alone.summary["last_five"]
    assert alone.summary["last_five"] != made.results["fedproto"][1].summary["last_five"]
    cells = {f"{name}-seed{s}" for name in ("local", "fedproto", "half") for s in (1234, 1235)}
    assert {p.name for p in (tmp_path / "c").iterdir() if p.is_dir()} == cells
    record = json.loads((tmp_path / "c" / "comparison.json").read_text())
    settings = {"weight": 0.5, "epochs": 2}
    assert record["variants"][2] == {"label": "half", "method": "fedproto", "settings": settings, "folder": "half"}
    results = (tmp_path / "c" / "results.csv").read_bytes()
    lines = list(csv.DictReader(results.decode().splitlines()))
    assert [(r["label"], r["method"], r["weight"], r["epochs"], r["seed"]) for r in lines][3:] == [
        ("fedproto", "fedproto", "", "", "1235"),
        ("half", "fedproto", "0.5", "2", "1234"),
        ("half", "fedproto", "0.5", "2", "1235"),
    ]
    assert (tmp_path / "c" / "table.md").read_text().startswith("| variant |")

    for name in ("results.csv", "half-seed1234/summary.json"):
        (tmp_path / "c" / name).unlink()
    shutil.rmtree(tmp_path / "c" / "half-seed1235")
    assert [len(row.runs) for row in read_rows(tmp_path / "c")[0]] == [2, 2, 0]
    assert list(resume_comparison(tmp_path / "c", jobs=1).results) == ["local", "fedproto", "half"]
    assert (tmp_path / "c" / "results.csv").read_bytes() == results


def test_without_local_in_python():
    made = pf.compare("fedavg", local=False, seeds=1, jobs=1, data=blobs(), **SMALL)
    assert list(made.results) == ["fedavg"]


def test_progress_of_a_method_without_a_head(monkeypatch):
    """Its accuracy is the one in its own way."""
    module = importlib.import_module("protofed.experiment.cells")
    run = module.run

    def without_head(settings, out, watch, until):
        def told(record, rounds):
            record.metrics = {"accuracy": record.metrics["accuracy_head"]}
            watch(record, rounds)

        return run(settings, out=out, watch=told, until=until)

    seen: list[Progress] = []
    plain = pf.compare("fedavg", local=False, seeds=1, jobs=1, watch=seen.append, data=blobs(), **SMALL)
    [result] = plain.results["fedavg"]
    assert [(p.by, p.accuracy) for p in seen] == [("head", row["accuracy_head"]) for row in result.metrics]
    before = [p.accuracy for p in seen]
    seen.clear()
    monkeypatch.setattr(module, "run", without_head)
    pf.compare("fedavg", local=False, seeds=1, jobs=1, watch=seen.append, data=blobs(), **SMALL)
    assert [(p.by, p.accuracy) for p in seen] == [("accuracy", value) for value in before]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ({"accuracy": 0.25, "accuracy_head": 0.5}, (0.5, "head")),
        ({"accuracy": 0.25, "accuracy_prototype": 0.25}, (0.25, "accuracy")),
        ({"accuracy": 0.25, "accuracy_head": None}, (0.25, "accuracy")),
        ({"accuracy_head": 0.5}, (0.5, "head")),  # an older run
    ],
)
def test_progress_of_a_finished_cell(last, expected, tmp_path):
    pf.compare("fedavg", local=False, seeds=1, jobs=1, out=tmp_path / "c", **QUICK, **FIXED)
    file = tmp_path / "c" / "fedavg-seed1234" / "summary.json"
    file.write_bytes(disk.sealed({**disk.opened(file.read_bytes(), file), "last_round": last}))
    seen: list[Progress] = []
    resume_comparison(tmp_path / "c", jobs=1, watch=seen.append)
    assert [(p.accuracy, p.by) for p in seen] == [expected]


# --- the command line -------------------------------------------------------------------------------------------------


def test_compare_on_the_command_line(call, tmp_path):
    words = ["fedavg", "upper bound=fedavg?epochs=3", *PAIRS, "--seeds", "1", "--jobs", "1"]
    code, out, _ = call("compare", *words, "--no-local", "--out", "c")
    assert code == 0 and "[2/2] upper-bound-seed1234" in out and "│ upper bound │" in out and "local" not in out
    assert (tmp_path / "c" / "upper-bound-seed1234" / "settings.toml").read_text().count("epochs = 3\n") == 1
    code, out, _ = call("table", "c", "--format", "markdown", "--columns", "accuracy,head")
    assert code == 0 and out.startswith("| variant | accuracy | head |\n") and "\n| upper bound |" in out


def test_methods_of_a_file_on_the_command_line(call, tmp_path):
    write(tmp_path / "x.toml", 'methods = ["fedavg?epochs=2"]\n')
    code, out, _ = call("compare", *PAIRS, "-c", "x.toml", "--seeds", "1", "--jobs", "1", "--out", "c")
    assert code == 0 and "[2/2] fedavg-seed1234" in out and "│ local" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["compare"], ["no method given"]),
        (["compare", "fedavg", "upper=fedavg?labls=all"], ["'upper'", "did you mean 'labels'"]),
        (["compare", "fedavg", "upper=fedavgg?labels=all"], ["'upper=fedavgg?labels=all'", "did you mean 'fedavg'"]),
        (["compare", "fedavg", "lrr=1"], ["unknown setting 'lrr'; did you mean 'lr'"]),
        (["sweep", "x=fedavg?lr=1", "--over", "lr=1,2"], ["'x'", "'lr'", "axis"]),
    ],
)
def test_bad_input_is_one_clear_line_and_nothing_is_begun(words, expected, call, tmp_path):
    code, _, err = call(*words, "--out", "c")
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    assert all(word in err for word in expected), err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_runs_side_by_side_after_this_process_computed_with_several_threads(tmp_path):
    """OpenMP's threads do not survive a fork: a forked run that waited for them would wait without end."""
    script = f"""
import torch
import protofed
torch.set_num_threads(2)
torch.rand(600, 600) @ torch.rand(600, 600)
torch.rand(4_000_000).exp()
found = protofed.compare(["fedavg"], seeds=2, jobs=2, out={str(tmp_path / "out")!r}, rounds=1, clients=4, engine="loop",
    threads=2, workers=1, data="digits", model="mlp")
print(sorted(found.results))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['fedavg', 'local']"
