"""The method interface: what is sent, the client's loss, what is returned, the server's update, how to predict.

A method is a frozen dataclass of its settings and the functions below; the defaults here are those of a client that
learns alone. A method sees tensors, banks and bundles. It does not know which engine runs it, so `client_start`,
`client_loss` and `client_return` must be pure and free of branches on tensor values: the same body runs for one client
and, under `torch.func.vmap`, for a stack of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import aggregate
from ..bank import PrototypeBank
from ..models.base import Levels, Output
from ..registry import Registry
from ..wire import Bundle

View = Literal["none", "weak", "strong"]
BLOCK = 2**16  # numbers that stay in a core's cache
VELOCITY = "velocity/"  # before the names of the server's momentum in its state


class Batch(NamedTuple):
    """One step's samples. `weight` is 1 for a sample and 0 for padding; every loss takes it.

    `x` is the method's `labelled_view` of the labelled samples. `unlabelled` are unlabelled samples as they are, `weak`
    and `strong` the views of them a method asks for by `views`, `unlabelled_weight` their padding mask, `numbers` the
    uniform random numbers it asks for by `random_numbers`; absent where a step has no unlabelled samples. `support` is 1
    for the labelled samples of an episode's support set.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    support: Tensor | None = None
    unlabelled: Tensor | None = None
    weak: Tensor | None = None
    strong: Tensor | None = None
    unlabelled_weight: Tensor | None = None
    numbers: Tensor | None = None


class Step(NamedTuple):
    """Row numbers of one training step, into a client's labelled and unlabelled sets.

    `support` says which of the labelled rows are the support set, where the step is an episode.
    """

    labelled: Tensor
    unlabelled: Tensor | None = None
    support: Tensor | None = None


class Pseudo(NamedTuple):
    """A step's pseudo-labels, for the record: the class, whether it was used (0 or 1), and how sure (more is surer).

    They are compared with labels that only the record has; a method never sees these.
    """

    label: Tensor
    accepted: Tensor
    score: Tensor


class Loss(NamedTuple):
    """A step's loss terms by name, and the pseudo-labels behind them."""

    terms: dict[str, Tensor]
    pseudo: Pseudo | None = None


@dataclass(frozen=True)
class Received(Bundle):
    """What a client holds at the start of a round: the server's message, and what it kept for itself."""

    memory: Bundle = field(default_factory=Bundle)


pytree.register_dataclass(Received)


class Network(Protocol):
    """A client's model as a method sees it: call it for `(embedding, logits)`; `params` are what is being trained.

    `network(x, params)` runs the model with other parameters (a helper's, the received ones, a sum of two sets).
    """

    params: Mapping[str, Tensor]

    def __call__(self, x: Tensor, params: Mapping[str, Tensor] | None = None) -> Output: ...

    def levels(self, x: Tensor) -> Levels:
        """Embedding and logits, and a low-level feature of 64 numbers before them."""
        ...

    def frozen(self, x: Tensor, weights: Mapping[str, Tensor]) -> Output:
        """Another model of this architecture (the received one, a helper's) in eval mode, without gradient."""
        ...


class Trained(Protocol):
    """A client after local training: its weights, and its model in eval mode over its whole labelled set."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """Parameters and floating buffers."""
        ...

    @property
    def num_samples(self) -> Tensor: ...

    @property
    def num_unlabelled(self) -> int: ...

    def bank(self) -> PrototypeBank:
        """Class means of the embeddings of the labelled set."""
        ...

    def outputs(self) -> tuple[Output, Batch]:
        """Embeddings and logits of the labelled set, and the set itself."""
        ...

    def low_bank(self) -> PrototypeBank:
        """Class means of the low-level features of the labelled set."""
        ...

    def unlabelled(self, view: View = "none", weights: Mapping[str, Tensor] | None = None) -> Output:
        """Embeddings and logits of the unlabelled set, or of a view of it; by other `weights` where given (the received
        ones)."""
        ...

    def run(self, x: Tensor) -> Output:
        """Embeddings and logits of any samples."""
        ...

    @property
    def generator(self) -> torch.Generator:
        """A random stream of this client's own for what it returns."""
        ...


