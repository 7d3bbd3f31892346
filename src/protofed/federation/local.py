"""One client's round: start from its model, train, return. The plain form, one client at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .. import seeds
from ..bank import PrototypeBank
from ..data.types import ClientData, Samples
from ..errors import ProtofedError
from ..methods.base import Batch, Method, Received
from ..models.base import Output
from ..wire import Bundle

EVAL_BATCH = 512


@dataclass(frozen=True)
class LocalSettings:
    """How a client trains, whatever the method."""

    epochs: int = 1
    batch: int = 8
    optimiser: Literal["sgd", "adam", "rmsprop"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.5
    weight_decay: float = 0.0
    keep_optimiser: bool = False

    def make(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        if self.optimiser == "sgd":
            return torch.optim.SGD(parameters, self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.optimiser == "adam":
            return torch.optim.Adam(parameters, self.lr, weight_decay=self.weight_decay)
        return torch.optim.RMSprop(parameters, self.lr, momentum=self.momentum, weight_decay=self.weight_decay)


class Skeleton:
    """A network's structure, shared by all clients of that architecture; the weights are values kept outside it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.trainable = [name for name, p in module.named_parameters() if p.requires_grad]
        self.dim: int = module.dim  # type: ignore[assignment]

    def initial_weights(self) -> dict[str, Tensor]:
        """Parameters and floating buffers. Integer buffers (a count of batches) carry nothing that is used."""
        state = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: v.detach().clone() for name, v in state.items() if v.is_floating_point()}

    def outputs(self, weights: Mapping[str, Tensor], x: Tensor) -> Output:
        """Eval mode, no gradient, in pieces."""
        self.module.eval()
        with torch.no_grad():
            parts = [functional_call(self.module, dict(weights), (piece,)) for piece in x.split(EVAL_BATCH)]
        return Output(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


class TrainingNetwork:
    """The model in training as a method sees it."""

    def __init__(self, skeleton: Skeleton, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        self.skeleton, self.params, self.buffers = skeleton, params, buffers

    def __call__(self, x: Tensor, params: Mapping[str, Tensor] | None = None) -> Output:
        chosen = self.params if params is None else params
        return functional_call(self.skeleton.module, {**self.buffers, **chosen}, (x,))


@dataclass(frozen=True)
class TrainedClient:
    """A client after training; embeddings are computed when a method asks for them."""

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
        return self.skeleton.outputs(self.weights, x), Batch(x, y, torch.ones(len(y)))

    def outputs(self) -> tuple[Output, Batch]:
        return self._outputs

    def bank(self) -> PrototypeBank:
        output, batch = self._outputs
        return PrototypeBank.from_embeddings(output.embedding, batch.y, self.num_classes, batch.weight)


@dataclass
class ClientState:
    """What a client keeps between rounds."""

    weights: dict[str, Tensor]
    optimiser: dict[str, Tensor] = field(default_factory=dict)
    memory: Bundle = field(default_factory=Bundle)


@dataclass(frozen=True)
class Outcome:
    """What became of one client's round. `failure` says why there is no upload."""

    upload: Bundle | None
    num_samples: int
    terms: Mapping[str, float]
    failure: str = ""

    @property
    def loss(self) -> float:
        return sum(self.terms.values())


def train_client(
    method: Method,
    skeleton: Skeleton,
    state: ClientState,
    data: ClientData,
    received: Bundle,
    *,
    client: int,
    round: int,
    local: LocalSettings,
    seed: int,
    num_classes: int,
) -> tuple[ClientState, Outcome]:
    """The client's new state and what it returns; where training went to NaN, its old state and a failure."""
    if len(data.labelled) == 0:
        raise ProtofedError(f"client {client} has no labelled sample to train on")
    holds = Received(received.bank, received.banks, received.weights, received.tensors, received.scalars, state.memory)
    weights = {k: v.detach().clone() for k, v in method.client_start(state.weights, holds).items()}
    params = {name: weights[name].requires_grad_() for name in skeleton.trainable}
    buffers = {name: v for name, v in weights.items() if name not in params}
    optimiser = local.make(list(params.values()))
    if local.keep_optimiser and state.optimiser:
        _restore_optimiser(optimiser, state.optimiser)
    network = TrainingNetwork(skeleton, params, buffers)
    skeleton.module.train()

    totals: dict[str, Tensor] = {}
    seen = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.derive(seed, "dropout", client, round))
        order = seeds.torch_stream(seed, "batches", client, round)
        views = seeds.torch_stream(seed, "views", client, round)
        pool = data.unlabelled
        for step in method.steps(data.labelled.labels, len(pool or ()), local.epochs, local.batch, order):
            x, y = data.labelled.take(step.labelled)
            batch = Batch(x, y, torch.ones(len(y)))
            if pool is not None and step.unlabelled is not None:
                weak, strong = method.views(pool.take(step.unlabelled), views)
                batch = batch._replace(weak=weak, strong=strong, unlabelled_weight=torch.ones(len(weak)))
            try:
                terms = method.client_loss(network, batch, holds, round)
            except ValueError as error:
                if "more than 1 value per channel" in str(error):
                    raise ProtofedError(
                        f"client {client} has one training sample, and batch norm needs two: "
                        "give it more data or choose a model without batch norm"
                    ) from None
                raise
            optimiser.zero_grad(set_to_none=True)
            torch.stack(list(terms.values())).sum().backward()
            optimiser.step()
            for name, value in terms.items():
                totals[name] = totals.get(name, torch.zeros(())) + value.detach() * len(y)
            seen += len(y)

    losses = {name: float(value) / seen for name, value in totals.items()}
    trained = {name: v.detach() for name, v in {**buffers, **params}.items()}
    broken = next((name for name, v in trained.items() if not bool(torch.isfinite(v).all())), None)
    bad_loss = next((name for name, v in losses.items() if v != v or abs(v) == float("inf")), None)
    if broken is not None or bad_loss is not None:
        what = f"loss term {bad_loss!r}" if bad_loss is not None else f"weight {broken!r}"
        return state, Outcome(None, len(data.labelled), losses, f"{what} became NaN or infinite in training")
    done = TrainedClient(skeleton, trained, data.labelled, num_classes)
    upload = method.client_return(done, holds, round)
    kept = _optimiser_tensors(optimiser) if local.keep_optimiser else {}
    after = ClientState(trained, kept, method.client_remember(done, holds, round))
    return after, Outcome(upload, len(data.labelled), losses)


def _optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimiser.state_dict()["state"]
    return {f"{i}.{key}": v for i, entry in state.items() for key, v in entry.items() if isinstance(v, Tensor)}


def _restore_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value.clone()
    optimiser.load_state_dict({**optimiser.state_dict(), "state": state})
