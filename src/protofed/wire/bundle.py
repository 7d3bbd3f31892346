"""A bundle: the named values of one message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..bank import PrototypeBank
from ..errors import ProtofedError

Message = bytes | bytearray
Weights = Mapping[str, Tensor]


class WireError(ProtofedError):
    """A message that cannot be used; the error says whose it is and what is wrong with it."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= 400 else f"{message[:397]}...")  # names come from the sender


@dataclass(frozen=True)
class Bundle:
    """Named values: what is sent, what is returned, and what a client keeps between rounds.

    `bank` is the one most methods exchange; `banks` holds further ones (helpers, peers, a second layer), each of which
    may be a stack. `weights` are the parameters and buffers of a model by name, `models` the weights of further models;
    `tensors` holds anything else (soft labels, say) and `scalars` single numbers.
    """

    bank: PrototypeBank | None = None
    banks: Mapping[str, PrototypeBank] = field(default_factory=dict)
    weights: Weights = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    models: Mapping[str, Weights] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether the bundle holds nothing."""
        return self.bank is None and not (self.banks or self.weights or self.tensors or self.scalars or self.models)

    def copied(self) -> Bundle:
        """The same bundle with tensors of its own."""
        return self._mapped(torch.clone)

    def to(self, device: torch.device | str) -> Bundle:
        """The same bundle with every tensor on a device."""
        return self._mapped(lambda tensor: tensor.to(device))

    def with_others(self, stacks: Bundle, place: int) -> Bundle:
        """The same bundle, and stacks of banks in which one place becomes unknown. No prototype is copied.

        Args:
            stacks: a bundle of nothing but stacks `[N, C, d]`.
            place: the place that is left out.
        """
        if stacks.empty:
            return self
        place_index = torch.tensor([place])
        others = {
            name: PrototypeBank(stack.means, stack.counts.index_fill(0, place_index.to(stack.counts.device), 0.0))
            for name, stack in stacks.banks.items()
        }
        return replace(self, banks={**self.banks, **others})

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Bundle:
        bundle: Bundle = pytree.tree_map(lambda v: change(v) if isinstance(v, Tensor) else v, self)
        return bundle

    def all_banks(self) -> dict[str, PrototypeBank]:
        """Every bank by name; the main one is called `""`."""
        return {**({} if self.bank is None else {"": self.bank}), **self.banks}


pytree.register_dataclass(Bundle)
