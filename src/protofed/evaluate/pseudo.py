"""The quality of pseudo-labels: how many were accepted, how many were right, and whether foreign samples were rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def tally(label: Tensor, accepted: Tensor, score: Tensor, truth: Tensor, classes: Tensor) -> dict[str, float]:
    """Counts of one client's pseudo-labels in a round.

    Args:
        label: The pseudo-label of each sample.
        accepted: Above 0 where it was used.
        score: How sure the client was.
        truth: The true class, −1 where it is unknown.
        classes: `[C]`, the client's classes; a sample of another class is foreign.

    Returns:
        The counts by name, and the AUROC of the scores where the client had foreign samples and others.
    """
    accepted_mask, truth_known = accepted > 0, truth >= 0
    foreign = truth_known & ~classes[truth.clamp_min(0)]
    counts = {
        "seen": len(truth),
        "accepted": int(accepted_mask.sum()),
        "judged": int((accepted_mask & truth_known).sum()),
        "correct": int((accepted_mask & truth_known & (label == truth)).sum()),
        "foreign": int(foreign.sum()),
        "foreign_accepted": int((foreign & accepted_mask).sum()),
    }
    result = {name: float(value) for name, value in counts.items()}
    if 0 < counts["foreign"] < int(truth_known.sum()):
        result["auroc"] = auroc(score[truth_known & ~foreign], score[foreign])
    return result


def pooled(tallies: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The measures of a round: shares over the samples of all clients, and the mean AUROC of the clients that have one.

    `pseudo_accuracy` is left out where no pseudo-label was used.
    """
    tallies = [t for t in tallies if t]
    total = {name: sum(t[name] for t in tallies) for name in (tallies[0] if tallies else ()) if name != "auroc"}
    if not total or not total["seen"]:
        return {}
    result = {"acceptance": total["accepted"] / total["seen"]}
    if total["judged"]:
        result["pseudo_accuracy"] = total["correct"] / total["judged"]
    if total["foreign"]:
        result["acceptance_unknown"] = total["foreign_accepted"] / total["foreign"]
        of_own_classes = total["seen"] - total["foreign"]
        if of_own_classes:
            result["acceptance_known"] = (total["accepted"] - total["foreign_accepted"]) / of_own_classes
    aurocs = [t["auroc"] for t in tallies if "auroc" in t]
    if aurocs:
        result["rejection_auroc"] = sum(aurocs) / len(aurocs)
    return result


def auroc(positives: Tensor, negatives: Tensor) -> float:
    """The probability that a positive sample has a larger score than a negative one; a tie counts half."""
    ordered = negatives.double().sort().values
    smaller = torch.searchsorted(ordered, positives.double(), right=False)
    smaller_or_equal = torch.searchsorted(ordered, positives.double(), right=True)
    return float((smaller + smaller_or_equal).double().mean() / (2 * len(negatives)))
