"""The same command gives the same bits: the engine follows by rule, and neither workers, cores nor time have a say in it."""

import json
import logging
import multiprocessing
import os
import random
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import settings as settings_of_tests
from hypothesis import strategies as st

import protofed as pf
from protofed import wire
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation import choose, rule, shared
from protofed.federation.choose import EngineSettings
from protofed.federation.rule import Facts, Recipe
from support.engines import finish, groups_of, images, leaves
from support.small import SMALL, blobs, labels_for

pytestmark = pytest.mark.slow

RAGGED = {"rounds": 2, "clients": 8, "shot_spread": 4.0, "participation": 0.7, "batch": 5, "epochs": 2}


def assert_equal_bits(one, other):
    """Server's state, clients' states and records of two runs, to the last bit."""
    for mine, its in zip(one, other, strict=True):
        mine, its = leaves(mine), leaves(its)
        assert mine.keys() == its.keys()
        for place, value in mine.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, its[place]), place
            elif not hasattr(value, "seconds"):
                assert value == its[place] or value != value, place
    for mine, its in zip(one[2], other[2], strict=True):
        assert repr(replace(mine, seconds=0.0)) == repr(replace(its, seconds=0.0))


@pytest.mark.parametrize("inner", ["loop", "stack"])
@pytest.mark.parametrize("method", ["fedproto", "fedavg", "fedapa", "semifl", "fedmatch"])
def test_any_number_of_workers_gives_the_bits_of_one_process(method, inner):
    labels = {"labels": "client", "labels_per_class": 3} if method == "fedmatch" else labels_for(method)
    keys = {**SMALL, "hidden": [33], "embedding": 9, **RAGGED, "data": blobs(per_class=60), **labels}
    settings = resolve(method, keys)
    alone = finish(settings, EngineSettings(inner, inner, "contiguous", "grouped", 1, 1))
    for number in (2, 3):
        assert_equal_bits(alone, finish(settings, EngineSettings("workers", inner, "contiguous", "grouped", number, 1)))


@pytest.mark.parametrize("inner", ["loop", "stack"])
def test_large_messages_do_not_change_the_bits(inner):
    """Weights of other clients come through shared memory, where they may begin at any address."""
    keys = {**SMALL, "hidden": [301], "embedding": 77, **RAGGED, "data": blobs(per_class=60)}
    settings = resolve("fedmatch", {**keys, "labels": "client", "labels_per_class": 3, "clients": 4})
    alone = finish(settings, EngineSettings(inner, inner, "contiguous", "grouped", 1, 1))
    assert_equal_bits(alone, finish(settings, EngineSettings("workers", inner, "contiguous", "grouped", 2, 1)))


def test_what_is_decoded_begins_where_torchs_own_tensors_do():
    """Whatever the length of the header and of the tensors before it: a product's last bits depend on it."""
    for length in range(1, 40):
        weights = {"a" * length: torch.randn(length), "b": torch.randn(3, length), "c": torch.randn(5)}
        message = wire.encode(wire.Bundle(weights=weights))
        for form in (bytes(message), bytearray(message)):
            decoded = wire.decode(form).weights
            assert all(torch.equal(decoded[name], value) for name, value in weights.items())
            assert all(value.data_ptr() % 64 == 0 for value in decoded.values())


def test_dropout_and_several_architectures_too():
    changes = {"models": ["mlp?hidden=7&embedding=5", "mlp?hidden=3&embedding=4"], "dim": 6, "projection_dropout": 0.5}
    keys = {k: v for k, v in SMALL.items() if k not in ("model", "embedding", "hidden")}
    settings = resolve(
        "fedproto", {**keys, **RAGGED, **changes, "projection": "consensus", "data": blobs(per_class=60)}
    )
    inner = ("stack", "loop")
    engines = [EngineSettings("workers", inner, "contiguous", "grouped", n, 1) for n in (1, 2, 3)]
    one, *others = [finish(settings, engine) for engine in engines]
    for other in others:
        assert_equal_bits(one, other)


