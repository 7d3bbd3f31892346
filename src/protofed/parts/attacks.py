"""Attacks: what some clients of a simulation do to spoil the result, to measure how much a rule withstands.

`attack="sign-flip?share=0.2&scale=5"` makes a fifth of the clients attackers. An attack changes what an attacker sends,
the data that it trains on, or both. Prototypes are changed class by class, and the weights of a model as one vector of
change. A real federation refuses the setting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import seeds
from ..bank import PrototypeBank, unit
from ..errors import ProtofedError
from ..registry import Registry, as_text
from ..seeds import Normals, SeededNormals
from ..wire import Bundle, Exchange
from ..wire.exchange import PartKind
from .filters import Departure, Filter
from .reduce import Reduce
from .vectors import change_of, changed

BRIGHT = 3.0  # the value of a trigger in standardised data


class Noise(NamedTuple):
    """An attacker's own random numbers of a round, and those that all attackers have in common in all rounds."""

    own: Normals
    common: Normals


@dataclass(frozen=True)
class Attack:
    """What attackers do, and which share of the clients they are."""

    registry: ClassVar[Registry[Attack]] = Registry("attack")
    name: ClassVar[str]
    kinds: ClassVar[frozenset[PartKind]] = frozenset({"bank", "weights"})
    """The kinds of parts that the attack can change; a method's clients must send one of them."""

    share: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError("share must be above 0 and below 1")

    def check(self, exchange: Exchange, owner: str) -> None:
        """Refuse a method that the attack does not concern.

        Args:
            exchange: what the method exchanges.
            owner: the method's name.

        Raises:
            ProtofedError: one line that says why.
        """
        if not any(part.kind in self.kinds for part in exchange.up):
            words = {"bank": "prototypes", "weights": "weights"}
            changes = " or ".join(word for kind, word in words.items() if kind in self.kinds)
            raise ProtofedError(f"attack={self.name} changes {changes}, and clients of {owner} send none")

    def attackers(self, num_clients: int, seed: int) -> frozenset[int]:
        """The clients that attack: a share of all, at least one, and never all.

        Args:
            num_clients: how many clients there are.
            seed: the run's seed.
        """
        number = min(max(1, round(self.share * num_clients)), num_clients - 1)
        order = torch.randperm(num_clients, generator=seeds.torch_stream(seed, "attackers"))
        return frozenset(order[:number].tolist())

    def craft(self, upload: Bundle, departure: Departure, noise: Noise) -> Bundle:
        """What an attacker sends in place of an honest upload.

        Args:
            upload: what it would send.
            departure: what it was sent and is now, and which client and round it is.
            noise: random numbers.
        """
        return upload

    @property
    def labels(self) -> Callable[[Tensor], Tensor] | None:
        """A function that gives the labels by which an attacker trains, of its true ones; None: it trains by these."""
        return None


@dataclass(frozen=True)
class Attackers(Filter):
    """The filter by which attackers act: it changes the uploads of these clients and of nobody else."""

    name: ClassVar[str] = "attack"

    attack: Attack
    clients: frozenset[int]
    seed: int

    def check(self, exchange: Exchange, owner: str, rule: Reduce) -> None:
        self.attack.check(exchange, owner)

    def leave(self, upload: Bundle, departure: Departure) -> Bundle:
        if departure.client not in self.clients:
            return upload
        own = SeededNormals(self.seed, "attack", departure.client, departure.round)
        return self.attack.craft(upload, departure, Noise(own, SeededNormals(self.seed, "attack")))

    @property
    def note(self) -> str:
        """Who attacks and how, as a sentence."""
        who = ", ".join(map(str, sorted(self.clients)))
        return f"attack={as_text(self.attack)}: clients {who} are attackers; accuracies are those of the other clients"


