"""One client's round: start from its model, train, return. The plain form, one client at a time.

`train_client` and the stack of clients share everything but the steps themselves: what is trained, what is recorded,
and what a client keeps and sends afterwards (`outcome_of`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import add
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import seeds, wire
from ..bank import PrototypeBank
from ..data.types import ClientData
from ..errors import ProtofedError
from ..evaluate.pseudo import tally
from ..methods.client import Pseudo, Trained, Weights
from ..models import norm
from ..models.base import Output
from ..models.quick import ProductLinear, factors_of, product_layers
from ..models.skeleton import Skeleton, TrainingNetwork
from ..parts import Batch, Feed, Received, Step, View
from ..parts.compression import compressed
from ..parts.filters import Departure
from ..wire import Bundle, Message
from ..wire.exchange import SAMPLES
from .batches import Task, all_samples, batches, client_size, viewed, viewed_pool
from .gradients import GradientNorms
from .optimiser import Optimiser, Products


@dataclass
class ClientState:
    """What a client keeps between rounds.

    `weights` are those of a model of its own, and empty where it is sent a model each round. `bank` has its prototypes
    under that model, where training has computed them.
    """

    weights: Weights = field(default_factory=dict)
    optimiser: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Bundle = field(default_factory=Bundle)
    bank: PrototypeBank | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to keep."""
        return not (self.weights or self.optimiser) and self.memory.empty

    def extras(self) -> Bundle:
        """Optimiser state and memory as one bundle, for a message or a file."""
        if not self.optimiser:
            return self.memory
        tensors = {**self.memory.tensors, **{f"optimiser/{k}": v for k, v in self.optimiser.items()}}
        return replace(self.memory, tensors=tensors)

    @classmethod
    def of(cls, weights: Weights, extras: Bundle, bank: PrototypeBank | None) -> ClientState:
        """A state from its weights, the bundle that `extras` gave, and its prototypes."""
        if extras.empty:
            return cls(weights, {}, extras, bank)
        prefix = "optimiser/"
        optimiser = {k.removeprefix(prefix): v for k, v in extras.tensors.items() if k.startswith(prefix)}
        tensors = {k: v for k, v in extras.tensors.items() if not k.startswith(prefix)}
        return cls(weights, optimiser, replace(extras, tensors=tensors), bank)


Keep = Callable[[int, ClientState], None]
"""A function that stores a client's state. It copies the tensors, which belong to the model in training."""


class MemoryStates(dict[int, ClientState]):
    """The clients' states in the memory of this process. A state is replaced as a whole, and never changed."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[int, int] = {}
        """How often each client's state has been replaced."""

    def __setitem__(self, client: int, state: ClientState) -> None:
        weights = {name: value.clone() for name, value in state.weights.items()}
        memory = state.memory if state.memory.empty else state.memory.copied()
        bank = None if state.bank is None else state.bank.compact()
        super().__setitem__(client, ClientState(weights, state.optimiser, memory, bank))
        self.versions[client] = self.versions.get(client, 0) + 1

    def snapshot(self) -> Snapshot:
        """The states as they are now. Nothing is copied: a state that a later round replaces stays with the snapshot."""
        return Snapshot(dict(self), dict(self.versions))


class Snapshot(Mapping[int, ClientState]):
    """The clients' states at one moment, which the next round does not change.

    Attributes:
        versions: By client, a number that is another one where its state has been replaced since an earlier snapshot of
            the same engine. A client that is not in it may have any state.
    """

    def __init__(self, states: Mapping[int, ClientState], versions: Mapping[int, int] | None = None) -> None:
        self._states, self.versions = states, dict(versions or {})

    def __getitem__(self, client: int) -> ClientState:
        return self._states[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    @classmethod
    def of(cls, states: Mapping[int, ClientState]) -> Snapshot:
        """A snapshot of what an engine exports."""
        if isinstance(states, Snapshot):
            return states
        take = getattr(states, "snapshot", None)
        return cls(dict(states)) if take is None else take()


@dataclass(frozen=True)
class Outcome:
    """The result of one client's round.

    `failure` says why there is no upload; `pseudo` has counts of its pseudo-labels, and `measures` what else is measured
    at a client and averaged in the record, such as what compression lost.
    """

    upload: Message | None
    terms: Mapping[str, float]
    failure: str = ""
    pseudo: Mapping[str, float] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)

    @property
    def diverged(self) -> bool:
        """Whether the client trained and its training became NaN; one that could not be reached has no loss terms."""
        return self.upload is None and bool(self.terms)


