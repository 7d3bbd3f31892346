"""The frame of a message: a safetensors header and the numbers behind it.

The library would do for large messages; most of ours are small, and writing and checking their header by hand is faster
(headers repeat from client to client and are cached).
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .bundle import Message

PROTOTYPES = "prototypes/"  # begins the names of tensors that hold a part of a bank's numbers
BYTE_KINDS = ("prototypes", "weights", "scalars", "framing")
VERSION = 1
HEADER = 2**24  # bytes a header may have
CACHED, CACHED_HEADER = 64, 2**16  # how many headers are cached, and how long one may be
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
TORCH_TYPES = {name: dtype for dtype, name in DTYPES.items()}
ALIGNMENT = 64  # bytes, of torch's own memory
NUMBER = struct.Struct("<d")
BankShapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class MessageLayout:
    """What a header says, checked: where each tensor lies, the shapes of the banks, and bytes by kind."""

    start: int  # of the numbers
    length: int  # of the numbers
    entries: tuple[
        tuple[str, int, int, tuple[int, ...], torch.dtype], ...
    ]  # name, offset, count, shape, dtype; by name
    banks: Mapping[str, list[int]]
    kinds: Mapping[str, int]


def framed(tensors: Mapping[str, Tensor], numbers: Mapping[str, float], banks: BankShapes) -> bytes:
    """Put tensors and single numbers into one message, a safetensors file as its library writes it.

    Args:
        tensors: by name.
        numbers: by name.
        banks: the name and the shape of every bank, of which only known rows are among the tensors.

    Returns:
        the message.
    """
    names = _in_order(tensors, numbers)
    pieces: list[Any] = [_header_of(tensors, numbers, banks, names)]
    for name in names:
        if name in numbers:
            pieces.append(NUMBER.pack(numbers[name]))
        else:
            value = tensors[name].detach().to("cpu").contiguous()
            no_array = value.dtype is torch.bfloat16  # which numpy does not know
            pieces.append(value.reshape(-1).view(torch.uint8).numpy() if no_array else value.numpy())
    return b"".join(pieces)


def framed_sizes(tensors: Mapping[str, Tensor], numbers: Mapping[str, float], banks: BankShapes) -> Counter[str]:
    """The bytes by kind of the message that `framed` would make, of which only the header is made.

    Args:
        tensors: by name; their values are not read, so they may lie on the meta device.
        numbers: by name.
        banks: the name and the shape of every bank.
    """
    return Counter(layout(_header_of(tensors, numbers, banks, _in_order(tensors, numbers))).kinds)


def _in_order(tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> list[str]:
    """The names of a message's entries, those with large numbers first: all lie aligned."""
    width = {name: value.element_size() for name, value in tensors.items()} | dict.fromkeys(numbers, 8)
    return sorted(width, key=lambda n: (-width[n], n))


def _header_of(
    tensors: Mapping[str, Tensor], numbers: Mapping[str, float], banks: BankShapes, names: Sequence[str]
) -> bytes:
    """The length of a message's header, and its text. `names` are those of all entries, in their order."""
    forms = ((torch.float64, ()) if n in numbers else (tensors[n].dtype, tuple(tensors[n].shape)) for n in names)
    return _header_text(banks, tuple(names), tuple(forms))


@lru_cache(maxsize=CACHED)
def _header_text(
    banks: BankShapes, names: tuple[str, ...], forms: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
) -> bytes:
    """The length of a header, and its text."""
    about = json.dumps({"version": VERSION, "banks": {n: list(shape) for n, shape in banks}}, sort_keys=True)
    header: dict[str, Any] = {"__metadata__": {"protofed": about}}
    end = 0
    for name, (dtype, shape) in zip(names, forms, strict=True):
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def layout(message: Message) -> MessageLayout:
    """Read and check the header of a message.

    Args:
        message: the bytes.

    Returns:
        what the header says.

    Raises:
        ValueError: the header is not one of ours; the error says what is wrong with it.
    """
    length = int.from_bytes(message[:8], "little")
    if len(message) < 8 or length > len(message) - 8:
        raise ValueError(f"{len(message)} bytes, cut short in the header")
    if length > HEADER:
        raise ValueError(f"a header of {length} bytes; at most {HEADER} are read")
    text = bytes(message[8 : 8 + length])
    return _read_layout(text) if length <= CACHED_HEADER else _read_layout.__wrapped__(text)


