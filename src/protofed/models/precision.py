"""Networks that compute in bfloat16: convolutions and matrix products, while weights and all that comes out is float32."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

Precision = Literal["float32", "bf16"]


class Reduced(nn.Module):
    """The part of a network's class that runs its forward pass under `torch.autocast` and gives float32."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """The output of the network as float32 values, of which gradients flow back into float32 weights."""
        # without autocast's cache of weights, which a stack's weights under `vmap` must not enter
        with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            output = super().forward(x, *args, **options)
        return type(output)(*(value.float() for value in output))


_reduced: dict[type[nn.Module], type[nn.Module]] = {}  # by the class of a network, the class that computes in bfloat16


def with_precision(network: nn.Module, precision: Precision) -> nn.Module:
    """Make a network compute in a precision, in every pass: training, prototypes and evaluation.

    Args:
        network: A network that gives a named tuple of tensors. It is changed in place.
        precision: `float32` leaves it as it is.

    Returns:
        The network.

    Example: `with_precision(model.build((1, 28, 28), 10), "bf16")`
    """
    if precision == "bf16" and not isinstance(network, Reduced):
        kind = type(network)
        if kind not in _reduced:
            _reduced[kind] = type(kind.__name__, (Reduced, kind), {"__doc__": kind.__doc__})
        network.__class__ = _reduced[kind]
    return network
