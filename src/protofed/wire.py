"""What travels. Everything a client and the server send each other is a `Bundle`, encoded here and nowhere else.

The encoding is safetensors. Of a bank only the known rows travel, with their class numbers and counts. Bytes are
counted by kind: `prototypes` (rows of banks), `weights` (model parameters and buffers), `scalars` (counts, class
numbers, other small values and tensors) and `framing` (header and padding), which together are the whole message.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .bank import PrototypeBank
from .errors import ProtofedError

KINDS = ("prototypes", "weights", "scalars", "framing")
VERSION = 1
# How many numbers the banks of one message may unfold to, known and unknown rows together. A message of a few bytes can
# claim any shape; one that brings many known rows may unfold to a thousand times those.
UNFOLDED = 2**27
HEADER = 2**24  # bytes
SMALL = 2**16  # bytes of messages that are read together
KEPT, KEPT_HEADER = 64, 2**16  # headers that are remembered, of at most so many bytes
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_TYPES = {name: kind for kind, name in DTYPES.items()}
NUMBERS = {torch.float16, torch.bfloat16, torch.float32, torch.float64} | {
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
}


Message = bytes | bytearray


class WireError(ProtofedError):
    """A message that cannot be used; says whose it is and what is wrong with it."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= 400 else f"{message[:397]}...")  # names come from the sender


def _unreadable(source: str, error: Exception) -> WireError:
    reason = "".join(c if c.isprintable() else " " for c in str(error))[:200]
    return WireError(f"{source}: not a protofed message ({type(error).__name__}: {reason})")


@dataclass(frozen=True)
class Bundle:
    """Named values: what is sent, what is returned, and what server and clients keep between rounds.

    `bank` is the one most methods exchange; `banks` holds further ones (helpers, peers, a second layer), each of which
    may be a stack. `weights` are model parameters and buffers by name; `tensors` anything else (soft labels, say).
    """

    bank: PrototypeBank | None = None
    banks: Mapping[str, PrototypeBank] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return self.bank is None and not (self.banks or self.weights or self.tensors or self.scalars)

    def copied(self) -> Bundle:
        """The same with tensors of its own."""
        return pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, self)

    def to(self, device: torch.device | str) -> Bundle:
        """Every tensor on a device."""
        return pytree.tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, self)

    def all_banks(self) -> dict[str, PrototypeBank]:
        return {**({} if self.bank is None else {"": self.bank}), **self.banks}


pytree.register_dataclass(Bundle)


def encode(bundle: Bundle) -> bytes:
    """The same bundle always gives the same bytes; an empty one gives none, since nothing has to travel."""
    if bundle.empty:
        return b""
    tensors: dict[str, Tensor] = {}
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for name, bank in bundle.all_banks().items():
        counts = bank.counts.reshape(-1)
        means = bank.means.reshape(counts.numel(), bank.dim)
        known = [row for row, count in enumerate(counts.tolist()) if count > 0]
        rows = torch.tensor(known, dtype=torch.int32)
        whole = len(known) == counts.numel()
        tensors[f"bank:{name}:means"] = means if whole else means[rows.to(means.device)]
        tensors[f"bank:{name}:rows"] = rows
        tensors[f"bank:{name}:counts"] = counts if whole else counts[rows.to(counts.device)]
        shapes.append((name, tuple(bank.means.shape)))
    tensors |= {f"weight:{k}": v for k, v in bundle.weights.items()}
    tensors |= {f"tensor:{k}": v for k, v in bundle.tensors.items()}
    tensors |= {f"scalar:{k}": torch.tensor(float(v), dtype=torch.float64) for k, v in bundle.scalars.items()}
    return _framed(tensors, tuple(shapes))


def _framed(tensors: Mapping[str, Tensor], banks: tuple[tuple[str, tuple[int, ...]], ...]) -> bytes:
    """A safetensors file as its library writes it; most messages are small, and the library takes longer over them."""
    names = sorted(tensors, key=lambda n: (-tensors[n].element_size(), n))  # large numbers first: all lie aligned
    values = [tensors[name].detach().to("cpu").contiguous() for name in names]
    text = _header_text(banks, tuple(names), tuple((v.dtype, tuple(v.shape)) for v in values))
    pieces: list[Any] = [value.reshape(-1).view(torch.uint8).numpy() for value in values]
    return b"".join([text, *pieces])