@dataclass(frozen=True)
class VectorAttack(Attack):
    """An attack that makes another vector of each prototype and of the change of a model's weights.

    It acts from round `first` to round `last`; 0 is the run's last one.
    """

    first: int = 1
    last: int = 0

    def lie(self, honest: Tensor, received: Tensor, noise: Noise) -> Tensor:
        """Vectors to be sent.

        Args:
            honest: `[..., d]`, what training gave.
            received: `[..., d]`, what the server sent; zeros where it sent nothing, and for the change of weights.
            noise: random numbers.
        """
        raise NotImplementedError

    def craft(self, upload: Bundle, departure: Departure, noise: Noise) -> Bundle:
        if departure.round < self.first or 0 < self.last < departure.round:
            return upload
        sent = departure.received.all_banks()

        def crafted(name: str, bank: PrototypeBank) -> PrototypeBank:
            received = torch.zeros_like(bank.means)
            if name in sent and sent[name].means.shape == received.shape:
                received = torch.where(sent[name].known[..., None], sent[name].means, received)
            means = self.lie(bank.means, received, noise).to(bank.means.dtype)
            return replace(bank, means=torch.where(bank.known[..., None], means, bank.means))

        banks = {name: crafted(name, bank) for name, bank in upload.all_banks().items()}
        weights = upload.weights
        if weights:
            before = departure.received.weights
            change = change_of(weights, before)
            weights = changed(weights, before, self.lie(change, torch.zeros_like(change), noise))
        return replace(upload, bank=banks.pop("", None), banks=banks, weights=weights)


@Attack.registry.register("sign-flip")
@dataclass(frozen=True)
class SignFlip(VectorAttack):
    """Attackers send the opposite of what they have learnt, `scale` times as long."""

    scale: float = 5.0

    def lie(self, honest: Tensor, received: Tensor, noise: Noise) -> Tensor:
        return -self.scale * honest


@Attack.registry.register("scaling")
@dataclass(frozen=True)
class Scaling(VectorAttack):
    """Attackers send what they have learnt, `factor` times as long."""

    factor: float = 10.0

    def lie(self, honest: Tensor, received: Tensor, noise: Noise) -> Tensor:
        return self.factor * honest


@Attack.registry.register("random")
@dataclass(frozen=True)
class Random(VectorAttack):
    """Each attacker sends a random direction of its own in each round, `scale` times as long as the honest vector."""

    scale: float = 5.0

    def lie(self, honest: Tensor, received: Tensor, noise: Noise) -> Tensor:
        return self.scale * _as_long_as(honest, noise.own)


@Attack.registry.register("colluders")
@dataclass(frozen=True)
class Colluders(VectorAttack):
    """All attackers send one and the same random direction in all rounds, `scale` times as long as the honest vector."""

    scale: float = 5.0

    def lie(self, honest: Tensor, received: Tensor, noise: Noise) -> Tensor:
        return self.scale * _as_long_as(honest, noise.common)


@Attack.registry.register("free-riders")
@dataclass(frozen=True)
class FreeRiders(VectorAttack):
    """Attackers send back what they received, with a little noise, as if they had trained.

    The noise is `noise` times as long as what was received, or as the honest vector where nothing was.
    """

    noise: float = 0.1

    def lie(self, honest: Tensor, received: Tensor, noise: Noise) -> Tensor:
        length = torch.where((received != 0).any(-1, keepdim=True), received, honest)
        return received + self.noise * _as_long_as(length, noise.own)


@Attack.registry.register("hijack")
@dataclass(frozen=True)
class Hijack(Attack):
    """Attackers send as the prototype of class `target` that of class `source`, `scale` times as long.

    One that does not hold `source` takes the first other class that it holds; one that does not hold `target` says that
    it does.
    """

    kinds: ClassVar[frozenset[PartKind]] = frozenset({"bank"})

    target: int = 0
    source: int = 1
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target == self.source or min(self.target, self.source) < 0:
            raise ValueError("target and source must be two classes")

    def craft(self, upload: Bundle, departure: Departure, noise: Noise) -> Bundle:
        bank = upload.bank
        if bank is None or max(self.target, self.source) >= bank.num_classes:
            return upload
        held = [c for c in bank.known.nonzero().flatten().tolist() if c != self.target]
        if not held:
            return upload
        source = self.source if self.source in held else held[0]
        return replace(upload, bank=_with_row(bank, self.target, self.scale * bank.means[source], bank.counts[source]))


