"""FedTGP: the server trains the global prototypes as a small network, with a margin between the classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from .. import aggregate, seeds
from ..bank import TINY, PrototypeBank
from ..parts import CE, Align, Batch, Nearest, Predict, Received, Reduced, terms_of
from ..pieces import in_pieces
from ..schedules import Weight
from ..wire import Exchange
from .base import PROTOTYPES, Method, register
from .checks import at_least_one, not_negative
from .client import Network, Terms
from .server import Setup, State, state

CLASSES, ROWS = 50, 256  # of a piece of the server's network, at least


@state
class TrainedPrototypes(State):
    """The prototypes, which are sent, and the network that gives them, which stays at the server."""

    bank: PrototypeBank
    network: Mapping[str, Tensor]


@register("fedtgp", paper="Zhang et al., AAAI 2024")
@dataclass(frozen=True)
class FedTGP(Method):
    """CE + λ·alignment with prototypes the server trains by a margin contrast."""

    exchange: ClassVar[Exchange] = PROTOTYPES
    predict: ClassVar[Predict] = Nearest()

    weight: Weight = 10.0  # λ; the unit of distance is the mean squared difference over dimensions
    server_lr: float = 0.01
    server_epochs: int = 100
    server_batch: int = 10
    max_margin: float = 100.0

    def __post_init__(self) -> None:
        not_negative(self, "weight", "max_margin")
        at_least_one(self, "server_epochs", "server_batch")
        if self.server_lr <= 0:
            raise ValueError("server_lr must be above 0")

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms:
        return terms_of((CE(), Align(self.weight)), net, net(batch.x), batch, received, round)

    def start(self, setup: Setup) -> TrainedPrototypes:
        stream = seeds.torch_stream(setup.seed, "server")
        d = setup.dim
        width: float = d**0.5

        def uniform(*shape: int) -> Tensor:
            return (2 * torch.rand(*shape, generator=stream) - 1) / width

        network = {
            "classes": torch.randn(setup.num_classes, d, generator=stream),
            "hidden.weight": uniform(d, d),
            "hidden.bias": uniform(d),
            "output.weight": uniform(d, d),
            "output.bias": uniform(d),
        }
        return TrainedPrototypes(PrototypeBank.empty(setup.num_classes, d), network)

    def update(self, state: TrainedPrototypes, reduced: Reduced, round: int, setup: Setup) -> TrainedPrototypes:
        banks = reduced.uploaded_banks
        average = aggregate.mean(banks)
        margin = aggregate.margin(average, self.max_margin)
        counts = average.filled_from(state.bank).counts  # a class once reported stays known
        z, y = banks.means[banks.known], banks.known.nonzero()[:, 1]
        generator = Generator(state.network, self.server_lr)
        share = one_hot(y, setup.num_classes).to(z.dtype)
        raised = torch.where(counts > 0, -margin * share, -float("inf"))  # the logits' part that does not change
        square = (z * z).sum(-1, keepdim=True)
        stream = seeds.torch_stream(setup.seed, "server", round)
        for _ in range(self.server_epochs):
            order = torch.randperm(len(y), generator=stream)
            columns = (tensor[order].split(self.server_batch) for tensor in (z, square, share, raised))
            for batch in zip(*columns, strict=True):
                generator.descend(*batch)
        bank = PrototypeBank(generator.prototypes(), counts).restricted(counts > 0)
        return TrainedPrototypes(bank, generator.network)


class ClassPiece(NamedTuple):
    """Some classes of a generator: views of their rows."""

    classes: Tensor
    hidden: Tensor
    output: Tensor
    square: Tensor  # of the prototypes' norms
    to_output: Tensor
    to_hidden: Tensor


class RowPiece(NamedTuple):
    """Some rows of one layer of a generator: views of what they are changed by."""

    weight: Tensor
    bias: Tensor
    gradient: Tensor  # [C, rows], by the layer's outputs
    inputs: Tensor


class Generator:
    """The server's network, which gives a prototype for every class from an embedding of it, in training.

    A round is thousands of small steps, so the gradient is in closed form and weights change in place. Forward and
    backward pass go in pieces of classes, and the change of the weights in pieces of their rows.
    """

    def __init__(self, network: Mapping[str, Tensor], lr: float) -> None:
        """
        Args:
            network: The weights by name, which stay as they are.
            lr: The learning rate of a step.
        """
        self.network = {name: value.clone() for name, value in network.items()}
        self.lr = lr
        classes = self.network["classes"]
        hidden, self.output, to_output, to_hidden = (torch.empty_like(classes) for _ in range(4))
        self.square = classes.new_empty(len(classes))
        by_class = (classes, hidden, self.output, self.square, to_output, to_hidden)
        self.number = max(1, len(classes) // CLASSES)
        self.pieces = [ClassPiece(*columns) for columns in zip(*(t.chunk(self.number) for t in by_class), strict=True)]
        rows = ROWS if len(self.pieces) > 1 else classes.shape[1]
        self.row_pieces = [
            RowPiece(weight, bias, gradient, inputs)
            for layer, by_output, inputs in (("output", to_output, hidden), ("hidden", to_hidden, classes))
            for weight, bias, gradient in zip(
                self.network[f"{layer}.weight"].split(rows),
                self.network[f"{layer}.bias"].split(rows),
                by_output.split(rows, dim=1),
                strict=True,
            )
        ]

    def prototypes(self) -> Tensor:
        """The prototype of every class."""
        in_pieces(self._forward, self.pieces)
        return self.output

    def _forward(self, piece: ClassPiece) -> None:
        net = self.network
        torch.addmm(net["hidden.bias"], piece.classes, net["hidden.weight"].T, out=piece.hidden).relu_()
        torch.addmm(net["output.bias"], piece.hidden, net["output.weight"].T, out=piece.output)
        torch.sum(piece.output * piece.output, -1, out=piece.square)

    def descend(self, z: Tensor, square: Tensor, member: Tensor, raised: Tensor) -> None:
        """One step of SGD on the cross-entropy over −‖z − p_c‖ with the margin added to the own class's distance.

        Where a distance is 0 its gradient is taken as 0.

        Args:
            z: Clients' prototypes `[n, d]`.
            square: Their squared norms `[n, 1]`.
            member: `[n, C]`, 1 at each prototype's class.
            raised: `[n, C]`, −margin at each prototype's class and −∞ at classes that nobody knows.
        """
        square = torch.addmm(square, z, self.prototypes().T, alpha=-2).add_(self.square)
        distance = square.clamp_min(TINY).sqrt_()
        pull = (member - (raised - distance).softmax(-1)).div_(distance).masked_fill_(square <= TINY, 0.0).div_(len(z))
        pulls = zip(self.pieces, pull.chunk(self.number, dim=1), strict=True)
        steps = in_pieces(lambda pair: self._backward(*pair, z), list(pulls))
        if len(self.pieces) > 1:
            in_pieces(self._change, self.row_pieces)
        else:  # too little for another core
            for rows in self.row_pieces:
                self._change(rows)
        for piece, step in zip(self.pieces, steps, strict=True):
            piece.classes.sub_(step, alpha=self.lr)

    def _backward(self, piece: ClassPiece, pull: Tensor, z: Tensor) -> Tensor:
        """The gradient by the classes' embeddings, from how strongly each z pulls each prototype."""
        torch.addmm(piece.output * pull.sum(0)[:, None], pull.T, z, alpha=-1, out=piece.to_output)
        torch.mm(piece.to_output, self.network["output.weight"], out=piece.to_hidden)
        piece.to_hidden.mul_(piece.hidden > 0)
        return piece.to_hidden @ self.network["hidden.weight"]

    def _change(self, piece: RowPiece) -> None:
        piece.weight.addmm_(piece.gradient.T, piece.inputs, alpha=-self.lr)
        piece.bias.sub_(piece.gradient.sum(0), alpha=self.lr)
