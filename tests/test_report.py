"""The HTML report: what it shows of whole folders, and of missing, cut-off and foreign files."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protofed.errors import ProtofedError
from protofed.report import content as content_module
from protofed.report.content import MOST_EVALUATIONS, content, flat
from protofed.report.curves import MOST_ROUNDS, curve
from protofed.report.page import embedded, render, write_page
from protofed.report.space import MOST_SNAPSHOTS, Snapshot, project, read_snapshot, read_snapshots, space, thin
from protofed.results.lock import FolderLock, is_held
from protofed.results.read import read_folder
from support.run_folders import accuracy, make_comparison, make_run, make_snapshot, write_rows

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def chart(shown, key):
    return next(c for c in shown["curves"] if c["key"] == key)


def test_table_of_a_comparison_has_means_deviations_and_the_best(tmp_path):
    shown = content(make_comparison(tmp_path / "c"))
    gains = ["gain head", "gain prototype"]
    costs = ["kB up / round", "kB down / round", "seconds"]
    assert shown["table"]["header"] == ["method", "head", "prototype", *gains, *costs]
    by_seed = [100 * accuracy(seed, 10, 0.05) for seed in (1, 2, 3)]
    row = next(r for r in shown["table"]["rows"] if r[0]["text"] == "fedsap")
    assert row[1]["text"] == f"{statistics.fmean(by_seed):.2f} ± {statistics.stdev(by_seed):.2f}"
    assert row[1]["value"] == pytest.approx(statistics.fmean(by_seed), rel=1e-4)
    assert [(r[0]["text"], r[1]["mark"]) for r in shown["table"]["rows"]] == [
        ("local", "second"),
        ("fedsap", "best"),
        ("fedavg", ""),
    ]
    assert shown["status"] == {"finished": 9, "failed": 0, "runs": 9, "under_way": [], "interrupted": []}
    assert shown["notes"] == []


def test_curves_are_mean_and_deviation_over_seeds(tmp_path):
    shown = content(make_comparison(tmp_path / "c"))
    line = next(s for s in chart(shown, "accuracy_head")["series"] if s["label"] == "fedavg")
    assert line["x"] == [2, 4, 6, 8, 10]
    for i, r in enumerate(line["x"]):
        values = [100 * accuracy(seed, r, -0.1) for seed in (1, 2, 3)]
        mean, deviation = statistics.fmean(values), statistics.stdev(values)
        assert line["y"][i] == pytest.approx(mean, rel=1e-4)
        assert line["high"][i] == pytest.approx(mean + deviation, rel=1e-4)
        assert line["low"][i] == pytest.approx(mean - deviation, rel=1e-4)
    loss = chart(shown, "loss")["series"][0]
    assert loss["x"] == list(range(1, 11))
    assert loss["y"][3] == 0.5


def test_band_of_a_single_run_is_over_clients(tmp_path):
    shown = content(make_run(tmp_path / "r"))
    line = chart(shown, "accuracy_head")["series"][0]
    assert shown["band"] == "clients"
    assert line["high"][0] - line["y"][0] == pytest.approx(2.0, abs=1e-6)
    assert [r[0]["text"] for r in shown["table"]["rows"]] == ["last round", "mean of the last five evaluations"]
    assert shown["table"]["rows"][0][1]["text"] == "91.00 ± 2.00"


@given(
    st.lists(
        st.dictionaries(st.integers(1, 9), st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=6),
        min_size=1,
        max_size=4,
    )
)
def test_curve_against_a_naive_loop(runs):
    rows = [[{"round": r, "v": v} for r, v in sorted(run.items())] for run in runs]
    found = curve("x", rows, lambda row: row["v"])
    expected = {}
    for r in range(1, 10):
        values = [run[r] for run in runs if run.get(r) is not None]
        if values:
            expected[r] = sum(values) / len(values)
    assert (found is None) == (not expected)
    if found is not None:
        assert found["x"] == sorted(expected)
        assert found["y"] == pytest.approx([expected[r] for r in found["x"]], rel=1e-4, abs=1e-3)


def test_long_runs_are_thinned_but_keep_their_ends(tmp_path):
    rows = [{"round": r, "v": float(r)} for r in range(1, 5001)]
    found = curve("x", [rows], lambda row: row["v"])
    assert len(found["x"]) == MOST_ROUNDS and found["x"][0] == 1 and found["x"][-1] == 5000
    run = make_run(tmp_path / "r", rounds=300)
    part = content(run)["clients"][0]
    assert len(part["rounds"]) == MOST_EVALUATIONS and part["rounds"][-1] == 300


def test_clients_and_classes(tmp_path):
    shown = content(make_run(tmp_path / "r"))
    clients = shown["clients"][0]
    assert clients["names"] == [f"client {c}" for c in range(4)]
    assert clients["head"][2] == [round(1000 * (accuracy(1, r) + 0.02)) for r in clients["rounds"]]
    classes = shown["classes"][0]
    assert classes["classes"] == ["cat", "dog", "fox"]
    assert classes["samples"] == [[5, 4, 0]] * 4
    assert classes["right"] == {"head": [[4, 4, 0]] * 4, "prototype": [[5, 3, 0]] * 4}
    assert classes["confusion"]["head"] == [[0, 0, 16], [0, 1, 4], [1, 1, 16]]


def test_terms_phases_measures_and_silhouette_are_shown_where_they_are(tmp_path):
    plain = content(make_run(tmp_path / "plain"))
    assert plain["measures"] == [] and plain["terms"][0]["phases"] == []
    assert not any(c["group"] == "silhouette" for c in plain["curves"])
    shown = content(make_run(tmp_path / "r", measures=True))
    assert shown["terms"][0]["phases"] == [{"name": "1", "from": 1, "to": 6}, {"name": "2", "from": 7, "to": 10}]
    assert [s["label"] for s in shown["terms"][0]["series"]] == ["ce", "align"]
    assert [(m["key"], m["unit"]) for m in shown["measures"]] == [("acceptance", "%"), ("threshold", "")]
    assert shown["measures"][0]["series"][0]["y"][3] == pytest.approx(20.0)
    assert chart(shown, "silhouette")["series"][0]["y"] == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_bytes_of_a_round(tmp_path):
    lines = {line["label"]: line for line in content(make_comparison(tmp_path / "c"))["bytes"]["lines"]}
    assert [p["bytes"] for p in lines["fedavg"]["points"]] == [1256, 1256, 1256]
    assert lines["fedavg"]["down"]["weights"] == 1000 and lines["fedsap"]["up"]["prototypes"] == 100
    assert lines["fedsap"]["points"][0]["head"] == pytest.approx(100 * accuracy(1, 10, 0.05))


def test_settings_are_told_apart_and_versions_listed(tmp_path):
    shown = content(make_comparison(tmp_path / "c"))
    assert shown["settings"]["differ"] == [["method.name", "local", "fedsap", "fedavg"]]
    assert ["data.name", "pets"] in shown["settings"]["shared"]
    assert shown["settings"]["seeds"] == [1, 2, 3]
    assert shown["versions"] == [{"text": "protofed 0.1.0, python 3.11", "runs": 9}]
    assert flat({"a": {"b": {"c": 1}}, "d": [1, "x"], "e": None}) == {"a.b.c": "1", "d": "[1,x]", "e": "none"}


def test_a_method_without_a_head_has_no_predictions_by_it(tmp_path):
    shown = content(make_run(tmp_path / "r", headless=True, snapshots=1))
    assert shown["notes"] == []
    assert [c["key"] for c in shown["curves"]] == ["accuracy_prototype", "accuracy", "loss"]
    own = chart(shown, "accuracy")["series"][0]
    assert own["high"][0] - own["y"][0] == pytest.approx(2.0, abs=1e-6)  # over clients, as by prototype
    assert "head" not in shown["clients"][0] and shown["clients"][0]["prototype"][0][-1] == 910
    assert list(shown["classes"][0]["right"]) == ["prototype"]
    assert shown["bytes"]["lines"][0]["points"] == [{"bytes": 256, "own": 91, "head": None, "prototype": 91}]
    assert shown["spaces"][0]["names"] == ["cat", "dog", "fox"]


def test_a_figure_that_does_not_exist_is_null_in_a_whole_summary(tmp_path):
    run = make_run(tmp_path / "r")
    summary = json.loads((run / "summary.json").read_text())
    summary["last_five"]["silhouette"] = None
    (run / "summary.json").write_text(json.dumps(summary))
    assert content(run)["notes"] == [] and content(run)["status"]["finished"] == 1


# --- under way, missing, cut off, foreign -----------------------------------------------------------------------------
def test_before_the_first_round_and_before_the_first_evaluation(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "settings.toml").write_text('rounds = 5\n[method]\nname = "fedsap"\n')
    with FolderLock(empty):
        shown = content(empty)
    assert shown["table"]["rows"] == [] and shown["curves"] == [] and shown["notes"] == []
    going = {"under_way": [{"name": "empty", "round": 0, "rounds": 5}], "interrupted": []}
    assert shown["status"] == {"finished": 0, "failed": 0, "runs": 1, **going}
    early = content(make_run(tmp_path / "early", rounds=1, planned=9, finished=False))
    assert [c["key"] for c in early["curves"]] == ["loss"] and early["clients"] == []
    run = make_run(tmp_path / "later", rounds=5, planned=9, finished=False)
    with FolderLock(run):
        later = content(run)
    assert [r[0]["text"] for r in later["table"]["rows"]] == ["round 4, so far"]
    none_yet = content(make_comparison(tmp_path / "none", finished=False))
    assert none_yet["status"]["runs"] == 9 and none_yet["curves"] == [] and none_yet["notes"] == []
    assert [row[1]["text"] for row in none_yet["table"]["rows"]] == ["–"] * 3


def test_a_line_being_written_is_passed_over(tmp_path):
    run = make_run(tmp_path / "r", finished=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 12, "accu')
    with FolderLock(run):
        shown = content(run)
    assert shown["notes"] == [] and chart(shown, "accuracy_head")["series"][0]["x"][-1] == 10


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("rounds.jsonl", '{"round": 1, "loss": 1}\nrubbish\n{"round": 3, "loss": 1}\n', "line 2 left out"),
        ("rounds.jsonl", '[1]\n{"no": 1}\n{"round": "x"}\n', "line 1 and 2 more left out"),
        ("metrics.jsonl", b"\xff\xfe\x00bad", "not readable"),
        ("clients.jsonl", '{"round": 2, "accuracy_head": [1], "accuracy_prototype": [], "samples": [1]}\n', "line 1"),
        ("summary.json", '{"method": ', "not finished"),
        ("summary.json", '{"method": "x"}', "seed is missing"),
        ("summary.json", "[]", "not finished"),
        ("confusion.json", '{"round": 1}', "confusion.json: not readable"),
        ("settings.toml", "rounds = = 3", "settings.toml: not readable"),
    ],
)
def test_what_cannot_be_read_is_noted_and_the_rest_shown(tmp_path, name, text, said):
    run = make_run(tmp_path / "r", snapshots=2)
    (run / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    shown = content(run)
    assert len(shown["notes"]) == 1 + (name == "summary.json")
    assert said in shown["notes"][0] and name in shown["notes"][0]
    assert shown["spaces"] and len(render(shown)) > 10_000


def test_runs_that_failed_are_counted_and_have_no_point(tmp_path):
    place = make_comparison(tmp_path / "c")
    for seed in (1, 2, 3):
        file = place / f"fedavg-seed{seed}" / "summary.json"
        lost = {"failure": "nobody returned anything", "dropped_clients": 40, "client_rounds": 40, "empty_rounds": 10}
        file.write_text(json.dumps(json.loads(file.read_text()) | lost))
    (place / "failed.json").write_text(json.dumps({"fedsap-seed3": "it diverged"}))
    (place / "fedsap-seed3" / "summary.json").unlink()
    shown = content(place)
    assert shown["status"]["failed"] == 4
    assert [line["label"] for line in shown["bytes"]["lines"]] == ["local", "fedsap"]
    assert [row[0]["text"] for row in shown["table"]["rows"]] == ["local", "fedsap", "fedavg †"]
    assert {cell["text"] for cell in shown["table"]["rows"][2][1:]} == {"failed"}
    notes = " ".join(shown["table"]["notes"])
    assert "120 of 120 client rounds" in notes and "failed: fedsap, seed 3: it diverged" in notes


HOLDER = """
import sys
from pathlib import Path
from protofed.results.lock import FolderLock
lock = FolderLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_whose_process_is_gone_is_interrupted(tmp_path):
    run = make_run(tmp_path / "r", rounds=6, planned=9, finished=False)
    assert not is_held(run) and not is_held(tmp_path / "nowhere")
    with FolderLock(run):
        assert is_held(run) and content(run)["status"]["under_way"] and is_held(run), "looking does not end the lock"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "held\n"
        assert read_folder(run).runs[0].state == "under way"
    finally:
        other.kill()
        other.wait()
    shown = content(run)
    assert (run / ".lock").is_file() and shown["status"]["under_way"] == []
    assert shown["status"]["interrupted"] == [{"name": "r", "round": 6, "rounds": 9}]
    assert [r[0]["text"] for r in shown["table"]["rows"]] == ["round 6, the last before it was interrupted"]
    assert shown["notes"] == [
        f"r: interrupted after round 6 of 9, shown as far as it came; `protofed resume {run}` goes on"
    ]