@lru_cache(maxsize=CACHED)
def _read_layout(text: bytes) -> MessageLayout:
    """The layout that a header's text describes; a ValueError or KeyError says what is wrong with it."""
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("the header is not a mapping")
    ranges = [(*entry["data_offsets"], name, entry) for name, entry in header.items() if name != "__metadata__"]
    entries, kinds, reached = [], Counter(framing=8 + len(text)), 0
    for begin, end, name, entry in sorted(ranges, key=lambda e: (e[0], e[1])):
        shape, dtype = entry["shape"], TORCH_TYPES[entry["dtype"]]
        if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)):
            raise ValueError(f"entry {name!r} has no proper place or shape")
        count = math.prod(shape)
        if begin != reached or end - begin != count * dtype.itemsize:
            raise ValueError(f"entry {name!r} lies at {begin} to {end}, which does not fit its shape or the others")
        entries.append((name, begin, count, tuple(shape), dtype))
        kinds[_kind(name)] += end - begin
        reached = end
    ordered = tuple(sorted(entries, key=lambda e: e[0]))
    return MessageLayout(8 + len(text), reached, ordered, _bank_shapes(header), kinds)


def _kind(key: str) -> str:
    """To which of `BYTE_KINDS` the bytes of an entry belong."""
    if key.startswith(("weight:", "model:")):
        return "weights"
    whole_rows = key.startswith("bank:") and key.endswith(":means")
    return "prototypes" if whole_rows or key.startswith(f"tensor:{PROTOTYPES}") else "scalars"


def _bank_shapes(header: Mapping[str, Any]) -> dict[str, list[int]]:
    """The shapes of the banks that a header names; a ValueError says where it is not one of ours."""
    about = json.loads(header["__metadata__"]["protofed"])
    if about["version"] != VERSION:
        raise ValueError(f"version {about['version']!r}; this program reads version {VERSION}")
    shapes: dict[str, list[int]] = about["banks"]
    for name, shape in shapes.items():
        proper = isinstance(shape, list) and 2 <= len(shape) <= 8
        if not proper or not all(type(n) is int and 0 <= n < 2**31 for n in shape):
            raise ValueError(f"bank {name!r} has no proper shape")
    return shapes


def _aligned(flat: Tensor) -> Tensor:
    """A tensor that begins where torch's own begin: the last bits of a product depend on it."""
    return flat if flat.data_ptr() % ALIGNMENT == 0 else flat.clone()


def unframed(messages: Sequence[Message], about: MessageLayout, summed: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The tensors of messages of one layout, side by side along a first axis.

    Args:
        messages: the bytes of each. Tensors lie in a copy of them; those of a single `bytearray` lie in it where they are
            aligned, or need not be.
        about: the layout that all of them have.
        summed: how the names of tensors begin that are summed and never multiplied, and so need not be aligned.

    Returns:
        the tensors by name.

    Raises:
        ValueError: the numbers that the header names do not fill a message exactly.
    """
    for message in messages:
        if len(message) - about.start != about.length:
            raise ValueError(f"{len(message) - about.start} bytes of numbers, of which {about.length} are named")
    if len(messages) > 1:
        return _side_by_side(messages, about)
    single = messages[0]
    skipped = about.start if isinstance(single, bytearray) else 0
    data = single if isinstance(single, bytearray) else bytearray(memoryview(single)[about.start :])
    result: dict[str, Tensor] = {}
    for name, begin, count, shape, dtype in about.entries:
        if not count:
            result[name] = torch.empty((1, *shape), dtype=dtype)
        else:
            flat = torch.frombuffer(data, dtype=dtype, count=count, offset=skipped + begin)
            result[name] = (flat if name.startswith(summed) else _aligned(flat)).view(1, *shape)
    return result


def _side_by_side(messages: Sequence[Message], about: MessageLayout) -> dict[str, Tensor]:
    """The tensors of several messages as views of one matrix of bytes, a row for each message."""
    width = -(-about.length // ALIGNMENT) * ALIGNMENT
    rows = torch.empty(len(messages), width, dtype=torch.uint8)
    with memoryview(rows.view(-1).numpy()) as target:  # type: ignore[arg-type]
        for k, message in enumerate(messages):
            target[k * width : k * width + about.length] = memoryview(message)[about.start :]
    result: dict[str, Tensor] = {}
    for name, begin, count, shape, dtype in about.entries:
        piece = rows[:, begin : begin + count * dtype.itemsize]
        result[name] = piece.view(dtype).unflatten(1, shape) if shape else piece.view(dtype)[:, 0]
    return result
