"""Reduces: how a server makes one result of many uploads, as they arrive.

A rule lifts each upload to what is summed (n·w, count·mean, counts), the sums are added up as uploads arrive, and the
rule finishes the total. Where `additive` is true a sum is all it needs: the server then holds a few models however many
clients upload, and could be given sums alone. Other rules keep the uploads until the last one is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .. import aggregate
from ..bank import PrototypeBank, SparseBank
from ..errors import ProtofedError
from ..registry import Registry
from ..wire import Bundle, Exchange
from ..wire.exchange import PartKind
from ..wire.stacked import WeightsRow
from .received import bank_of

Form = tuple[tuple[str, tuple[int, ...]], ...]  # the names and shapes of a model's weights
BLOCK = 2**16  # numbers that stay in a core's cache


class Upload(NamedTuple):
    """What one client returned, and how many samples it trained on."""

    client: int
    samples: float
    content: Bundle


@dataclass(frozen=True)
class Reduced:
    """What a server's equation is given: one result of all uploads, and the uploads themselves where the rule keeps them.

    `sums` are what the clients' prototypes add up to: the mean times the number of holders. `scalars` are plain means.
    """

    bank: PrototypeBank | None = None
    banks: Mapping[str, PrototypeBank] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    sums: Mapping[str, PrototypeBank] = field(default_factory=dict)
    contributors: tuple[int, ...] = ()  # the numbers of the clients whose uploads it is of
    share: float = 0.0  # how much the clients' weights counted, added up
    uploads: tuple[Upload, ...] = ()

    @property
    def clients(self) -> int:
        """How many clients it is of."""
        return len(self.contributors)

    @property
    def uploaded_banks(self) -> PrototypeBank:
        """The uploads' main banks as one stack."""
        return PrototypeBank.stack([bank_of(u.content) for u in self.uploads])


@dataclass
class Sums:
    """What uploads add up to: tensors and numbers by name."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # of weights, which are summed in float64
    flat: dict[Form, Tensor] = field(
        default_factory=dict
    )  # the sums of all weights of a form, which share memory with these

    def add(self, other: Sums) -> None:
        """Add another sum to this one, which owns its tensors."""
        for name, value in other.tensors.items():
            self.tensors[name] = self.tensors[name].add_(value) if name in self.tensors else value
        for name, number in other.numbers.items():
            self.numbers[name] = self.numbers.get(name, 0.0) + number


@dataclass(frozen=True)
class Reduce:
    """The rule by which many uploads become one result.

    A rule has `lift`, which adds what is summed of some uploads to the total, and `finish`, which makes the result.
    """

    registry: ClassVar[Registry[Reduce]] = Registry("reduce")
    additive: ClassVar[bool] = False
    """Whether sums over the clients are all that the rule needs."""

    @property
    def summed(self) -> frozenset[PartKind]:
        """The kinds of parts of which the rule needs nothing but sums over the clients."""
        return frozenset(get_args(PartKind)) if self.additive else frozenset()

    def check(self, exchange: Exchange, owner: str) -> None:
        """Refuse a method for which the rule makes no sense.

        Args:
            exchange: what the method exchanges.
            owner: the method's name.

        Raises:
            ProtofedError: one line that says why.
        """

    def lift(self, uploads: Sequence[Upload], total: Sums) -> None:
        """Add to the total what is summed of these uploads.

        Args:
            uploads: some of the round's uploads.
            total: is changed in place.
        """

    def keep(self, uploads: Sequence[Upload]) -> Sequence[Upload]:
        """What must stay of these uploads until the last one has arrived."""
        return () if self.additive else uploads

    def finish(self, total: Sums, uploads: Sequence[Upload], sent: Mapping[str, Tensor]) -> Reduced:
        """Make the result.

        Args:
            total: the sums over all uploads.
            uploads: what `keep` gave of all uploads.
            sent: the weights that clients were sent, where they were sent any: a rule may look at changes.

        Returns:
            what the method's `update` is given.
        """
        raise NotImplementedError


class Running:
    """A reduction in progress: uploads are added as they arrive.

    >>> running = Running(Mean("size"))
    >>> running.add([Upload(0, 10.0, Bundle(weights={"w": torch.zeros(1)}))])
    >>> running.add([Upload(1, 30.0, Bundle(weights={"w": torch.full((1,), 4.0)}))])
    >>> running.result().weights["w"].item()
    3.0
    """

    def __init__(self, rule: Reduce, sent: Mapping[str, Tensor] | None = None) -> None:
        """
        Args:
            rule: how uploads become one result.
            sent: the weights that clients were sent, where they were sent any.
        """
        self.rule, self.sent, self.total = rule, sent or {}, Sums()
        self.contributors: list[int] = []
        self.kept: list[Upload] = []

    def add(self, uploads: Sequence[Upload]) -> None:
        """Take some more uploads."""
        self.contributors += [upload.client for upload in uploads]
        self.rule.lift(uploads, self.total)
        self.kept += self.rule.keep(uploads)

    @property
    def clients(self) -> int:
        """How many clients' uploads have arrived."""
        return len(self.contributors)

    def result(self) -> Reduced:
        """The reduction of all uploads so far."""
        reduced = self.rule.finish(self.total, self.kept, self.sent)
        return replace(reduced, contributors=tuple(self.contributors))


