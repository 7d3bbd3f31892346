"""The judge: scores a client's predictions from what the client holds and was sent, and from nothing else.

An engine gives it each client's model as a `Visit`: outputs over a set of samples, the client's own prototypes, and the
message it was sent. The method's `predict` makes predictions of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..bank import PrototypeBank
from ..data.types import FederatedData, Samples
from ..evaluate import Drawn, Pool, Scores, Snapshot, embedding_measures, score_client, silhouette, vote
from ..models.base import Output
from ..parts import Predict
from ..wire import Bundle

SHAPE_SAMPLES = 300  # the most test samples of a client for silhouette and snapshots
SNAPSHOT_CLIENTS = 6
QUERIES = 1000  # the most test samples of a client that search its training samples
SampleSet = Literal["labelled", "test", "validation", "triggered", "unseen", "central"]


@dataclass(frozen=True)
class Evaluation:
    """Which samples are evaluated, and what is measured beside accuracy."""

    part: Literal["test", "validation", "triggered", "unseen"] = "test"
    candidates: Literal["own", "all"] = "own"
    """The nearest prototype is chosen among the classes of the client's training data, or among all known ones."""
    votes: bool = False
    """Whether scores include each client's class probabilities on the central test set."""
    silhouette: int = 0
    """The number of clients whose silhouette of the embedding space is measured."""
    snapshot: bool = False
    """Whether the scores of some clients include embeddings and the prototypes they are compared with."""
    qualities: bool = False
    """Whether balanced accuracy, AUROC and calibration error are measured."""
    embedding: bool = False
    """Whether retrieval and few-shot accuracy of the embedding are measured."""
    pool: int = 0
    """The number of clients whose scores include embeddings, for retrieval among all clients together."""
    drawn: int = 0
    """The number of clients that give some embeddings to the silhouette of all clients together."""


class Visit(Protocol):
    """A client as the judge meets it."""

    client: int
    received: Bundle

    def outputs(self, samples: SampleSet) -> Output:
        """Embeddings and logits of one of the client's sets of samples, by the model the client would use."""
        ...

    def own_bank(self) -> PrototypeBank:
        """The class means of the client's labelled samples under that model."""
        ...


def samples_of(data: FederatedData, client: int, name: SampleSet) -> Samples:
    """One of a client's sets of samples. The central test set is the same for all clients, in the scale of each."""
    if name == "central":
        central = data.central_for(client)
        assert central is not None
        return central
    client_data = data.clients[client]
    samples = {
        "labelled": client_data.labelled,
        "test": client_data.test,
        "validation": client_data.validation,
        "triggered": client_data.triggered,
        "unseen": client_data.unseen,
    }
    chosen_samples = samples[name]
    assert chosen_samples is not None
    return chosen_samples


def score(visit: Visit, predict: Predict, data: FederatedData, options: Evaluation) -> Scores:
    """Score one client on its own test or validation samples.

    Args:
        visit: The client with its model.
        predict: The method's rule of prediction.
        data: The data of the federation.
        options: Which samples are scored, and what is measured beside accuracy.

    Returns:
        Confusions by head and by prototype, with votes, silhouette and snapshot where the options ask for them.
    """
    client, classes = visit.client, data.clients[visit.client].classes
    bank = predict.bank(visit.received, visit.own_bank, classes)
    candidates = bank.restricted(classes) if options.candidates == "own" else bank
    output, y = visit.outputs(options.part), samples_of(data, client, options.part).labels
    scores = score_client(output.embedding, output.logits, y, candidates, predict.scores, options.qualities)
    if options.votes and data.central_test is not None:
        central = visit.outputs("central")
        scores = replace(scores, votes=vote(central.embedding, central.logits, bank, predict.scores))
    if options.embedding:
        scores = _with_embedding(scores, visit, data, options)
    if client < options.drawn:
        scores = replace(scores, drawn=_drawn(output.embedding, y, client, min(options.drawn, len(data.clients))))
    pictured = options.snapshot and client < SNAPSHOT_CLIENTS
    if client >= options.silhouette and not pictured:
        return scores
    z, y = _some(output.embedding, y, SHAPE_SAMPLES)
    return replace(
        scores,
        silhouette=silhouette(z, y) if client < options.silhouette else None,
        snapshot=Snapshot.of(z, y, bank) if pictured else None,
    )


def _some(z: Tensor, y: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """At most so many embeddings with their classes, evenly spread over a set that may be sorted by class."""
    rows = torch.linspace(0, len(y) - 1, min(len(y), most), device=y.device).round().long()
    return z[rows], y[rows]


def _drawn(z: Tensor, y: Tensor, client: int, clients: int) -> Drawn:
    """The embeddings that a client gives to the silhouette of all together: one in as many as there are clients, each
    another part, so that clients that share a model and a test set give no sample twice."""
    z, y = _some(z, y, QUERIES)
    rows = slice(client % len(y), None, clients)
    return Drawn(z[rows].cpu().numpy(), y[rows].cpu().numpy())


def _with_embedding(scores: Scores, visit: Visit, data: FederatedData, options: Evaluation) -> Scores:
    """The scores with the measures of the embedding, and with embeddings where the client is one of a pool."""
    z, y = _some(visit.outputs(options.part).embedding, samples_of(data, visit.client, options.part).labels, QUERIES)
    labels = samples_of(data, visit.client, "labelled").labels
    gallery = visit.outputs("labelled").embedding if len(labels) else z[:0]
    measures = {**scores.measures, **embedding_measures(z, y, (gallery, labels))}
    pool = None
    if visit.client < options.pool and len(labels):
        pool = Pool.of(*_some(z, y, SHAPE_SAMPLES), *_some(gallery, labels, SHAPE_SAMPLES))
    return replace(scores, measures=measures, pool=pool)
