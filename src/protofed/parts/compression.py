"""Filters that make uploads smaller: shorter numbers, integers, the largest changes alone, changed classes alone.

`filters=["top-k?share=0.1", "quantise?bits=8"]` applies them in that order at the client, after filters that bound or
add noise; the server restores what the method returned, as far as possible, before it is checked. Those that leave
something out fill it from what the server sent to that client, which both know to the last bit.

On the wire the values that are left keep their places: those of weights are sent under the names of weights, as one row
`[1, k]`, and those of prototypes as tensors whose names begin with `prototypes/`. Indexes, class numbers and counts are
tensors of the filter's own, so that their bytes count too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..bank import PrototypeBank
from ..errors import ProtofedError
from ..wire import Bundle, Exchange, WireError, encode
from ..wire.frame import PROTOTYPES
from .filters import Departure, Filter, left, restored
from .reduce import Reduce

SCALE = "scale/"  # begins the names of the scales that quantised values travel with
CHANGED, TOP = "changed/", "top-k/"  # begin the names of what these filters add
COUNTS = "/counts"  # ends the names of the counts of rows that are not sent
Change = Callable[[str, Tensor, int], Tensor]
"""A function of a value's name, the value, and the number of its first axes that make rows."""


def with_values(upload: Bundle, change: Change) -> Bundle:
    """An upload with every prototype and weight changed.

    Args:
        upload: what is sent.
        change: gets the name of a value (`bank/low`, `weight/head.bias`), the value, and the number of its row axes.

    Returns:
        the upload with the changed values. Counts, single numbers and tensors of other kinds are as they were.
    """
    banks = {
        name: replace(bank, means=change(f"bank/{name}", bank.means, bank.means.ndim - 1))
        for name, bank in upload.all_banks().items()
    }
    weights = {name: change(f"weight/{name}", value, 1) for name, value in upload.weights.items()}
    tensors = {n: change(n, v, 1) if n.startswith(PROTOTYPES) else v for n, v in upload.tensors.items()}
    main = banks.pop("", None)
    return replace(upload, bank=main, banks=banks, weights=weights, tensors=tensors)


@dataclass(frozen=True)
class Shorter(Filter):
    """Send prototypes and weights as shorter floating-point numbers."""

    stage: ClassVar[int] = 2
    dtype: ClassVar[torch.dtype]

    def leave(self, upload: Bundle, departure: Departure) -> Bundle:
        most = torch.finfo(self.dtype).max  # beyond it there is only infinity, which no message may hold

        def shorter(name: str, value: Tensor, rows: int) -> Tensor:
            return value.clamp(-most, most).to(self.dtype) if value.is_floating_point() else value

        return with_values(upload, shorter)

    def restore(self, upload: Bundle, source: str, sent: Bundle) -> Bundle:
        def longer(name: str, value: Tensor, rows: int) -> Tensor:
            """What has another type was not shortened, or is refused when it is checked."""
            return value.float() if value.dtype == self.dtype else value

        return with_values(upload, longer)


@Filter.registry.register("float16")
@dataclass(frozen=True)
class Float16(Shorter):
    """Send prototypes and weights in half precision: 11 significant bits, and numbers up to 65,504."""

    dtype: ClassVar[torch.dtype] = torch.float16