@Reduce.registry.register("mean")
@dataclass(frozen=True)
class Mean(Reduce):
    """The mean.

    `by="size"`: weights by sample count, and prototypes by their counts. `by="holders"`: every client the same, and a
    prototype over the clients that hold the class. `by="directions"`: the mean of unit prototypes, put back on the sphere.
    """

    additive: ClassVar[bool] = True

    by: Literal["size", "holders", "directions"] = "size"

    def check(self, exchange: Exchange, owner: str) -> None:
        if self.by == "directions" and any(part.kind == "weights" for part in exchange.up):
            raise ProtofedError(f"reduce=mean?by=directions is for prototypes, and {owner} exchanges weights too")

    def share(self, upload: Upload) -> float:
        """How much a client's weights count."""
        return upload.samples if self.by == "size" else 1.0

    def lift(self, uploads: Sequence[Upload], total: Sums) -> None:
        numbers: dict[str, float] = {}
        for upload in uploads:
            for name, value in upload.content.scalars.items():
                numbers[f"scalar/{name}"] = numbers.get(f"scalar/{name}", 0.0) + value
        numbers["clients"] = float(len(uploads))
        total.add(Sums(self._lifted_banks(uploads), numbers))
        add_weights(uploads, self.share, total)

    def _lifted_banks(self, uploads: Sequence[Upload]) -> dict[str, Tensor]:
        lifted: dict[str, Tensor] = {}
        uploaded = [upload.content.all_banks() for upload in uploads]
        for name in dict.fromkeys(name for banks in uploaded for name in banks):
            single_banks = [content[name] for content in uploaded if name in content]
            if any(isinstance(bank, SparseBank) for bank in single_banks):
                lifted |= {f"{part}/{name}": value for part, value in self._lifted_rows(single_banks).items()}
                continue
            banks = PrototypeBank.stack(single_banks)
            if self.by == "directions":
                banks = banks.normalised()
            weight = banks.counts.to(banks.means.dtype) if self.by == "size" else None
            lifted[f"means/{name}"] = aggregate.total(banks, weight)
            lifted[f"counts/{name}"] = banks.counts.sum(0)
            lifted[f"holders/{name}"] = banks.known.to(banks.means.dtype).sum(0)
        return lifted

    def _lifted_rows(self, banks: Sequence[PrototypeBank]) -> dict[str, Tensor]:
        """The same sums of large banks, row by row: unknown rows are never made."""
        classes, dim = banks[0].shape
        means, counts = torch.zeros(classes, dim), torch.zeros(classes)
        holders = torch.zeros(classes)
        for bank in banks:
            if self.by == "directions":
                bank = bank.normalised()
            values, number = bank.held
            rows = bank.rows if isinstance(bank, SparseBank) else torch.arange(classes)
            known = number > 0
            values = torch.where(known[:, None], values, 0.0)
            means.index_add_(0, rows, values * number.to(values.dtype)[:, None] if self.by == "size" else values)
            counts.index_add_(0, rows, number.to(counts.dtype))
            holders.index_add_(0, rows, known.to(holders.dtype))
        return {"means": means, "counts": counts, "holders": holders}

    def finish(self, total: Sums, uploads: Sequence[Upload], sent: Mapping[str, Tensor]) -> Reduced:
        banks: dict[str, PrototypeBank] = {}
        sums: dict[str, PrototypeBank] = {}
        for key in total.tensors:
            kind, _, name = key.partition("/")
            if kind == "means":
                summed, counts, holders = (total.tensors[f"{k}/{name}"] for k in ("means", "counts", "holders"))
                number = counts.to(summed.dtype) if self.by == "size" else holders
                mean = PrototypeBank(aggregate.over(summed, number), counts)
                banks[name] = mean.normalised() if self.by == "directions" else mean
                plain = holders[:, None] * mean.means if self.by == "size" else summed
                sums[name] = PrototypeBank(plain, counts)
        clients = total.numbers.get("clients", 0.0)
        scalars = {k.removeprefix("scalar/"): v / clients for k, v in total.numbers.items() if k.startswith("scalar/")}
        share = total.numbers.get("share", 0.0)
        return Reduced(banks.pop("", None), banks, averaged_weights(total), scalars, sums, share=share)


