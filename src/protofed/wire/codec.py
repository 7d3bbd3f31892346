"""Bundles to bytes and back. Bytes may come from outside: whatever they hold, decoding ends in a bundle or a `WireError`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..bank import LARGE, PrototypeBank, SparseBank
from .bundle import Bundle, Message, Weights, WireError
from .exchange import Expected, PartKind, is_finite
from .frame import framed, framed_sizes, layout, unframed
from .stacked import StackedWeights, WeightsRow, stacked_weights

# How many numbers the banks of one message may unfold to, known and unknown rows together. A message of a few bytes can
# claim any shape; one that brings many known rows may unfold to a thousand times those.
UNFOLDED = 2**27
SMALL = 2**18  # bytes of messages that are read together
# Of prototypes; integers are for those that a filter has quantised.
NUMBERS = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16}


def encode(bundle: Bundle) -> bytes:
    """Encode a bundle.

    Args:
        bundle: the named values to send.

    Returns:
        the message. The same bundle always gives the same bytes; an empty one gives none.

    >>> decode(encode(Bundle(scalars={"samples": 40.0}))).scalars
    {'samples': 40.0}
    """
    return b"" if bundle.empty else framed(*_entries(bundle, _known_rows))


def encoded_sizes(bundle: Bundle) -> Counter[str]:
    """The bytes by kind of the message that a bundle is encoded to, which is not made for it.

    Args:
        bundle: the named values.

    Returns:
        what `sizes` gives for the message.

    >>> bundle = Bundle(bank=PrototypeBank(torch.zeros(10, 512), torch.ones(10)))
    >>> encoded_sizes(bundle) == sizes(encode(bundle))
    True
    """
    return Counter() if bundle.empty else framed_sizes(*_entries(bundle, _known_rows_form))


Rows = tuple[Tensor, Tensor, Tensor]
Entries = tuple[dict[str, Tensor], dict[str, float], tuple[tuple[str, tuple[int, ...]], ...]]


def _known_rows(bank: PrototypeBank) -> Rows:
    """The prototypes of a bank's known classes, the numbers of the classes, and the counts."""
    counts = bank.counts.reshape(-1)
    means = bank.means.reshape(counts.numel(), bank.dim)
    if bool((counts > 0).all()):
        return means, torch.arange(counts.numel(), dtype=torch.int32, device=counts.device), counts
    known = (counts > 0).nonzero().squeeze(1)
    return means[known.to(means.device)], known.to(torch.int32), counts[known]


def _known_rows_form(bank: PrototypeBank) -> Rows:
    """What `_known_rows` gives, without its values."""
    number = int((bank.counts > 0).sum())
    means, counts = bank.means.new_empty(number, bank.dim, device="meta"), bank.counts.new_empty(number, device="meta")
    return means, torch.empty(number, dtype=torch.int32, device="meta"), counts


def _entries(bundle: Bundle, rows_of: Callable[[PrototypeBank], Rows]) -> Entries:
    """The tensors and numbers of a message by the names that they have in it, and the shapes of its banks."""
    tensors: dict[str, Tensor] = {}
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for name, bank in bundle.all_banks().items():
        parts = zip(("means", "rows", "counts"), rows_of(bank), strict=True)
        tensors |= {f"bank:{name}:{part}": value for part, value in parts}
        shapes.append((name, tuple(bank.means.shape)))
    for model in bundle.models:
        if "/" in model:
            raise ValueError(f"model {model!r}: a name with a slash cannot be sent")
    tensors |= {f"weight:{k}": v for k, v in bundle.weights.items()}
    tensors |= {f"model:/{model}/{k}": v for model, values in bundle.models.items() for k, v in values.items()}
    tensors |= {f"tensor:{k}": v for k, v in bundle.tensors.items()}
    return tensors, {f"scalar:{k}": float(v) for k, v in bundle.scalars.items()}, tuple(shapes)


def decode(message: Message, source: str = "message", expected: Expected | None = None) -> Bundle:
    """Decode a message. Nothing in the message is ever executed.

    Args:
        message: the bytes. Tensors of the bundle lie in a copy of them, or in the message itself where it is a `bytearray`,
            which nobody else may then change.
        source: the sender's name, for errors.
        expected: what the message must look like. Shapes of banks are checked before memory is taken for them, and
            everything else after.

    Returns:
        the bundle.

    Raises:
        WireError: the message cannot be read, or is not as expected.

    >>> decode(b"nonsense", source="client 3")
    Traceback (most recent call last):
        ...
    protofed.wire.bundle.WireError: client 3: not a protofed message (ValueError: 8 bytes, cut short in the header)
    """
    return _decoded_alone(message, source, expected, ())