def test_an_interrupted_run_enters_no_mean(tmp_path):
    place = make_comparison(tmp_path / "c")
    whole = content(place)
    for name in ("summary.json", "metrics.jsonl"):
        (place / "fedavg-seed3" / name).unlink()
    rows = (place / "fedavg-seed3" / "rounds.jsonl").read_text().splitlines()[:4]
    (place / "fedavg-seed3" / "rounds.jsonl").write_text(
        "\n".join(rows).replace('"weights": 1000', '"weights": 9') + "\n"
    )
    shown = content(place)
    assert "fedavg-seed3: interrupted after round 4 of 10, left out of all means" in shown["notes"][-1]
    means = [100 * accuracy(seed, 10, -0.1) for seed in (1, 2)]
    assert shown["table"]["rows"][2][1]["value"] == pytest.approx(statistics.fmean(means), rel=1e-4)
    line = next(s for s in chart(shown, "loss")["series"] if s["label"] == "fedavg")
    assert line == {**next(s for s in chart(whole, "loss")["series"] if s["label"] == "fedavg")}
    bytes_line = shown["bytes"]["lines"][2]
    assert len(bytes_line["points"]) == 2 and bytes_line["down"]["weights"] == 1000
    with FolderLock(place):  # the comparison goes on, and so will its runs
        assert [run["name"] for run in content(place)["status"]["under_way"]] == ["fedavg-seed3"]


