"""The command line as a person uses it. Most calls run in this process; a few in one of their own."""

import json
import os
import pty
import subprocess
import sys

import numpy as np
import pytest

import protofed as pf
from protofed.cli.options import parse_seeds
from support.small import blobs

QUICK = ["clients=4", "rounds=2", "shot=6", "way=2"]
LOOP = ["engine=loop", "inner=loop", "layout=contiguous", "convolution=grouped", "workers=1", "threads=1"]
NAMED = [*QUICK, *LOOP]  # nothing is left to choose


def save_npz(path, **changes):
    data = blobs()
    arrays = {
        "x_train": data.x_train.numpy(),
        "y_train": data.y_train.numpy(),
        "x_test": data.x_test.numpy(),
        "y_test": data.y_test.numpy(),
    }
    np.savez(path, **{**arrays, **changes})
    return path


def test_run_writes_a_complete_folder(call, tmp_path):
    code, out, err = call("run", "fedsap", *QUICK, "--out", "here")
    assert code == 0
    facts, chosen = err.splitlines()
    assert facts.startswith("INFO: engine: mlp: 17,226 parameters") and chosen.startswith("INFO: engine: ")
    assert "round 2/2" in out and "run folder: here" in out
    names = {p.name for p in (tmp_path / "here").iterdir()}
    files = ".lock run.json "
    files += (
        "settings.toml metrics.jsonl rounds.jsonl clients.jsonl confusion.json summary.json checkpoint snapshots models"
    )
    assert names == set(files.split())
    rows = [json.loads(line) for line in (tmp_path / "here/metrics.jsonl").read_text().splitlines()]
    wanted = "round accuracy silhouette pooled_silhouette loss bytes_up bytes_down seconds dropped_clients"
    measures = "accuracy_{0} accuracy_{0}_std weighted_{0} f1_{0} worst_{0} decile_{0} balanced_{0} auroc_{0} ece_{0}"
    assert [r["round"] for r in rows] == [1, 2]
    assert rows[0].keys() == {*wanted.split(), *measures.format("head").split(), *measures.format("prototype").split()}


def test_confusions_agree_with_the_accuracies(call, tmp_path):
    call("run", "fedproto", *QUICK, "--out", "here")
    stored = json.loads((tmp_path / "here/confusion.json").read_text())
    last = json.loads((tmp_path / "here/clients.jsonl").read_text().splitlines()[-1])
    assert stored["round"] == last["round"] == 2 and stored["rows"] == ["true", "predicted", "count"]
    assert list(stored["clients"]) == [f"client {c}" for c in range(4)]
    for kind in ("head", "prototype"):
        for client, rows in enumerate(own[kind] for own in stored["clients"].values()):
            total = sum(count for *_, count in rows)
            assert total == last["samples"][client]
            hits = sum(count for true, predicted, count in rows if true == predicted)
            assert hits / total == last[f"accuracy_{kind}"][client]


@pytest.mark.slow
def test_clients_of_two_architectures(call, tmp_path):
    code, _, err = call("run", "fedproto", *QUICK, "models=mlp,mlp?hidden=8", "dim=16", "ensemble=true", "--out", "m")
    assert code == 0 and sum("operations a step" in line for line in err.splitlines()) == 2
    summary = json.loads((tmp_path / "m/summary.json").read_text())
    # 64 pixels; hidden, embedding 64, projection to 16, head of 10: weights and biases
    sizes = [65 * h + (h + 1) * 64 + 65 * 16 + 17 * 10 for h in (128, 8)]
    assert summary["model_parameters"] == dict(zip(["mlp", "mlp?hidden=8"], sizes, strict=True))
    last = summary["last_round"]
    both = [last["accuracy_head@mlp"], last["accuracy_head@mlp?hidden=8"]]
    assert last["accuracy_head"] == pytest.approx(sum(both) / 2)
    assert 0 <= last["ensemble_head"] <= 1 and 0 <= last["ensemble_prototype"] <= 1
    settings = (tmp_path / "m/settings.toml").read_text()
    assert 'projection = "linear"' in settings and "dim = 16" in settings and "[model]" not in settings
    assert call("run", "fedproto", "--config", "m/settings.toml", "--out", "again")[0] == 0
    assert (tmp_path / "m/clients.jsonl").read_text() == (tmp_path / "again/clients.jsonl").read_text()