@lru_cache(maxsize=KEPT)
def _header_text(
    banks: tuple[tuple[str, tuple[int, ...]], ...],
    names: tuple[str, ...],
    forms: tuple[tuple[torch.dtype, tuple[int, ...]], ...],
) -> bytes:
    """Length and text of a header. The messages of a round have the same few."""
    about = json.dumps({"version": VERSION, "banks": {n: list(shape) for n, shape in banks}}, sort_keys=True)
    header: dict[str, Any] = {"__metadata__": {"protofed": about}}
    end = 0
    for name, (dtype, shape) in zip(names, forms, strict=True):
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def decode(message: Message, source: str = "message", expected: Expected | None = None) -> Bundle:
    """The bundle in a message, or a `WireError` that names `source`. Never executes anything in the message.

    Tensors lie in a copy of the message; in the message itself where it is a `bytearray`, which nobody else may then change.

    With `expected`, shapes of banks are checked before memory is taken for them, and everything else after: use it for
    messages from outside.
    """
    if not message:
        if expected is not None:
            expected.check(Bundle(), source)
        return Bundle()
    try:
        layout = _layout(message)
        shapes = layout.banks
        if expected is not None:
            for name, shape in shapes.items():
                expected.check_shape(name, shape, source)
        body = _unframed(message, layout)
        sent = sum(v.numel() for k, v in body.items() if k.startswith("bank:"))
        unfolded = sum(math.prod(shape[:-1]) * (shape[-1] + 1) for shape in shapes.values())  # means and counts
        limit = max(UNFOLDED, 1024 * sent)
        if unfolded > limit:
            raise ValueError(f"banks of {unfolded} numbers are too large; at most {limit} are taken")
        banks = {name: _decode_bank(body, name, shape) for name, shape in shapes.items()}
        parts: dict[str, dict[str, Tensor]] = {"weight": {}, "tensor": {}, "scalar": {}}
        for key, value in body.items():  # _decode_bank has taken out what belongs to banks
            kind, _, name = key.partition(":")
            if kind not in parts or (kind == "scalar" and (value.ndim or value.dtype != torch.float64)):
                raise ValueError(f"entry {key!r} is not part of a message")
            parts[kind][name] = value
        scalars = {k: float(v) for k, v in parts["scalar"].items()}
    except WireError:
        raise
    except Exception as error:  # bytes from outside may provoke nearly anything; none of it may stop the receiver
        raise _unreadable(source, error) from None
    bundle = Bundle(banks.pop("", None), banks, parts["weight"], parts["tensor"], scalars)
    if expected is not None:
        expected.check(bundle, source)
    return bundle


def decode_each(
    messages: Sequence[Message], sources: Sequence[str], expected: Expected | None = None
) -> list[Bundle | WireError]:
    """`decode` of each message, or its error. Small ones of one header are read together, in a fraction of the time."""
    groups: dict[Any, list[int]] = {}
    for k, message in enumerate(messages):
        head = 8 + int.from_bytes(message[:8], "little")
        groups.setdefault(bytes(message[:head]) if len(message) <= SMALL else k, []).append(k)
    result: dict[int, Bundle | WireError] = {}
    for group in groups.values():
        together = _decode_together([messages[k] for k in group], expected) if len(group) > 1 else None
        for place, k in enumerate(group):
            result[k] = _decoded(messages[k], sources[k], expected) if together is None else together[place]
    return [result[k] for k in range(len(messages))]


def _decoded(message: Message, source: str, expected: Expected | None) -> Bundle | WireError:
    try:
        return decode(message, source, expected)
    except WireError as error:
        return error


