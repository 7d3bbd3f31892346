"""Retrieval and few-shot accuracy of an embedding, beside plain loops; and how they are recorded."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

import protofed as pf
from protofed import seeds
from protofed.evaluate import Confusion, Scores, few_shot, retrieval
from protofed.evaluate.embedding import EMBEDDING, POOLED, Pool, embedding_measures, pooled_measures
from protofed.federation.site import bundle_of, scores_of
from protofed.results.tables import parse_column
from protofed.wire import decode, encode
from support.errors import refusal
from support.small import SMALL, blobs


def drawn(n, classes, seed, d=3):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    return torch.randn(n, d, generator=g) + y[:, None], y


def by_loops(z, y, gallery=None, ks=(1, 5)):
    """For each query: sort, walk down the list, note the precision at every hit."""
    precisions, hits = [], {k: [] for k in ks}
    for i in range(len(z)):
        others = [(g, c) for g, c in zip(*gallery, strict=True)] if gallery else []
        others = others or [(z[j], y[j]) for j in range(len(z)) if j != i]
        near = sorted(others, key=lambda o: float(1 - torch.cosine_similarity(z[i], o[0], dim=0)))
        right = [bool(c == y[i]) for _, c in near]
        if not any(right):
            continue
        found = [sum(right[: k + 1]) / (k + 1) for k in range(len(right)) if right[k]]
        precisions.append(sum(found) / len(found))
        for k in ks:
            hits[k].append(any(right[:k]))
    if not precisions:
        return {}
    return {"map": np.mean(precisions), **{f"recall{k}": np.mean(hits[k]) for k in ks}}


@settings(max_examples=25)
@given(st.integers(1, 25), st.integers(1, 25), st.integers(1, 5), st.integers(0, 2**32), st.booleans())
def test_retrieval_is_that_of_loops(n, m, classes, seed, leave_one_out):
    z, y = drawn(n, classes, seed)
    gallery = None if leave_one_out else drawn(m, classes, seed + 1)
    assert retrieval(z, y, gallery) == pytest.approx(by_loops(z, y, gallery), abs=1e-9)


def test_retrieval_in_pieces_is_that_of_scikit_learn():
    """More queries than are worked on at a time; mAP is the mean of scikit-learn's average precision."""
    z, y = drawn(300, 4, 1)
    gallery, classes = drawn(200, 4, 2)
    distances = torch.cdist(z.double(), gallery.double())
    theirs = [average_precision_score(classes == y[i], -distances[i]) for i in range(len(z))]
    assert retrieval(z, y, (gallery, classes), metric="squared")["map"] == pytest.approx(np.mean(theirs), abs=1e-4)


def test_what_retrieval_refuses():
    z, y = drawn(4, 2, 0)
    assert "metric='other'" in refusal(lambda: retrieval(z, y, metric="other"))
    assert "[n, d]" in refusal(lambda: retrieval(z, y[:3]))
    assert "[n, d]" in refusal(lambda: retrieval(z, y, (z[:, :2], y)))


@settings(max_examples=15)
@given(st.integers(2, 4), st.integers(1, 3), st.integers(0, 2**32))
def test_few_shot_is_that_of_loops(way, shot, seed):
    z, y = drawn(60, 5, seed)
    found = few_shot(z, y, way, shot, episodes=7, queries=4, seed=seed)
    stream = seeds.torch_stream(seed, "few-shot", way, shot)
    usable = [c for c in range(5) if int((y == c).sum()) > shot]
    accuracies = []
    for _ in range(7):
        episode = torch.randperm(len(usable), generator=stream)[:way].tolist()
        means, asked = [], []
        for k, c in enumerate(episode):
            rows = torch.nonzero(y == usable[c]).squeeze(1)
            rows = rows[torch.randperm(len(rows), generator=stream)]
            means.append(sum(z[r] for r in rows[:shot]) / shot)
            asked += [(int(r), k) for r in rows[shot : shot + 4]]
        right = [min(range(way), key=lambda j: float(((z[r] - means[j]) ** 2).sum())) == k for r, k in asked]
        accuracies.append(sum(right) / len(right))
    assert found.accuracy == pytest.approx(np.mean(accuracies))
    assert found.interval == pytest.approx(1.96 * np.std(accuracies, ddof=1) / math.sqrt(7), abs=1e-9)


def test_what_few_shot_refuses():
    z, y = drawn(20, 2, 0)
    assert "expected at least way=3" in refusal(lambda: few_shot(z, y, way=3))
    assert "way of at least 2" in refusal(lambda: few_shot(z, y, way=1))
    assert few_shot(z, y, way=2, episodes=1).interval == 0


def test_a_client_with_few_samples_has_what_they_allow():
    z, y = drawn(6, 1, 0)
    assert embedding_measures(z, y, (z[:0], y[:0])).keys() == {"map", "recall1", "recall5"}
    assert embedding_measures(z, y, (z[:0], y[:0])) == pytest.approx({"map": 1.0, "recall1": 1.0, "recall5": 1.0})
    assert pooled_measures([]) == {}


def test_pooled_is_one_search_over_all_training_samples():
    parts = [(*drawn(8, 3, s), *drawn(12, 3, s + 9)) for s in range(3)]
    whole = [torch.cat(column) for column in zip(*parts, strict=True)]
    expected = by_loops(whole[0], whole[1], (whole[2], whole[3]))
    found = pooled_measures([Pool.of(*part) for part in parts])
    assert found == pytest.approx({f"pooled_{k}": v for k, v in expected.items()}, abs=1e-9)


@pytest.mark.parametrize("engine", [{}, {"engine": "stack"}, {"engine": "workers", "inner": "stack", "workers": 2}])
def test_a_run_measures_its_embeddings_at_the_end(engine, tmp_path):
    keys = {**SMALL, "data": blobs(), "embedding_measures": True, **engine}
    result = pf.run("fedproto", out=tmp_path / "run", **keys)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [set(EMBEDDING) <= row.keys() for row in rows] == [False, False, True]
    for name in (*EMBEDDING, *POOLED):
        assert result.summary["last_five"][name] == rows[-1][name] == result.summary["last_round"][name]
        assert parse_column(name).value(result.summary) == pytest.approx(100 * rows[-1][name])
    assert len(result.summary["per_client"]["map"]) == 5
    plain = pf.run("fedproto", **{**keys, "embedding_measures": False}).summary
    same = {k: v for k, v in result.summary["last_five"].items() if k not in (*EMBEDDING, *POOLED)}
    assert plain["last_five"] == same


def test_titles():
    titles = [parse_column(name).title for name in ("map", "recall5", "shot1", "pooled_map", "pooled_recall1")]
    assert titles == ["mAP", "recall@5", "1-shot", "pooled mAP", "pooled recall@1"]


def test_embeddings_and_measures_travel_with_a_sites_scores():
    confusion = Confusion.of([0, 1], [0, 1])
    pool = Pool.of(*drawn(4, 2, 0), *drawn(5, 2, 1))
    sent = scores_of(decode(encode(bundle_of(Scores(confusion, None, measures={"map": 0.5}, pool=pool))), "a"), "a")
    assert np.array_equal(sent.pool.gallery, pool.gallery) and sent.measures == {"map": 0.5}
