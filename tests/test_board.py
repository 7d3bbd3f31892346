"""Scores in columns: those of one client after another, to the last bit; an evaluation that computes nothing twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from protofed.data import Dataset
from protofed.evaluate import Board, Confusion, Confusions, Scores, silhouette, summarise
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation import judge


def drawn(rng: np.random.Generator, classes: int, sizes: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(rng.integers(0, classes, n), rng.integers(0, classes, n)) for n in sizes]


@pytest.mark.parametrize(("classes", "sizes"), [(3, [5, 1, 40]), (10, [200, 3, 17, 90]), (400, [6, 2]), (1, [4, 2])])
def test_columns_are_the_clients_own_confusions(classes: int, sizes: list[int]) -> None:
    pairs = drawn(np.random.default_rng(classes), classes, sizes)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    y, predicted = (np.concatenate([pair[k] for pair in pairs]) for k in range(2))
    columns = Confusions.of(owner, y, predicted, len(sizes))
    alone = [Confusion.of(*pair) for pair in pairs]
    listed = Confusions.listed([alone[0], *alone, None, alone[0]])
    split = Confusions.joined([columns.taken(np.array([1, 0])), columns.taken(np.arange(1, len(sizes)))])
    for found, expected in (
        (columns, alone),
        (listed, [alone[0], *alone, None, alone[0]]),
        (split, [*alone[:2][::-1], *alone[1:]]),
    ):
        assert [found[k] for k in range(len(found))] == expected
        assert found.correct.tolist() == [0 if c is None else c.correct for c in expected]
        assert found.samples.tolist() == [0 if c is None else c.samples for c in expected]
        assert found.macro_f1().tolist() == [0.0 if c is None else c.macro_f1() for c in expected]
    hidden = columns.where(np.arange(len(sizes)) > 0)
    assert hidden[0] is None and hidden.present.tolist() == [False] + [True] * (len(sizes) - 1)


def test_means_over_clients_are_those_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    values = [0.0, 2.0, 5.0, 9.0]
    scores = {}
    for client, n in enumerate([30, 7, 12, 9, 41, 3, 8, 20, 11, 6, 15]):
        (head, prototype) = (Confusion.of(*pair) for pair in drawn(rng, 4, [n, n]))
        scores[client] = Scores(head, prototype, silhouette=0.1 * client if client < 3 else None)
    board = Board.joined(
        [Board.of({c: scores[c] for c in part}) for part in ((4, 2, 0), (10, 1, 3, 9), (5, 6, 7, 8))], range(11)
    )
    assert dict(board) == scores and list(board) == list(scores)
    found = summarise(board, values, ["a", "b"] * 5 + ["a"], "prototype")
    assert found == summarise(list(scores.values()), values, ["a", "b"] * 5 + ["a"], "prototype")
    for name in ("head", "prototype"):
        confusions = [getattr(s, f"by_{name}") for s in scores.values()]
        accuracies = [c.correct / c.samples for c in confusions]
        assert found[f"accuracy_{name}"] == float(np.mean(accuracies))
        assert found[f"f1_{name}"] == float(np.mean([c.macro_f1() for c in confusions]))
        assert found[f"mae_{name}"] == float(np.mean([c.mean_absolute_error(values) for c in confusions]))
        assert found[f"decile_{name}"] == float(np.mean(sorted(accuracies)[:2]))
        assert found[f"accuracy_{name}@b"] == float(np.mean(accuracies[1::2]))
        assert found[f"weighted_{name}"] == sum(c.correct for c in confusions) / sum(c.samples for c in confusions)
    assert found["silhouette"] == pytest.approx(0.1) and found["accuracy"] == found["accuracy_prototype"]
    assert board.column("accuracy_head") == [s.accuracy_head for s in scores.values()]


def federation(method: str, **settings: object):
    generator = torch.Generator().manual_seed(3)
    y, y_test = torch.arange(60) % 3, torch.arange(700) % 3
    x, x_test = (torch.randn(len(labels), 6, generator=generator) + labels[:, None] for labels in (y, y_test))
    data = Dataset.from_arrays(x, y, x_test, y_test, num_classes=3, group_train=torch.arange(60) // 10)
    common = {"data": data, "partition": "natural", "clients": 6, "rounds": 7, "batch": 5, "model": "mlp", "seed": 1}
    return build(resolve(method, {**common, **settings}))[1]


@pytest.mark.parametrize(("method", "every_round"), [("fedavg", False), ("fedproto", True), ("fedproc", True)])
def test_prototypes_that_nobody_sends_are_scored_after_the_last_rounds(method: str, every_round: bool) -> None:
    measured = [record.round for record in federation(method) if "accuracy_prototype" in record.metrics]
    assert measured == ([1, 2, 3, 4, 5, 6, 7] if every_round else [3, 4, 5, 6, 7])


@pytest.mark.parametrize(
    ("method", "score", "rounds"), [("fedavg", "never", 0), ("fedavg", "always", 7), ("fedproto", "never", 7)]
)
def test_prototypes_that_nobody_sends_are_scored_as_asked(method: str, score: str, rounds: int) -> None:
    records = list(federation(method, score_prototypes=score))
    assert sum("accuracy_prototype" in record.metrics for record in records) == rounds
    assert all("accuracy_head" in record.metrics for record in records)


@pytest.mark.parametrize("method", ["fedavg", "fedproto", "fedproc"])
def test_workers_score_what_one_process_scores(method: str) -> None:
    """The central test set has two pieces, which workers share; some clients have never taken part."""
    runs = []
    for engine in ({"engine": "loop"}, {"engine": "workers", "inner": "loop", "workers": 2}):
        trained = federation(method, participation=0.5, **engine)
        records = list(trained)
        trained.engine.close()
        runs.append([(r.metrics, r.scores) for r in records])
    assert runs[0] == runs[1]


def test_a_stack_scores_each_client_as_alone() -> None:
    """Clients with few tests are stacked, and those with many are not."""
    runs = []
    for engine in ("loop", "stack"):
        records = list(federation("fedproto", engine=engine, participation=0.5, test="local", test_share=0.3))
        runs.append([[(s.by_head, s.by_prototype) for s in r.scores or ()] for r in records])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_clients_that_share_model_and_tests_share_their_silhouette(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of six clients have a model of their own in the first round; those of FedAvg never do."""
    counted = []
    monkeypatch.setattr(judge, "silhouette", lambda z, y: counted.append(len(y)) or silhouette(z, y))
    record = federation(method, participation=0.34, engine="loop").step()
    assert len(counted) == (1 if method == "fedavg" else 3)
    found = [score.silhouette for score in record.scores or ()]
    assert len(found) == 6 and None not in found and len(set(found)) == len(counted)


def test_workers_have_all_their_jobs_before_their_parent_scores_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that is busy hands out no jobs."""
    trained, numbers = federation("fedproto", engine="workers", inner="loop", workers=2, participation=0.67), []
    replies = trained.engine._replies
    monkeypatch.setattr(
        trained.engine, "_replies", lambda jobs, *rest: numbers.append(len(jobs)) or replies(jobs, *rest)
    )
    trained.step()
    trained.engine.close()
    assert numbers == [2]


def test_a_board_of_one_part_is_that_part_in_the_order_of_the_clients() -> None:
    scores = {c: Scores(Confusion.of([0, 1], [0, c]), None, silhouette=float(c)) for c in (7, 3)}
    board = Board.of(scores)
    assert Board.joined([board], [7, 3]) is board
    turned = Board.joined([board], [3, 7])
    assert list(turned) == [3, 7] == list(turned.details) and dict(turned) == scores