def _decode_together(messages: Sequence[Message], expected: Expected | None) -> list[Bundle] | None:
    """Messages of one header; None where any of them is not as it should be: `decode` then says which, and why."""
    first = _decoded(messages[0], "", expected)  # what all have in common is checked here
    if isinstance(first, WireError) or any(len(m) != len(messages[0]) for m in messages):
        return None
    if first.empty:
        return [first for _ in messages]
    layout, n = _layout(messages[0]), len(messages)
    numbers = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8).view(n, -1)
    body: dict[str, Tensor] = {}
    for name, begin, count, shape, dtype in layout.entries:
        place = layout.start + begin
        piece = numbers[:, place : place + count * dtype.itemsize].contiguous()
        body[name] = (piece.view(dtype) if count else torch.empty(0, dtype=dtype)).view(n, *shape)
    banks: dict[str, PrototypeBank] = {}
    for name, whole in layout.banks.items():
        means, rows, counts = (body.pop(f"bank:{name}:{part}") for part in ("means", "rows", "counts"))
        total = math.prod(whole[:-1])
        rising = rows.numel() == 0 or bool(
            (rows.diff(dim=1) > 0).all() & (rows[:, 0] >= 0).all() & (rows < total).all()
        )
        if not rising or bool((counts <= 0).any()) or not (_is_finite(means) and _is_finite(counts)):
            return None
        if rows.shape[1] < total:
            at = (rows + torch.arange(n)[:, None] * total).view(-1)
            means = means.new_zeros(n * total, whole[-1]).index_copy_(0, at, means.flatten(0, 1))
            counts = counts.new_zeros(n * total).index_copy_(0, at, counts.view(-1))
        banks[name] = PrototypeBank(means.view(n, *whole), counts.view(n, *whole[:-1]))
    if not all(_is_finite(value) for value in body.values()):
        return None
    parts: dict[str, dict[str, Tensor]] = {"weight": {}, "tensor": {}, "scalar": {}}
    for key, value in body.items():
        kind, _, name = key.partition(":")
        parts[kind][name] = value
    bundles = []
    for k in range(n):
        mine = {name: bank[k] for name, bank in banks.items()}
        weights, tensors, scalars = ({name: v[k] for name, v in values.items()} for values in parts.values())
        numbers_of = {name: float(value) for name, value in scalars.items()}
        bundles.append(Bundle(mine.pop("", None), mine, weights, tensors, numbers_of))
    return bundles


def _is_finite(value: Tensor) -> bool:
    # a finite sum is cheap proof; an infinite one may also come of large values
    return not value.is_floating_point() or math.isfinite(float(value.sum())) or bool(torch.isfinite(value).all())


@dataclass(frozen=True)
class Layout:
    """What a header says, checked: where each tensor lies, the shapes of the banks, and bytes by kind."""

    start: int  # of the numbers
    length: int  # of the numbers
    entries: tuple[tuple[str, int, int, tuple[int, ...], torch.dtype], ...]  # name, place, count, shape, dtype; by name
    banks: Mapping[str, list[int]]
    kinds: Mapping[str, int]


def _layout(message: Message) -> Layout:
    length = int.from_bytes(message[:8], "little")
    if len(message) < 8 or length > len(message) - 8:
        raise ValueError(f"{len(message)} bytes, cut short in the header")
    if length > HEADER:
        raise ValueError(f"a header of {length} bytes; at most {HEADER} are read")
    text = bytes(message[8 : 8 + length])
    return _read_layout(text) if length <= KEPT_HEADER else _read_layout.__wrapped__(text)


@lru_cache(maxsize=KEPT)
def _read_layout(text: bytes) -> Layout:
    """The messages of a round have the same few headers; what is wrong with one is not kept."""
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("the header is not a mapping")
    found = [(*entry["data_offsets"], name, entry) for name, entry in header.items() if name != "__metadata__"]
    entries, kinds, reached = [], Counter(framing=8 + len(text)), 0
    for begin, end, name, entry in sorted(found, key=lambda e: (e[0], e[1])):
        shape, kind = entry["shape"], TORCH_TYPES[entry["dtype"]]
        if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)):
            raise ValueError(f"entry {name!r} has no proper place or shape")
        count = math.prod(shape)
        if begin != reached or end - begin != count * kind.itemsize:
            raise ValueError(f"entry {name!r} lies at {begin} to {end}, which does not fit its shape or the others")
        entries.append((name, begin, count, tuple(shape), kind))
        kinds[_kind(name)] += end - begin
        reached = end
    return Layout(8 + len(text), reached, tuple(sorted(entries, key=lambda e: e[0])), _bank_shapes(header), kinds)