def decode_each(
    messages: Sequence[Message],
    sources: Sequence[str],
    expected: Expected | None = None,
    summed: Collection[PartKind] = (),
) -> list[Bundle | WireError]:
    """Decode several messages. Small ones with the same header are read together, in a fraction of the time.

    Args:
        messages: the bytes of each.
        sources: the senders' names, for errors.
        expected: what each message must look like.
        summed: the kinds of parts that are summed and not kept. Large banks then stay the rows that were sent, as a
            `SparseBank`, and weights are rows of one matrix, as a `WeightsRow`.

    Returns:
        of each message the bundle, or the error of that message.
    """
    groups: dict[Any, list[int]] = {}
    for k, message in enumerate(messages):
        head = 8 + int.from_bytes(message[:8], "little")
        groups.setdefault(bytes(message[:head]) if len(message) <= SMALL else k, []).append(k)
    result: dict[int, Bundle | WireError] = {}
    for group in groups.values():
        try:
            together = _decoded([messages[k] for k in group], sources[group[0]], expected, summed)
            result |= dict(zip(group, together, strict=True))
        except Exception:  # one of them is not as it should be: each by itself says which, and why
            result |= {k: _decoded_or_error(messages[k], sources[k], expected, summed) for k in group}
    return [result[k] for k in range(len(messages))]


def _decoded_or_error(
    message: Message, source: str, expected: Expected | None, summed: Collection[PartKind]
) -> Bundle | WireError:
    try:
        return _decoded_alone(message, source, expected, summed)
    except WireError as error:
        return error


def _decoded_alone(message: Message, source: str, expected: Expected | None, summed: Collection[PartKind]) -> Bundle:
    try:
        return _decoded([message], source, expected, summed)[0]
    except WireError:
        raise
    except Exception as error:  # bytes from outside may provoke nearly anything; none of it may stop the receiver
        raise _unreadable(source, error) from None


def _decoded(
    messages: Sequence[Message], source: str, expected: Expected | None, summed: Collection[PartKind]
) -> list[Bundle]:
    """Messages of one header as bundles; it raises where any of them is not as it should be."""
    if not messages[0]:
        if expected is not None:
            expected.check(Bundle(), source)
        return [Bundle() for _ in messages]
    about, n = layout(messages[0]), len(messages)
    if expected is not None:
        for name, shape in about.banks.items():
            expected.check_shape(name, shape, source)
    body = unframed(messages, about, ("weight:",) if "weights" in summed else ())
    sent = sum(v[0].numel() for k, v in body.items() if k.startswith("bank:"))
    unfolded = sum(math.prod(shape[:-1]) * (shape[-1] + 1) for shape in about.banks.values())  # means and counts
    limit = max(UNFOLDED, 1024 * sent)
    if unfolded > limit:
        raise ValueError(f"banks of {unfolded} numbers are too large; at most {limit} are taken")
    rows = [value for key, value in body.items() if key.startswith("bank:")]
    counts = [value for key, value in body.items() if key.startswith("bank:") and key.endswith(":counts")]
    banks = {name: _decoded_banks(body, name, shape, n, "bank" in summed) for name, shape in about.banks.items()}
    parts: dict[str, dict[str, Tensor]] = {"weight": {}, "model": {}, "tensor": {}, "scalar": {}}
    for key, value in body.items():  # the entries of banks have been taken out
        kind, _, name = key.partition(":")
        if kind not in parts or (kind == "scalar" and (value.ndim > 1 or value.dtype != torch.float64)):
            raise ValueError(f"entry {key!r} is not part of a message")
        parts[kind][name] = value
    numbers = {name: value.tolist() for name, value in parts.pop("scalar").items()}
    weights = stacked_weights(parts["weight"]) if n > 1 and "weights" in summed else None
    bundles = [_bundle({b: stack[k] for b, stack in banks.items()}, parts, weights, numbers, k) for k in range(n)]
    if expected is not None:
        expected.check(bundles[0], source)
        # names and shapes of the others are the first one's; their values are looked at together
        if n > 1 and not (all(map(is_finite, [*body.values(), *rows])) and all(bool((c > 0).all()) for c in counts)):
            raise ValueError("NaN, infinity or a negative count")
    return bundles


