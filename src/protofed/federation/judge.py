"""The judge: scores a client's predictions from what the client holds and was sent, and from nothing else.

An engine gives it each client's model as a `Visit`: outputs over a set of samples, the client's own prototypes, and the
message it was sent. The method's `predict` makes predictions of them. Most clients are scored by their confusions alone, and
these are counted once for all clients that have the same model, test samples and prototypes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..bank import PrototypeBank
from ..common import guiding_bank
from ..data.types import ClientData, FederatedData, Samples
from ..evaluate import (
    Confusion,
    Drawn,
    Pool,
    Scores,
    Snapshot,
    embedding_measures,
    predicted,
    score_client,
    silhouette,
    vote,
)
from ..evaluate.accuracy import SHARE
from ..models.base import Output
from ..parts import Mix, Predict
from ..parts.predict import EVEN
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
    prototypes: bool = True
    """Whether predictions by prototype are scored, also where clients have to compute their prototypes for it."""

    @property
    def shaped(self) -> int:
        """The number of clients of whose embeddings something is measured: those with lower numbers."""
        return max(self.silhouette, self.drawn, SNAPSHOT_CLIENTS if self.snapshot else 0)

    def one_by_one(self, predict: Predict) -> bool:
        """Whether clients are scored one by one: where more is asked of predictions than confusions, or each mixes in its
        own way."""
        return self.qualities or self.votes or self.embedding or isinstance(predict, Mix)

    def pictures(self, client: int) -> bool:
        """Whether a client's scores include embeddings and prototypes."""
        return self.snapshot and client < SNAPSHOT_CLIENTS


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
    samples: Samples | None = getattr(data.clients[client], name)
    assert samples is not None
    return samples


def score(visit: Visit, predict: Predict, data: FederatedData, options: Evaluation) -> Scores:
    """Score one client on its own test or validation samples.

    Args:
        visit: The client with its model.
        predict: The method's rule of prediction.
        data: The data of the federation.
        options: Which samples are scored, and what is measured beside accuracy.

    Returns:
        Confusions by each prediction, with votes, silhouette and snapshot where the options ask for them.
    """
    client, classes = visit.client, data.clients[visit.client].classes
    pictured, votes = options.pictures(client), options.votes and data.central_test is not None
    bank = None
    if options.prototypes or pictured or votes:
        bank = predict.bank(visit.received, visit.own_bank, classes)
    candidates = bank if bank is None or options.candidates == "all" else bank.restricted(classes)
    output, y = visit.outputs(options.part), samples_of(data, client, options.part).labels
    scored = candidates if options.prototypes else None
    mixture = None
    if isinstance(predict, Mix) and candidates is not None:
        mixture = Mixture.of(visit, predict, data, candidates, classes if options.candidates == "own" else None)
    scores = score_client(output.embedding, output.logits, y, scored, predict.scores, options.qualities, mixture)
    if mixture is not None:
        scores = replace(scores, measures={**scores.measures, SHARE: mixture.share})
    if votes and bank is not None:
        central, mixes = visit.outputs("central"), None
        if mixture is not None:
            mixes = replace(mixture, bank=bank, trained=asked_classes(visit, classes, bank))
        scores = replace(scores, votes=vote(central.embedding, central.logits, bank, predict.scores, mixes))
    if options.embedding:
        scores = _with_embedding(scores, visit, data, options)
    return replace(scores, **shape(visit, predict, data, options, {}))


def shape(
    visit: Visit, predict: Predict, data: FederatedData, options: Evaluation, measured: dict[Any, float]
) -> dict[str, Any]:
    """What is measured of a client's embeddings: those drawn for all clients together, silhouette and snapshot.

    Args:
        visit: The client with its model.
        predict: The method's rule of prediction.
        data: The data of the federation.
        options: What is measured, and of which samples.
        measured: The silhouettes of this model by set of samples, to which the client's is added.

    Returns:
        The values by the names of `Scores`.
    """
    client, found = visit.client, dict[str, Any]()
    if client >= options.shaped:
        return found
    samples = samples_of(data, client, options.part)
    embedding, labels = visit.outputs(options.part).embedding, samples.labels
    if client < options.drawn:
        found["drawn"] = _drawn(embedding, labels, client, min(options.drawn, len(data.clients)))
    z, y = _some(embedding, labels, SHAPE_SAMPLES)
    if client < options.silhouette:
        rows = id(samples.index), id(samples.y)
        if rows not in measured:
            measured[rows] = silhouette(z, y)
        found["silhouette"] = measured[rows]
    if options.pictures(client):
        bank = predict.bank(visit.received, visit.own_bank, data.clients[client].classes)
        found["snapshot"] = Snapshot.of(z, y, bank)
    return found


