"""The commands that use what a run has learnt, as a person types them."""

import csv
import re

import numpy as np
import pytest

import protofed as pf
from support.small import SMALL, blobs

DATA = blobs()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a small run of four sites, and new samples."""
    monkeypatch.chdir(tmp_path)
    data = pf.data.Dataset.from_arrays(
        DATA.x_train,
        DATA.y_train,
        class_names=("ash", "beech", "cedar", "fir"),
        group_train=np.array(["north", "south"])[np.arange(len(DATA.x_train)) % 2],
        name="trees",
    )
    changes = {"partition": "natural", "clients": 0}
    given = {key: value for key, value in SMALL.items() if key not in ("partition", "way", "shot", "clients")}
    pf.run("fedproto", data=data, out="run", **{**given, **changes})
    np.savez("new.npz", x_test=DATA.x_test.numpy(), y_test=DATA.y_test.numpy())
    return tmp_path


def test_predict_writes_a_table(place, call):
    code, out, _ = call("predict", "run", "new.npz", "--client", "north", "--by", "ensemble", "--out", "p.csv")
    with (place / "p.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    names = ["ash", "beech", "cedar", "fir"]
    assert header == ["class", *(f"probability_{n}" for n in names), *(f"distance_{n}" for n in names), "unlike_known"]
    found = pf.load("run").predict(DATA.x_test, "north", "ensemble")
    assert code == 0 and [row[0] for row in rows] == found.classes and len(rows) == 40
    assert np.allclose(np.array([row[1:5] for row in rows], float), found.probabilities, atol=1e-5)
    assert [row[-1] == "true" for row in rows] == found.unlike.tolist()
    right = np.mean(found.labels == DATA.y_test.numpy())
    assert f"40 samples by north (ensemble); {right:.1%} right" in out and "written to p.csv" in out


def test_predict_prints_a_short_table(place, call):
    np.save("some.npy", DATA.x_test.numpy())
    code, out, _ = call("predict", "run", "some.npy", "--client", "1")
    assert code == 0 and out.count("│") > 20 and "20 more rows with --out" in out and "right" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", "run", "new.npz"], "the run has 2 clients, each with its classifier; name one of north, south"),
        (["predict", "run", "new.npz", "--client", "west"], "unknown client 'west'. Known: north, south"),
        (["predict", "run", "none.npz", "--client", "north"], "none.npz: no such file or folder"),
        (["predict", "none", "new.npz"], "none: no such run folder"),
        (["predict", ".", "new.npz"], "not a run folder"),
        (["predict", "run", "new.npz", "--client", "0", "--out", "none/p.csv"], "no such folder none"),
        (["export", "run", "--client", "0", "--out", "m.tar"], "name the format with --format, or by the ending"),
        (["export", "run", "--client", "0", "--out", "none/m.pt2"], "no such folder none"),
        (["export", "run", "--client", "0", "--out", "new.npz", "--format", "pt2"], "exists already"),
    ],
)
def test_bad_words_are_one_line(words, message, place, call):
    code, _, err = call(*words)
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1


def snippet(card):
    return re.search(r"```python\n(.*?)```", card.read_text(encoding="utf-8"), flags=re.S)[1]


@pytest.mark.parametrize("format", ["safetensors", pytest.param("pt2", marks=pytest.mark.slow)])
def test_export_checks_the_file_and_writes_its_card(format, place, call, capsys):
    code, out, _ = call("export", "run", "--client", "south", "--out", f"south.{format}")
    assert code == 0 and "run again, its outputs are the same bits as ours" in out
    card = place / "south.md"
    text = card.read_text(encoding="utf-8")
    summary = pf.load("run").summary["per_client"]
    for words in (
        "trees",
        "`rounds`: 3",
        "ash, beech, cedar, fir",
        "must not",
        f"head: {summary['accuracy_head'][1]:.1%}",
    ):
        assert words in text, words
    capsys.readouterr()
    exec(compile(snippet(card), str(card), "exec"), {})
    assert any(name in capsys.readouterr().out for name in ("ash", "beech", "cedar", "fir"))


def test_predictions_from_an_exported_file(place, call):
    call("export", "run", "--client", "south", "--out", "south.safetensors")
    call("predict", "run", "new.npz", "--client", "south", "--out", "a.csv")
    code, _, _ = call("predict", "south.safetensors", "new.npz", "--out", "b.csv")
    assert code == 0 and (place / "a.csv").read_text() == (place / "b.csv").read_text()


@pytest.mark.slow
def test_a_csv_becomes_a_model_in_onnx(place, call):
    """As a practitioner would: train on arrays, predict for a table of new rows, export, and run it elsewhere."""
    onnxruntime = pytest.importorskip("onnxruntime")
    names = ("ash", "beech", "cedar", "fir")
    labelled = zip(DATA.x_test.tolist(), DATA.y_test.tolist(), strict=True)
    rows = ["a,b,c,d,e,f,label", *(",".join(map(str, [*x, names[y]])) for x, y in labelled)]
    (place / "new.csv").write_text("\n".join(rows))
    code, out, _ = call("predict", "run", "new.csv", "--client", "north", "--out", "p.csv")
    ours = pf.load("run").predict(DATA.x_test, "north", "prototype")
    assert code == 0 and f"{np.mean(ours.labels == DATA.y_test.numpy()):.1%} right" in out
    code, out, _ = call("export", "run", "--client", "north", "--out", "north.onnx")
    assert code == 0 and "equal to ours" in out
    session = onnxruntime.InferenceSession("north.onnx")
    scores, distances = session.run(["scores", "distances"], {"x": DATA.x_test.numpy()})
    assert np.allclose(distances, ours.distances, rtol=1e-5, atol=1e-5)
    assert [names[k] for k in scores.argmax(-1)] == ours.classes
    assert session.get_modelmeta().custom_metadata_map["classes"].splitlines() == list(names)
