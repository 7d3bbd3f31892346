"""Loss terms as parts: each is a named unit with a weight that may follow a schedule over the rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from .. import losses
from ..models.base import Levels, Output
from ..registry import Registry
from ..schedules import Weight, weight_at
from .feed import Batch
from .received import Received, bank_of


class Parameters(Protocol):
    """A network, of which a term sees the parameters."""

    @property
    def params(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class Term:
    """One term of a client's loss: `weight · loss`, by name."""

    registry: ClassVar[Registry[Term]] = Registry("term")
    name: ClassVar[str]
    key: ClassVar[str] = ""
    """What the record calls the term, where that is not its name."""
    reads: ClassVar[tuple[str, ...]] = ("bank",)
    """The parts of the server's message that the loss needs."""

    weight: Weight = 1.0

    def __call__(
        self, net: Parameters, output: Output | Levels, batch: Batch, received: Received, round: int
    ) -> dict[str, Tensor]:
        """The weighted loss of one step, under the name that the record has for it."""
        weight, loss = weight_at(self.weight, round), self.loss(net, output, batch, received)
        return {self.key or self.name: loss if weight == 1 else weight * loss}

    def loss(self, net: Parameters, output: Output | Levels, batch: Batch, received: Received) -> Tensor:
        """The loss without its weight."""
        raise NotImplementedError


def terms_of(
    parts: tuple[Term, ...], net: Parameters, output: Output | Levels, batch: Batch, received: Received, round: int
) -> dict[str, Tensor]:
    """Several terms of one forward pass.

    Args:
        parts: the terms.
        net: the network.
        output: what the network gave for the batch.
        batch: the step's samples.
        received: what the client was sent.
        round: the round, counted from 1.

    Returns:
        the weighted losses by name.
    """
    return {name: value for part in parts for name, value in part(net, output, batch, received, round).items()}


@Term.registry.register("ce")
@dataclass(frozen=True)
class CE(Term):
    """Cross-entropy of the classifier head."""

    reads: ClassVar[tuple[str, ...]] = ()

    def loss(self, net: Parameters, output: Output | Levels, batch: Batch, received: Received) -> Tensor:
        return losses.cross_entropy(output.logits, batch.y, weight=batch.weight)


@Term.registry.register("align")
@dataclass(frozen=True)
class Align(Term):
    """Squared distance to the received prototype of the sample's class."""

    reduction: Literal["mean", "sum"] = "mean"  # over the dimensions

    def loss(self, net: Parameters, output: Output | Levels, batch: Batch, received: Received) -> Tensor:
        return losses.alignment(output.embedding, batch.y, bank_of(received), self.reduction, weight=batch.weight)


@Term.registry.register("proxy")
@dataclass(frozen=True)
class Proxy(Term):
    """Softmax over scaled cosines with the received prototypes, which holds the classes apart."""

    scale: float = 32.0

    def loss(self, net: Parameters, output: Output | Levels, batch: Batch, received: Received) -> Tensor:
        return losses.proxy(output.embedding, batch.y, bank_of(received), self.scale, weight=batch.weight)


@Term.registry.register("contrast")
@dataclass(frozen=True)
class Contrast(Term):
    """Cross-entropy over cosines with the received prototypes, divided by a temperature."""

    key: ClassVar[str] = "global"

    temperature: float = 0.5

    def loss(self, net: Parameters, output: Output | Levels, batch: Batch, received: Received) -> Tensor:
        bank = bank_of(received)
        return losses.prototype_cross_entropy(output.embedding, batch.y, bank, self.temperature, weight=batch.weight)


@Term.registry.register("spread")
@dataclass(frozen=True)
class Spread(Term):
    """Uniformity of the prediction by prototypes, which holds embeddings back from collapse."""

    key: ClassVar[str] = "entropy"

    temperature: float = 0.1

    def loss(self, net: Parameters, output: Output | Levels, batch: Batch, received: Received) -> Tensor:
        return losses.uniformity(output.embedding, bank_of(received), self.temperature, weight=batch.weight)


@Term.registry.register("peers")
@dataclass(frozen=True)
class Peers(Term):
    """Contrast with every client's prototypes: those sent as `peers`, and the client's own last ones."""

    key: ClassVar[str] = "clients"
    reads: ClassVar[tuple[str, ...]] = ("bank", "peers")

    temperature: float = 0.5

    def loss(self, net: Parameters, output: Output | Levels, batch: Batch, received: Received) -> Tensor:
        peers, own_bank = received.banks["peers"], received.memory.bank
        if own_bank is not None:  # it does not travel; classes that it lacks come from the received bank
            own_bank = own_bank.filled_from(bank_of(received))
        z, y, weight = output.embedding, batch.y, batch.weight
        return losses.peer_contrast(z, y, peers, self.temperature, weight=weight, further=own_bank)


@Term.registry.register("prox")
@dataclass(frozen=True)
class Proximal(Term):
    """Half the squared distance of the parameters to those received."""

    reads: ClassVar[tuple[str, ...]] = ("weights",)

    def loss(self, net: Parameters, output: Output | Levels, batch: Batch, received: Received) -> Tensor:
        return losses.proximal(net.params, received.weights)