def test_the_title_says_what_was_run_and_a_sweep_is_called_one(tmp_path):
    shown = content(make_comparison(tmp_path / "c"))
    assert (shown["title"], shown["kind"], shown["folder"]) == (
        "pets: 4 clients, 10 rounds, 3 seeds",
        "Comparison",
        "c",
    )
    one = content(make_run(tmp_path / "r"))
    assert (one["title"], one["kind"]) == ("fedsap on pets: 4 clients, 10 rounds, seed 1", "Run")
    sweep = content(RESULTS / "fedapa-csi-crowd-ablation")
    assert (sweep["title"], sweep["kind"]) == ("csi-crowd.npz: 4 clients, 40 rounds, 3 seeds", "Sweep over variant")
    (tmp_path / "r" / "settings.toml").write_text("rounds = = 3")
    assert content(tmp_path / "r")["title"] == "r"


def test_it_opens_with_a_verdict_and_the_gains_of_every_site(tmp_path):
    shown = content(make_comparison(tmp_path / "c"))
    assert shown["verdict"]["sentences"][0] == "fedsap gains over Local: 97.00 % by head, +5.00 ± 0.00 points."
    part = shown["verdict"]["gains"]["head"]
    assert sorted(part["sites"]) == [f"client {c}" for c in range(4)] and part["first"] == "fedsap"
    assert {line["label"]: line["values"] for line in part["lines"]} == {
        "fedsap": pytest.approx([5] * 4, abs=1e-3),
        "fedavg": pytest.approx([-10] * 4, abs=1e-3),
    }
    assert shown["opens"] == "fedsap-seed1"
    assert content(tmp_path / "c" / "fedavg-seed1")["verdict"] == {"sentences": [], "gains": {}}
    sites = content(RESULTS / "fedapa-csi-crowd")["verdict"]["gains"]["prototype"]["sites"]
    assert "large room, session 1" in sites and len(sites) == 4


