"""How clients are scored: said under every table, on the whole test set where they share a model, each space or all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import silhouette_score

import protofed as pf
from protofed.evaluate import Confusion, Drawn, Scores, pooled_silhouette, whole_set
from protofed.federation.judge import _drawn
from protofed.federation.site import bundle_of, scores_of
from protofed.results.archive import read_summaries
from protofed.results.columns import Row, parse_column
from protofed.results.comparison import ComparisonFolder
from protofed.results.notes import notes
from protofed.results.protocol import protocol_notes, protocol_of, with_protocol
from protofed.results.read import read_folder, read_rows
from protofed.wire import decode, encode
from support.run_folders import FIRST_VERSION

RESULTS = Path(__file__).parent.parent / "docs" / "results"
FEW = {
    "data": "digits",
    "clients": 8,
    "rounds": 2,
    "partition": "n-way",
    "way": 4,
    "shot": 10,
    "seed": 7,
    "snapshots": 0,
}
LOOP = {"engine": "loop", "layout": "contiguous", "threads": 1, "workers": 1}


# --- the whole test set -----------------------------------------------------------------------------------------------
@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(2, 5), st.integers(1, 6))
def test_the_whole_test_set_by_loops(seed, classes, clients):
    """Clients see all samples of the classes they hold; one model is right as often as a loop over all samples counts."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, 40)
    predicted = rng.integers(0, classes, 40)
    held = [rng.permutation(classes)[: rng.integers(1, classes + 1)] for _ in range(clients)]
    parts = [np.isin(y, own) for own in held]
    scores = [Scores(Confusion.of(y[part], predicted[part]), None) for part in parts if part.any()]
    found = whole_set(scores, torch.from_numpy(y), ("head",)) if scores else {}
    everything = set(y.tolist()) <= {int(c) for own in held for c in own}
    right = sum(int(a == b) for a, b in zip(y, predicted, strict=True)) / len(y)
    assert found == ({"whole_head": right} if everything else {})


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_two_models_have_no_accuracy_on_the_whole_test_set(seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, 30)
    one, other = rng.integers(0, 3, 30), rng.integers(0, 3, 30)
    differ = Confusion.of(y, one) != Confusion.of(y, other)
    scores = [Scores(Confusion.of(y, p), None) for p in (one, other)]
    assert bool(whole_set(scores, torch.from_numpy(y), ("head",))) is not differ


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_own_classes_and_the_whole_test_set_in_one_run(method):
    """Scored on its own classes, a shared model has the accuracy that `scope=all` gives; models of their own have none."""
    own = pf.run(method, **FEW, **LOOP).summary["last_five"]
    whole = pf.run(method, **FEW, **LOOP, scope="all", candidates="all").summary["last_five"]
    assert own["silhouette"] != own["pooled_silhouette"]
    if method == "fedproto":
        assert "whole_head" not in own and "whole_head" not in whole
        return
    assert own["whole_head"] == pytest.approx(whole["accuracy_head"], abs=1e-12) == whole["whole_head"]
    assert own["accuracy_head"] != pytest.approx(own["whole_head"], abs=1e-3)
    assert "whole_prototype" not in own, "each client seeks among its own classes"


# --- the silhouette of all clients together -----------------------------------------------------------------------------
@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_the_pooled_silhouette_is_that_of_scikit_learn(seed, clients):
    rng = np.random.default_rng(seed)
    parts = [(rng.normal(size=(12, 3)).astype(np.float32), rng.permutation(12) % 3) for _ in range(clients)]
    pools = [Drawn(z, y) for z, y in parts]
    z, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    assert pooled_silhouette(pools) == {"pooled_silhouette": pytest.approx(silhouette_score(z, y), abs=1e-6)}
    assert pooled_silhouette([]) == {} and pooled_silhouette([Drawn(z * np.nan, y)]) == {}


def test_clients_with_one_space_each_are_told_from_clients_with_one_space_for_all():
    """Two clients whose classes stand apart, but each has swapped the places of the other's: only the pooled one sees it."""
    z, y = np.repeat([[0.0], [9.0]], 20, axis=0) + np.random.default_rng(0).normal(size=(40, 1)), np.repeat([0, 1], 20)
    apart = [Drawn(v, y) for v in (z, 9 - z)]
    assert min(silhouette_score(v, y) for v in (z, 9 - z)) > 0.7
    assert pooled_silhouette(apart)["pooled_silhouette"] < 0.1


