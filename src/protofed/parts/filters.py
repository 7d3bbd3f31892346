"""Filters around the wire: what leaves a client may be bounded or compressed, whatever the method.

`filters=["clip?norm=1", "quantise?bits=8"]` applies them in that order at the client; the server undoes in reverse order
what can be undone, before anything is checked or reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..bank import PrototypeBank
from ..errors import ProtofedError
from ..models.base import Output
from ..registry import Registry
from ..seeds import Normals
from ..wire import Bundle, Exchange, WireError
from .feed import Batch
from .received import Received
from .reduce import Reduce, Reduced, Sums

SCALE = "scale/"  # begins the names of the scales that quantised values travel with


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
    guarded: ClassVar[bool] = True
    """Whether the server can read each upload, so that its guard may judge it; false where an upload is masked or noisy."""

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
            raise ProtofedError(f"filters: {self.name} acts on what clients send, and clients of {owner} send nothing")

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

    def total(self, sums: Sums, arrival: Arrival) -> Sums:
        """Change at the server what the uploads add up to, before the rule makes the result of it.

        Args:
            sums: what the rule has summed.
            arrival: the round, and the server's noise.
        """
        return sums

    def describe(self, releases: int) -> Mapping[str, float]:
        """What the record of a round says of this filter.

        Args:
            releases: the number of rounds so far in which the client that took part most often took part.

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


@Filter.registry.register("quantise")
@dataclass(frozen=True)
class Quantise(Filter):
    """Send rows of prototypes, and of weights that are matrices or kernels, as integers with one scale for each row."""

    bits: int = 8  # or 16

    def __post_init__(self) -> None:
        if self.bits not in (8, 16):
            raise ValueError("bits must be 8 or 16")

    @property
    def dtype(self) -> torch.dtype:
        """The integers that values are rounded to."""
        return torch.int8 if self.bits == 8 else torch.int16

    def leave(self, upload: Bundle, departure: Departure) -> Bundle:
        scales: dict[str, Tensor] = {}

        def rounded(name: str, value: Tensor, rows: int) -> Tensor:
            """`value` as integers, one scale for each entry of its first `rows` axes."""
            flat = value.reshape(*value.shape[:rows], -1)
            scale = flat.abs().amax(-1) / (2 ** (self.bits - 1) - 1)
            scales[SCALE + name] = scale
            scaled = flat / torch.where(scale > 0, scale, 1.0)[..., None]
            return scaled.round().to(self.dtype).reshape(value.shape)

        banks = {
            name: replace(bank, means=rounded(f"bank/{name}", bank.means, bank.means.ndim - 1))
            for name, bank in upload.all_banks().items()
        }
        weights = {n: rounded(f"weight/{n}", v, 1) if v.ndim > 1 else v for n, v in upload.weights.items()}
        main = banks.pop("", None)
        return replace(upload, bank=main, banks=banks, weights=weights, tensors={**upload.tensors, **scales})

    def restore(self, upload: Bundle, source: str, sent: Bundle) -> Bundle:
        def value(name: str, integers: Tensor, rows: int) -> Tensor:
            """The numbers that were rounded to integers; what has no scale was not rounded."""
            scale = upload.tensors.get(SCALE + name)
            if scale is None:
                return integers
            if integers.dtype != self.dtype or scale.shape != integers.shape[:rows] or scale.dtype != torch.float32:
                raise WireError(f"{source}: {name.replace('/', ' ')} does not fit its scale")
            return integers * scale.reshape(*scale.shape, *[1] * (integers.ndim - rows))

        banks = {
            name: replace(bank, means=value(f"bank/{name}", bank.means, bank.means.ndim - 1))
            for name, bank in upload.all_banks().items()
        }
        weights = {n: value(f"weight/{n}", v, 1) for n, v in upload.weights.items()}
        tensors = {n: v for n, v in upload.tensors.items() if not n.startswith(SCALE)}
        main = banks.pop("", None)
        return replace(upload, bank=main, banks=banks, weights=weights, tensors=tensors)


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
