"""The judge: scores a client's predictions from what the client holds and was sent, and from nothing else.

An engine gives it each client's model as a `Visit`: outputs over a set of samples, the client's own prototypes, and the
message it was sent. How to predict is the method's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from ..bank import PrototypeBank
from ..data.types import FederatedData, Samples
from ..evaluate import Scores, Snapshot, score_client, silhouette, vote
from ..models.base import Output
from ..parts import Predict
from ..wire import Bundle

SHAPE_SAMPLES = 300  # of a client's test samples, for silhouette and snapshots
SNAPSHOT_CLIENTS = 6
SampleSet = Literal["labelled", "test", "validation", "central"]


@dataclass(frozen=True)
class Evaluation:
    """How clients are evaluated."""

    part: Literal["test", "validation"] = "test"
    candidates: Literal["own", "all"] = "own"
    """The nearest prototype is chosen among the classes of the client's training data, or among all known ones."""
    votes: bool = False
    """Also give each client's class probabilities on the central test set."""
    silhouette: int = 0
    """Of how many clients the silhouette of the embedding space is measured too."""
    snapshot: bool = False
    """Also give some clients' embeddings, with the prototypes they are compared with."""


class Visit(Protocol):
    """A client as the judge meets it."""

    client: int
    received: Bundle

    def outputs(self, samples: SampleSet) -> Output:
        """Embeddings and logits of one of its sets of samples, by the model it would use."""
        ...

    def own_bank(self) -> PrototypeBank:
        """Class means of its labelled samples under that model."""
        ...


def samples_of(data: FederatedData, client: int, which: SampleSet) -> Samples:
    """One of a client's sets of samples; the central test set is the same for all."""
    own = data.clients[client]
    samples = {"labelled": own.labelled, "test": own.test, "validation": own.validation, "central": data.central_test}
    found = samples[which]
    assert found is not None
    return found


def score(visit: Visit, predict: Predict, data: FederatedData, how: Evaluation) -> Scores:
    """One client's scores on its own test or validation samples."""
    client, classes = visit.client, data.clients[visit.client].classes
    bank = predict.bank(visit.received, visit.own_bank, classes)
    candidates = bank.restricted(classes) if how.candidates == "own" else bank
    output, y = visit.outputs(how.part), samples_of(data, client, how.part).labels
    scores = score_client(output.embedding, output.logits, y, candidates, predict.scores)
    if how.votes and data.central_test is not None:
        central = visit.outputs("central")
        scores = replace(scores, votes=vote(central.embedding, central.logits, bank, predict.scores))
    pictured = how.snapshot and client < SNAPSHOT_CLIENTS
    if client >= how.silhouette and not pictured:
        return scores
    # evenly spread over the test set, which may be sorted by class
    rows = torch.linspace(0, len(y) - 1, min(len(y), SHAPE_SAMPLES), device=y.device).round().long()
    z, y = output.embedding[rows], y[rows]
    return replace(
        scores,
        silhouette=silhouette(z, y) if client < how.silhouette else None,
        snapshot=Snapshot.of(z, y, bank) if pictured else None,
    )