def test_names_of_sites_come_from_the_summary_then_from_confusions(tmp_path):
    run = make_run(tmp_path / "r", clients=2)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "client_names": ["north clinic", "south clinic"]}))
    assert content(run)["clients"][0]["names"] == ["north clinic", "south clinic"]
    (run / "summary.json").write_text(json.dumps({**summary, "client_names": ["one too few"]}))
    assert content(run)["clients"][0]["names"] == ["client 0", "client 1"]


def test_bytes_spent_until_an_accuracy(tmp_path):
    spent = {line["label"]: line for line in content(make_comparison(tmp_path / "c"))["bytes"]["spent"]["head"]}
    assert spent["fedsap"]["x"] == [256 * r for r in (2, 4, 6, 8, 10)] and spent["fedsap"]["rounds"] == [2, 4, 6, 8, 10]
    assert spent["fedavg"]["x"][0] == 2 * 1256
    assert spent["fedsap"]["y"][-1] == pytest.approx(100 * accuracy(2, 10, 0.05), rel=1e-4)
    local = next(line for line in content(RESULTS / "digits")["bytes"]["spent"]["head"] if line["label"] == "local")
    assert local["x"] == [] and local["level"] == pytest.approx(97.58, abs=0.01)


def test_dropped_clients_have_names_and_reasons(tmp_path):
    place = make_comparison(tmp_path / "c")
    assert content(place)["dropped"] == []
    file = place / "fedsap-seed2" / "rounds.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[3]["dropped"], rows[4]["dropped"] = {"1": "NaN", "2": "too late"}, {"1": "NaN"}
    write_rows(file, rows)
    (line,) = content(place)["dropped"]
    assert (line["label"], line["dropped"], line["asked"], line["others"]) == ("fedsap", 3, 120, 0)
    assert line["sites"] == [("client 1", 2), ("client 2", 1)] and line["reasons"] == [("NaN", 2), ("too late", 1)]