@dataclass(frozen=True)
class Setup:
    """What a server knows before the first round. `client_sizes` counts the samples each client trains on.

    Where clients have different architectures, names of weights (here, in the server's state and in uploads) begin with
    the architecture's number, `"2:head.weight"`; a client sees its own without it.
    """

    num_classes: int
    dim: int
    client_sizes: tuple[int, ...]
    weights: Mapping[str, Tensor]  # the initial models' trained parameters and floating buffers
    seed: int
    architectures: tuple[int, ...] = ()  # the number of each client's

    @property
    def num_clients(self) -> int:
        return len(self.client_sizes)


class Upload(NamedTuple):
    """What one client returned."""

    client: int
    num_samples: int
    content: Bundle


@dataclass(frozen=True)
class Method:
    """The settings of a method are the fields of its dataclass."""

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    travels: ClassVar[tuple[str, ...]] = ()
    """Which parts of a `Bundle` are exchanged: `"bank"`, `"weights"`, `"banks.NAME"`, `"tensors.NAME"`, `"scalars.NAME"`."""
    required: ClassVar[tuple[str, ...]] = ()
    """Which of those every upload must hold; one without is dropped."""
    private_model: ClassVar[bool] = True
    """Whether each client keeps a model of its own between rounds (and is evaluated by it)."""
    projection: ClassVar[Literal["none", "consensus"]] = "none"
    """What stands between encoder and head unless the settings say otherwise: FedPAGR's consensus head, or nothing."""
    predicts: ClassVar[Literal["head", "prototype"]] = "head"
    """How the method's paper predicts. The other way is measured beside it, unless there is no trained head."""
    trains_head: ClassVar[bool] = True
    reads_unlabelled: ClassVar[bool] = False
    """Whether clients train on unlabelled samples too; these then count in a client's size."""
    needs_labels: ClassVar[bool] = True
    """Whether a client without a labelled sample cannot train."""
    asks_clients: ClassVar[bool] = True
    """Whether clients take part in rounds at all; a server that learns alone asks none."""
    views: ClassVar[tuple[View, ...]] = ()
    """Which views of unlabelled samples a step is given: `"weak"`, `"strong"`."""
    labelled_view: ClassVar[View] = "none"
    """Which view of labelled samples a step is given."""
    random_numbers: ClassVar[int] = 0
    """How many uniform random numbers a step is given for each unlabelled sample."""

    # --- server -------------------------------------------------------------------------------------------------
    def server_start(self, setup: Setup) -> Bundle:
        """The server's state before the first round."""
        return Bundle()

    def send(self, state: Bundle, client: int, round: int) -> Bundle:
        """What a client is sent at the start of a round. Return the same object to all to send the same to all."""
        return Bundle()

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        """The state after a round. `uploads` is never empty; a round nobody returned from changes nothing."""
        return state

    @property
    def server_training_epochs(self) -> int:
        """Epochs the server trains on its own labels, before the first round and after each; 0: it does not train."""
        return 0

    server_view: ClassVar[View] = "none"
    """Which view of its labelled samples the server trains on."""

    def server_loss(self, network: Network, batch: Batch, state: Bundle, round: int) -> dict[str, Tensor] | Loss:
        """The terms of the server's own loss. Its model starts from the state's weights."""
        raise TypeError(f"{type(self).__name__} defines no server_loss")

    def server_trained(self, state: Bundle, trained: Trained, round: int) -> Bundle:
        """The state after the server's own training, from which clients are then sent something."""
        return replace(state, weights={**state.weights, **trained.weights})

    def measures(self, state: Bundle, round: int) -> Mapping[str, float]:
        """Numbers about the server's state that belong in the record of each round (a threshold, a phase)."""
        return {}

    def closing_note(self, state: Bundle, rounds: int) -> str:
        """What whoever reads the result must know of how the run went (a phase that never began); empty: nothing."""
        return ""

    def bank_shapes(self, setup: Setup) -> Mapping[str, tuple[int | None, ...]]:
        """Shapes of uploaded banks that are not `[C, d]`, by name (`""` is the main one); None stands for any size."""
        return {}

    def tensor_shapes(self, setup: Setup) -> Mapping[str, tuple[int, ...]]:
        """Shapes of uploaded `tensors`, by name; one of another shape is dropped with its client."""
        return {}

    def client_banks(self, state: Bundle) -> PrototypeBank | None:
        """Every client's last prototypes `[N, C, d]`, where the server keeps them: for choosing diverse clients."""
        return None

    # --- client -------------------------------------------------------------------------------------------------
    def client_start(self, weights: Mapping[str, Tensor], received: Received) -> Mapping[str, Tensor]:
        """The model a client trains from: received weights where there are any, else its own."""
        return {**weights, **received.weights}

    def expand(self, weights: Mapping[str, Tensor], parameters: Collection[str]) -> Mapping[str, Tensor]:
        """All that is trained and kept for a model, made from a new one: more than its weights for FedMatch, which splits
        each of its `parameters` into two. Names beyond the model's are parameters too."""
        return weights

    def collapse(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The model that expanded weights stand for. Elementwise, as it is also called with stacks."""
        return weights

    def steps(
        self, labels: Tensor, num_unlabelled: int, epochs: int, batch: int, round: int, generator: torch.Generator
    ) -> Iterator[Step]:
        """The rows of each training step: whole epochs over the labelled set, shuffled anew each time."""
        for rows in epoch_rows(len(labels), epochs, batch, generator):
            yield Step(rows)

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> dict[str, Tensor] | Loss:
        """The terms of the loss by name; their sum is minimised. With pseudo-labels, a `Loss` that names them."""
        raise TypeError(f"{type(self).__name__} defines no client_loss")

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        """What a client returns after local training."""
        return Bundle()

    def client_remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        """What a client keeps for itself until its next round, beside its model."""
        return received.memory

    # --- prediction ---------------------------------------------------------------------------------------------
    @property
    def tuning_epochs(self) -> int:
        """Epochs a client trains what it is sent on its own data before it is evaluated; they change no state."""
        return 0

    def evaluation_bank(self, state: Bundle, own: PrototypeBank) -> PrototypeBank:
        """The bank for nearest-prototype prediction: the global one where a class has one, else the client's own.

        It may be a stack of banks, where `prototype_scores` knows what to do with one.
        """
        return own if state.bank is None else state.bank.filled_from(own)

    def prototype_scores(self, z: Tensor, bank: PrototypeBank) -> Tensor:
        """`[n, C]` scores, highest wins, −∞ where the bank knows no class; their softmax votes in an ensemble."""
        return -bank.distances(z)


@dataclass(frozen=True)
class SharedBank(Method):
    """For methods whose server holds one bank and sends it to all: starts empty, and banks come back."""

    travels: ClassVar[tuple[str, ...]] = ("bank",)
    required: ClassVar[tuple[str, ...]] = ("bank",)

    def server_start(self, setup: Setup) -> Bundle:
        return Bundle(bank=PrototypeBank.empty(setup.num_classes, setup.dim))

    def send(self, state: Bundle, client: int, round: int) -> Bundle:
        return state

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        return Bundle(bank=trained.bank())


@dataclass(frozen=True)
class SharedModel(Method):
    """For methods with one model for all: it is sent to all, and comes back to be averaged by sample count."""

    travels: ClassVar[tuple[str, ...]] = ("weights",)
    required: ClassVar[tuple[str, ...]] = ("weights",)
    private_model: ClassVar[bool] = False

    def server_start(self, setup: Setup) -> Bundle:
        return Bundle(weights=setup.weights)

    def send(self, state: Bundle, client: int, round: int) -> Bundle:
        return state

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        return Bundle(weights=trained.weights)

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        return replace(state, weights={**state.weights, **weighted_average(uploads)})


registry: Registry[Method] = Registry("method")
register = registry.register


def epoch_rows(n: int, epochs: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Shuffled batches. A last batch of one sample joins the one before it: batch norm cannot train on one."""
    for _ in range(epochs):
        rows = list(torch.randperm(n, generator=generator).split(batch))
        if batch > 1 and len(rows) > 1 and len(rows[-1]) == 1:
            rows[-2:] = [torch.cat(rows[-2:])]
        yield from rows


def paired_epochs(
    labelled: int, unlabelled: int, epochs: int, batch: int, generator: torch.Generator
) -> Iterator[Step]:
    """Whole epochs over both sets: as many steps as the labelled set gives, the unlabelled set dealt evenly to them.

    A set with fewer samples than there are steps is gone through several times; an empty one takes no part.
    """
    for _ in range(epochs):
        own = list(epoch_rows(labelled, 1, batch, generator))
        if not unlabelled:
            yield from (Step(rows) for rows in own)
            continue
        pool = torch.randperm(unlabelled, generator=generator)
        pool = pool.repeat(-(-len(own) // unlabelled))
        for rows, more in zip(own, pool.tensor_split(len(own)), strict=True):
            yield Step(rows, more)


def unlabelled_epochs(unlabelled: int, epochs: int, batch: int, generator: torch.Generator) -> Iterator[Step]:
    """Whole epochs over the unlabelled set alone, where the labels are at the server."""
    none = torch.zeros(0, dtype=torch.int64)
    return (Step(none, rows) for rows in epoch_rows(unlabelled, epochs, batch, generator))


def bank_of(bundle: Bundle) -> PrototypeBank:
    """The bundle's bank, where the method's own protocol says there is one."""
    if bundle.bank is None:
        raise ValueError("this bundle has no bank")
    return bundle.bank


def uploaded_banks(uploads: Sequence[Upload]) -> PrototypeBank:
    """The clients' banks as one stack."""
    return PrototypeBank.stack([bank_of(u.content) for u in uploads])


def weighted_average(uploads: Sequence[Upload], shares: Sequence[float] | None = None) -> dict[str, Tensor]:
    """Weights averaged by the clients' sample counts (or `shares`), each over the clients whose model has it.

    Summed in float64 so that the order of clients hardly matters.
    """
    shares = [u.num_samples for u in uploads] if shares is None else shares
    sums: dict[str, Tensor] = {}
    totals: dict[str, float] = {}
    for upload, share in zip(uploads, shares, strict=True):
        for name, value in upload.content.weights.items():
            if name not in sums:
                sums[name], totals[name] = torch.zeros(value.shape, dtype=torch.float64), 0.0
            totals[name] += share
    for name, total in sums.items():
        there = [
            (u.content.weights[name], s) for u, s in zip(uploads, shares, strict=True) if name in u.content.weights
        ]
        pieces = [(value.reshape(-1).split(BLOCK), share / totals[name]) for value, share in there]
        for place, part in enumerate(
            total.view(-1).split(BLOCK)
        ):  # a part stays in the cache while all are added to it
            for values, share in pieces:
                part.add_(values[place], alpha=share)
    kinds = {name: value.dtype for upload in uploads for name, value in upload.content.weights.items()}
    return {name: total.to(kinds[name]) for name, total in sums.items()}


def moved(state: Bundle, average: Mapping[str, Tensor], momentum: float) -> Bundle:
    """The state after a step of SGD (learning rate 1) from its weights to the clients' average; it keeps the velocity."""
    velocity = {n.removeprefix(VELOCITY): v for n, v in state.tensors.items() if n.startswith(VELOCITY)}
    weights, velocity = aggregate.with_momentum(state.weights, average, velocity, momentum)
    kept = {VELOCITY + name: value for name, value in velocity.items()}
    return replace(state, weights={**state.weights, **weights}, tensors={**state.tensors, **kept})
