"""Membership: whether an attacker who has a sample can tell that the client trained on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .message import ClientMessage, Encoder, Sent
from .samples import Labelled, candidates
from .statistics import Estimate, auc_estimate, true_positives

MOST_MEMBERS = 500
REFERENCE = 200  # samples of a class behind a prototype of other people's samples
SCORES = {
    "distance": "distance to the prototype sent",
    "angle": "angle to the prototype sent",
    "loss": "loss of the model",
    "elsewhere": "angle to a prototype of other people's samples",
}
"""The scores of a candidate, and what each is."""


@dataclass(frozen=True)
class Scores:
    """The scores of members and of as many non-members, the higher the likelier a member."""

    members: np.ndarray
    others: np.ndarray


@dataclass(frozen=True)
class Membership:
    """How well one score tells members from non-members, and whether it needs the message."""

    auc: Estimate
    true_positives: float | None
    from_message: bool


def candidate_scores(
    message: ClientMessage, sent: Sent, others: Labelled, has_head: bool, rng: np.random.Generator
) -> dict[str, Scores]:
    """Score candidates with what a message holds, and with the client's model.

    A distance or an angle is divided by the median over all candidates of its class, which needs no knowledge of who
    is a member, so that classes can be compared.

    Args:
        message: The client's message, with the samples it trains on and its test samples.
        sent: The message as it leaves, or as the method returns it.
        others: Training samples of other clients.
        has_head: Whether the model has a head that is trained.
        rng: The random stream of the draws.

    Returns:
        The scores by name; empty where no class has both members and non-members.
    """
    bank, encoder = sent.content.bank, message.encoder(sent)
    held = message.data.classes.clone()
    held[message.members.labels] = True
    classes = held if bank is None else held & bank.known.to(held.device)
    members, non_members = candidates(message, classes, MOST_MEMBERS, rng)
    if len(members[1]) == 0:
        return {}
    y = torch.cat([members[1], non_members[1]])
    z, logits = encoder.outputs(torch.cat([members[0], non_members[0]]))
    values: dict[str, Tensor] = {}
    if bank is not None:
        prototypes = bank.means[y]
        values["distance"] = _calibrated((z - prototypes).norm(dim=1), y)
        values["angle"] = _calibrated(1 - F.cosine_similarity(z, prototypes), y)
    if has_head:
        values["loss"] = F.cross_entropy(logits, y, reduction="none")
    reference, found = _class_means(encoder, others, y)
    if bool(found.any()):
        values["elsewhere"] = _calibrated(1 - F.cosine_similarity(z[found], reference[found]), y[found])
    return {name: Scores(*(-value.double()).cpu().numpy().reshape(2, -1)) for name, value in values.items()}


def membership(
    clients: Sequence[Mapping[str, Scores]], weights_sent: bool, rng: np.random.Generator
) -> dict[str, Membership]:
    """Pool the scores of some clients, and say how well each tells members from non-members.

    Args:
        clients: The scores of each client by name.
        weights_sent: Whether the message holds the model's weights, so that every score follows from it.
        rng: The random stream of the bootstrap.

    Returns:
        The measures by the name of the score, each over the clients that have it.
    """
    result = {}
    for name in SCORES:
        found = [scores[name] for scores in clients if name in scores]
        if not found:
            continue
        members, others = np.concatenate([s.members for s in found]), np.concatenate([s.others for s in found])
        from_message = weights_sent or name in ("distance", "angle")
        measured = auc_estimate(members, others, rng)
        result[name] = Membership(measured, true_positives(members, others), from_message)
    return result


def strongest(measures: Mapping[str, Membership], from_message: bool = True) -> str | None:
    """The score that tells members best, of those that need the message or of the others; None where there is none."""
    names = [name for name, measure in measures.items() if measure.from_message == from_message]
    return max(names, key=lambda name: measures[name].auc.value, default=None)


def _calibrated(value: Tensor, y: Tensor) -> Tensor:
    """Values divided by the median of their class."""
    medians = torch.ones(int(y.max()) + 1, dtype=value.dtype)
    for label in y.unique():
        medians[label] = value[y == label].median().clamp_min(1e-12)
    return value / medians[y]


def _class_means(encoder: Encoder, others: Labelled, y: Tensor) -> tuple[Tensor, Tensor]:
    """For each label the mean embedding of other people's samples of that class, and whether there are any."""
    x, labels = others
    means = torch.zeros(int(y.max()) + 1, encoder.skeleton.dim)
    found = torch.zeros(len(means), dtype=torch.bool)
    for label in y.unique():
        rows = (labels == label).nonzero().flatten()[:REFERENCE]
        if len(rows):
            means[label], found[label] = encoder.outputs(x[rows]).embedding.mean(0), True
    return means[y], found[y]