@pytest.mark.parametrize("name", ["rounds.jsonl", "metrics.jsonl", "clients.jsonl"])
def test_a_file_missing_from_a_finished_run_is_noted(tmp_path, name):
    run = make_run(tmp_path / "r")
    (run / name).unlink()
    assert content(run)["notes"] == [f"{run / name}: missing, although the run has finished"]


def test_values_of_the_wrong_kind_are_no_numbers(tmp_path):
    run = make_run(tmp_path / "r", finished=False)
    strange = {"round": 11, "loss": "much", "terms": [1], "up": None, "down": {"weights": "x"}, "measures": {"a": True}}
    with (run / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(strange) + "\n")
    write_rows(
        run / "clients.jsonl", [{"round": 2, "accuracy_head": ["a"], "accuracy_prototype": [None], "samples": [1]}]
    )
    shown = content(run)
    assert chart(shown, "loss")["series"][0]["x"][-1] == 10
    assert shown["measures"] == [] and shown["clients"][0]["head"] == [[None]]


def test_a_broken_comparison_falls_back_to_folder_names(tmp_path):
    place = make_comparison(tmp_path / "c")
    (place / "comparison.json").write_text("{")
    shown = content(place)
    assert [v["label"] for v in shown["variants"]] == ["fedavg", "fedsap", "local"]
    assert shown["status"]["finished"] == 9 and "comparison.json: not readable" in shown["notes"][0]