@Filter.registry.register("bfloat16")
@dataclass(frozen=True)
class BFloat16(Shorter):
    """Send prototypes and weights as bfloat16: 8 significant bits, and the range of float32."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16


@Filter.registry.register("quantise")
@dataclass(frozen=True)
class Quantise(Filter):
    """Send rows of prototypes, and of weights that are matrices or kernels, as integers with one scale for each row."""

    stage: ClassVar[int] = 2

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
            if value.ndim < 2:
                return value
            flat = value.float().reshape(*value.shape[:rows], -1)
            scale = flat.abs().amax(-1) / (2 ** (self.bits - 1) - 1)
            scales[SCALE + name] = scale
            scaled = flat / torch.where(scale > 0, scale, 1.0)[..., None]
            return scaled.round().to(self.dtype).reshape(value.shape)

        changed = with_values(upload, rounded)
        return replace(changed, tensors={**changed.tensors, **scales})

    def restore(self, upload: Bundle, source: str, sent: Bundle) -> Bundle:
        def value(name: str, integers: Tensor, rows: int) -> Tensor:
            """The numbers that were rounded to integers; what has no scale was not rounded."""
            scale = upload.tensors.get(SCALE + name)
            if scale is None:
                return integers
            if integers.dtype != self.dtype or scale.shape != integers.shape[:rows] or scale.dtype != torch.float32:
                raise WireError(f"{source}: {name.replace('/', ' ')} does not fit its scale")
            return integers * scale.reshape(*scale.shape, *[1] * (integers.ndim - rows))

        changed = with_values(upload, value)
        return replace(changed, tensors=_without_names(changed.tensors, SCALE))


@dataclass(frozen=True)
class Partial(Filter):
    """A filter that leaves out what the server can fill from what it sent."""

    stage: ClassVar[int] = 1
    kinds: ClassVar[tuple[str, ...]] = ("bank", "weights")

    def check(self, exchange: Exchange, owner: str, rule: Reduce) -> None:
        super().check(exchange, owner, rule)
        down = {(part.kind, part.name) for part in exchange.down}
        if not any((part.kind, part.name) in down for part in exchange.up if part.kind in self.kinds):
            what = "prototypes" if self.kinds == ("bank",) else "prototypes or weights"
            raise ProtofedError(
                f"filters: {self.name} leaves out {what} that the server has sent, and {owner} sends none that come back"
            )


@Filter.registry.register("top-k")
@dataclass(frozen=True)
class TopK(Partial):
    """Send only the numbers that changed most against what the client was sent, a `share` of each tensor's.

    What is sent are the numbers themselves and their places. A class that was not in what the client was sent is sent in
    full, and so is a tensor of which numbers and places would take no less. What is left out is lost: a client keeps no
    account of it.
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError("share must be above 0 and at most 1")

    def leave(self, upload: Bundle, departure: Departure) -> Bundle:
        received = departure.received
        tensors, weights = dict(upload.tensors), dict(upload.weights)
        for name, value in upload.weights.items():
            before = received.weights.get(name)
            picked = None if before is None else self._picked(value, before)
            if picked is not None:
                weights[name], tensors[f"{TOP}weight/{name}"] = picked
        banks = upload.all_banks()
        for name, bank in upload.all_banks().items():
            sent = _same_form(received, name, bank)
            if sent is None or not bool((both := bank.known & sent.known).any()):
                continue
            picked = self._picked(bank.means[both], sent.means[both])
            if picked is not None:
                tensors[PROTOTYPES + name], tensors[f"{TOP}bank/{name}"] = picked
                banks[name] = _set_aside(bank, both, f"{TOP}rows/{name}", tensors)
        main = banks.pop("", None)
        return replace(upload, bank=main, banks=banks, weights=weights, tensors=tensors)

    def _picked(self, value: Tensor, before: Tensor) -> tuple[Tensor, Tensor] | None:
        """The numbers that changed most, as one row, and their places; None where all of them are no larger."""
        flat, number = value.reshape(-1), max(1, round(self.share * value.numel()))
        places = torch.int16 if flat.numel() <= 2**15 else torch.int32
        if number * (4 + places.itemsize) >= flat.numel() * 4:
            return None
        change = (flat - before.reshape(-1)).abs()
        index = change.topk(number).indices.sort().values
        return flat[index][None], index.to(places)

    def restore(self, upload: Bundle, source: str, sent: Bundle) -> Bundle:
        tensors, weights, banks = dict(upload.tensors), dict(upload.weights), upload.all_banks()
        for key in [n for n in tensors if n.startswith(f"{TOP}weight/")]:
            name = key.removeprefix(f"{TOP}weight/")
            before, values = sent.weights.get(name), weights.get(name)
            if before is None or values is None:
                raise WireError(f"{source}: sent a part of weight {name!r}, which it was not sent")
            weights[name] = _filled(before, values, tensors.pop(key), f"{source}: weight {name!r}")
        for key in [n for n in tensors if n.startswith(f"{TOP}bank/")]:
            name = key.removeprefix(f"{TOP}bank/")
            rows, sent_bank = _taken_back(banks, sent, name, f"{TOP}rows/{name}", tensors, source)
            values = tensors.pop(PROTOTYPES + name, None)
            if values is None:
                raise WireError(f"{source}: sent places of prototypes and none of their numbers")
            means = _filled(sent_bank.means[rows], values, tensors.pop(key), f"{source}: prototypes")
            banks[name] = replace(banks[name], means=banks[name].means.index_put((rows,), means))
        main = banks.pop("", None)
        return replace(upload, bank=main, banks=banks, weights=weights, tensors=tensors)


@Filter.registry.register("changed")
@dataclass(frozen=True)
class Changed(Partial):
    """Send only prototypes that differ from those the client was sent, by more than a `tolerance` of their norm.

    Of the others their class numbers and counts are sent: the server keeps its own prototype and still learns who holds
    the class. A class that was not in what the client was sent is sent in full.
    """

    kinds: ClassVar[tuple[str, ...]] = ("bank",)

    tolerance: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < 1:
            raise ValueError("tolerance must be at least 0 and below 1")

    def leave(self, upload: Bundle, departure: Departure) -> Bundle:
        tensors, banks = dict(upload.tensors), upload.all_banks()
        for name, bank in upload.all_banks().items():
            before = _same_form(departure.received, name, bank)
            if before is None:
                continue
            far = (bank.means - before.means).norm(dim=-1) > self.tolerance * before.means.norm(dim=-1)
            same = bank.known & before.known & ~far
            if bool(same.any()):
                banks[name] = _set_aside(bank, same, f"{CHANGED}{name}", tensors)
        main = banks.pop("", None)
        return replace(upload, bank=main, banks=banks, tensors=tensors)

    def restore(self, upload: Bundle, source: str, sent: Bundle) -> Bundle:
        tensors, banks = dict(upload.tensors), upload.all_banks()
        for name in [n.removeprefix(CHANGED) for n in tensors if n.startswith(CHANGED) and not n.endswith(COUNTS)]:
            rows, before = _taken_back(banks, sent, name, f"{CHANGED}{name}", tensors, source)
            banks[name] = replace(banks[name], means=banks[name].means.index_put((rows,), before.means[rows]))
        main = banks.pop("", None)
        return replace(upload, bank=main, banks=banks, tensors=tensors)


