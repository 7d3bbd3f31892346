"""Measures of predicted probabilities, beside scikit-learn's and plain loops; and how they are recorded."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

import protofed as pf
from protofed.evaluate import Confusion, Scores, summarise
from protofed.evaluate.probabilities import auroc, calibration_error, log_odds, probabilities
from protofed.federation.site import bundle_of, scores_of
from protofed.results.tables import parse_column
from protofed.wire import Bundle, WireError, decode, encode
from support.errors import refusal
from support.small import SMALL, blobs


@st.composite
def predictions(draw):
    """Scores of which many are equal, some classes cannot be predicted, and some samples are as sure as can be."""
    n, classes = draw(st.integers(2, 40)), draw(st.integers(2, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scores = np.round(
        rng.normal(scale=draw(st.sampled_from([0.5, 3.0, 60.0])), size=(n, classes)), draw(st.integers(0, 3))
    )
    if draw(st.booleans()):
        scores[:, 0] = -np.inf
    return torch.tensor(scores, dtype=torch.float32), rng.integers(0, classes, n)


@given(predictions())
def test_auroc_is_that_of_scikit_learn(drawn):
    scores, y = drawn
    odds = log_odds(scores).astype(np.float32)
    present = np.unique(y)
    if len(present) < 2:
        assert auroc(odds, y) is None
        return
    ordered = np.clip(odds, -1e30, 1e30)  # scikit-learn wants them finite
    areas = [roc_auc_score(y == c, ordered[:, c]) for c in present]
    assert auroc(odds, y) == pytest.approx(np.mean(areas), abs=1e-12)
    if odds.shape[1] == 2:
        assert auroc(odds, y) == pytest.approx(roc_auc_score(y, ordered[:, 1]), abs=1e-12)


@pytest.mark.parametrize("classes", [2, 5])
def test_auroc_of_probabilities_is_that_of_scikit_learn(classes):
    rng = np.random.default_rng(1)
    scores, y = torch.tensor(rng.normal(size=(300, classes))), rng.integers(0, classes, 300)
    p = probabilities(scores)
    theirs = roc_auc_score(y, p[:, 1]) if classes == 2 else roc_auc_score(y, p, multi_class="ovr", average="macro")
    assert auroc(log_odds(scores), y) == pytest.approx(theirs, abs=1e-6)


@given(predictions())
def test_log_odds_are_those_of_the_probabilities(drawn):
    scores, _ = drawn
    p, odds = probabilities(scores), log_odds(scores)
    inside = (p > 1e-9) & (p < 1 - 1e-9)
    np.testing.assert_allclose(odds[inside], np.log(p[inside]) - np.log1p(-p[inside]), atol=1e-6)
    assert not np.isnan(odds).any()


@given(predictions())
def test_calibration_error_is_that_of_a_loop(drawn):
    scores, y = drawn
    p = probabilities(scores)
    bins = [[] for _ in range(15)]
    for row, label in zip(p, y, strict=True):
        sure = max(row)
        k = next(k for k in range(15) if sure * 15 <= k + 1 or k == 14)
        bins[k].append((sure, float(int(np.argmax(row)) == label)))
    loop = sum(abs(sum(right for _, right in b) - sum(sure for sure, _ in b)) for b in bins if b) / len(y)
    assert calibration_error(p, y) == pytest.approx(loop, abs=1e-12)


@given(predictions())
def test_balanced_accuracy_is_that_of_scikit_learn(drawn):
    scores, y = drawn
    predicted = probabilities(scores).argmax(1)
    assert Confusion.of(y, predicted).balanced_accuracy() == pytest.approx(balanced_accuracy_score(y, predicted))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=35))
def test_worst_client_and_worst_tenth(right):
    scores = [Scores(Confusion.of([0] * 20, [0] * k + [1] * (20 - k)), None) for k in right]
    found = summarise(scores, predictions=("head",))
    accuracies = sorted(k / 20 for k in right)
    tenth = accuracies[: math.ceil(len(right) / 10)]
    assert found["worst_head"] == accuracies[0]
    assert found["decile_head"] == pytest.approx(sum(tenth) / len(tenth))


def test_they_are_recorded_in_the_last_five_rounds(tmp_path):
    result = pf.run(
        "fedproto", out=tmp_path / "run", **{**SMALL, "data": blobs(), "rounds": 7, "validation_share": 0.3}
    )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    clients = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    for kind in ("head", "prototype"):
        for measure in ("balanced", "auroc", "ece"):
            key = f"{measure}_{kind}"
            assert [key in row for row in rows] == [False] * 2 + [True] * 5
            assert rows[-1][key] == pytest.approx(np.mean(clients[-1][key]))
            assert result.summary["last_five"][key] == pytest.approx(np.mean([row[key] for row in rows[2:]]))
            per_client = np.mean([row[key] for row in clients[2:]], axis=0)
            assert result.summary["per_client"][key] == pytest.approx(per_client, abs=1e-6)
        worst = [min(row[f"accuracy_{kind}"]) for row in clients]
        assert [row[f"worst_{kind}"] for row in rows] == worst
        assert result.summary["last_five"][f"worst_{kind}"] == pytest.approx(np.mean(worst[2:]))
    assert set(result.summary["best_on_validation"]) >= {"round", "accuracy_head", "validation_head"}


def test_a_client_whose_test_samples_are_of_one_class_has_no_auroc(tmp_path):
    keys = {**SMALL, "data": blobs(), "rounds": 1, "way": 1, "spread": 1.0}
    result = pf.run("fedproto", out=tmp_path / "run", **keys)
    per_client = result.summary["per_client"]
    assert None in per_client["auroc_head"] and None not in per_client["balanced_head"]


@pytest.mark.parametrize(
    "engine", [{"engine": "stack"}, {"engine": "workers", "inner": "stack", "workers": 2}], ids=["stack", "workers"]
)
def test_engines_measure_the_same(engine):
    loop, other = (pf.run("fedproto", **{**SMALL, "data": blobs(), **how}) for how in ({}, engine))
    for key, value in loop.summary["last_five"].items():
        assert other.summary["last_five"][key] == pytest.approx(value, abs=1e-3), key


def test_they_travel_with_a_sites_scores_and_are_checked():
    confusion = Confusion.of([0, 1], [0, 1])
    scores = Scores(confusion, confusion, measures={"auroc_head": 0.75, "ece_prototype": 0.1})
    sent = decode(encode(bundle_of(scores)), "a site")
    assert scores_of(sent, "a site").measures == scores.measures
    for wrong in ({"auroc_head": 2.0}, {"auroc_head": float("nan")}, {"anything": 0.5}):
        with pytest.raises(WireError, match="a site: not an evaluation"):
            scores_of(Bundle(tensors=sent.tensors, scalars=wrong), "a site")


def test_columns():
    better = {name: parse_column(name).better for name in ("auroc_head", "ece_head", "worst_prototype", "decile_head")}
    assert better == {"auroc_head": "higher", "ece_head": "lower", "worst_prototype": "higher", "decile_head": "higher"}
    assert parse_column("last_balanced_head").title == "balanced head, last round"
    assert "auroc_head" in refusal(lambda: parse_column("auroc"))