def _unframed(message: Message, layout: Layout) -> dict[str, Tensor]:
    """The tensors of a message by name, views of one copy of it, or of a `bytearray` itself; raises where they do not
    fill it exactly."""
    length = len(message) - layout.start
    if layout.length != length:
        raise ValueError(f"{length} bytes of numbers, of which {layout.length} are named")
    data = message if isinstance(message, bytearray) else bytearray(memoryview(message)[layout.start :])
    start = len(data) - length
    return {
        name: torch.frombuffer(data, dtype=kind, count=count, offset=start + begin).reshape(shape)
        if count
        else torch.empty(shape, dtype=kind)
        for name, begin, count, shape, kind in layout.entries
    }


def _bank_shapes(header: Mapping[str, Any]) -> dict[str, list[int]]:
    """What the header says about banks; raises where it is not one of ours."""
    about = json.loads(header["__metadata__"]["protofed"])
    if about["version"] != VERSION:
        raise ValueError(f"version {about['version']!r}; this program reads version {VERSION}")
    for name, shape in about["banks"].items():
        proper = isinstance(shape, list) and 2 <= len(shape) <= 8
        if not proper or not all(type(n) is int and 0 <= n < 2**31 for n in shape):
            raise ValueError(f"bank {name!r} has no proper shape")
    return about["banks"]


def _decode_bank(body: dict[str, Tensor], name: str, shape: list[int]) -> PrototypeBank:
    """The whole bank from its known rows, which are taken out of `body`."""
    means, rows, counts = (body.pop(f"bank:{name}:{part}") for part in ("means", "rows", "counts"))
    what = f"bank {name!r}" if name else "bank"
    total, dim = math.prod(shape[:-1]), shape[-1]
    if rows.ndim != 1 or means.shape != (len(rows), dim) or counts.shape != rows.shape:
        raise ValueError(f"{what}: {list(means.shape)} rows, {list(counts.shape)} counts for shape {shape}")
    if not means.is_floating_point() or not counts.is_floating_point() or rows.dtype != torch.int32:
        raise ValueError(f"{what}: dtypes {means.dtype}, {counts.dtype}, {rows.dtype}")
    if 0 in counts.tolist():
        raise ValueError(f"{what}: a row with no samples behind it")
    numbers = rows.tolist()
    if numbers and (numbers[0] < 0 or numbers[-1] >= total or any(a >= b for a, b in pairwise(numbers))):
        raise ValueError(f"{what}: class numbers must rise within 0 to {total - 1}")
    if len(numbers) == total:
        return PrototypeBank(means.reshape(shape), counts.reshape(shape[:-1]))
    flat_means = torch.zeros(total, dim, dtype=means.dtype)
    flat_counts = torch.zeros(total, dtype=counts.dtype)
    index = rows.to(torch.int64)
    flat_means[index], flat_counts[index] = means, counts
    return PrototypeBank(flat_means.reshape(shape), flat_counts.reshape(shape[:-1]))


def sizes(message: Message, source: str = "message") -> Counter[str]:
    """Bytes of an encoded message by kind; they add up to its length."""
    if not message:
        return Counter()
    try:
        return Counter(_layout(message).kinds)
    except Exception as error:
        raise _unreadable(source, error) from None


def _kind(key: str) -> str:
    if key.startswith("weight:"):
        return "weights"
    return "prototypes" if key.startswith("bank:") and key.endswith(":means") else "scalars"