def _bundle(
    banks: dict[str, PrototypeBank],
    parts: dict[str, dict[str, Tensor]],
    stack: StackedWeights | None,
    numbers: dict[str, list[float]],
    k: int,
) -> Bundle:
    """The bundle of message k of those that were read together."""
    tensors = {name: value[k] for name, value in parts["tensor"].items()}
    weights: Weights = {n: v[k] for n, v in parts["weight"].items()} if stack is None else WeightsRow(stack, k)
    models: dict[str, dict[str, Tensor]] = {}
    for name, value in parts["model"].items():
        _, model, weight = name.split("/", 2)
        models.setdefault(model, {})[weight] = value[k]
    scalars = {name: values[k] for name, values in numbers.items()}
    return Bundle(banks.pop("", None), banks, weights, tensors, scalars, models)


def _decoded_banks(
    body: dict[str, Tensor], name: str, shape: list[int], n: int, sparse: bool
) -> PrototypeBank | list[SparseBank]:
    """A stack of n whole banks from their known rows, which are taken out of `body`, or n large ones as these rows."""
    means, rows, counts = (body.pop(f"bank:{name}:{part}") for part in ("means", "rows", "counts"))
    what = f"bank {name!r}" if name else "bank"
    total, dim = math.prod(shape[:-1]), shape[-1]
    if rows.ndim != 2 or means.shape[1:] != (rows.shape[1], dim) or counts.shape != rows.shape:
        raise ValueError(f"{what}: {list(means.shape[1:])} rows, {list(counts.shape[1:])} counts for shape {shape}")
    if means.dtype not in NUMBERS or not counts.is_floating_point() or rows.dtype != torch.int32:
        raise ValueError(f"{what}: dtypes {means.dtype}, {counts.dtype}, {rows.dtype}")
    if bool((counts == 0).any()):
        raise ValueError(f"{what}: a row with no samples behind it")
    if rows.numel() and bool((rows[:, 0] < 0).any() | (rows[:, -1] >= total).any() | (rows.diff(dim=1) <= 0).any()):
        raise ValueError(f"{what}: class numbers must rise within 0 to {total - 1}")
    if sparse and len(shape) == 2 and total * dim >= LARGE and 2 * rows.shape[1] <= total:
        return [SparseBank(rows[k].long(), means[k], counts[k], total) for k in range(n)]
    if rows.shape[1] < total:
        target = (rows + torch.arange(n)[:, None] * total).view(-1)
        means = means.new_zeros(n * total, dim).index_copy_(0, target, means.flatten(0, 1))
        counts = counts.new_zeros(n * total).index_copy_(0, target, counts.reshape(-1))
    return PrototypeBank(means.view(n, *shape), counts.view(n, *shape[:-1]))


def _unreadable(source: str, error: Exception) -> WireError:
    """The error of a message that is none, with what is wrong with it in printable characters."""
    reason = "".join(c if c.isprintable() else " " for c in str(error))[:200]
    return WireError(f"{source}: not a protofed message ({type(error).__name__}: {reason})")


def sizes(message: Message, source: str = "message") -> Counter[str]:
    """Count the bytes of a message by kind.

    Args:
        message: the bytes.
        source: the sender's name, for errors.

    Returns:
        the bytes of each of `BYTE_KINDS` that occurs; they add up to the message's length.

    >>> from protofed import PrototypeBank
    >>> sizes(encode(Bundle(bank=PrototypeBank(torch.zeros(10, 512), torch.ones(10)))))["prototypes"]
    20480
    """
    total: Counter[str] = Counter()
    add_sizes(total, message, source)
    return total


def add_sizes(total: Counter[str], message: Message, source: str = "message") -> None:
    """Add the bytes of a message, by kind, to those counted so far.

    Args:
        total: is changed in place.
        message: the bytes.
        source: the sender's name, for errors.
    """
    if message:
        try:
            kinds = layout(message).kinds
        except Exception as error:
            raise _unreadable(source, error) from None
        for kind, size in kinds.items():
            total[kind] += size