@pytest.mark.slow
def test_a_run_can_be_repeated_from_its_settings(call, tmp_path):
    call("run", "fedproto", *QUICK, "lr=0.03", "--out", "a")
    code, *_ = call("run", "fedproto", "--config", "a/settings.toml", "--out", "b")
    assert code == 0
    assert (tmp_path / "a/settings.toml").read_text() == (tmp_path / "b/settings.toml").read_text()
    assert (tmp_path / "a/clients.jsonl").read_text() == (tmp_path / "b/clients.jsonl").read_text()


@pytest.mark.slow
def test_a_run_without_out_says_where_it_is(call, tmp_path):
    code, out, _ = call("run", "local", *QUICK)
    folder = out.split("run folder: ")[1].strip()
    assert code == 0 and (tmp_path / folder / "summary.json").exists() and folder.startswith("runs")


def test_own_npz_by_path(call, tmp_path):
    path = save_npz(tmp_path / "mine.npz")
    code, out, _ = call("run", "fedproto", f"data={path}", *QUICK)
    assert code == 0 and "fedproto" in out


def test_compare_ends_with_a_table_that_has_local(call, tmp_path):
    code, out, _ = call(
        "compare", "fedproto", "fedsap", *QUICK, "scale=16", "--seeds", "2", "--out", "c", "--jobs", "2"
    )
    assert code == 0
    for word in ("local", "fedproto", "fedsap", "±", "head", "prototype", "2 seeds", "run folders: c"):
        assert word in out
    assert out.splitlines()[0] == "6 runs, with 2 seeds: 1234, 1235", "before the first run, for who meant a seed"
    table = (tmp_path / "c/table.md").read_text()
    assert table.count("**") >= 4 and len([line for line in table.splitlines() if line.startswith("|")]) == 5
    assert "| method | head | prototype |" in table, "fedproto's prototypes do not stand beside fedsap's head"
    assert len(list((tmp_path / "c").glob("*-seed*/summary.json"))) == 6
    assert "scale = 16" in (tmp_path / "c/fedsap-seed1234/settings.toml").read_text()


@pytest.mark.slow
def test_a_comparison_resumes_without_running_finished_cells(call, tmp_path):
    call("compare", "fedproto", *QUICK, "--seeds", "2", "--out", "c", "--jobs", "1")
    table = (tmp_path / "c/table.md").read_text()
    kept = tmp_path / "c/fedproto-seed1234/metrics.jsonl"
    before = kept.stat().st_mtime_ns
    (tmp_path / "c/local-seed1235/summary.json").unlink()
    code, out, _ = call("resume", "c", "--jobs", "1")
    assert code == 0 and "fedproto" in out
    assert kept.stat().st_mtime_ns == before
    strip = lambda text: [line.rsplit("|", 2)[0] for line in text.splitlines()]  # all but the seconds  # noqa: E731
    assert strip((tmp_path / "c/table.md").read_text()) == strip(table)


def test_seeds_as_number_list_or_range():
    assert parse_seeds("3") == 3
    assert parse_seeds("7,9") == [7, 9]
    assert parse_seeds("1234-1236") == [1234, 1235, 1236]


@pytest.mark.parametrize("words", [["methods"], ["models"], ["data"], ["settings"], ["--help"], ["--version"]])
def test_lists(call, words):
    code, out, _ = call(*words)
    assert code == 0
    expected = {
        "methods": pf.methods.available(),
        "models": list(pf.models.available()),
        "data": pf.data.available(),
    }
    for name in expected.get(words[0], []):
        assert name in out


@pytest.mark.slow
def test_data_show_prints_and_draws(call, tmp_path):
    code, out, _ = call("data", "show", "partition=dirichlet", "alpha=0.2", "clients=6", "--picture", "p.png")
    assert code == 0 and "picture: p.png" in out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert call("data", "show", "clients=6")[0] == 0


