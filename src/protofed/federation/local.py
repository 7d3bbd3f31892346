"""One client's round: start from its model, train, return. The plain form, one client at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import islice
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .. import seeds
from ..bank import PrototypeBank
from ..data.augment import Augmentation, draw
from ..data.types import ClientData, Samples, Unlabelled
from ..errors import ProtofedError
from ..evaluate.pseudo import tally
from ..methods.base import Batch, Loss, Method, Pseudo, Received, Step, View
from ..models import norm
from ..models.base import Levels, Output
from ..wire import Bundle, Message
from .optimiser import LocalSettings, Optimiser

EVAL_BATCH = 512
GATHER = 32  # steps whose samples are fetched together
STATISTICS_BATCH = 250  # samples at most in a batch of the pass that gives static batch norm its statistics


class Skeleton:
    """A network's structure, shared by all clients of that architecture; the weights are values kept outside it."""

    def __init__(self, module: nn.Module, channels_last: bool = False) -> None:
        self.module = module
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        if channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.dim: int = module.dim  # type: ignore[assignment]
        self.params: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        # frozen parameters are the same for all clients; integer buffers (a count of batches) carry nothing that is used
        buffers = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
        self.slots = {**self.params, **buffers}

    def loaded(self) -> dict[str, Tensor]:
        """The module's trained parameters and floating buffers themselves, until the next client's are loaded."""
        return {name: v.detach() for name, v in self.slots.items()}

    def weights(self) -> dict[str, Tensor]:
        """A copy of them."""
        return {name: v.clone() for name, v in self.loaded().items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Put a client's weights into the module."""
        with torch.no_grad():
            for name, slot in self.slots.items():
                slot.copy_(weights[name])

    def arranged(self, x: Tensor) -> Tensor:
        """A batch in the memory layout this network is run in."""
        return x.contiguous(memory_format=self.layout) if x.ndim == 4 else x

    def outputs(self, x: Tensor, weights: Mapping[str, Tensor] | None = None) -> Output:
        """Of the weights that are loaded, or of others: eval mode, no gradient, in pieces."""
        self.module.eval()
        others = {} if weights is None else dict(weights)
        with torch.no_grad():
            parts = [functional_call(self.module, others, (self.arranged(piece),)) for piece in x.split(EVAL_BATCH)]
        return Output(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))

    def collect(self, pieces: Iterable[Tensor]) -> None:
        """Give static batch norm its statistics: those of a pass over data with the weights that are loaded."""
        self.module.eval()  # without dropout; the layers that collect use the batch's own statistics all the same
        with torch.no_grad():
            for k, piece in enumerate(pieces, 1):
                with norm.collecting(self.module, k):
                    self.module(self.arranged(piece))

    def low(self, x: Tensor) -> Tensor:
        """The low-level features, the same way."""
        self.module.eval()
        with torch.no_grad():
            return torch.cat([self.module(self.arranged(piece), levels=True).low for piece in x.split(EVAL_BATCH)])


class TrainingNetwork:
    """The model in training as a method sees it."""

    def __init__(self, skeleton: Skeleton, params: Mapping[str, Tensor]) -> None:
        self.skeleton, self.module, self.params = skeleton, skeleton.module, params

    def __call__(self, x: Tensor, params: Mapping[str, Tensor] | None = None) -> Output:
        x = self.skeleton.arranged(x)
        return self.module(x) if params is None else functional_call(self.module, dict(params), (x,))

    def levels(self, x: Tensor) -> Levels:
        return self.module(self.skeleton.arranged(x), levels=True)

    def frozen(self, x: Tensor, weights: Mapping[str, Tensor]) -> Output:
        return frozen(self.module, self.skeleton.arranged(x), weights)


def frozen(module: nn.Module, x: Tensor, weights: Mapping[str, Tensor]) -> Output:
    """The module with other weights in eval mode, in the midst of training."""
    module.eval()
    try:
        with torch.no_grad():
            return functional_call(module, dict(weights), (x,))
    finally:
        module.train()


