"""Filters around the wire: what leaves a client may be bounded or compressed (`compression.py`), whatever the method.

`filters=["clip?norm=1", "quantise?bits=8"]` applies them in that order at the client; the server undoes in reverse order
what can be undone, before anything is checked or reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch

from ..bank import PrototypeBank
from ..errors import ProtofedError
from ..models.base import Output
from ..registry import Registry
from ..seeds import Normals
from ..wire import Bundle, Exchange
from .feed import Batch
from .received import Received
from .reduce import Reduce, Reduced, Sums


class TrainedOutputs(Protocol):
    """A client after training, as far as a filter sees it."""

    def outputs(self) -> tuple[Output, Batch]:
        """Embeddings and logits of the labelled samples, and these as one batch."""
        ...


@dataclass(frozen=True)
class Departure:
    """What a filter knows at a client, beside the upload that is about to leave."""

    client: int
    round: int
    received: Received
    trained: TrainedOutputs
    rule: Reduce
    normals: Normals
    """The client's own noise: from the seed in a simulation, from the operating system at a real site."""


@dataclass(frozen=True)
class Arrival:
    """What a filter knows at the server, when all uploads of a round have been summed."""

    round: int
    normals: Normals


@dataclass(frozen=True)
class Filter:
    """What is done to every upload, whatever the method."""

    registry: ClassVar[Registry[Filter]] = Registry("filter")
    name: ClassVar[str]
    setting: ClassVar[str] = "filters"
    """The setting by which it is chosen, for errors."""

    guarded: ClassVar[bool] = True
    """Whether the server can read each upload, so that its guard may judge it; false where an upload is masked or noisy."""

    stage: ClassVar[int] = 0
    """The place of the filter: 0 where it leaves the form of an upload, 1 where it leaves out, 2 where it shortens."""

    def check(self, exchange: Exchange, owner: str, rule: Reduce) -> None:
        """Refuse a method for which the filter makes no sense.

        Args:
            exchange: what the method exchanges.
            owner: the method's name.
            rule: how the method reduces uploads.

        Raises:
            ProtofedError: one line that says why.
        """
        if not exchange.up:
            raise ProtofedError(
                f"{self.setting}: {self.name} acts on what clients send, and clients of {owner} send nothing"
            )

    def rule(self, rule: Reduce) -> Reduce:
        """The rule by which the server reduces uploads that went through this filter; by default the method's own."""
        return rule

    def leave(self, upload: Bundle, departure: Departure) -> Bundle:
        """Change an upload at the client, before it is encoded.

        Args:
            upload: what the client returns.
            departure: what the client was sent and is now, and which client and round it is.

        Returns:
            what is sent instead.
        """
        return upload

    def restore(self, upload: Bundle, source: str, sent: Bundle) -> Bundle:
        """Undo at the server what can be undone, for each upload and before it is checked.

        Args:
            upload: what arrived.
            source: the sender's name, for errors.
            sent: what the server sent to this client at the start of the round.

        Returns:
            the upload as the method returned it, as far as possible.
        """
        return upload

    def inspect(self, upload: Bundle, source: str, sent: Bundle, rule: Reduce) -> None:
        """Refuse a restored upload that does not keep to what the filter does at honest clients.

        Args:
            upload: the upload, restored.
            source: the sender's name, for errors.
            sent: what the server sent to this client at the start of the round.
            rule: how uploads are reduced.

        Raises:
            WireError: the client is dropped with this reason.
        """

    def total(self, sums: Sums, arrival: Arrival) -> Sums:
        """Change at the server what the uploads add up to, before the rule makes the result of it.

        Args:
            sums: what the rule has summed.
            arrival: the round, and the server's noise.
        """
        return sums

    def describe(self, rounds: int, exchange: Exchange) -> Mapping[str, float]:
        """What the record of a round says of this filter.

        Args:
            rounds: the number of rounds so far in which the client that took part most often took part.
            exchange: what the method exchanges.

        Returns:
            numbers by name, by default none.
        """
        return {}

    def arrive(self, reduced: Reduced) -> Reduced:
        """Change the reduced uploads at the server."""
        return reduced


@Filter.registry.register("clip")
@dataclass(frozen=True)
class Clip(Filter):
    """Bound the norm of each prototype, and the norm of the change of a shared model's weights. Single numbers pass."""

    norm: float = 1.0

    def __post_init__(self) -> None:
        if not self.norm > 0:
            raise ValueError("norm must be above 0")

    def check(self, exchange: Exchange, owner: str, rule: Reduce) -> None:
        super().check(exchange, owner, rule)
        for part in exchange.up:
            if part.kind == "tensor":
                raise ProtofedError(f"filters: clip bounds prototypes and weights, and {owner} also sends {part.name}")
            if part.kind == "weights" and exchange.keeps_model:
                raise ProtofedError(
                    f"filters: clip bounds the change of a shared model; {owner}'s clients keep their own"
                )

    def leave(self, upload: Bundle, departure: Departure) -> Bundle:
        received = departure.received
        bank = None if upload.bank is None else self._bounded(upload.bank)
        banks = {name: self._bounded(b) for name, b in upload.banks.items()}
        change = {name: value - received.weights[name] for name, value in upload.weights.items()}
        norm = torch.stack([c.double().norm() for c in change.values()]).norm() if change else torch.ones(())
        share = float((self.norm / norm).clamp_max(1.0))
        weights = {n: v if share == 1 else received.weights[n] + share * change[n] for n, v in upload.weights.items()}
        return replace(upload, bank=bank, banks=banks, weights=weights)

    def _bounded(self, bank: PrototypeBank) -> PrototypeBank:
        norms = bank.means.norm(dim=-1, keepdim=True)
        return replace(bank, means=bank.means * (self.norm / norms.clamp_min(self.norm)))


def rule_of(rule: Reduce, filters: Sequence[Filter]) -> Reduce:
    """The rule by which uploads that went through filters are reduced.

    Args:
        rule: the method's own.
        filters: in the order in which they act at the client.
    """
    for part in filters:
        rule = part.rule(rule)
    return rule


def left(filters: Sequence[Filter], upload: Bundle, departure: Departure) -> Bundle:
    """An upload as it leaves its client.

    Args:
        filters: in the order in which they act at the client.
        upload: what the client returns.
        departure: what the client was sent and is now.
    """
    for part in filters:
        upload = part.leave(upload, departure)
    return upload


def restored(filters: Sequence[Filter], upload: Bundle, source: str, sent: Bundle) -> Bundle:
    """An upload as the server reads it: the filters are undone in reverse order.

    Args:
        filters: in the order in which they acted at the client.
        upload: what arrived.
        source: the sender's name, for errors.
        sent: what the server sent to this client.
    """
    for part in reversed(filters):
        upload = part.restore(upload, source, sent)
    return upload


def check_order(filters: Sequence[Filter]) -> None:
    """Refuse an order that makes no sense: a filter before one that can no longer read what it leaves, or twice.

    Args:
        filters: in the order in which they act at the client.

    Raises:
        ProtofedError: one line that names the two.
    """
    for k, part in enumerate(filters):
        for earlier in filters[:k]:
            if earlier.stage > part.stage:
                raise ProtofedError(f"filters: {part.name} must stand before {earlier.name}, which compresses")
            if earlier.stage and earlier.name == part.name:
                raise ProtofedError(f"filters: {part.name} stands there twice")