BAD = {
    "unknown method": (["run", "fedsapp"], ["fedsapp", "did you mean 'fedsap'"]),
    "unknown key": (["run", "fedsap", "roundz=3"], ["roundz", "did you mean 'rounds'"]),
    "not a pair": (["run", "fedsap", "rounds"], ["key=value"]),
    "bad value": (["run", "fedsap", "rounds=x"], ["rounds"]),
    "missing config": (["run", "fedsap", "--config", "no.toml"], ["no.toml", "no such"]),
    "broken config": (["run", "fedsap", "--config", "broken.toml"], ["broken.toml", "TOML"]),
    "missing npz": (["run", "fedsap", "data=no.npz"], ["no.npz"]),
    "missing idx": (["run", "fedsap", "data=mnist", "path=nowhere"], ["nowhere", "train-images"]),
    "missing cifar": (["run", "fedsap", "data=cifar10", "path=nowhere"], ["nowhere", "cifar-10"]),
    "wrong shape": (["run", "fedsap", "data=shape.npz"], ["shape"]),
    "missing array": (["run", "fedsap", "data=noarray.npz"], ["y_train"]),
    "not an npz": (["run", "fedsap", "data=text.npz"], ["text.npz"]),
    "labels outside the range": (["run", "fedsap", "data=negative.npz"], ["labels", "-1"]),
    "float labels": (["run", "fedsap", "data=float.npz"], ["y_train", "regression"]),
    "NaN samples": (["run", "fedsap", "data=nan.npz"], ["NaN"]),
    "too many classes a client": (["run", "fedsap", "way=30"], ["way", "10"]),
    "shot larger than the data": (["run", "fedsap", "shot=5000"], ["shot", "5000"]),
    "more clients than samples": (["run", "fedsap", "partition=iid", "clients=5000"], ["5000"]),
    "natural without groups": (["run", "fedsap", "partition=natural"], ["group"]),
    "cnn on tiny images": (["run", "fedsap", "model=cnn", "shot=6"], ["8", "mlp"]),
    "missing pretrained": (["run", "fedsap", "model=resnet18", "pretrained=no.pt", "shot=6"], ["no.pt"]),
    "no such device": (["run", "fedsap", "shot=6", "device=gpu"], ["gpu", "cuda"]),
    "a device that is not there": (["run", "fedsap", "shot=6", "device=mps"], ["mps", "device=cpu"]),
    "another method's unknown key": (["run", "fedsap", "fedproto.weigth=2"], ["fedproto", "did you mean 'weight'"]),
    "a file in the way": (["compare", "local", *QUICK, "--out", "text.npz/x"], ["text.npz"]),
    "picture in the way": (["data", "show", "--picture", "text.npz/x.png"], ["text.npz"]),
    "load no python": (["run", "local", "--load", "text.npz"], ["text.npz"]),
    "more models than clients": (["run", "fedsap", *QUICK, "models=mlp,mlp,mlp,mlp,mlp"], ["models", "4 clients"]),
    "a model of the mix misspelt": (["run", "fedsap", "models=mlp,mlpp"], ["did you mean 'mlp'"]),
    "a setting in the mix misspelt": (["run", "fedsap", "models=mlp,mlp?hiden=8"], ["did you mean 'hidden'"]),
    "model and models": (["run", "fedsap", "model=mlp", "models=mlp,cnn"], ["model", "use one of the two"]),
    "a capability too few": (["run", "fedsap", *QUICK, "models=mlp", "capability=1,2"], ["capability", "4 clients"]),
    "one width for all": (
        ["run", "fedsap", *NAMED, "models=mlp,mlp?embedding=8", "projection=none"],
        ["mlp 64, mlp 8", "projection=linear"],
    ),
    "dim without projection": (["run", "fedsap", *QUICK, "projection=none", "dim=8"], ["dim=8", "projection"]),
    "diverse without prototypes": (["run", "fedsap", *NAMED, "choice=diverse"], ["choice=diverse", "fedapa"]),
    "engine words for another mix": (["run", "fedsap", *QUICK, "inner=loop,stack"], ["inner", "1 models"]),
    "too many threads": (["run", "fedsap", "threads=100000"], ["threads"]),
    "a seed twice": (["compare", "fedavg", "--seeds", "3,3"], ["seed"]),
    "resume nothing": (["resume", "nowhere"], ["nowhere", "no such"]),
    "resume a plain folder": (["resume", "."], ["settings.toml"]),
    "folder exists": (["run", "local", *QUICK, "--out", "there"], ["there", "exists already"]),
    "comparison folder exists": (["compare", "local", *QUICK, "--out", "there"], ["there", "exists already"]),
    "compare unknown": (["compare", "fedavgg"], ["did you mean 'fedavg'"]),
    "bad seeds": (["compare", "fedavg", "--seeds", "x"], ["--seeds"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line_and_exit_code_2(case, call, tmp_path):
    save_npz(tmp_path / "shape.npz", x_test=np.zeros((40, 3), np.float32))
    save_npz(tmp_path / "negative.npz", y_train=np.repeat([-1, 0, 1, 2], 40))
    save_npz(tmp_path / "float.npz", y_train=np.linspace(0, 3, 160))
    save_npz(tmp_path / "nan.npz", x_train=np.full((160, 6), np.nan, np.float32))
    np.savez(tmp_path / "noarray.npz", x_train=np.zeros((4, 2)))
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "broken.toml").write_text("rounds = = 3")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "letter.txt").write_text("Dear Sir,")
    words, expected = BAD[case]
    code, _, err = call(*words)
    assert code == 2, err
    assert err.startswith("error: ") and err.count("\n") == 1
    for word in expected:
        assert word in err


@pytest.mark.slow
def test_an_unreadable_checkpoint_is_one_line(call, tmp_path):
    call("run", "fedproto", *QUICK, "--out", "r")
    (tmp_path / "r/summary.json").unlink()
    for place in (tmp_path / "r/checkpoint").iterdir():
        (place / "server.safetensors").write_bytes(b"junk")
    code, _, err = call("resume", "r")
    assert code == 2 and err.count("\n") == 1 and "server.safetensors" in err


@pytest.mark.slow
def test_the_installed_command_fails_cleanly_in_a_process_of_its_own(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "protofed", "run", "fedsap", "roundz=3"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr and "rounds" in done.stderr


@pytest.mark.slow
def test_a_terminal_gets_a_progress_bar(tmp_path):
    """Under a pseudo-terminal the bar shows round, accuracy, loss and time left."""
    master, slave = pty.openpty()
    words = [sys.executable, "-m", "protofed", "run", "fedproto", *QUICK, "--out", str(tmp_path / "r")]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "160"}
    process = subprocess.Popen(words, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    output = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:
            break
        if not piece:
            break
        output += piece
    assert process.wait() == 0
    text = output.decode()
    for word in ("2/2", "head", "loss", "left", "━"):
        assert word in text


@pytest.mark.usefixtures("own_names")
@pytest.mark.slow
def test_own_methods_are_loaded_from_a_file(call, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from protofed.methods import register\n"
        "from protofed.methods.local import Local\n"
        "@register('my-own')\n@dataclass(frozen=True)\nclass Mine(Local):\n    'Local by another name.'\n"
    )
    assert call("run", "my-own", *QUICK)[0] == 2
    assert call("run", "my-own", *QUICK, "--load", "mine.py", "--out", "r")[0] == 0
    code, out, _ = call("compare", "my-own", *QUICK, "--load", "mine.py", "--seeds", "1", "--jobs", "2", "--out", "c")
    assert code == 0 and "my-own" in out
    assert call("run", "local", "--load", "no.py")[0] == 2


@pytest.mark.slow
def test_a_choice_on_the_command_line_replaces_the_files(call, tmp_path):
    (tmp_path / "s.toml").write_text('[partition]\nname = "dirichlet"\nalpha = 0.3\n')
    assert call("run", "local", "rounds=1", "clients=3", "--config", "s.toml", "alpha=0.9", "--out", "a")[0] == 0
    assert "alpha = 0.9" in (tmp_path / "a/settings.toml").read_text()
    assert call("run", "local", "rounds=1", "clients=3", "--config", "s.toml", "partition=iid", "--out", "b")[0] == 0
    assert 'name = "iid"' in (tmp_path / "b/settings.toml").read_text()


def test_a_run_that_cannot_begin_leaves_no_folder(call, tmp_path):
    code, _, err = call(
        "run", "fedproto", "labels=server", "server_labels=50", "clients=4", "partition=iid", "--out", "r"
    )
    assert code == 2 and "client 0" in err
    assert not (tmp_path / "r").exists()
