"""The benchmark: at tiny sizes, with no word about how long anything takes."""

import inspect
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from protofed import ProtofedError, models
from protofed.bench import NAMES, evaluation, measure, run_bench, server_case, servers
from protofed.bench.beside import OTHER_CODE, THIS_CODE, beside_markdown, compared
from protofed.bench.clock import Clock
from protofed.bench.contender import Skip, make, server_call
from protofed.bench.limit import Merged, batches, in_layout, layouts
from protofed.bench.memory import tree_seconds
from protofed.bench.plain import PlainFedAvg, PlainFedProto
from protofed.bench.processes import Field
from protofed.bench.report import markdown
from protofed.bench.workloads import SERVER, TRAINING, Training
from protofed.experiment.build import build
from protofed.experiment.settings import resolve

ROOT = Path(__file__).parent.parent


# --- the whole --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Two workloads measured once for all tests, with two of the engines: what was returned, and the files."""
    folder = tmp_path_factory.mktemp("bench")
    files = {"json_file": folder / "bench.json", "markdown_file": folder / "bench.md"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "ENGINES", ("loop", "auto"))  # a process takes seconds to start
        return run_bench(["mlp-digits", "many"], quick=True, repeats=2, **files), folder


@pytest.mark.soak
def test_the_json_file_holds_everything(quick):
    results, folder = quick
    assert json.loads((folder / "bench.json").read_text()) == results
    assert {"cores", "torch", "python", "protofed"} <= results["machine"].keys()
    assert results["quick"] is True and results["repeats"] == 2
    assert list(results["workloads"]) == ["mlp-digits", "many"]


@pytest.mark.soak
def test_all_contenders_took_part(quick):
    found = quick[0]["workloads"]["mlp-digits"]
    assert found["skipped"] == {}
    kinds = [c["kind"] for c in found["contenders"].values()]
    assert sorted(kinds) == ["engine", "engine", "limit", "own-batch", "plain"]
    assert {"loop, 1 thread", "auto"} <= found["contenders"].keys()
    auto = found["contenders"]["auto"]["settings"]
    assert auto["engine"] in ("loop", "stack", "workers")  # what was chosen stands there


@pytest.mark.soak
def test_everything_follows_from_the_seconds(quick):
    found = quick[0]["workloads"]["mlp-digits"]
    contenders = found["contenders"]
    for c in contenders.values():
        assert len(c["seconds"]) == 2 and min(c["seconds"]) > 0
        assert c["best"] == min(c["seconds"]) and c["median"] == statistics.median(c["seconds"])
        assert c["samples_per_second"] == pytest.approx(found["samples_per_round"] / c["best"])
        assert c["clients_per_second"] == pytest.approx(found["clients_per_round"] / c["best"])
    plain = min(min(c["seconds"]) for c in contenders.values() if c["kind"] == "plain")
    limits = [c for c in contenders.values() if c["kind"] == "limit"]
    limit = min(min(c["seconds"]) for c in limits)
    training = min(min(c["training_seconds"]) for c in limits)
    steps = min(min(c["seconds"]) for c in contenders.values() if c["kind"] == "own-batch")
    assert training < limit  # the rest is the pass for the prototypes
    assert found["ratios"].keys() == {label for label, c in contenders.items() if c["kind"] == "engine"}
    for label, ratios in found["ratios"].items():
        own = min(contenders[label]["seconds"])
        assert ratios["over_plain"] == pytest.approx(plain / own)
        assert ratios["of_limit"] == pytest.approx(limit / own)
        assert ratios["of_training_limit"] == pytest.approx(training / own)
        assert ratios["of_own_batch"] == pytest.approx(steps / own)
    sweep = [row["seconds"] for row in found["limit_sweep"]]
    assert len(sweep) == len(batches(TRAINING["mlp-digits"].quick())) and sweep == sorted(sweep)


@pytest.mark.soak
def test_many_compares_like_with_like(quick):
    found = quick[0]["workloads"]["many"]
    many, few = found["rows"].values()
    assert few["settings"] == many["settings"] and found["skipped"] == {}
    assert few["clients"] < many["clients"] and 0 < few["took_part"] <= few["clients"]
    for row in (few, many):
        assert len(row["seconds"]) == found["rounds"] and 0 < row["built_bytes"] <= row["peak_bytes"]
    assert "bytes_per_idle_client" in found