@settings_of_tests(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 9), st.integers(0, 2**20))
def test_groups_follow_from_the_clients_alone(sizes, most, seed):
    """Every client once, no group too large, like numbers, like sizes together; a group is itself one group."""
    from protofed.federation.stack import StackEngine

    engine = StackEngine.__new__(StackEngine)
    engine.parameters, engine.device = (100,), torch.device("cpu")
    engine.method = mock.Mock()
    engine.data = mock.Mock(clients=[mock.Mock(labelled=range(n), unlabelled=None) for n in sizes])
    chosen = [c for c in range(len(sizes)) if random.Random(seed + c).random() < 0.8]
    with groups_of(most):
        groups = engine.groups(chosen)
        assert sorted(c for group in groups for c in group) == chosen
        assert len(groups) == -(-len(chosen) // most)
        assert not groups or max(map(len, groups)) - min(map(len, groups)) <= 1
        flat = [sizes[c] for group in groups for c in group]
        assert flat == sorted(flat, reverse=True)
        assert all(engine.groups(group) == [group] for group in groups)


# --- the rule ---------------------------------------------------------------------------------------------------------
FACTS = st.builds(Facts, *[st.integers(1, 10**9)] * 2, st.integers(0, 64), st.integers(0, 500), st.booleans())


@given(FACTS)
def test_the_rule_leaves_nothing_open_and_a_smaller_model_is_stacked_all_the_more(facts):
    recipe = rule.rule(facts)
    assert "auto" not in (recipe.engine, recipe.layout, recipe.convolution)
    assert rule.rule(facts, recipe) == recipe
    EngineSettings(recipe.engine, recipe.engine, recipe.layout, recipe.convolution, 1, 1).check(1)
    if recipe.engine == "stack":
        smaller = replace(facts, parameters=facts.parameters // 2 + 1, flops=facts.flops // 2)
        assert facts.clients > 1 and rule.rule(smaller).engine == "stack"


@given(FACTS, st.sampled_from(["auto", "loop", "stack"]), st.sampled_from(["auto", "contiguous", "channels_last"]))
def test_what_is_asked_for_by_name_stays(facts, how, layout):
    recipe = rule.rule(facts, Recipe(how, layout, "auto"))
    assert how in ("auto", recipe.engine)
    assert recipe.engine == "stack" or layout in ("auto", recipe.layout)


@pytest.mark.parametrize(
    ("model", "shape", "way"),
    [
        ({"model": "mlp", "hidden": [128]}, None, "stack"),
        ({"model": "mlp", "hidden": [4000, 100]}, None, "loop"),
        ({"model": "cnn", "channels": [2, 3], "embedding": 6}, 16, "stack"),
        ({"model": "cnn", "channels": [32, 64], "embedding": 512}, 28, "loop channels_last"),
        ({"model": "resnet9", "width": 0.125, "norm": "batch"}, 16, "loop channels_last lean"),
        ({"model": "tinyconvnet4", "batch": 32}, 28, "loop"),
    ],
)
def test_the_rule_on_some_models(model, shape, way):
    keys = {k: v for k, v in SMALL.items() if k not in ("model", "hidden", "embedding", "engine", "layout", "workers")}
    data = images(size=shape) if shape else blobs()
    for cores in (1, 2, 16):
        with mock.patch.object(choose, "cores", lambda n=cores: n):
            settings, federation = build(resolve("fedproto", {**keys, **model, "data": data, "shot": 5}))
        federation.engine.close()
        chosen = settings.engine
        assert chosen.recipe(0) == replace(chosen, engine="auto").recipe(0) and chosen.recipe(0).label == way
        assert chosen.threads == 1 == torch.get_num_threads()
        assert chosen.workers == (1 if way == "stack" else min(cores, 5))


def test_threads_are_asked_for_by_name(caplog):
    given = {**SMALL, "data": blobs(), "engine": "auto", "layout": "auto", "workers": 0}
    settings, _ = build(resolve("fedproto", {**given, "threads": 2}))
    assert settings.engine.threads == 2 == torch.get_num_threads() and settings.engine.workers == 1
    with pytest.raises(pf.ProtofedError, match="threads=2: a worker process has one thread"):
        build(resolve("fedproto", {**given, "engine": "workers", "threads": 2}))


# --- the real command -------------------------------------------------------------------------------------------------
def protofed(*words):
    done = subprocess.run([sys.executable, "-m", "protofed", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def rows_and_tensors(folder):
    """All that a run folder holds of its numbers, without the seconds."""
    found = {}
    for name in ("metrics", "rounds", "clients"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        found[name] = [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]
        assert found[name]
    checkpoint = max((folder / "checkpoint").glob("round-*"))
    for file in sorted(checkpoint.glob("*.safetensors")):
        found[file.name] = {k: v.tolist() for k, v in safetensors.torch.load_file(file).items()}
    return found


@pytest.mark.soak
def test_the_same_command_five_times(tmp_path):
    """With every choice left open, on one core and on two, with other OpenMP settings."""
    keys = ["clients=70", "shot=4", "rounds=2", "hidden=16", "participation=0.95"]
    cores = sorted(os.sched_getaffinity(0))
    found = []
    for number in range(5):
        out = tmp_path / str(number)
        with mock.patch.dict(os.environ, OMP_NUM_THREADS=str(1 + number % 3)):
            os.sched_setaffinity(0, cores[: 1 + number % len(cores)])
            try:
                protofed("run", "fedproto", *keys, "--out", str(out))
            finally:
                os.sched_setaffinity(0, cores)
        found.append(rows_and_tensors(out))
    assert found[0] == found[1] == found[2] == found[3] == found[4]


@pytest.mark.soak
def test_jobs_of_a_comparison_do_not_change_the_bits(tmp_path):
    keys = ["--seeds", "1", "clients=2", "shot=2", "rounds=1", "hidden=600,500"]
    for jobs in ("1", "2"):
        protofed("compare", "fedavg", *keys, "--jobs", jobs, "--out", str(tmp_path / jobs))
    cells = sorted(p.parent.relative_to(tmp_path / "1") for p in (tmp_path / "1").rglob("settings.toml"))
    assert len(cells) == 2  # the baseline has its own
    for cell in cells:
        assert rows_and_tensors(tmp_path / "1" / cell) == rows_and_tensors(tmp_path / "2" / cell)


# --- where there can be no worker process -----------------------------------------------------------------------------
OPEN = {**SMALL, "data": blobs(), "hidden": [4000, 100], "rounds": 2, "engine": "auto", "layout": "auto", "workers": 2}


def _loss(_):
    return pf.run("fedproto", **OPEN).summary["last_round"]


def test_a_daemonic_process_trains_by_itself(caplog):
    expected = _loss(0)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(_loss, [0]) == [expected]


@pytest.mark.parametrize("number", [11, 28, 38])
@pytest.mark.parametrize("what", ["reserve", "fork", "second fork"])
def test_a_system_that_refuses_processes_or_memory(what, number, caplog):
    settings = resolve("fedproto", {**OPEN, "keep_optimiser": True})
    engine = EngineSettings("workers", "loop", "contiguous", "grouped", 2, 1)
    expected = finish(settings, replace(engine, engine="loop", workers=1))
    error, fork, calls = OSError(number, os.strerror(number)), os.fork, []

    def refused(*given):
        calls.append(given)
        if what == "second fork" and len(calls) == 1:
            return fork()
        raise error

    owner, name = (shared, "reserve") if what == "reserve" else (os, "fork")
    with mock.patch.object(owner, name, refused), caplog.at_level(logging.WARNING, "protofed"):
        assert_equal_bits(expected, finish(settings, engine))
    assert calls and os.strerror(number) in caplog.text and "worker processes" in caplog.text


def test_a_client_dropped_in_its_first_round_can_be_saved(tmp_path):
    for engine in ("loop", "stack", "workers"):
        out = tmp_path / engine
        given = {**SMALL, "data": blobs(), "engine": engine, "inner": "loop", "workers": 2, "lr": 1e30}
        pf.run("fedproto", out=out, **given)
        assert pf.resume(out, data=blobs()).summary
