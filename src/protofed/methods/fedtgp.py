"""FedTGP: the server trains the global prototypes as a small network, with a margin between the classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

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

CLASSES, ROWS = 50, 128  # of a piece of the server's network


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
        self.classes = self.network["classes"]
        self.hidden, self.output = torch.empty_like(self.classes), torch.empty_like(self.classes)
        self.square = self.classes.new_empty(len(self.classes))  # of the prototypes' norms
        self.to_output, self.to_hidden = torch.empty_like(self.classes), torch.empty_like(self.classes)
        self.class_pieces = [slice(i, i + CLASSES) for i in range(0, len(self.classes), CLASSES)]
        width = self.classes.shape[1] if len(self.class_pieces) == 1 else ROWS
        self.row_pieces = [slice(i, i + width) for i in range(0, self.classes.shape[1], width)]

    def _forward(self, piece: slice) -> None:
        net, hidden, output = self.network, self.hidden[piece], self.output[piece]
        torch.addmm(net["hidden.bias"], self.classes[piece], net["hidden.weight"].T, out=hidden).relu_()
        torch.addmm(net["output.bias"], hidden, net["output.weight"].T, out=output)
        torch.sum(output * output, -1, out=self.square[piece])

    def prototypes(self) -> Tensor:
        """The prototype of every class."""
        in_pieces(self._forward, self.class_pieces)
        return self.output

    def descend(self, z: Tensor, square: Tensor, member: Tensor, raised: Tensor) -> None:
        """One step of SGD on the cross-entropy over −‖z − p_c‖ with the margin added to the own class's distance.

        Where a distance is 0 its gradient is taken as 0.

        Args:
            z: Clients' prototypes `[n, d]`.
            square: Their squared norms `[n, 1]`.
            member: `[n, C]`, 1 at each prototype's class.
            raised: `[n, C]`, −margin at each prototype's class and −∞ at classes that nobody knows.
        """
        p = self.prototypes()
        square = torch.addmm(square, z, p.T, alpha=-2).add_(self.square)
        distance = square.clamp_min(TINY).sqrt_()
        pull = (member - (raised - distance).softmax(-1)).div_(distance).masked_fill_(square <= TINY, 0.0).div_(len(z))
        steps = in_pieces(lambda piece: self._backward(piece, pull[:, piece], z), self.class_pieces)
        in_pieces(self._change, self.row_pieces)
        for piece, step in zip(self.class_pieces, steps, strict=True):
            self.classes[piece].sub_(step, alpha=self.lr)

    def _backward(self, piece: slice, pull: Tensor, z: Tensor) -> Tensor:
        """The gradient by the classes' embeddings, from how strongly each z pulls each prototype."""
        to_output, to_hidden = self.to_output[piece], self.to_hidden[piece]
        torch.addmm(self.output[piece] * pull.sum(0)[:, None], pull.T, z, alpha=-1, out=to_output)
        torch.mm(to_output, self.network["output.weight"], out=to_hidden)
        to_hidden.mul_(self.hidden[piece] > 0)
        return to_hidden @ self.network["hidden.weight"]

    def _change(self, piece: slice) -> None:
        layers = ("output", self.to_output, self.hidden), ("hidden", self.to_hidden, self.classes)
        for layer, gradient, inputs in layers:
            self.network[f"{layer}.weight"][piece].addmm_(gradient[:, piece].T, inputs, alpha=-self.lr)
            self.network[f"{layer}.bias"][piece].sub_(gradient[:, piece].sum(0), alpha=self.lr)