@dataclass(frozen=True)
class Mixture:
    """A client's own mixture of head and prototypes: the head's share, and the classes of which the head is asked."""

    predict: Mix
    bank: PrototypeBank
    trained: Tensor
    share: float

    @classmethod
    def of(
        cls, visit: Visit, predict: Mix, data: FederatedData, bank: PrototypeBank, allowed: Tensor | None = None
    ) -> Mixture:
        """The mixture of a client that chooses among the classes of a bank; among no others than `allowed` ones."""
        client = data.clients[visit.client]
        trained = asked_classes(visit, client.classes, bank)
        trained = trained if allowed is None else trained & allowed
        if predict.share == "held":
            return cls(predict, bank, trained, visit.received.scalars[SHARE])
        if predict.share != "validated":
            return cls(predict, bank, trained, predict.share)
        if client.validation is None or not len(client.validation):
            return cls(predict, bank, trained, EVEN)
        output, y = visit.outputs("validation"), samples_of(data, visit.client, "validation").labels
        share = predict.chosen(output.logits, predict.scores(output.embedding, bank), trained, y)
        return cls(predict, bank, trained, share)

    def __call__(self, z: Tensor, logits: Tensor) -> Tensor:
        """The logarithms `[n, C]` of the mixed probabilities."""
        return self.predict.mixed(logits, self.predict.scores(z, self.bank), self.trained, self.share)


def asked_classes(visit: Visit, classes: Tensor, bank: PrototypeBank) -> Tensor:
    """The classes of which a client's head is asked in a mixture.

    A model that clients share was trained on all classes, and a private one on the client's own; of a class without a
    prototype the head alone can say something.
    """
    return classes | bool(visit.received.weights) | ~bank.known


def as_held(message: Bundle, weights: Mapping[str, Tensor]) -> Bundle:
    """A message with the prototypes, and the head's share in a mixture, that a client's guided model holds."""
    scalars = {**message.scalars, SHARE: float(weights["share"])}
    return replace(message, bank=guiding_bank(weights), scalars=scalars)


@dataclass
class Candidates:
    """The prototypes among which clients' nearest is chosen. They are made once for all clients of one message and one set
    of classes, unless they depend on a client's own prototypes."""

    predict: Predict
    options: Evaluation
    made: dict[Any, tuple[PrototypeBank, Bundle]] = field(default_factory=dict)

    def of(self, received: Bundle, own: Callable[[], PrototypeBank], client: ClientData) -> tuple[PrototypeBank, bool]:
        """A client's candidates, and whether other clients of the same message and classes have the same."""
        key = id(received), client.class_bytes
        if key in self.made:
            return self.made[key][0], True
        asked: list[bool] = []

        def asking() -> PrototypeBank:
            asked.append(True)
            return own()

        bank = self.predict.bank(received, asking, client.classes)
        bank = bank.restricted(client.classes) if self.options.candidates == "own" else bank
        if not asked:
            self.made[key] = bank, received  # the message is kept, so that no other one gets its id
        return bank, not asked


@dataclass
class Counting:
    """Counts the confusions of clients that share a model. What two clients have in common is counted once."""

    predict: Predict
    data: FederatedData
    options: Evaluation
    candidates: Candidates
    counted: dict[Any, Confusion | None] = field(default_factory=dict)

    def confusions(self, visit: Visit) -> tuple[Confusion, Confusion | None, bool]:
        """A client's confusions by head and by prototype, and whether they are those of all clients with the same message,
        test samples and classes."""
        samples = samples_of(self.data, visit.client, self.options.part)
        rows = id(samples.index), id(samples.y)  # clients with the same classes share one list of test rows
        by_head, output = self.counted.get(rows), None
        if by_head is None:
            output = visit.outputs(self.options.part)
            by_head = self.counted[rows] = _confusion(samples, output.logits)
        if not self.options.prototypes:
            return by_head, None, True
        bank, shared = self.candidates.of(visit.received, visit.own_bank, self.data.clients[visit.client])
        key = *rows, id(bank)
        if shared and key in self.counted:
            return by_head, self.counted[key], True
        by_prototype = None
        if bool(bank.known.any()):
            output = output or visit.outputs(self.options.part)
            by_prototype = _confusion(samples, self.predict.scores(output.embedding, bank))
        if shared:  # then the candidates keep the bank, and its id stays its own
            self.counted[key] = by_prototype
        return by_head, by_prototype, shared


def _confusion(samples: Samples, scores: Tensor) -> Confusion:
    """The confusion of samples with the classes of their largest scores."""
    return Confusion.of(samples.labels.cpu(), predicted(scores))


def _some(z: Tensor, y: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """At most so many embeddings with their classes, evenly spread over a set that may be sorted by class."""
    if len(y) <= most:
        return z, y
    rows = torch.linspace(0, len(y) - 1, most, device=y.device).round().long()
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
