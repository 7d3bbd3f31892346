"""The guard: no single upload may spoil a federation for ever.

A message that is well formed may still be absurd: prototypes of 1e30, a count of a billion samples. The guard stands
between the wire and the reduction. It compares what a client claims with what the server knows of it, and the norm of
what it sends with the norms of what the others sent and of what it was sent. After the update it looks at the server's
new state. It keeps no memory of its own, so that a run that is stopped and resumed decides the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..bank import PrototypeBank
from ..parts import Upload
from ..wire import Bundle, Exchange, WireError
from ..wire.exchange import is_finite
from ..wire.stacked import WeightsRow

FACTOR = 10.0
"""How many times the others' norm an upload's norm may be, by default; `docs/results/guard.json` has honest runs' ratios."""
GROWTH = 1e6  # how many times its norm before a server's state may have after an update
ENOUGH = 8  # uploads whose median is trusted before the others have arrived
ROUNDING = 1e-4  # relative; sums of counts are in float32
NOTHING = 1e-12  # a norm below it says nothing about how large the others may be


SentNorms = Callable[[Upload], Mapping[str, float]]
"""A function that gives the norms of what the client of an upload was sent."""
Kind = tuple[str, int]


class Judged(NamedTuple):
    """An upload with its norms, and with those of what its client was sent."""

    upload: Upload
    norms: Mapping[str, float]
    sent: Mapping[str, float]


@dataclass(frozen=True)
class Guard:
    """What is expected of uploads beside their form.

    Attributes:
        factor: How many times the others' norm an upload's norm may be.
        exchange: What the method exchanges.
        size: The number of samples that a client has, as the server knows it.
    """

    factor: float
    exchange: Exchange
    size: Callable[[int], int]

    @cached_property
    def _limits(self) -> dict[str, float | None]:
        """The most that each part of an upload may say, where there is such a bound."""
        return {part.name: part.most for part in self.exchange.up}

    def check_claims(self, upload: Upload, source: str) -> None:
        """Refuse numbers that cannot be true of the client: more samples than it has, or a share above 1.

        Args:
            upload: What the client sent.
            source: The client's name.

        Raises:
            WireError: One line that says what it claims and what is known.
        """
        size = self.size(upload.client)
        if upload.samples > size * (1 + ROUNDING):
            raise WireError(f"{source}: it claims to have trained on {upload.samples:g} samples, and has {size}")
        limits = self._limits
        for name, bank in upload.content.all_banks().items():
            most = upload.samples * (limits.get(name or "bank") or 1.0)
            counts = bank.held[1].sum(-1, dtype=torch.float64)
            total = max(counts.reshape(-1).tolist(), default=0.0)
            if total > most * (1 + ROUNDING):
                raise WireError(f"{source}: its prototypes claim {total:g} samples, and it has {upload.samples:g}")
        for name, value in upload.content.scalars.items():
            limit = limits.get(name)
            if limit is not None and not -ROUNDING <= value / limit <= 1 + ROUNDING:
                raise WireError(f"{source}: its {name} is {value:g}; expected a number from 0 to {limit:g}")

    def inspection(self, sent: SentNorms, owner: Sequence[int]) -> Inspection:
        """The inspection of one round's uploads.

        Args:
            sent: The norms of what the client of an upload was sent.
            owner: The number of each client's architecture.
        """
        return Inspection(self.factor, sent, owner)


class Inspection:
    """Judges the norms of one round's uploads, as they arrive in chunks.

    An upload may have `factor` times the norm of what its client was sent, or of the median of the round's uploads,
    whichever is larger. One that is beyond it when it arrives waits until all norms are known.
    """

    def __init__(self, factor: float, sent: SentNorms, owner: Sequence[int]) -> None:
        self.factor, self.sent, self.owner = factor, sent, owner
        self.norms: dict[Kind, list[float]] = {}
        self.waiting: list[Judged] = []

    def judge(self, uploads: Sequence[Upload], last: bool) -> tuple[list[Upload], dict[int, str]]:
        """Take a chunk of uploads.

        Args:
            uploads: Those that have arrived.
            last: Whether they are the round's last ones.

        Returns:
            The uploads that may be used from now on, and the reasons why clients' uploads may not, by client.
        """
        norms = norms_of_each([upload.content for upload in uploads])
        arrived = [Judged(u, of_upload, self.sent(u)) for u, of_upload in zip(uploads, norms, strict=True)]
        for judged in arrived:
            for name, norm in judged.norms.items():
                self.norms.setdefault(self._kind(name, judged.upload.client), []).append(norm)
        medians = {kind: _lower_median(v) for kind, v in self.norms.items() if last or len(v) >= ENOUGH}
        accepted, refused, waiting = [], {}, []
        for judged in (*self.waiting, *arrived):
            reason = self._excess(judged, medians)
            if not reason:
                accepted.append(judged.upload)
            elif last:
                refused[judged.upload.client] = reason
            else:
                waiting.append(judged)
        self.waiting = waiting
        return accepted, refused

    def _kind(self, name: str, client: int) -> Kind:
        """What a norm is compared with: weights of different architectures have nothing in common."""
        return name, self.owner[client] if name.startswith("weights") else 0

    def _excess(self, judged: Judged, medians: Mapping[Kind, float]) -> str:
        """Which norm is beyond the bound, as words; empty where none is."""
        for name, times in self.ratios(judged, medians).items():
            if times > self.factor:
                bound = f"guard={self.factor:g} allows {self.factor:g}"
                return f"the norm of its {name} is {times:.3g} times that of the others; {bound}"
        return ""

    def ratios(self, judged: Judged, medians: Mapping[Kind, float]) -> dict[str, float]:
        """How many times as large as the others' an upload's norms are, or as what its client was sent."""
        client, sent = judged.upload.client, judged.sent
        return {
            name: norm / max(sent.get(name, 0.0), medians.get(self._kind(name, client), 0.0), NOTHING)
            for name, norm in judged.norms.items()
        }