class TrainedModel(Trained, Protocol):
    """A trained client as the engines see it."""

    @property
    def own_bank(self) -> PrototypeBank | None:
        """The client's prototypes, where the method has computed them."""
        ...


class Training(NamedTuple):
    """The result of training: the trained client (None where it became NaN), its optimiser state, the loss terms, the
    reason of a failure, counts of pseudo-labels, and what else was measured."""

    trained: TrainedModel | None
    optimiser: Mapping[str, Tensor]
    terms: Mapping[str, float]
    failure: str
    pseudo: Mapping[str, float]
    measures: Mapping[str, float] = {}


@dataclass(frozen=True)
class TrainedClient:
    """A client after training, with its weights still in the module. Embeddings are computed when a method asks for them."""

    skeleton: Skeleton
    weights: Weights
    data: ClientData
    task: Task
    client: int
    round: int

    @property
    def num_unlabelled(self) -> int:
        """The number of the client's unlabelled samples."""
        return len(self.data.unlabelled or ())

    @property
    def generator(self) -> torch.Generator:
        """The client's random stream for what it returns."""
        return seeds.torch_stream(self.task.seed, "return", self.client, self.round)

    @cached_property
    def _outputs(self) -> tuple[Output, Batch]:
        x, y = self.data.labelled.take()
        return self.skeleton.outputs(x), Batch(x, y, torch.ones(len(y), device=x.device))

    @cached_property
    def _bank(self) -> PrototypeBank:
        output, batch = self._outputs
        return PrototypeBank.from_embeddings(output.embedding, batch.y, self.task.num_classes, batch.weight)

    @property
    def own_bank(self) -> PrototypeBank | None:
        """The client's prototypes, where the method has computed them."""
        return self.__dict__.get("_bank")

    def run(self, x: Tensor) -> Output:
        """Embeddings and logits of any samples."""
        return self.skeleton.outputs(x)

    def unlabelled(self, view: View = "none", weights: Weights | None = None) -> Output:
        """Embeddings and logits of a view of the unlabelled samples, by the client's model or by other weights."""
        return self.skeleton.outputs(viewed_pool(self.task, self.data, view, self.client, self.round), weights)

    def labelled(self, view: View) -> Output:
        """Embeddings and logits of a view of the labelled samples."""
        x = viewed(self.task, self.data.labelled.take()[0], view, f"{view} labelled", self.client, self.round)
        return self.skeleton.outputs(x)

    def outputs(self) -> tuple[Output, Batch]:
        """Embeddings and logits of the labelled samples, and these as one batch."""
        return self._outputs

    def bank(self) -> PrototypeBank:
        """The class means of the embeddings of the labelled samples."""
        return self._bank

    def low_bank(self) -> PrototypeBank:
        """The class means of the low-level features of the labelled samples."""
        x, y = self.data.labelled.take()
        return PrototypeBank.from_embeddings(self.skeleton.low(x), y, self.task.num_classes)

    def common(self, x: Tensor) -> Tensor:
        """The features of samples in the space that all clients have in common."""
        return self.skeleton.common(x)


def with_memory(message: Bundle, memory: Bundle) -> Received:
    """The message a client was sent, together with its memory of earlier rounds."""
    parts = message.bank, message.banks, message.weights, message.tensors, message.scalars, message.models
    return Received(*parts, memory)


