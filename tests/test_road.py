"""The whole road of a new user: a table of three sites, advice, a run, predictions of new rows, and ONNX."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("place")]
HEADER = ["height", "width", "age", "weight", "light", "soil", "tree", "ward"]
TREES = ("ash", "beech", "cedar")
SOILS = ("dry", "loose", "wet")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a table of three sites, and one of new rows."""
    rng = np.random.default_rng(0)

    def rows(number: int, site: str) -> list[list[str]]:
        made = []
        for k in range(number):
            tree = k % 3
            numbers = rng.normal(size=5) * [1, 1, 1, 9, 1] + 2.5 * np.eye(5)[tree] + [0, 0, 0, 80, 0]
            soil = SOILS[tree if rng.random() < 0.7 else rng.integers(3)]
            made.append([*(f"{value:.3f}" for value in numbers), soil, TREES[tree], site])
        return made

    monkeypatch.chdir(tmp_path)
    training = [row for site in ("Aachen", "Bonn", "Celle") for row in rows(60, site)]
    for file, header, content in (
        ("trees.csv", HEADER, training),
        ("new.csv", HEADER[:6], [r[:6] for r in rows(9, "")]),
    ):
        with Path(file).open("w", newline="") as out:
            csv.writer(out).writerows([header, *content])
    return tmp_path


def softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(odds / odds.sum(1, keepdims=True))


def encoded(file: str) -> np.ndarray:
    """New rows as the model card describes them: numbers, then 1 for the soil's word."""
    with Path(file).open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    numbers = [[float(row[name]) for name in HEADER[:5]] for row in rows]
    return np.hstack([numbers, [[float(row["soil"] == soil) for soil in SOILS] for row in rows]]).astype(np.float32)


@pytest.mark.soak
def test_at_most_six_commands(place: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")

    def protofed(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "protofed", *words],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        return done.stdout

    quick = ["--budget", "90s", "--methods", "fedproto", "rounds=3", "lr=0.1", "weight=1"]
    said = protofed("advise", "trees.csv", "label=tree", "site=ward", *quick, "--jobs", "1", "--out", "advice")
    assert "go on with: protofed run --config advice/settings.toml" in said and "--client Aachen --by" in said
    assert "run folder: runs/trees" in protofed("run", "--config", "advice/settings.toml", "--out", "runs/trees")
    said = protofed("predict", "runs/trees", "new.csv", "--client", "Bonn", "--by", "head", "--out", "found.csv")
    assert "9 samples by Bonn (head)" in said
    said = protofed("export", "runs/trees", "--client", "Bonn", "--format", "onnx", "--out", "bonn.onnx")
    assert "bonn.onnx: Bonn; run again, its outputs are" in said
    card = Path("bonn.md").read_text()
    assert "0. height\n" in card and "5. soil=dry\n6. soil=loose\n7. soil=wet\n" in card

    outputs = runtime.InferenceSession("bonn.onnx").run(["logits"], {"x": encoded("new.csv")})  # the fifth
    with Path("found.csv").open(newline="") as stream:
        found = list(csv.DictReader(stream))
    shares = np.array([[float(row[f"probability_{tree}"]) for tree in TREES] for row in found])
    np.testing.assert_allclose(softmax(outputs[0]), shares, atol=1e-5)
    assert [row["class"] for row in found] == [TREES[k] for k in outputs[0].argmax(1)]


def test_at_most_ten_lines_of_python(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.experiment.advise.run.MOST_SEEDS", 3)
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    quick = {"methods": ["fedproto"], "rounds": 3, "lr": 0.1, "weight": 1.0, "jobs": 1}
    # --- the lines
    import onnxruntime

    import protofed as pf

    advice = pf.advise("trees.csv", label="tree", site="ward", budget="90s", out="advice", **quick)
    result = pf.run(config=advice.settings, out="runs/trees")
    found = result.predict("new.csv", client="Bonn", by=advice.by)
    result.export("bonn.onnx", client="Bonn")
    session = onnxruntime.InferenceSession("bonn.onnx")
    x = result.model("Bonn").inputs("new.csv").numpy()
    logits, scores, distances = session.run(["logits", "scores", "distances"], {"x": x})
    # ---
    deciding = {"head": logits, "prototype": scores}[advice.by]
    np.testing.assert_array_equal(x, encoded("new.csv"))
    np.testing.assert_allclose(softmax(deciding), found.probabilities, atol=1e-5)
    np.testing.assert_allclose(distances, found.distances, rtol=1e-5, atol=1e-5)
    assert [TREES[k] for k in deciding.argmax(1)] == found.classes
    assert pf.load("runs/trees").predict("new.csv", "Bonn", advice.by).classes == found.classes