def norms_of(bundle: Bundle) -> dict[str, float]:
    """The norms that are compared between uploads, by what they are norms of.

    Of a bank it is that of its largest prototype, and of a model that of all its weights.

    >>> norms_of(Bundle(weights={"w": torch.tensor([3.0, 4.0])}))
    {'weights': 5.0}
    """
    return norms_of_each([bundle])[0]


def norms_of_each(bundles: Sequence[Bundle]) -> list[dict[str, float]]:
    """What `norms_of` gives for each of several bundles, whose banks are measured together where they are alike."""
    norms: list[dict[str, float]] = [{} for _ in bundles]
    for name in dict.fromkeys(name for bundle in bundles for name in bundle.all_banks()):
        banks = {k: all_banks[name] for k, b in enumerate(bundles) if name in (all_banks := b.all_banks())}
        for k, norm in zip(banks, _largest_norms(list(banks.values())), strict=True):
            norms[k][f"prototypes {name}".rstrip()] = norm
    return [before | _other_norms(bundle) for before, bundle in zip(norms, bundles, strict=True)]


def _largest_norms(banks: Sequence[PrototypeBank]) -> list[float]:
    """The norm of each bank's largest prototype; 0 where it knows no class."""
    forms = {(type(bank), bank.shape, bank.held[0].dtype) for bank in banks}
    if len(forms) == 1 and type(banks[0]) is PrototypeBank and banks[0].means.dtype == torch.float32:
        stack = PrototypeBank.stack(banks)
        norms = torch.linalg.vector_norm(stack.means, dim=-1) * stack.known
        if bool(torch.isfinite(norms).all()):
            return norms.flatten(1).amax(1).tolist() if norms[0].numel() else [0.0] * len(banks)
    return [_largest_norm(bank.known_means) for bank in banks]


def _largest_norm(rows: Tensor) -> float:
    """The norm of the largest of some rows; 0 where there is none."""
    norms = torch.linalg.vector_norm(rows if rows.dtype == torch.float32 else rows.double(), dim=-1)
    if not bool(torch.isfinite(norms).all()):  # in float32 the squares of large numbers overflow
        norms = torch.linalg.vector_norm(rows.double(), dim=-1)
    return max(norms.tolist(), default=0.0)


def _other_norms(bundle: Bundle) -> dict[str, float]:
    """The norms of a bundle's weights and other tensors."""
    norms: dict[str, float] = {}
    if bundle.weights:
        weights = bundle.weights
        norms["weights"] = weights.norm if isinstance(weights, WeightsRow) else total_norm(weights.values())
    for name, weights in bundle.models.items():
        norms[f"weights of model {name}"] = total_norm(weights.values())
    for name, value in bundle.tensors.items():
        norms[f"values of {name}"] = total_norm([value])
    return norms


def total_norm(tensors: Any) -> float:
    """The norm of all tensors together, which are finite."""
    total = 0.0
    for value in tensors:
        norm = float(torch.linalg.vector_norm(value)) if value.is_floating_point() else 0.0
        if math.isinf(norm):  # in float32 the squares of large numbers overflow
            norm = float(torch.linalg.vector_norm(value, dtype=torch.float64))
        total = math.hypot(total, norm)
    return total


def problem_of(before: Any, after: Any) -> str:
    """Why a server's new state cannot be used: it is not finite, or absurdly larger than the one before.

    Args:
        before: The state that clients were sent.
        after: The state after the update.

    Returns:
        The problem as words; empty where there is none.
    """
    for place, value in _tensors(after):
        if not is_finite(value):
            return f"{place} became NaN or infinite"
    old, new = (total_norm(v for place, v in _tensors(s) if not place.endswith("counts")) for s in (before, after))
    if old > NOTHING and new > GROWTH * old:
        return f"its norm became {new / old:.3g} times what it was"
    return ""


def _tensors(state: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a server's state, each with its place."""
    for path, value in pytree.tree_flatten_with_path(state)[0]:
        if isinstance(value, Tensor):
            yield pytree.keystr(path).lstrip("."), value


def _lower_median(norms: Sequence[float]) -> float:
    """The median of the norms that are not 0; of an even number the lower one, as the larger one may be the absurd one."""
    counted = sorted(norm for norm in norms if norm > NOTHING)
    return counted[(len(counted) - 1) // 2] if counted else 0.0