@dataclass(frozen=True)
class Expected:
    """What a message must look like to be accepted.

    `travels` names the parts a method exchanges (see `Method.travels`), `required` those that must be there. `weights`
    and `tensors` are templates: shape and dtype count, values do not, so they may lie on the meta device. A bank is
    `[num_classes, dim]` unless `banks` gives another shape by name (`""` is the main bank), with None for any size.
    """

    num_classes: int
    dim: int
    travels: tuple[str, ...]
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    banks: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32

    def check(self, bundle: Bundle, source: str) -> None:
        """Names, shapes, dtypes, finite values, counts ≥ 0. The error names the sender and the part."""
        there = _parts(bundle)
        for part in there:
            self._allow(part, source)
        for part in self.required:
            if part not in there:
                raise WireError(f"{source}: sent no {part}, which this method needs")
        for name, bank in bundle.all_banks().items():
            what = _bank_name(name, source)
            self.check_shape(name, bank.means.shape, source)
            if bank.counts.shape != bank.means.shape[:-1]:
                raise WireError(f"{what} has counts of shape {_list(bank.counts.shape)} for {_list(bank.means.shape)}")
            if bank.means.dtype != self.dtype or not bank.counts.is_floating_point():
                raise WireError(
                    f"{what} is {bank.means.dtype} with counts {bank.counts.dtype}; expected {self.dtype} and floating"
                )
            _numbers(what, bank.means)
            _numbers(f"{what} counts", bank.counts)
            if bool((bank.counts < 0).any()):
                raise WireError(f"{what} has a negative count")
        if bundle.weights:
            for name in sorted(self.weights.keys() ^ bundle.weights.keys()):
                state = "is missing" if name in self.weights else "was not asked for"
                raise WireError(f"{source}: weight {name!r} {state}")
        for kind, values, templates in (
            ("weight", bundle.weights, self.weights),
            ("tensor", bundle.tensors, self.tensors),
        ):
            for name, value in values.items():
                _alike(f"{source}: {kind} {name!r}", value, templates.get(name))
                _numbers(f"{source}: {kind} {name!r}", value)
        for name, number in bundle.scalars.items():
            if not math.isfinite(number):
                raise WireError(f"{source}: scalar {name!r} is {number}; expected a finite number")

    def check_shape(self, name: str, shape: Sequence[int], source: str) -> None:
        """The shape of one bank, before or after it takes memory."""
        self._allow(_bank_part(name), source)
        wanted = self.banks.get(name, (self.num_classes, self.dim))
        if len(shape) != len(wanted) or any(w not in (None, n) for n, w in zip(shape, wanted, strict=True)):
            raise WireError(f"{_bank_name(name, source)} has shape {_list(shape)}; expected {_list(wanted)}")

    def _allow(self, part: str, source: str) -> None:
        if part not in self.travels:
            raise WireError(f"{source}: sent {part!r}, which this method does not exchange")


def _parts(bundle: Bundle) -> list[str]:
    """What is in a bundle, in the words of `Method.travels`."""
    return [
        *map(_bank_part, bundle.all_banks()),
        *(["weights"] if bundle.weights else []),
        *(f"tensors.{name}" for name in bundle.tensors),
        *(f"scalars.{name}" for name in bundle.scalars),
    ]


def _bank_part(name: str) -> str:
    return f"banks.{name}" if name else "bank"


def _bank_name(name: str, source: str) -> str:
    return f"{source}: bank {name!r}" if name else f"{source}: bank"


def _list(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('any' if n is None else str(n) for n in shape)}]"


def _alike(what: str, value: Tensor, template: Tensor | None) -> None:
    if template is not None and value.shape != template.shape:
        raise WireError(f"{what} has shape {_list(value.shape)}; expected {_list(template.shape)}")
    if template is not None and value.dtype != template.dtype:
        raise WireError(f"{what} is {value.dtype}; expected {template.dtype}")


def _numbers(what: str, value: Tensor) -> None:
    if value.dtype not in NUMBERS:
        raise WireError(f"{what} is {value.dtype}; expected numbers")
    if not _is_finite(value):
        raise WireError(f"{what} holds NaN or infinity")