def test_a_comparison_cannot_name_folders_outside_itself(tmp_path):
    make_run(tmp_path / "secret-seed1")
    place = make_comparison(tmp_path / "c", seeds=1)
    record = json.loads((place / "comparison.json").read_text())
    record["variants"][0]["folder"] = "../secret"
    (place / "comparison.json").write_text(json.dumps(record))
    shown = content(place)
    assert "is not in this folder" in shown["notes"][0]
    assert "secret" not in json.dumps(shown["variants"])


def test_folders_that_are_no_runs(tmp_path):
    with pytest.raises(ProtofedError, match="no such run folder"):
        content(tmp_path / "nowhere")
    with pytest.raises(ProtofedError, match=r"neither a run folder \(settings.toml\) nor a comparison"):
        content(tmp_path)


def test_a_folder_of_loose_runs_is_a_comparison(tmp_path):
    make_run(tmp_path / "runs" / "one", method="fedsap")
    make_run(tmp_path / "runs" / "two", method="fedavg")
    found = read_folder(tmp_path / "runs")
    assert found.comparison and [(v.label, v.method) for v in found.variants] == [("one", "fedsap"), ("two", "fedavg")]


def test_many_runs_show_details_of_the_first_seed_only(tmp_path, monkeypatch):
    monkeypatch.setattr(content_module, "MOST_IN_DETAIL", 8)
    shown = content(make_comparison(tmp_path / "c"))
    assert [c["run"] for c in shown["clients"]] == ["local-seed1", "fedsap-seed1", "fedavg-seed1"]
    assert "6 runs are left out" in shown["notes"][0]


# --- the embedding space ----------------------------------------------------------------------------------------------
def test_planes_share_their_axes_and_keep_distances(tmp_path):
    g = np.random.default_rng(0)
    basis = np.linalg.qr(g.normal(size=(6, 2)))[0]  # data that lies in a plane is shown as it is, up to a rotation
    flat_points = [scale * g.normal(size=(30, 2)) for scale in (1.0, 4.0)]
    snaps = [
        Snapshot(r, p @ basis.T, np.zeros(30, int), np.zeros(30, int), (p[:3] @ basis.T)[None], np.ones((1, 3), bool))
        for r, p in enumerate(flat_points)
    ]
    planes, said = project(snaps)
    assert "100 % of the variance" in said
    shown = np.concatenate([p.points for p in planes])
    true = np.concatenate(flat_points)
    np.testing.assert_allclose(_distances(shown), _distances(true), atol=1e-8)
    np.testing.assert_allclose(planes[1].stars[:, :2], planes[1].points[:3], atol=1e-8)


def _distances(points):
    return np.linalg.norm(points[:, None] - points[None], axis=-1)