def train_client(
    task: Task,
    skeleton: Skeleton,
    state: ClientState,
    data: ClientData,
    received: Received,
    client: int,
    round: int,
    keep: Keep,
) -> Outcome:
    """Train one client in a round. A client whose training became NaN keeps its old state.

    Args:
        task: What the clients of the federation have in common.
        skeleton: The client's architecture.
        state: What the client has kept from its last round.
        data: The client's data.
        received: The message it was sent, with its memory.
        client: The client's number.
        round: The round.
        keep: Stores the client's new state.

    Returns:
        What the client sends, or the reason why it sends nothing.
    """
    training = trained_client(task, skeleton, state, data, received, client, round)
    return outcome_of(task, training, data, received, client, round, keep)


def trained_client(
    task: Task, skeleton: Skeleton, state: ClientState, data: ClientData, received: Any, client: int, round: int
) -> Training:
    """Take the steps of one client's training; the arguments are those of `train_client`.

    The trained model stays in the skeleton until another one is loaded.
    """
    learner, local = task.learner, task.local
    check_trainable(task, data, client)
    skeleton.load(learner.begin(state.weights, received))
    optimiser = Optimiser(local, skeleton.params, state.optimiser if local.exports_optimiser else {}, round)
    network = TrainingNetwork(skeleton, skeleton.params)
    params = list(skeleton.params.values())
    norms = GradientNorms(params[0])
    layers = dict(product_layers(skeleton.module)) if optimiser.takes_products else {}
    names: list[str] = []
    values, sizes = [], []
    pseudo_labels = PseudoLabels()
    with torch.random.fork_rng(devices=[]), factors_of(layers):
        seeds.start_default_stream(data.labelled.x.device, task.seed, "dropout", client, round)
        for step, batch in batches(task, skeleton, data, received, client, round):
            with one_sample_is_too_few(task.name_of(client)):
                terms, pseudo = task.loss(network, batch, received, round)
            names = list(terms)
            if local.gradients:
                norms.add(terms, params)
            total = reduce(add, terms.values())
            optimiser.step(*_gradients(total, skeleton.params, layers))
            values.append([term.detach() for term in terms.values()])
            sizes.append(step_size(step))
            if pseudo is not None:
                pseudo_labels.add(step, Pseudo(*(t.detach() for t in pseudo)))
    shares = torch.tensor(sizes, dtype=values[0][0].dtype, device=values[0][0].device) / sum(sizes)
    columns = zip(names, zip(*values, strict=True), strict=True)
    means = {name: float(shares @ torch.stack(column)) for name, column in columns}
    if norm.collects(skeleton.module):
        skeleton.collect(all_samples(data))
    weights = skeleton.loaded()
    failure = what_is_not_finite(means, weights)
    trained = None if failure else TrainedClient(skeleton, weights, data, task, client, round)
    optimiser_state = optimiser.export() if local.exports_optimiser else {}
    counts = pseudo_labels.counts(task, data, client)
    return Training(trained, optimiser_state, means, failure, counts, norms.measures())


def _gradients(
    total: Tensor, params: Mapping[str, Tensor], layers: Mapping[str, ProductLinear]
) -> tuple[list[Tensor], None, Products]:
    """The gradients of a loss as an optimiser's step takes them, of some layers as products.

    A weight that the loss also reads directly, as a proximal term does, has the sum of both as its gradient.
    """
    given = torch.autograd.grad(total, list(params.values()), allow_unused=True, materialize_grads=not layers)
    gradients: list[Tensor] = []
    products: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for (name, param), gradient in zip(params.items(), given, strict=True):
        factors = layers[name].taken() if name in layers else []
        if gradient is None and factors:
            products[name] = factors
            continue
        whole = torch.zeros_like(param) if gradient is None else gradient
        for g, x in factors:
            whole = whole + g.t() @ x
        gradients.append(whole)
    return gradients, None, products


