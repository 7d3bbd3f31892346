"""Accuracy, F1, mean absolute error and ensembles against scikit-learn and plain loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, mean_absolute_error

from protofed.bank import PrototypeBank
from protofed.evaluate import Confusion, Scores, ensemble, score_client, summarise, vote

pairs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=40)


@given(pairs)
@settings(max_examples=60, deadline=None)
def test_confusion_equals_scikit_learns(drawn):
    y, predicted = (np.array(column) for column in zip(*drawn, strict=True))
    confusion = Confusion.of(torch.from_numpy(y), torch.from_numpy(predicted))
    dense = np.zeros((7, 7), int)
    for true, guess, count in confusion.rows:
        dense[true, guess] = count
    assert (dense == confusion_matrix(y, predicted, labels=range(7))).all()
    assert confusion.correct / confusion.samples == pytest.approx(accuracy_score(y, predicted))
    assert confusion.macro_f1() == pytest.approx(f1_score(y, predicted, average="macro", zero_division=0))
    values = [0, 1, 2, 3, 5, 8, 20]
    wanted = mean_absolute_error(np.array(values)[y], np.array(values)[predicted])
    assert confusion.mean_absolute_error(values) == pytest.approx(wanted)


def scores_of(*clients):
    return [
        Scores(Confusion.of(torch.tensor(y), torch.tensor(h)), Confusion.of(torch.tensor(y), torch.tensor(p)))
        for y, h, p in clients
    ]


def test_means_over_clients_and_over_samples_differ():
    scores = scores_of(([0, 1], [0, 1], [1, 1]), ([0, 0, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1]))
    found = summarise(scores, values=[0.0, 10.0], architectures=["a", "b"])
    assert found["accuracy_head"] == pytest.approx((1 + 1 / 6) / 2)
    assert found["weighted_head"] == pytest.approx(3 / 8)
    assert found["accuracy_head_std"] == pytest.approx((1 - 1 / 6) / 2)
    assert found["mae_head"] == pytest.approx((0 + 10 * 5 / 6) / 2)
    assert found["accuracy_head@a"] == 1 and found["accuracy_prototype@b"] == 1
    assert "mae_head" not in summarise(scores) and not [k for k in summarise(scores) if "@" in k]


def test_an_ensemble_is_the_argmax_of_the_mean_of_probabilities():
    g = torch.Generator().manual_seed(3)
    y = torch.randint(0, 4, (30,), generator=g)
    scores, head, near = [], np.zeros((30, 4)), np.zeros((30, 4))
    for _ in range(5):
        z, logits = torch.randn(30, 3, generator=g), torch.randn(30, 4, generator=g)
        bank = PrototypeBank(torch.randn(4, 3, generator=g), torch.tensor([1.0, 2.0, 0.0, 1.0]))
        scored_by = lambda z, b: -b.distances(z)  # noqa: E731
        one = score_client(z, logits, y, bank, scored_by)
        scores.append(Scores(one.by_head, one.by_prototype, vote(z, logits, bank, scored_by)))
        for i in range(30):
            head[i] += np.exp(logits[i].numpy()) / np.exp(logits[i].numpy()).sum()
            weights = [np.exp(-float(((z[i] - bank.means[c]) ** 2).sum())) * (c != 2) for c in range(4)]
            near[i] += np.array(weights) / sum(weights)
    found = ensemble(scores, y)
    assert found["ensemble_head"] == pytest.approx(float((head.argmax(1) == y.numpy()).mean()))
    assert found["ensemble_prototype"] == pytest.approx(float((near.argmax(1) == y.numpy()).mean()))


def test_a_bank_that_knows_nothing_votes_for_nobody():
    votes = vote(torch.randn(2, 3), torch.randn(2, 4), PrototypeBank.empty(4, 3), lambda z, b: -b.distances(z))
    assert np.allclose(votes[1], 0.25)
