"""What pseudo-labels were worth: counts, shares and AUROC against plain loops and scikit-learn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from protofed.evaluate.pseudo import auroc, pooled, tally


@given(
    inside=st.lists(st.integers(-4, 4), min_size=1, max_size=30),
    outside=st.lists(st.integers(-4, 4), min_size=1, max_size=30),
)
@settings(max_examples=100, deadline=None)
@pytest.mark.slow
def test_auroc_equals_scikit_learn_with_ties(inside, outside):
    expected = roc_auc_score([1] * len(inside) + [0] * len(outside), inside + outside)
    assert auroc(torch.tensor(inside).float(), torch.tensor(outside).float()) == pytest.approx(expected)


def test_auroc_with_an_infinite_score():
    """A bank of one class gives an endless margin."""
    assert auroc(torch.tensor([float("inf"), 0.0]), torch.tensor([1.0, float("-inf")])) == pytest.approx(0.75)


@st.composite
def rounds(draw):
    n = draw(st.integers(1, 25))
    column = lambda low, high: draw(st.lists(st.integers(low, high), min_size=n, max_size=n))  # noqa: E731
    classes = draw(st.lists(st.booleans(), min_size=4, max_size=4))
    return column(0, 3), column(0, 1), column(-3, 3), column(-1, 3), classes


def naive_tally(label, accepted, score, truth, classes):
    counts = dict.fromkeys(("seen", "accepted", "judged", "correct", "foreign", "foreign_accepted"), 0.0)
    known, foreign = [], []
    for guess, used, sure, true in zip(label, accepted, score, truth, strict=True):
        counts["seen"] += 1
        counts["accepted"] += used
        if true < 0:
            continue
        counts["judged"] += used
        counts["correct"] += used and guess == true
        (known if classes[true] else foreign).append(sure)
        if not classes[true]:
            counts["foreign"] += 1
            counts["foreign_accepted"] += used
    if known and foreign:
        counts["auroc"] = roc_auc_score([1] * len(known) + [0] * len(foreign), known + foreign)
    return counts


@given(rounds())
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_tally_equals_a_loop(given):
    label, accepted, score, truth, classes = given
    made = tally(
        torch.tensor(label),
        torch.tensor(accepted).float(),
        torch.tensor(score).float(),
        torch.tensor(truth),
        torch.tensor(classes),
    )
    assert made == pytest.approx(naive_tally(*given))


@given(st.lists(rounds(), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_pooled_is_over_all_samples_together(clients):
    tallies = [naive_tally(*client) for client in clients]
    made = pooled([{}, *tallies])  # a client without unlabelled samples has none
    total = {k: sum(t[k] for t in tallies) for k in tallies[0] if k != "auroc"}
    expected = {"acceptance": total["accepted"] / total["seen"]}
    if total["judged"]:
        expected["pseudo_accuracy"] = total["correct"] / total["judged"]
    if total["foreign"]:
        expected["acceptance_unknown"] = total["foreign_accepted"] / total["foreign"]
        if total["seen"] > total["foreign"]:
            own = total["accepted"] - total["foreign_accepted"]
            expected["acceptance_known"] = own / (total["seen"] - total["foreign"])
    ranked = [t["auroc"] for t in tallies if "auroc" in t]
    if ranked:
        expected["rejection_auroc"] = sum(ranked) / len(ranked)
    assert made == pytest.approx(expected)


def test_nobody_and_nothing():
    assert pooled([]) == pooled([{}, {}]) == {}
    nothing = torch.zeros(0)
    empty = tally(nothing.long(), nothing, nothing, nothing.long(), torch.ones(3, dtype=torch.bool))
    assert empty["seen"] == 0 and "auroc" not in empty and pooled([empty]) == {}
    one = tally(torch.tensor([1]), torch.zeros(1), torch.zeros(1), torch.tensor([1]), torch.ones(3, dtype=torch.bool))
    assert pooled([one]) == {"acceptance": 0.0}


def test_labels_that_nobody_knows_count_as_seen_alone():
    """STL-10's unlabelled pictures: whether they are right or foreign cannot be told."""
    made = tally(
        torch.tensor([0, 1, 2]), torch.ones(3), torch.arange(3.0), torch.tensor([-1, -1, 2]), torch.tensor([True] * 3)
    )
    assert made == {"seen": 3, "accepted": 3, "judged": 1, "correct": 1, "foreign": 0, "foreign_accepted": 0}
    assert pooled([made]) == {"acceptance": 1.0, "pseudo_accuracy": 1.0}