def outcome_of(
    task: Task, training: Training, data: ClientData, received: Received, client: int, round: int, keep: Keep
) -> Outcome:
    """Store what a client keeps after training, and return what it sends.

    The outcome holds none of the model's tensors: the upload is encoded, and `keep` copies the state. Where only sums
    leave a client, the upload is its vector in a secure sum, which whoever stands in for the client must not give away.
    """
    if training.trained is None:
        return Outcome(None, training.terms, training.failure, training.pseudo)
    learner, trained = task.learner, training.trained
    upload, message = learner.returned(trained, received, round), b""
    measures: Mapping[str, float] = {}
    if not upload.empty:
        scalars = {**upload.scalars, SAMPLES: float(client_size(learner.feed, data))}
        upload = Bundle(upload.bank, upload.banks, upload.weights, upload.tensors, scalars, upload.models)
        if task.filters:
            departure = Departure(client, round, received, trained, task.rule, task.normals(client, round))
            upload, measures = compressed(task.filters, upload, departure)
        try:
            message = wire.encode(upload) if task.secure is None else task.secure.vector(client, upload)
        except ProtofedError as error:  # a number that no secure sum can hold; the client keeps its old state
            return Outcome(None, training.terms, str(error), training.pseudo)
    memory = learner.remember(trained, received, round)
    weights, bank = (trained.weights, trained.own_bank) if task.keeps_model else ({}, None)
    state = ClientState(weights, training.optimiser, memory, bank)
    if not state.empty:
        keep(client, state)
    return Outcome(message, training.terms, "", training.pseudo, {**training.measures, **measures})


class PseudoLabels:
    """The pseudo-labels that a client gave in one round, for the record."""

    def __init__(self) -> None:
        self.labels: list[Pseudo] = []
        self.rows: list[Tensor] = []

    def add(self, step: Step, pseudo: Pseudo) -> None:
        """Add the pseudo-labels of one step."""
        if step.unlabelled is not None:
            self.labels.append(pseudo)
            self.rows.append(step.unlabelled)

    def counts(self, task: Task, data: ClientData, client: int) -> dict[str, float]:
        """How many pseudo-labels were given, accepted and right; empty where no labels were held back."""
        held_back = task.held_back[client] if self.labels and task.held_back else None
        if held_back is None:
            return {}
        label, accepted, score = (torch.cat(column) for column in zip(*self.labels, strict=True))
        truth = held_back[torch.cat(self.rows).to(held_back.device)].to(label.device)
        return tally(label, accepted, score, truth, data.classes.to(label.device))


def step_size(step: Step) -> int:
    """The weight of a step's loss in the round's mean: its labelled samples, or else its unlabelled ones."""
    return step.labelled.shape[0] or (0 if step.unlabelled is None else step.unlabelled.shape[0])


def check_trainable(task: Task, data: ClientData, client: int) -> None:
    """Raise a `ProtofedError` for a client without the samples that the learner trains on."""
    feed: Feed = task.learner.feed
    if feed.needs_labels and len(data.labelled) == 0:
        raise ProtofedError(f"{task.name_of(client)} has no labelled sample to train on")
    if not feed.needs_labels and not len(data.unlabelled or ()):
        raise ProtofedError(
            f"{task.name_of(client)} has no unlabelled sample, which {task.name} trains on; "
            "set labels=server or labels=client"
        )


@contextmanager
def one_sample_is_too_few(client: str) -> Iterator[None]:
    """A context in which batch norm's error about a batch of one sample names the client."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ProtofedError(
            f"{client} trains on a batch of one sample, and batch norm needs two: "
            "give it more data, a larger batch, or a model without batch norm"
        ) from None


def what_is_not_finite(means: Mapping[str, float], weights: Weights) -> str:
    """The name of a loss term or weight that became NaN or infinite, as a sentence; empty where all are finite."""
    for name, value in means.items():
        if not math.isfinite(value):
            return f"loss term {name!r} became NaN or infinite in training"
    for name, tensor in weights.items():
        if not math.isfinite(float(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
            return f"weight {name!r} became NaN or infinite in training"
    return ""