def _same_form(received: Bundle, name: str, bank: PrototypeBank) -> PrototypeBank | None:
    """The bank of that name that the client was sent; None where there is none of this form."""
    before = received.all_banks().get(name)
    if before is None or bank.means.ndim != 2 or before.means.shape != bank.means.shape:
        return None
    return before if before.means.dtype == bank.means.dtype else None


def _set_aside(bank: PrototypeBank, rows: Tensor, key: str, tensors: dict[str, Tensor]) -> PrototypeBank:
    """The bank without some rows, whose class numbers and counts are added to `tensors`."""
    tensors[key] = rows.nonzero()[:, 0].to(torch.int32)
    tensors[key + COUNTS] = bank.counts[rows]
    return PrototypeBank(torch.where(rows[:, None], 0, bank.means), torch.where(rows, 0, bank.counts))


def _taken_back(
    banks: dict[str, PrototypeBank], sent: Bundle, name: str, key: str, tensors: dict[str, Tensor], source: str
) -> tuple[Tensor, PrototypeBank]:
    """Undo `_set_aside` but for the means: the rows, and the bank that the client was sent. The counts are put back."""
    bank = banks.get(name)
    before = None if bank is None else _same_form(sent, name, bank)
    rows, counts = tensors.pop(key, None), tensors.pop(key + COUNTS, None)
    if bank is None or before is None or rows is None or counts is None:
        raise WireError(f"{source}: left out prototypes that it was not sent")
    _check_places(rows, len(before.counts), f"{source}: class numbers")
    places = rows.long()
    fits = counts.shape == rows.shape and counts.dtype == bank.counts.dtype and bool((counts > 0).all())
    if not fits or not bool(before.known[places].all()) or bool(bank.known[places].any()):
        raise WireError(f"{source}: the prototypes that it left out do not fit those that it was sent")
    banks[name] = replace(bank, counts=bank.counts.index_put((places,), counts))
    return places, before


def _filled(before: Tensor, values: Tensor, index: Tensor, what: str) -> Tensor:
    """What was sent, with some of its numbers replaced."""
    _check_places(index, before.numel(), f"{what}: places")
    if values.shape != (1, len(index)) or values.dtype != before.dtype:
        raise WireError(f"{what}: {list(values.shape)} numbers of {values.dtype} for {len(index)} places")
    return before.reshape(-1).index_put((index.long(),), values[0]).reshape(before.shape)


def _check_places(index: Tensor, size: int, what: str) -> None:
    """Refuse numbers of places that do not rise within a size."""
    if index.ndim != 1 or index.dtype not in (torch.int16, torch.int32) or not len(index):
        raise WireError(f"{what} are {list(index.shape)} of {index.dtype}; expected a list of int16 or int32")
    if int(index[0]) < 0 or int(index[-1]) >= size or bool((index.long().diff() <= 0).any()):
        raise WireError(f"{what} must rise within 0 to {size - 1}")


def _without_names(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if not name.startswith(prefix)}


def compressed(filters: Sequence[Filter], upload: Bundle, departure: Departure) -> tuple[Bundle, dict[str, float]]:
    """An upload as it leaves its client, and what compression lost and saved.

    Args:
        filters: in the order in which they act at the client.
        upload: what the client returns.
        departure: what the client was sent and is now.

    Returns:
        what is sent; and, where a filter compresses, the relative error of what the server will restore and how many
        times smaller the message became.
    """
    packing = [part for part in filters if part.stage]
    whole = left([part for part in filters if not part.stage], upload, departure)
    if not packing:
        return whole, {}
    packed = left(packing, whole, departure)
    back = restored(packing, packed, "upload", departure.received)
    size, error = 0.0, 0.0
    for one, other in zip(_values(whole), _values(back), strict=True):
        size += float(one.double().square().sum())
        error += float((other.double() - one.double()).square().sum())
    ratio = len(encode(whole)) / len(encode(packed))
    return packed, {"compression_error": (error / size) ** 0.5 if size else 0.0, "compression": ratio}


def _values(upload: Bundle) -> list[Tensor]:
    """The prototypes and weights of an upload, in an order of their own."""
    banks, weights = upload.all_banks(), upload.weights
    return [*(banks[name].means for name in sorted(banks)), *(weights[name] for name in sorted(weights))]