def test_clients_with_one_test_set_give_each_sample_once():
    z = torch.arange(50.0)[:, None]
    given = [_drawn(z, z[:, 0].long(), client, 4) for client in range(4)]
    assert sorted(np.concatenate([d.y for d in given]).tolist()) == list(range(50))
    scores = Scores(Confusion.of([0, 1], [0, 0]), None, drawn=given[1])
    back = scores_of(decode(encode(bundle_of(scores))), "a site").drawn
    assert back is not None and np.array_equal(back.z, given[1].z)


# --- said under the table -------------------------------------------------------------------------------------------------
def run_of(seed, **protocol):
    ways = {"bytes_up": {}, "bytes_down": {}}
    return {
        "seed": seed,
        "rounds": 1,
        "seconds": 1.0,
        **ways,
        "last_five": {"accuracy_head": 0.5},
        "protocol": protocol,
    }


def test_every_table_says_its_protocol():
    own, whole = protocol_of({}), protocol_of({"scope": "all", "candidates": "all"})
    local = protocol_of({"test": "local"})
    rows = [Row("a", "fedavg", {}, [run_of(1, **own)]), Row("b", "fedavg", {}, [run_of(1, **own)])]
    assert [line for line in notes(rows) if "scope=own" in line and "candidates=own" in line] == protocol_notes(rows)
    assert len(protocol_notes(rows)) == 1
    rows += [Row("c", "fedavg", {}, [run_of(1, **whole)]), Row("d", "fedavg", {}, [run_of(1, **local)])]
    lines = protocol_notes(rows)
    assert [line.split(":")[0] for line in lines] == ["protocol of a, b", "protocol of c", "protocol of d"]
    assert "scope=all" in lines[1] and "candidates=all" in lines[1] and "test=local" in lines[2]
    assert protocol_notes([Row("old", "fedavg", {}, [{**run_of(1), "protocol": None}])]) == []


def test_a_folder_of_before_says_it_from_its_settings(tmp_path):
    results = pf.compare(
        ["fedavg"], out=tmp_path / "c", seeds=1, jobs=1, **{k: v for k, v in FEW.items() if k != "seed"}, **LOOP
    )
    assert all(result.summary["protocol"] == protocol_of({}) for runs in results.results.values() for result in runs)
    for rows in (read_rows(tmp_path / "c")[0], [v.row() for v in read_folder(tmp_path / "c").variants]):
        assert protocol_notes(rows) == protocol_notes(results.rows()) != []
    old = {k: v for k, v in results.rows()[0].runs[0].items() if k != "protocol"}
    assert with_protocol(old, {"candidates": "all"})["protocol"]["candidates"] == "all"
    assert with_protocol(results.rows()[0].runs[0], {"candidates": "all"})["protocol"]["candidates"] == "own"
    assert with_protocol(old, {})["protocol"] is None, "nothing is known"


OLD = (FIRST_VERSION, RESULTS / "fedapa-few-laptop/lr-0.01", RESULTS / "first/alike")


@pytest.mark.parametrize("folder", OLD, ids=lambda folder: folder.name)
def test_a_stored_table_of_a_version_without_the_line_says_its_settings(folder):
    """Their summaries have no protocol, and the first one's settings no `scope` and no `candidates`."""
    assert all("protocol" not in summary for summary in read_summaries(folder).values())
    settings = next(iter(ComparisonFolder(folder).read().settings.values()))
    scored = "test=local" if settings["test"] == "local" else "scope=own"
    [line] = protocol_notes(read_rows(folder)[0])
    assert scored in line and f"candidates={settings.get('candidates', 'own')}" in line
    assert line in (folder / "table.md").read_text(encoding="utf-8").splitlines()


def test_the_columns():
    assert parse_column("last_whole_head").title == "whole test set head, last round"
    assert (parse_column("pooled_silhouette").scale, parse_column("silhouette").scale) == (1, 1)
    assert parse_column("pooled_map").scale == 100