@pytest.mark.soak
def test_the_markdown_has_a_row_for_each_contender(quick):
    results, folder = quick
    text = (folder / "bench.md").read_text()
    assert text == markdown(results) and "### mlp-digits" in text and "### many" in text
    for label in results["workloads"]["mlp-digits"]["contenders"]:
        assert f"| {label} |" in text
    assert "goal" not in text  # they are about the real sizes
    assert "goal, auto: times the best plain loop" in markdown({**results, "quick": False})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workloads": ["cnn82"]}, "unknown workload 'cnn82'; did you mean 'cnn28'?"),
        ({"json_file": "no-such-folder/bench.json"}, "its folder does not exist"),
    ],
)
def test_bad_input_is_named_before_anything_is_measured(given, message, tmp_path):
    if "json_file" in given:
        given = {"json_file": tmp_path / given["json_file"]}
    with pytest.raises(ProtofedError, match=message.replace("?", r"\?")):
        run_bench(quick=True, **given)


def test_names():
    assert measure.ENGINES == ("loop", "stack", "workers", "auto")
    assert (
        *("cnn28", "cifar-cohort", "cifar-cohort-pfl", "resnet18", "mlp-digits"),
        *("server", "servers", "many", "startup", "evaluation", "around"),
    ) == NAMES


def test_a_server_case_counts_what_would_travel():
    """In this process: everyone's prototypes go down to everyone, and what the engine does is not the server's."""
    case = next(c for c in servers.CASES if c.label == "FedAPA, 100 clients").quick()
    answer = server_case.main(case.spec | {"settings": {"engine": "loop"}})
    first, second = answer["rounds"]
    assert first["down"] < second["down"] and second["down"] > 4 * 4 * 4 * 12 * 8  # four clients, four banks of float32
    for entry in answer["rounds"]:
        seconds = entry["seconds"]
        assert seconds["server"] + seconds["engine"] == pytest.approx(seconds["round"])
        assert seconds["downloads"] + seconds["update"] <= seconds["server"]
    row = {"label": "a", "measured": "server", "skipped": {}, "this": servers._summary([answer], "server")}
    header, rows, _ = servers.table({"rows": [row, {**row, "other": row["this"]}]})
    assert len(header) == len(rows[0]) == len(rows[1]) and rows[1][-2:] == ["1.00", "1.00"]


# --- the contenders do the same work ----------------------------------------------------------------------------------
TINY = Training(
    "tiny", "fedproto", clients=3, per_round=3, samples=6, shape=(5,), model="mlp", batch=6, classes=3,
    options={"hidden": (7,), "embedding": 4}, lr=0.1,
)  # fmt: skip


def engine_weights(workload, x, y, rounds):
    """Initial weights, and those of each client (or of the server) after some rounds of protofed's plain loop."""
    settings = resolve(workload.method, {**workload.settings(x, y), "engine": "loop", "threads": 1})
    _, federation = build(settings)
    for _ in range(rounds):
        federation.step()
    if workload.method == "fedavg":
        return federation.engine.start, [federation.state.weights]
    states = federation.engine.export()
    return federation.engine.start, [states[c].weights for c in range(workload.clients)]


@pytest.mark.parametrize("method", ["fedproto", "fedavg"])
def test_the_hand_written_loop_computes_what_protofed_computes(method):
    """One batch per client and round, so that the order of samples plays no part."""
    workload = replace(TINY, method=method)
    x, y = workload.load(None)
    start, expected = engine_weights(workload, x, y, rounds=3)
    if method == "fedproto":
        proto = PlainFedProto(workload, x, y)
        for model in proto.models:
            model.load_state_dict(start)
        for _ in range(3):
            proto.round()
        found = [model.state_dict() for model in proto.models]
    else:
        average = PlainFedAvg(workload, x, y)
        average.weights = {name: value.clone() for name, value in start.items()}
        for _ in range(3):
            average.round()
        found = [average.weights]
    for ours, theirs in zip(expected, found, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)


def test_all_processes_map_the_same_samples(tmp_path):
    TINY.write_samples(tmp_path)
    x, y = TINY.load(str(tmp_path))
    again, labels = TINY.load(str(tmp_path))
    assert x.shape == (18, 5) and torch.equal(x, again) and torch.equal(y, labels)
    assert torch.equal(y, TINY.load(None)[1])


@pytest.mark.parametrize("name", TRAINING)
def test_the_limit_trains_in_every_layout(name):
    workload = TRAINING[name].quick()
    x, y = workload.load(None)
    assert workload.per_round * workload.batch in batches(workload)
    for layout in layouts(workload):
        merged = Merged(workload, in_layout(x, layout), y, batches(workload)[0], layout)
        before = [p.detach().clone() for p in merged.model.parameters()]
        timed = merged.round()
        assert any(not torch.equal(a, b) for a, b in zip(before, merged.model.parameters(), strict=True))
        assert timed.training > 0 and (timed.prototypes > 0) == (workload.method == "fedproto")


