"""Disclosure: what can be read in a message without any attack."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..wire.exchange import SAMPLES
from .message import ClientMessage, Sent
from .statistics import auc


@dataclass(frozen=True)
class Disclosure:
    """What a message says by itself. Class lists hold class numbers; what is not sent is None.

    `count_error` is the mean absolute error of the counts over the classes held. `class_auc` says how well the counts
    tell classes that the client holds from others: 1 is perfectly, 0.5 not at all; None where it holds every class.
    """

    bytes: dict[str, int]
    parts: list[str]
    samples: int
    samples_sent: float | None
    classes_held: list[int]
    counts_held: list[int]
    classes_sent: list[int] | None
    counts_sent: list[float] | None
    count_error: float | None
    class_auc: float | None


def disclosure(message: ClientMessage, sent: Sent, classes: int) -> Disclosure:
    """What a client's message gives away by itself.

    Args:
        message: The client's message, with the samples it trains on.
        sent: The message as it leaves, or as the method returns it.
        classes: The number of classes.

    Returns:
        The disclosure.
    """
    content = sent.content
    counts = torch.bincount(message.members.labels, minlength=classes).cpu()
    held = counts > 0
    banks = content.all_banks()
    parts = [
        f"prototypes{f' ({name})' if name else ''} [{', '.join(map(str, b.means.shape))}]" for name, b in banks.items()
    ]
    parts += (
        [f"weights of a model ({sum(v.numel() for v in content.weights.values()):,} numbers)"]
        if content.weights
        else []
    )
    parts += [f"weights of a further model ({name})" for name in content.models]
    parts += [f"{name.replace('_', ' ')} [{', '.join(map(str, v.shape))}]" for name, v in content.tensors.items()]
    parts += [f"the number of its {name}" if name == SAMPLES else name.replace("_", " ") for name in content.scalars]
    sent_counts = None if content.bank is None else content.bank.counts.cpu().float()
    error = None if sent_counts is None else float((sent_counts - counts)[held].abs().mean())
    told = None
    if sent_counts is not None and bool(held.any()) and not bool(held.all()):
        told = auc(sent_counts[held].numpy(), sent_counts[~held].numpy())
    return Disclosure(
        bytes=dict(sent.bytes),
        parts=parts,
        samples=message.trained_on,
        samples_sent=content.scalars.get(SAMPLES),
        classes_held=held.nonzero().flatten().tolist(),
        counts_held=counts[held].tolist(),
        classes_sent=None if content.bank is None else content.bank.known.nonzero().flatten().tolist(),
        counts_sent=None if sent_counts is None else sent_counts[sent_counts > 0].tolist(),
        count_error=error,
        class_auc=told,
    )