def test_space_is_whole_numbers_within_the_square(tmp_path):
    run = make_run(tmp_path / "r", snapshots=3)
    shown = content(run)["spaces"][0]
    assert [f["round"] for f in shown["frames"]] == [2, 4, 6]
    for frame in shown["frames"]:
        points = np.array(frame["points"]).reshape(-1, 2)
        assert points.shape == (60, 2) and points.min() >= 0 and points.max() <= 1000
    assert np.ptp(np.array(shown["frames"][-1]["points"])) > np.ptp(np.array(shown["frames"][0]["points"])) + 100
    stars = np.array(shown["frames"][0]["stars"]).reshape(-1, 4)
    assert stars[:, 2].tolist() == [0, 1]  # fox is not known
    assert shown["frames"][0]["y"] == [0, 1, 2] * 20 and shown["frames"][1]["y"] is None
    assert shown["frames"][0]["similarity"] == [[100, 0, None], [0, 100, None], [None, None, None]]
    assert shown["names"] == ["cat", "dog", "fox"]


@settings(max_examples=30, deadline=None)
@given(hnp.arrays(np.float64, (2, 4, 3), elements=st.floats(-5, 5)), hnp.arrays(np.bool_, (2, 4)))
def test_similarity_against_a_naive_loop(prototypes, known):
    empty = np.zeros((0, 3))
    found = Snapshot(1, empty, np.zeros(0), np.zeros(0), np.where(known[..., None], prototypes, 0), known).similarity()
    means = [[prototypes[h, c] for h in range(2) if known[h, c]] for c in range(4)]
    for a in range(4):
        for b in range(4):
            if not means[a] or not means[b]:
                assert np.isnan(found[a, b])
                continue
            u, v = np.mean(means[a], axis=0), np.mean(means[b], axis=0)
            if np.linalg.norm(u) > 1e-6 and np.linalg.norm(v) > 1e-6:
                assert found[a, b] == pytest.approx(u @ v / np.linalg.norm(u) / np.linalg.norm(v), abs=1e-6)


def test_stacks_of_banks_thinning_and_other_spaces(tmp_path):
    several = read_snapshot(make_snapshot(tmp_path / "round-000001.npz", banks=3))
    assert several.prototypes.shape == (3, 3, 5)
    shown = space([several], "pca", most=20)
    assert shown["banks"] == 3 and len(shown["frames"][0]["stars"]) == 4 * 6
    assert len(shown["frames"][0]["y"]) == 20 and "20 of 60 samples" in shown["about"]
    same = thin([several, several], 10)
    np.testing.assert_array_equal(same[0].z, same[1].z)
    other = Snapshot(1, several.z, several.y, several.client, np.ones((1, 3, 9)), np.ones((1, 3), bool))
    assert space([other], "pca", 50)["frames"][0]["stars"] == []  # prototypes of another dimension have no place in it


def test_tsne_places_all_snapshots_together(tmp_path):
    snaps = [read_snapshot(make_snapshot(tmp_path / f"round-{r:06d}.npz", grown=r)) for r in (1, 4)]
    planes, said = project(snaps, "tsne")
    assert said.startswith("t-SNE over all snapshots together")
    again, _ = project(snaps, "tsne")
    np.testing.assert_array_equal(planes[1].points, again[1].points)
    y, points = planes[1].snapshot.y, planes[1].points
    distance = _distances(points)
    np.fill_diagonal(distance, np.inf)
    assert (y[distance.argmin(axis=1)] == y).all()


def test_bad_snapshots_are_noted(tmp_path):
    run = make_run(tmp_path / "r", snapshots=2)
    (run / "snapshots" / "round-000008.npz").write_bytes(b"PK\x03\x04 cut off")
    np.savez(run / "snapshots" / "round-000010.npz", z=np.ones((3, 5)))
    np.savez(run / "snapshots" / "round-000012.npz", **_snapshot(z=np.ones((3, 7))))
    np.savez(run / "snapshots" / "round-000014.npz", **_snapshot(y=np.ones(9, int)))
    np.savez(run / "snapshots" / "round-000016.npz", **_snapshot(z=np.full((3, 5), np.nan)))
    np.savez(run / "snapshots" / "round-000018.npz", **_snapshot(z=np.array([[{}]], dtype=object)))
    snapshots, notes = read_snapshots(run)
    assert [s.round for s in snapshots] == [2, 4]
    for note, said in zip(
        notes,
        [
            "not readable",
            "expected z, y, client",
            "5 dimensions as in round 2, got 7",
            "y (9,)",
            "no finite",
            "not readable",
        ],
        strict=True,
    ):
        assert said in note
    assert content(run)["notes"] == notes


