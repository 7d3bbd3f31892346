"""One client's round: start from its model, train, return. The plain form, one client at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .. import seeds
from ..bank import PrototypeBank
from ..data.types import ClientData, Samples
from ..errors import ProtofedError
from ..methods.base import Batch, Method, Received, Step
from ..models.base import Levels, Output
from ..wire import Bundle
from .optimiser import LocalSettings, Optimiser

EVAL_BATCH = 512
GATHER = 32  # steps whose samples are fetched together


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

    def outputs(self, x: Tensor) -> Output:
        """Of the weights that are loaded: eval mode, no gradient, in pieces."""
        self.module.eval()
        with torch.no_grad():
            parts = [self.module(self.arranged(piece)) for piece in x.split(EVAL_BATCH)]
        return Output(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))

    def low(self, x: Tensor) -> Tensor:
        """The low-level features, the same way."""
        self.module.eval()
        with torch.no_grad():
            return torch.cat([self.module(self.arranged(piece), levels=True).low for piece in x.split(EVAL_BATCH)])


class TrainingNetwork:
    """The model in training as a method sees it."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton, self.module = skeleton, skeleton.module
        self.params: Mapping[str, Tensor] = skeleton.params

    def __call__(self, x: Tensor, params: Mapping[str, Tensor] | None = None) -> Output:
        x = self.skeleton.arranged(x)
        return self.module(x) if params is None else functional_call(self.module, dict(params), (x,))

    def levels(self, x: Tensor) -> Levels:
        return self.module(self.skeleton.arranged(x), levels=True)


@dataclass(frozen=True)
class TrainedClient:
    """A client after training, its weights still in the module; embeddings are computed when a method asks for them."""

    skeleton: Skeleton
    weights: Mapping[str, Tensor]
    data: Samples
    num_classes: int

    @property
    def num_samples(self) -> Tensor:
        return torch.tensor(len(self.data))

    @cached_property
    def _outputs(self) -> tuple[Output, Batch]:
        x, y = self.data.take()
        return self.skeleton.outputs(x), Batch(x, y, torch.ones(len(y), device=x.device))

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
    """What became of one client's round. `failure` says why there is no upload."""

    upload: bytes | None
    num_samples: int
    terms: Mapping[str, float]
    failure: str = ""


@dataclass(frozen=True)
class Task:
    """What the clients of one federation have in common."""

    method: Method
    local: LocalSettings
    seed: int
    num_classes: int


def holds(received: Bundle, state: ClientState) -> Received:
    return Received(received.bank, received.banks, received.weights, received.tensors, received.scalars, state.memory)


def train_client(
    task: Task, skeleton: Skeleton, state: ClientState, data: ClientData, received: Bundle, client: int, round: int
) -> tuple[ClientState, Bundle | None, dict[str, float], str]:
    """The client's new state, its upload and loss terms; where training went to NaN, its old state and what failed.

    State and upload hold the module's own tensors: keep or encode them before the next client is loaded.
    """
    method, local = task.method, task.local
    check_trainable(data, client)
    has = holds(received, state)
    skeleton.load(method.client_start(state.weights, has))
    params = list(skeleton.params.values())
    optimiser = Optimiser(local, skeleton.params, state.optimiser if local.keep_optimiser else {})
    network = TrainingNetwork(skeleton)
    skeleton.module.train()

    names: list[str] = []
    values, sizes = [], []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.derive(task.seed, "dropout", client, round))
        order = seeds.torch_stream(task.seed, "batches", client, round)
        views = seeds.torch_stream(task.seed, "views", client, round)
        pool = data.unlabelled
        steps = method.steps(data.labelled.labels, len(pool or ()), local.epochs, local.batch, order)
        for step, x, y in _gathered(steps, data.labelled, skeleton):
            batch = Batch(x, y, torch.ones(len(y), device=x.device))
            if pool is not None and step.unlabelled is not None:
                weak, strong = method.views(pool.take(step.unlabelled), views)
                batch = batch._replace(
                    weak=weak, strong=strong, unlabelled_weight=torch.ones(len(weak), device=x.device)
                )
            with one_sample_is_too_few(client):
                terms = method.client_loss(network, batch, has, round)
            names, stacked = list(terms), torch.stack(list(terms.values()))
            optimiser.step(torch.autograd.grad(stacked.sum(), params, materialize_grads=True))
            values.append(stacked.detach())
            sizes.append(len(y))

    share = torch.tensor(sizes, dtype=values[0].dtype, device=values[0].device) / sum(sizes)
    losses = dict(zip(names, (share @ torch.stack(values)).tolist(), strict=True))
    weights = skeleton.loaded()
    problem = what_is_not_finite(losses, weights)
    if problem:
        return state, None, losses, problem
    trained = TrainedClient(skeleton, weights, data.labelled, task.num_classes)
    upload = method.client_return(trained, has, round)
    kept = optimiser.export() if local.keep_optimiser else {}
    return ClientState(weights, kept, method.client_remember(trained, has, round)), upload, losses, ""


def _gathered(steps: Iterator[Step], data: Samples, skeleton: Skeleton) -> Iterator[tuple[Step, Tensor, Tensor]]:
    """Each step with its samples, which are fetched for many steps at once."""
    while group := list(islice(steps, GATHER)):
        sizes = [len(step.labelled) for step in group]
        x, y = data.take(torch.cat([step.labelled for step in group]))
        yield from zip(group, skeleton.arranged(x).split(sizes), y.split(sizes), strict=True)


def check_trainable(data: ClientData, client: int) -> None:
    if len(data.labelled) == 0:
        raise ProtofedError(f"client {client} has no labelled sample to train on")


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
