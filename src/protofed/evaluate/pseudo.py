"""What pseudo-labels were worth: how many were used, how many were right, and whether foreign samples were kept out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def tally(label: Tensor, accepted: Tensor, score: Tensor, truth: Tensor, classes: Tensor) -> dict[str, float]:
    """Counts over one client's round. `truth` is −1 where nobody knows it; a class not in `classes [C]` is foreign."""
    used, told = accepted > 0, truth >= 0
    foreign = told & ~classes[truth.clamp_min(0)]
    counts = {
        "seen": len(truth),
        "accepted": int(used.sum()),
        "judged": int((used & told).sum()),
        "correct": int((used & told & (label == truth)).sum()),
        "foreign": int(foreign.sum()),
        "foreign_accepted": int((foreign & used).sum()),
    }
    result = {name: float(value) for name, value in counts.items()}
    if 0 < counts["foreign"] < int(told.sum()):
        result["auroc"] = auroc(score[told & ~foreign], score[foreign])
    return result


def pooled(tallies: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The round's measures: shares over all clients' samples; AUROC is the mean over the clients that have one.

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
        own = total["seen"] - total["foreign"]
        if own:
            result["acceptance_known"] = (total["accepted"] - total["foreign_accepted"]) / own
    ranked = [t["auroc"] for t in tallies if "auroc" in t]
    if ranked:
        result["rejection_auroc"] = sum(ranked) / len(ranked)
    return result


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The chance that a sample from inside scores above one from outside; a tie counts half."""
    ordered = outside.double().sort().values
    below = torch.searchsorted(ordered, inside.double(), right=False)
    up_to = torch.searchsorted(ordered, inside.double(), right=True)
    return float((below + up_to).double().mean() / (2 * len(outside)))