@pytest.mark.parametrize("case", SERVER, ids=lambda case: case.label)
def test_server_rules_run(case):
    result = server_call(case.quick())()
    assert torch.isfinite(result.means).all()


# --- ratios, goals, overhead ------------------------------------------------------------------------------------------
def contender(kind, *seconds, **more):
    return {"kind": kind, "seconds": list(seconds), "best": min(seconds), "median": statistics.median(seconds), **more}


def test_goals_are_about_auto_the_best_plain_loop_and_the_best_limit():
    contenders = {
        "plain loop, 1 thread": contender("plain", 6.0, 5.0),
        "plain loop, 2 threads": contender("plain", 4.0, 4.2),
        "loop, 1 thread": contender("engine", 5.0, 5.0, compute_seconds=[[4.9], [4.8]]),
        "auto": contender("engine", 2.0, 2.2, compute_seconds=[[1.9, 1.7], [2.2, 1.98]]),
        "limit 1": contender("limit", 1.6, 1.7, training_seconds=[1.3, 1.4]),
        "limit 2": contender("limit", 1.8, 1.9, training_seconds=[1.2, 1.5]),
    }
    found = measure.derive(TRAINING["cnn28"], contenders)
    assert found["best_plain"] == "plain loop, 2 threads" and found["limit"] == "limit 1"
    assert found["ratios"]["auto"]["over_plain"] == pytest.approx(2.0)
    assert found["ratios"]["auto"]["of_limit"] == pytest.approx(0.8)
    assert found["ratios"]["auto"]["of_training_limit"] == pytest.approx(0.6)
    assert found["overhead"]["auto"] == pytest.approx((0.1 + 0.05) / 2)
    assert [goal["met"] for goal in found["goals"]] == [True, True, False, False]


def test_without_auto_the_goals_stay_open():
    found = measure.derive(TRAINING["resnet18"], {"plain loop, 1 thread": contender("plain", 1.0)})
    assert found["ratios"] == {} and [goal["met"] for goal in found["goals"]] == [None] * 3


def test_the_clock_counts_nested_calls_once_and_sees_forked_processes():
    clock = Clock()
    inner = clock.timed(lambda: time.sleep(0.02))
    outer = clock.timed(inner)
    begun = time.perf_counter()
    outer()
    elapsed = time.perf_counter() - begun
    child = multiprocessing.get_context("fork").Process(target=inner)
    child.start()
    child.join()
    here, there = clock.read()
    assert 0.02 <= here <= elapsed and there >= 0.02  # counted twice, the sleep would be longer than the call


def test_memory_grows_by_what_is_held():
    code = """
import mmap
from protofed.bench.memory import tree_memory
before = tree_memory()
with mmap.mmap(-1, 32 << 20) as held:
    held.write(bytes([1]) * len(held))
    after = tree_memory()
print(after["now"] - before["now"], after["peak"] - before["peak"])
"""  # in a process of its own: other tests may leave children here that end, and caches that are freed
    grown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    now, peak = map(int, grown)
    assert now > 0.9 * (32 << 20) and peak >= 0


# --- contenders that cannot take part -----------------------------------------------------------------------------------
def test_an_engine_that_does_not_exist_is_skipped_with_the_reason():
    spec = {"kind": "engine", "workload": "mlp-digits", "quick": True, "folder": None, "settings": {"engine": "magic"}}
    with pytest.raises(Skip, match="engine"):
        make(spec)


@pytest.mark.slow
def test_one_that_dies_leaves_the_field():
    with Field() as field:
        field.add("broken", {"kind": "no such kind"})
        assert field.turn() == {}
    assert field.skipped == {"broken": "KeyError: 'no such kind'"}


