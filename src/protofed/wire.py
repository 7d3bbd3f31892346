"""What travels. Everything a client and the server send each other is a `Bundle`, encoded here and nowhere else.

The encoding is safetensors. Of a bank only the known rows travel, with their class numbers and counts. Bytes are counted
by kind: `prototypes` (rows of banks), `weights` (model parameters and buffers), `scalars` (counts, class numbers, other
small values and tensors) and `framing` (header and padding), which together are the whole message.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.utils import _pytree as pytree

from .bank import PrototypeBank
from .errors import ProtofedError

KINDS = ("prototypes", "weights", "scalars", "framing")


class WireError(ProtofedError):
    """A message that cannot be used; says whose it is and what is wrong with it."""


@dataclass(frozen=True)
class Bundle:
    """Named values: what is sent, what is returned, and what server and clients keep between rounds.

    `bank` is the one most methods exchange; `banks` holds further ones (helpers, peers, a second layer), each of which may
    be a stack. `weights` are model parameters and buffers by name; `tensors` anything else (soft labels, a history).
    """

    bank: PrototypeBank | None = None
    banks: Mapping[str, PrototypeBank] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)

    def all_banks(self) -> dict[str, PrototypeBank]:
        return {**({} if self.bank is None else {"": self.bank}), **self.banks}


pytree.register_dataclass(Bundle)


def encode(bundle: Bundle) -> bytes:
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for name, bank in bundle.all_banks().items():
        flat = bank.counts.reshape(-1)
        rows = torch.nonzero(flat > 0).squeeze(1)
        tensors[f"bank:{name}:means"] = bank.means.reshape(-1, bank.dim)[rows]
        tensors[f"bank:{name}:rows"] = rows.to(torch.int32)
        tensors[f"bank:{name}:counts"] = flat[rows]
        shapes[name] = list(bank.means.shape)
    tensors |= {f"weight:{k}": v for k, v in bundle.weights.items()}
    tensors |= {f"tensor:{k}": v for k, v in bundle.tensors.items()}
    tensors |= {f"scalar:{k}": torch.tensor(float(v), dtype=torch.float64) for k, v in bundle.scalars.items()}
    body = {k: v.detach().to("cpu").contiguous() for k, v in tensors.items()}
    return save(body, metadata={"protofed": "1", "banks": json.dumps(shapes)})


def decode(message: bytes, source: str = "message") -> Bundle:
    """The bundle in a message, or a `WireError` that names `source`. Never executes anything in the message."""
    try:
        body = load(message)
        header = json.loads(message[8 : 8 + int.from_bytes(message[:8], "little")])
        shapes = json.loads(header["__metadata__"]["banks"])
        if header["__metadata__"].get("protofed") != "1":
            raise ValueError("unknown version")
        banks = {name: _decode_bank(body, name, shape) for name, shape in shapes.items()}
        parts: dict[str, dict[str, Tensor]] = {"weight": {}, "tensor": {}, "scalar": {}}
        for key, value in body.items():
            kind, _, name = key.partition(":")
            if kind != "bank":
                parts[kind][name] = value
        scalars = {k: float(v) for k, v in parts["scalar"].items()}
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise WireError(f"{source}: not a protofed message ({type(error).__name__}: {error})") from None
    return Bundle(banks.pop("", None), banks, parts["weight"], parts["tensor"], scalars)


def _decode_bank(body: Mapping[str, Tensor], name: str, shape: list[int]) -> PrototypeBank:
    means, rows, counts = (body[f"bank:{name}:{part}"] for part in ("means", "rows", "counts"))
    *lead, classes, dim = shape
    total = classes
    for n in lead:
        total *= n
    if means.shape != (len(rows), dim) or counts.shape != rows.shape or rows.ndim != 1:
        raise ValueError(f"bank {name or 'bank'!r}: {tuple(means.shape)} rows for shape {shape}")
    index = rows.to(torch.int64)
    if total > 100_000_000 or (len(index) and (int(index.min()) < 0 or int(index.max()) >= total)):
        raise ValueError(f"bank {name or 'bank'!r}: class numbers outside 0 to {total - 1}")
    flat_means = torch.zeros(total, dim, dtype=means.dtype)
    flat_counts = torch.zeros(total, dtype=counts.dtype)
    flat_means[index], flat_counts[index] = means, counts
    return PrototypeBank(flat_means.reshape(shape), flat_counts.reshape(shape[:-1]))


def sizes(message: bytes) -> Counter[str]:
    """Bytes of an encoded message by kind; they add up to its length."""
    header_length = int.from_bytes(message[:8], "little")
    header = json.loads(message[8 : 8 + header_length])
    count: Counter[str] = Counter(framing=8 + header_length)
    for key, entry in header.items():
        if key != "__metadata__":
            begin, end = entry["data_offsets"]
            kind = "weights" if key.startswith("weight:") else "prototypes" if key.endswith(":means") else "scalars"
            count[kind] += end - begin
    return count


@dataclass(frozen=True)
class Expected:
    """What a message must look like to be accepted. `travels` names the parts a method sends, see `Method.travels`."""

    num_classes: int
    dim: int
    travels: tuple[str, ...]
    weights: Mapping[str, torch.Size] = field(default_factory=dict)

    def check(self, bundle: Bundle, source: str) -> None:
        """Names, shapes, dtype, finite values, counts ≥ 0. The error names the sender and the part."""
        if bundle.bank is not None and "bank" not in self.travels:
            raise WireError(f"{source}: sent a bank, which this method does not exchange")
        for name, bank in bundle.all_banks().items():
            self._known(source, "bank", name, f"banks.{name}" if name else "bank")
            what = f"{source}: bank {name!r}" if name else f"{source}: bank"
            if bank.means.shape[-2:] != (self.num_classes, self.dim):
                raise WireError(
                    f"{what} has shape {tuple(bank.means.shape)}; expected [{self.num_classes}, {self.dim}]"
                )
            _numbers(what, bank.means)
            _numbers(f"{what} counts", bank.counts)
            if bool((bank.counts < 0).any()):
                raise WireError(f"{what} has a negative count")
        if bundle.weights:
            self._known(source, "weights", "", "weights")
            for name in self.weights.keys() ^ bundle.weights.keys():
                state = "is missing" if name in self.weights else "was not asked for"
                raise WireError(f"{source}: weight {name!r} {state}")
            for name, value in bundle.weights.items():
                if value.shape != self.weights[name]:
                    raise WireError(
                        f"{source}: weight {name!r} has shape {tuple(value.shape)}; "
                        f"expected {tuple(self.weights[name])}"
                    )
                _numbers(f"{source}: weight {name!r}", value)
        for name, value in bundle.tensors.items():
            self._known(source, "tensor", name, f"tensors.{name}")
            _numbers(f"{source}: tensor {name!r}", value)
        for name, number in bundle.scalars.items():
            self._known(source, "scalar", name, f"scalars.{name}")
            _numbers(f"{source}: scalar {name!r}", torch.tensor(number))

    def _known(self, source: str, kind: str, name: str, path: str) -> None:
        if path not in self.travels:
            raise WireError(f"{source}: sent {kind} {name!r}, which this method does not exchange")


def _numbers(what: str, value: Tensor) -> None:
    if value.is_complex() or value.dtype == torch.bool:
        raise WireError(f"{what} is {value.dtype}; expected numbers")
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise WireError(f"{what} holds NaN or infinity")