def _snapshot(**other):
    n = len(other.get("z", np.ones((3, 5))))
    base = {"z": np.ones((n, 5)), "y": np.zeros(n, int), "client": np.zeros(n, int)}
    return {**base, "prototypes": np.ones((2, 5)), "known": np.ones(2, bool), **other}


def test_many_snapshots_are_thinned(tmp_path):
    for r in range(1, 61):
        make_snapshot(tmp_path / "snapshots" / f"round-{r:06d}.npz", samples=6)
    rounds = [s.round for s in read_snapshots(tmp_path)[0]]
    assert len(rounds) == MOST_SNAPSHOTS and rounds[0] == 1 and rounds[-1] == 60


# --- the page ---------------------------------------------------------------------------------------------------------
class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.inside, self.texts = [], "", {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("id", tag)

    def handle_data(self, data):
        self.texts[self.inside] = self.texts.get(self.inside, "") + data


def test_page_stands_alone(tmp_path):
    place = write_page(make_comparison(tmp_path / "c", snapshots=2))
    text = place.read_text(encoding="utf-8")
    page = _Page(text)
    assert place == tmp_path / "c" / "report.html"
    for tag, attrs in page.tags:
        for key in ("src", "href", "action", "data"):
            assert not (attrs.get(key) or "").startswith(("http", "//", "/", "file")), (tag, attrs)
    assert "http://" not in text and "https://" not in text and "@import" not in text and "url(" not in text
    assert json.loads(page.texts["content"]) == content(tmp_path / "c")
    assert {"header", "nav", "main", "footer", "h1", "h2", "caption"} <= {tag for tag, _ in page.tags}
    labelled = {attrs.get("aria-labelledby") for tag, attrs in page.tags if tag == "section"}
    assert labelled == {attrs["id"] for tag, attrs in page.tags if tag == "h2"}


@given(st.text())
def test_no_name_can_leave_the_script_element(name):
    text = embedded({"name": name, "list": [name]})
    assert not {"<", ">", "&"} & set(text)
    assert json.loads(text) == {"name": name, "list": [name]}


def test_names_with_markup_stay_names(tmp_path):
    evil = "</script><img src=x onerror=alert(1)>$title"
    run = make_run(tmp_path / "r", method=evil)
    text = render(content(run))
    assert "<img" not in text
    assert json.loads(_Page(text).texts["content"])["variants"][0]["label"] == evil


def test_report_command(call, tmp_path, monkeypatch):
    run = make_run(tmp_path / "r")
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    place = tmp_path / "new" / "page.html"
    assert call("report", run, "--open", "--out", place)[0] == 0
    assert place.is_file() and opened == [place.resolve().as_uri()]
    with pytest.raises(ProtofedError, match=r"expected a file name ending in \.html"):
        write_page(run, out=tmp_path / "page.pdf")
    with pytest.raises(ProtofedError, match="expected one of pca, tsne"):
        write_page(run, projection="umap")
    (tmp_path / "file").write_text("")
    with pytest.raises(ProtofedError, match="cannot be written"):
        write_page(run, out=tmp_path / "file" / "page.html")


def test_page_is_light_and_quick(tmp_path):
    place = make_comparison(tmp_path / "c", rounds=100, clients=20, measures=True, snapshots=10)
    began = time.perf_counter()
    page = write_page(place)
    assert time.perf_counter() - began < 30
    assert page.stat().st_size < 8_000_000