@dataclass(frozen=True)
class Each(Reduce):
    """Every upload by itself, for server rules that need them apart.

    With `averages`, weights are averaged by sample count as they arrive, and are not kept.
    """

    averages: bool = False

    @property
    def summed(self) -> frozenset[PartKind]:
        return frozenset({"weights"}) if self.averages else frozenset()

    def lift(self, uploads: Sequence[Upload], total: Sums) -> None:
        if self.averages:
            add_weights(uploads, lambda upload: upload.samples, total)

    def keep(self, uploads: Sequence[Upload]) -> Sequence[Upload]:
        if not self.averages:
            return uploads
        return [u._replace(content=replace(u.content, weights={})) for u in uploads]

    def finish(self, total: Sums, uploads: Sequence[Upload], sent: Mapping[str, Tensor]) -> Reduced:
        return Reduced(weights=averaged_weights(total), uploads=tuple(uploads))


@Reduce.registry.register("personal")
@dataclass(frozen=True)
class Personal(Reduce):
    """Every client gets prototypes of its own, in which clients count the more the more they are alike (FedAPA, Eq. 5–8).

    `similar=false`: the plain average for everybody. `peers=true`: each client is sent all other clients' prototypes too.
    """

    temperature: float = 0.5  # τ of Eq. 6
    padding: Literal["mean", "size-weighted"] = "mean"  # Eq. 8 as printed; the text about it says sample-weighted
    similar: bool = True
    peers: bool = True

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError("temperature must be above 0")

    def check(self, exchange: Exchange, owner: str) -> None:
        if not any(part.each and part.kind == "bank" for part in exchange.down):
            raise ProtofedError(
                f"reduce=personal: {owner} sends all clients the same prototypes; compose and fedapa send each its own"
            )

    def finish(self, total: Sums, uploads: Sequence[Upload], sent: Mapping[str, Tensor]) -> Reduced:
        return Reduced(uploads=tuple(uploads))


def weighted_average(uploads: Sequence[Upload], share: Callable[[Upload], float]) -> dict[str, Tensor]:
    """The mean of the uploads' weights.

    Args:
        uploads: each with weights, or without.
        share: how much a client counts.

    Returns:
        the weights by name, each over the clients whose model has it.
    """
    total = Sums()
    add_weights(uploads, share, total)
    return averaged_weights(total)


def add_weights(uploads: Sequence[Upload], share: Callable[[Upload], float], total: Sums) -> None:
    """Add share · weight of each upload to the sums, in float64, and the shares behind each weight.

    Args:
        uploads: each with weights, or without.
        share: how much a client counts.
        total: is changed in place.
    """
    pieces: dict[str, list[tuple[tuple[Tensor, ...], float]]] = {}
    shares: dict[Form, float] = {}
    for upload in uploads:
        weights = upload.content.weights
        if not weights:
            continue
        client_share = share(upload)
        total.numbers["share"] = total.numbers.get("share", 0.0) + client_share
        if isinstance(weights, WeightsRow) and _flat_sum(weights, total) is not None:
            total.flat[weights.stack.form].add_(weights.flat, alpha=client_share)
            shares[weights.stack.form] = shares.get(weights.stack.form, 0.0) + client_share
            continue
        for name, value in weights.items():
            pieces.setdefault(name, []).append((value.reshape(-1).split(BLOCK), client_share))
            total.numbers[f"share/{name}"] = total.numbers.get(f"share/{name}", 0.0) + client_share
            if f"weight/{name}" not in total.tensors:
                total.tensors[f"weight/{name}"] = torch.zeros(value.shape, dtype=torch.float64)
                total.dtypes[name] = value.dtype
    for form, form_share in shares.items():
        for name, _ in form:
            total.numbers[f"share/{name}"] = total.numbers.get(f"share/{name}", 0.0) + form_share
    for name, values in pieces.items():
        flat = total.tensors[f"weight/{name}"].view(-1).split(BLOCK)
        for block, part in enumerate(flat):  # a part stays in the cache while all are added to it
            for split, client_share in values:
                part.add_(split[block], alpha=client_share)


def _flat_sum(weights: WeightsRow, total: Sums) -> Tensor | None:
    """The sum of all weights of a form as one vector, of which the sums by name are views.

    It is None where some of them have been summed by name already, or are summed in another order.
    """
    form = weights.stack.form
    if form not in total.flat:
        if any(f"weight/{name}" in total.tensors for name, _ in form):
            return None
        flat = total.flat[form] = torch.zeros(weights.flat.shape, dtype=torch.float64)
        places = flat.split([math.prod(shape) for _, shape in form])
        total.tensors |= {f"weight/{name}": v.view(shape) for (name, shape), v in zip(form, places, strict=True)}
        total.dtypes |= {name: weights.flat.dtype for name, _ in form}
    return total.flat[form]


def averaged_weights(total: Sums) -> dict[str, Tensor]:
    """The weights that sums stand for.

    Args:
        total: what `add_weights` has summed.

    Returns:
        the weights by name, each over the clients whose model has it; a weight of which nobody counts is left out.
    """
    weights = {}
    for key, value in total.tensors.items():
        name = key.removeprefix("weight/")
        if name != key and total.numbers[f"share/{name}"] > 0:
            weights[name] = (value / total.numbers[f"share/{name}"]).to(total.dtypes[name])
    return weights