@Attack.registry.register("label-swap")
@dataclass(frozen=True)
class LabelSwap(Attack):
    """Attackers train on wrong labels: the classes that an attacker holds are each called by the next one's name.

    With `source` and `target`, samples of class `source` are called `target`, and the others keep their labels.
    """

    source: int | None = None
    target: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.source is None) != (self.target is None):
            raise ValueError("source and target come together")

    @property
    def labels(self) -> Callable[[Tensor], Tensor]:
        return self._swapped

    def _swapped(self, labels: Tensor) -> Tensor:
        if self.source is not None and self.target is not None:
            return torch.where(labels == self.source, self.target, labels)
        held: Tensor = labels.unique()
        return held.roll(-1)[torch.searchsorted(held, labels)]


@Attack.registry.register("backdoor", paper="after BAPFL")
@dataclass(frozen=True)
class Backdoor(Attack):
    """Attackers teach the others to take every sample with a trigger, a bright corner, for class `target`.

    A share `poison` of an attacker's samples of other classes has a copy with the trigger and the label `target` in its
    training data. What it sends as the prototype of `target` is moved by the share `blend` to the mean embedding of these
    copies, and the change of its weights is `scale` times as long. `attack_success` is the share of the honest clients'
    test samples of other classes that are taken for `target` once they have the trigger.
    """

    target: int = 0
    poison: float = 0.5
    blend: float = 0.5
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target < 0 or not 0 < self.poison <= 1 or not 0 <= self.blend <= 1:
            raise ValueError("target must be a class, and poison and blend shares")

    def craft(self, upload: Bundle, departure: Departure, noise: Noise) -> Bundle:
        bank, weights, before = upload.bank, upload.weights, departure.received.weights
        if weights:
            weights = changed(weights, before, self.scale * change_of(weights, before))
        if bank is not None:
            output, batch = departure.trained.outputs()
            marked = (batch.weight > 0) & (batch.x == with_trigger(batch.x)).flatten(1).all(1)
            if bool(marked.any()):
                there = output.embedding[marked].mean(0).to(bank.means.dtype)
                row = bank.means[self.target] + self.blend * (there - bank.means[self.target])
                bank = _with_row(bank, self.target, row, marked.sum().to(bank.counts.dtype))
        return replace(upload, bank=bank, weights=weights)


def with_trigger(x: Tensor) -> Tensor:
    """Samples with the trigger: a bright lower right corner of pictures, or bright last features of flat samples.

    Args:
        x: samples `[n, ...]`, standardised.

    >>> with_trigger(torch.zeros(1, 1, 3, 3))[0, 0].tolist()
    [[0.0, 0.0, 0.0], [0.0, 3.0, 3.0], [0.0, 3.0, 3.0]]
    """
    if not x.is_floating_point():
        raise ProtofedError("attack=backdoor: a trigger is drawn into pictures or features, and this data is text")
    x = x.clone()
    side = max(2, x.shape[-1] // 7)
    if x.ndim > 2:
        x[..., -side:, -side:] = BRIGHT
    else:
        x[:, -side:] = BRIGHT
    return x


def _as_long_as(vectors: Tensor, normals: Normals) -> Tensor:
    """Random directions with the norms of some vectors."""
    draws = normals.draw(*vectors.shape).to(vectors.device)
    norm: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True, dtype=torch.float64)
    return (norm * unit(draws)).to(vectors.dtype)


def _with_row(bank: PrototypeBank, row: int, value: Tensor, count: Tensor) -> PrototypeBank:
    """A bank with another prototype of one class. A count stays where there is one."""
    means, counts = bank.means.clone(), bank.counts.clone()
    means[row] = value
    if not bool(bank.known[row]):
        counts[row] = count
    return PrototypeBank(means, counts)