@dataclass(frozen=True)
class TrainedClient:
    """A client after training, its weights still in the module; embeddings are computed when a method asks for them."""

    skeleton: Skeleton
    weights: Mapping[str, Tensor]
    client: ClientData
    task: Task
    who: int
    round: int

    @property
    def data(self) -> Samples:
        return self.client.labelled

    @property
    def num_classes(self) -> int:
        return self.task.num_classes

    @property
    def num_samples(self) -> Tensor:
        return torch.tensor(len(self.data))

    @property
    def num_unlabelled(self) -> int:
        return len(self.client.unlabelled or ())

    @property
    def generator(self) -> torch.Generator:
        return seeds.torch_stream(self.task.seed, "return", self.who, self.round)

    @cached_property
    def _outputs(self) -> tuple[Output, Batch]:
        x, y = self.data.take()
        return self.skeleton.outputs(x), Batch(x, y, torch.ones(len(y), device=x.device))

    def run(self, x: Tensor) -> Output:
        return self.skeleton.outputs(x)

    def unlabelled(self, view: View = "none", weights: Mapping[str, Tensor] | None = None) -> Output:
        return self.skeleton.outputs(viewed_pool(self.task, self.client, view, self.who, self.round), weights)

    def outputs(self) -> tuple[Output, Batch]:
        return self._outputs

    def bank(self) -> PrototypeBank:
        output, batch = self._outputs
        return PrototypeBank.from_embeddings(output.embedding, batch.y, self.num_classes, batch.weight)

    def low_bank(self) -> PrototypeBank:
        x, y = self.data.take()
        return PrototypeBank.from_embeddings(self.skeleton.low(x), y, self.num_classes)


@dataclass
class ClientState:
    """What a client keeps between rounds."""

    weights: Mapping[str, Tensor]
    optimiser: dict[str, Tensor] = field(default_factory=dict)
    memory: Bundle = field(default_factory=Bundle)


@dataclass(frozen=True)
class Outcome:
    """What became of one client's round. `failure` says why there is no upload; `pseudo` counts its pseudo-labels."""

    upload: Message | None
    num_samples: int
    terms: Mapping[str, float]
    failure: str = ""
    pseudo: Mapping[str, float] = field(default_factory=dict)


class Training(NamedTuple):
    """What training gave: the client's new state, its upload, loss terms, what failed, counts of pseudo-labels."""

    state: ClientState
    upload: Bundle | None
    terms: dict[str, float]
    failure: str = ""
    pseudo: Mapping[str, float] = {}


@dataclass(frozen=True)
class Task:
    """What the clients of one federation have in common.

    `held_back` are the labels of the unlabelled samples: only the record of what pseudo-labels were worth reads them.
    """

    method: Method
    local: LocalSettings
    seed: int
    num_classes: int
    augmentation: Augmentation | None = None
    held_back: Sequence[Tensor | None] = ()


def client_size(method: Method, data: ClientData) -> int:
    """How many samples a client trains on, for servers that weigh clients by size."""
    return len(data.labelled) + (len(data.unlabelled or ()) if method.reads_unlabelled else 0)


def planned_steps(task: Task, data: ClientData, client: int, round: int) -> Iterator[Step]:
    order = seeds.torch_stream(task.seed, "batches", client, round)
    local = task.local
    return task.method.steps(data.labelled.labels, len(data.unlabelled or ()), local.epochs, local.batch, round, order)


# --- views ------------------------------------------------------------------------------------------------------------
def view_of(augmentation: Augmentation | None, name: View, x: Tensor, u: Tensor | None) -> Tensor:
    if name == "none" or augmentation is None or u is None:
        return x
    return getattr(augmentation, name)(x, u)


def draws(task: Task, step: Step, stream: torch.Generator) -> dict[str, Tensor]:
    """A step's random numbers, always drawn in this order: of labelled samples, of each view, of the method's own."""
    drawn: dict[str, Tensor] = {}
    augmentation, method = task.augmentation, task.method
    if augmentation is not None and method.labelled_view != "none":
        drawn["labelled"] = draw(getattr(augmentation, method.labelled_view), len(step.labelled), stream)
    if step.unlabelled is not None:
        for name in method.views if augmentation is not None else ():
            drawn[name] = draw(getattr(augmentation, name), len(step.unlabelled), stream)
        if method.random_numbers:
            drawn["numbers"] = torch.rand(len(step.unlabelled), method.random_numbers, generator=stream)
    return drawn


