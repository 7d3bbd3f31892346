"""What a client has in hand while it trains."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.utils import _pytree as pytree

from ..bank import PrototypeBank
from ..wire import Bundle


@dataclass(frozen=True)
class Received(Bundle):
    """What a client holds at the start of a round: the server's message, and what it kept for itself as `memory`."""

    memory: Bundle = field(default_factory=Bundle)


pytree.register_dataclass(Received)


def bank_of(bundle: Bundle) -> PrototypeBank:
    """The bank of a bundle, for methods whose exchange says that there is one.

    Args:
        bundle: what was received or uploaded.

    Returns:
        its main bank.

    Raises:
        ValueError: the bundle has none.
    """
    if bundle.bank is None:
        raise ValueError("this bundle has no bank")
    return bundle.bank
