"""Computed cost: what one sample costs a model, and ProtoFSSL's formulae for a client and round (Tables 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..errors import ProtofedError

Family = Literal["supervised", "fixmatch", "fedmatch", "protofssl"]
BYTES = 4  # of a float32 on the wire

_aten = torch.ops.aten
_WINDOWS = {_aten.max_pool2d_with_indices, _aten.avg_pool2d}
_WHOLE = {_aten.mean, _aten._adaptive_avg_pool2d}  # operations that read each value once
_NORMS = {
    _aten.native_batch_norm,
    _aten.cudnn_batch_norm,
    _aten.native_group_norm,
    _aten.native_layer_norm,
}


class _Counter(TorchDispatchMode):
    """Sums the floating-point operations of everything that runs in its context."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation imports torch's compiler, which takes longer than a short run

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += _operations(func, args, kwargs or {}, out)
        return out


def _operations(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    operation = func.overloadpacket
    if operation in flop_registry:
        return int(flop_registry[operation](*args, **kwargs, out_val=out))
    if operation in _WINDOWS:
        values: Tensor = out[0] if isinstance(out, tuple) else out
        height, width = args[1] if len(args[1]) == 2 else args[1] * 2
        return values.numel() * height * width
    if operation in _WHOLE:
        return args[0].numel()
    if operation in _NORMS:
        return 2 * args[0].numel()
    return out.numel() if torch.Tag.pointwise in func.tags and isinstance(out, Tensor) else 0


def forward_flops(module: nn.Module, sample_shape: Sequence[int], tokens: bool = False) -> int:
    """Floating-point operations of one sample's forward pass in eval mode.

    Each multiply-add of convolutions and matrix products counts two, each value that an elementwise operation gives
    (activations, sums of shortcuts) one, each value in a pooling's window one, and each value normalised two. Biases of
    convolutions and linear layers are not counted. Counted this way, ResNet9 has exactly the numbers of ProtoFSSL's
    Table 2.

    Args:
        module: the network.
        sample_shape: the shape of one sample.
        tokens: whether samples are token ids.

    Returns:
        the number of operations.

    >>> forward_flops(nn.Linear(3, 2), (3,))
    12
    """
    parameter = next(module.parameters(), None)
    device = None if parameter is None else parameter.device
    sample = torch.zeros(1, *sample_shape, dtype=torch.long if tokens else torch.float32, device=device)
    training = module.training
    module.eval()
    try:
        # attention as plain matrix products, because each faster kernel is a single operation and not all are counted
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _Counter() as counter:
            module(sample)
    finally:
        module.train(training)
    return counter.flops


def client_flops(
    family: Family,
    forward: float,
    labelled: int,
    unlabelled: int,
    epochs: int,
    *,
    helpers: int,
    classes: int,
    dim: int,
) -> float:
    """Operations of a client in a round (ProtoFSSL, Table 1).

    As in the table, backward passes are not counted, and all labelled and unlabelled samples are seen in each epoch.

    Args:
        family: `supervised` is training on the labelled samples alone; `fixmatch` is FedRGD too.
        forward: operations of one forward pass.
        labelled: the number of labelled samples.
        unlabelled: the number of unlabelled samples.
        epochs: local epochs.
        helpers: the number of helper clients.
        classes: the number of classes.
        dim: the width of the embedding, which counts for ProtoFSSL's distances to the helpers' prototypes.

    >>> client_flops("fixmatch", 1.0, 50, 490, 1, helpers=2, classes=10, dim=512)
    1030.0
    """
    _check(family)
    if family == "supervised":
        return forward * labelled * epochs
    if family == "fixmatch":
        return forward * (labelled + 2 * unlabelled) * epochs
    if family == "fedmatch":
        return forward * (labelled + (2 + helpers) * unlabelled) * epochs
    distances = dim * helpers * classes * unlabelled * epochs
    return forward * (labelled + unlabelled) * epochs + distances + forward * labelled


def client_bytes(family: Family, parameters: int, *, helpers: int, refresh: int, classes: int, dim: int) -> float:
    """Bytes to and from a client in a round, in float32 (ProtoFSSL, Table 1).

    FedMatch's clients get their helpers' models anew every `refresh` rounds. ProtoFSSL's send one bank of prototypes
    and get one of each helper.

    Args:
        family: as in `client_flops`.
        parameters: of the model.
        helpers: the number of helper clients.
        refresh: rounds between two choices of helpers.
        classes: the number of classes.
        dim: the width of the embedding.

    >>> client_bytes("fedmatch", 100, helpers=2, refresh=4, classes=10, dim=512)
    2000.0
    """
    _check(family)
    if refresh < 1:
        raise ProtofedError(f"refresh={refresh}; expected at least 1 round")
    model = BYTES * parameters
    if family == "fedmatch":
        return (4 + 2 * helpers / refresh) * model
    if family == "protofssl":
        return 2 * model + BYTES * dim * (1 + helpers) * classes
    return 2 * model


def _check(family: str) -> None:
    if family not in get_args(Family):
        raise ProtofedError(f"no formula for the cost of {family!r}; expected one of {', '.join(get_args(Family))}")