def viewed_pool(task: Task, data: ClientData, view: View, client: int, round: int) -> Tensor:
    """All of a client's unlabelled samples, as a view of them."""
    assert data.unlabelled is not None
    x = data.unlabelled.take()
    if view == "none" or task.augmentation is None:
        return x
    stream = seeds.torch_stream(task.seed, f"{view} pool", client, round)
    return view_of(task.augmentation, view, x, draw(getattr(task.augmentation, view), len(x), stream).to(x.device))


def all_samples(data: ClientData) -> Iterator[Tensor]:
    """Everything a client may train on, in pieces."""
    for part in (data.labelled, data.unlabelled):
        if part is None or len(part) < 2:  # one sample has no deviation
            continue
        for rows in torch.arange(len(part)).tensor_split(-(-len(part) // STATISTICS_BATCH)):
            yield part.take(rows)[0] if isinstance(part, Samples) else part.take(rows)


# --- training ---------------------------------------------------------------------------------------------------------
def holds(received: Bundle, state: ClientState) -> Received:
    return Received(received.bank, received.banks, received.weights, received.tensors, received.scalars, state.memory)


def as_loss(given: dict[str, Tensor] | Loss) -> Loss:
    return given if isinstance(given, Loss) else Loss(given)


def train_client(
    task: Task, skeleton: Skeleton, state: ClientState, data: ClientData, received: Bundle, client: int, round: int
) -> Training:
    """Train one client; where training went to NaN, its state is the old one and there is no upload.

    State and upload hold the module's own tensors: keep or encode them before the next client is loaded.
    """
    method, local = task.method, task.local
    check_trainable(task.method, data, client)
    has = holds(received, state)
    start = method.client_start(state.weights, has)
    skeleton.load(start)
    beyond = {name: v.clone().requires_grad_() for name, v in start.items() if name not in skeleton.slots}
    named = {**skeleton.params, **beyond}
    params = list(named.values())
    optimiser = Optimiser(local, named, state.optimiser if local.keep_optimiser else {}, round)
    network = TrainingNetwork(skeleton, named)
    skeleton.module.train()

    names: list[str] = []
    values, sizes = [], []
    guesses: list[Pseudo] = []
    guessed: list[Tensor] = []
    with torch.random.fork_rng(devices=[]):
        seeds.start_default_stream(data.labelled.x.device, task.seed, "dropout", client, round)
        for step, batch in _batches(task, skeleton, data, client, round):
            with one_sample_is_too_few(client):
                terms, pseudo = as_loss(method.client_loss(network, batch, has, round))
            names = list(terms)
            total = reduce(add, terms.values())
            gradient = torch.autograd.grad(total, params, allow_unused=True, materialize_grads=True)
            optimiser.step(gradient)
            values.append([term.detach() for term in terms.values()])
            sizes.append(step_size(step))
            if pseudo is not None and step.unlabelled is not None:
                guesses.append(Pseudo(*(t.detach() for t in pseudo)))
                guessed.append(step.unlabelled)

    share = torch.tensor(sizes, dtype=values[0][0].dtype, device=values[0][0].device) / sum(sizes)
    losses = {
        name: float(share @ torch.stack(column)) for name, column in zip(names, zip(*values, strict=True), strict=True)
    }
    weights = {**skeleton.loaded(), **{name: v.detach() for name, v in beyond.items()}}
    if beyond:  # the module held a part of the model; what it stands for is another set of weights
        weights = {name: v.clone() for name, v in weights.items()}
        skeleton.load(method.collapse(weights))
    if norm.collects(skeleton.module):
        skeleton.collect(all_samples(data))
        weights |= {name: v for name, v in skeleton.loaded().items() if name not in skeleton.params}
    counts = pseudo_counts(task, data, client, guesses, guessed)
    problem = what_is_not_finite(losses, weights)
    if problem:
        return Training(state, None, losses, problem, counts)
    trained = TrainedClient(skeleton, weights, data, task, client, round)
    upload = method.client_return(trained, has, round)
    kept = optimiser.export() if local.keep_optimiser else {}
    after = ClientState(weights, kept, method.client_remember(trained, has, round))
    return Training(after, upload, losses, "", counts)


def step_size(step: Step) -> int:
    """How much a step's loss counts in the mean of the round: its labelled samples, or else its unlabelled ones."""
    return step.labelled.shape[0] or (0 if step.unlabelled is None else step.unlabelled.shape[0])


def pseudo_counts(
    task: Task, data: ClientData, client: int, guesses: Sequence[Pseudo], rows: Sequence[Tensor]
) -> dict[str, float]:
    held_back = task.held_back[client] if guesses and task.held_back else None
    if held_back is None:
        return {}
    label, accepted, score = (torch.cat(column) for column in zip(*guesses, strict=True))
    truth = held_back[torch.cat(list(rows)).to(held_back.device)].to(label.device)
    return tally(label, accepted, score, truth, data.classes.to(label.device))


def _batches(task: Task, skeleton: Skeleton, data: ClientData, client: int, round: int) -> Iterator[tuple[Step, Batch]]:
    """Each step with its samples, which are fetched and augmented for many steps at once."""
    steps = planned_steps(task, data, client, round)
    stream = seeds.torch_stream(task.seed, "views", client, round)
    device = data.labelled.x.device
    while group := list(islice(steps, GATHER)):
        drawn = [draws(task, step, stream) for step in group]
        sizes = [len(step.labelled) for step in group]
        x, y = data.labelled.take(torch.cat([step.labelled for step in group]))
        x = view_of(task.augmentation, task.method.labelled_view, x, _joined(drawn, "labelled", device))
        columns = zip(skeleton.arranged(x).split(sizes), y.split(sizes), strict=True)
        pools = _pool_batches(task, skeleton, data.unlabelled, group, drawn)
        ones = torch.ones(len(y), device=device).split(sizes)
        for step, (own, labels), weight, pool in zip(group, columns, ones, pools, strict=True):
            support = None if step.support is None else step.support.to(device, torch.float32)
            yield step, Batch(own, labels, weight, support, **pool)


def _pool_batches(
    task: Task,
    skeleton: Skeleton,
    pool: Unlabelled | None,
    group: Sequence[Step],
    drawn: Sequence[Mapping[str, Tensor]],
) -> list[dict[str, Tensor]]:
    """The unlabelled part of each batch of a group."""
    rows = [step.unlabelled for step in group if step.unlabelled is not None]
    if pool is None or not rows:
        return [{} for _ in group]
    u = pool.take(torch.cat(rows))
    parts = {"unlabelled": u}
    for name in task.method.views:
        parts[name] = view_of(task.augmentation, name, u, _joined(drawn, name, u.device))
    numbers = _joined(drawn, "numbers", u.device)
    if numbers is not None:
        parts["numbers"] = numbers
    split = {n: (skeleton.arranged(t) if n != "numbers" else t).split([len(r) for r in rows]) for n, t in parts.items()}
    result: list[dict[str, Tensor]] = []
    taken = 0
    for step in group:
        if step.unlabelled is None:
            result.append({})
            continue
        own = {name: pieces[taken] for name, pieces in split.items()}
        result.append({**own, "unlabelled_weight": torch.ones(len(own["unlabelled"]), device=u.device)})
        taken += 1
    return result


def _joined(drawn: Sequence[Mapping[str, Tensor]], name: str, device: torch.device) -> Tensor | None:
    there = [numbers[name] for numbers in drawn if name in numbers]
    return torch.cat(there).to(device) if there else None


def check_trainable(method: Method, data: ClientData, client: int) -> None:
    if method.needs_labels and len(data.labelled) == 0:
        raise ProtofedError(f"client {client} has no labelled sample to train on")
    if not method.needs_labels and not len(data.unlabelled or ()):
        raise ProtofedError(
            f"client {client} has no unlabelled sample, which {method.name} trains on; set labels=server or labels=client"
        )


@contextmanager
def one_sample_is_too_few(client: int) -> Iterator[None]:
    """Batch norm over a single value: say whose data is too small."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ProtofedError(
            f"client {client} trains on a batch of one sample, and batch norm needs two: "
            "give it more data, a larger batch, or a model without batch norm"
        ) from None


def what_is_not_finite(losses: Mapping[str, float], weights: Mapping[str, Tensor]) -> str:
    """Which loss term or weight became NaN or infinite; empty where all is well."""
    for name, value in losses.items():
        if not math.isfinite(value):
            return f"loss term {name!r} became NaN or infinite in training"
    for name, tensor in weights.items():
        if not math.isfinite(float(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
            return f"weight {name!r} became NaN or infinite in training"
    return ""