# --- beside another checkout ------------------------------------------------------------------------------------------
def test_speeds_beside_another_checkout_and_their_table():
    turns = [
        {THIS_CODE: {"seconds": 1.0, "processor_seconds": 2.0}, OTHER_CODE: {"seconds": 2.0, "processor_seconds": 2.2}},
        {THIS_CODE: {"seconds": 2.0, "processor_seconds": 2.5}, OTHER_CODE: {"seconds": 3.0, "processor_seconds": 2.5}},
        {THIS_CODE: {"seconds": 2.0, "processor_seconds": 2.0}, OTHER_CODE: {"seconds": 2.0, "processor_seconds": 3.0}},
    ]
    found = compared(turns)
    assert found["speed"] == {"best": 2.0, "median": 1.5}
    assert found["speed_by_processor"]["best"] == pytest.approx(1.1) and found["speed_by_processor"]["median"] == 1.1
    way = {
        "engine": "loop",
        "inner": "loop",
        "layout": "channels_last",
        "convolution": "lean",
        "workers": 1,
        "threads": 1,
    }
    row = {**found, "settings": {THIS_CODE: {**way, "convolution": "grouped"}, OTHER_CODE: way}}
    text = beside_markdown({"machine": measure.machine(), "quick": False, "workloads": {"cnn28": row}})
    wanted = "| cnn28 | loop channels_last | loop channels_last lean | 3 | 1.000 | 2.000 | 0.50 | 0.67 | 0.91 | 0.91 |"
    assert wanted in text.splitlines()


def test_a_workload_and_its_model_are_handed_to_code_without_them():
    """In a process of its own, whose protofed is made to lack both."""
    code = """
import json, sys
from protofed import models
from protofed.bench import elsewhere, workloads
given, file = json.loads(sys.argv[1]), sys.argv[2]
del workloads.TRAINING[given["name"]]
del models.registry._entries[given["model"]]
elsewhere.hand_in(given, file)
workload = workloads.TRAINING[given["name"]].quick()
print(type(workload.build_model().encoder.pool).__name__, workload.shape)
"""
    given = {**asdict(TRAINING["cifar-cohort-pfl"]), "of_the_future": 1}
    file = inspect.getfile(models.registry["dropout-cnn"])
    done = subprocess.run([sys.executable, "-c", code, json.dumps(given), file], capture_output=True, text=True)
    assert done.stdout.strip() == "MaxPool2d (3, 32, 32)", done.stderr


def test_the_processors_time_of_a_process_and_its_children():
    before = tree_seconds(os.getpid())
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert tree_seconds(os.getpid()) > before or not before  # there is no /proc
    assert tree_seconds(2**22 + 1) == 0.0


# --- evaluation ---------------------------------------------------------------------------------------------------------
@pytest.mark.soak
def test_an_evaluation_is_measured_beside_its_training_and_beside_a_checkout(monkeypatch):
    cases = [case for case in evaluation.CASES if case.name in ("tests", "shared, last rounds", "many")]
    monkeypatch.setattr(evaluation, "CASES", cases)
    checkout = Path(__file__).parents[1]
    result = measure.measure(["evaluation"], repeats=1, quick=True, beside=checkout)["workloads"]["evaluation"]
    dense, compared, alone = result["rows"].values()
    assert dense["products"] > 0 and "products" not in compared, "the bound is that of dense layers"
    assert any("the matrix products alone would take" in note for note in evaluation.table(result)[2])
    assert compared["equal"] and compared["speed_best"] > 0 and alone["share"] > 0
    assert set(compared[evaluation.THIS_CODE]) == {"training", "evaluation", "evaluation_cpu"}
    wanted = ["tests: times the other's speed", "many: evaluation of a training round"]
    assert [goal["what"] for goal in result["goals"]] == wanted
    assert "equal to the last bit" in evaluation.table(result)[2][-1]


def test_figures_that_differ_are_seen():
    one = {"metrics": {"accuracy": 0.5, "worst": 0.1}, "confusions": {"head": "a"}}
    assert evaluation._equal(one, {"metrics": {"accuracy": 0.5}, "confusions": {"head": "a", "prototype": "b"}})
    assert not evaluation._equal(one, {"metrics": {"accuracy": 0.5000001}, "confusions": {}})
    assert not evaluation._equal(one, {"metrics": {}, "confusions": {"head": "b"}})


def test_around_evaluates_every_round_whatever_a_checkout_does_with_the_last_ones():
    from protofed.bench import around

    assert all(case["settings"]["evaluate_every"] == 1 for case in around.CASES.values())


@pytest.mark.soak
def test_around_times_a_run_of_any_checkout(tmp_path):
    from protofed.bench import around

    case = around._sized(around.CASES["200 × MLP, a tenth takes part"], quick=True)
    saved, plain = (around._timed(case, every, tmp_path / str(every), ROOT / "src") for every in (1, 1000))
    assert len(saved["round_seconds"]) == 2 and saved["written_bytes"] > plain["written_bytes"] > 0
    rows = {"case": {"this code": around._summary([saved], [plain])}}
    result = {"rows": rows, "start_cpu_seconds": {"import torch": [1.0], "this code": [2.0]}}
    header, lines, notes = around.table(result)
    assert len(header) == len(lines[0]) and lines[0][0] == "case" and "2.00" in notes[-1]
