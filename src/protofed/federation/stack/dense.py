"""Stacks of multilayer perceptrons without gradient: what `vmap` computes, with fewer calls and without its copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from ...models.base import Classifier, Output, Staged

PASSED = (nn.Identity, nn.Dropout)  # layers that do nothing in eval mode


def dense_network(module: nn.Module, weights: Mapping[str, Tensor]) -> Callable[[Tensor], Output] | None:
    """The network of K clients as a function of samples `[K, n, ...]`, in eval mode and without gradient.

    Args:
        module: The clients' architecture.
        weights: Their models, with a leading axis.

    Returns:
        The function, which gives the bits of `vmap`; None where the network is more than flattening, linear layers and
        a ReLU after some of them.
    """
    if type(module) is not Classifier or type(module.encoder) not in (nn.Sequential, Staged):
        return None
    layers = [(f"encoder.{name}", layer) for name, layer in module.encoder.named_children()]
    kinds = [type(layer) for _, layer in layers]
    known = set(kinds) <= {nn.Flatten, nn.Linear, nn.ReLU} and nn.ReLU not in kinds[:1]
    after_linear = all(before is nn.Linear for before, kind in pairwise(kinds) if kind is nn.ReLU)
    if not (known and after_linear and type(module.head) is nn.Linear and type(module.drop) in PASSED):
        return None
    if any(name not in weights for name, _ in module.named_parameters(remove_duplicate=False)) or _unusual(module):
        return None

    def run(x: Tensor) -> Output:
        for name, layer in layers:
            x = _layer(layer, name, weights, x)
        return Output(x, _layer(module.head, "head", weights, x))

    return run


def _unusual(module: nn.Module) -> bool:
    """Whether a layer has hooks, or flattens other axes than those of a sample."""
    flat = [(layer.start_dim, layer.end_dim) for layer in module.modules() if isinstance(layer, nn.Flatten)]
    hooked = any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())
    return hooked or any(axes != (1, -1) for axes in flat)


def _layer(layer: nn.Module, name: str, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The outputs of one layer of all clients. A ReLU overwrites what the linear layer before it gave."""
    if isinstance(layer, nn.Flatten):
        return x.flatten(2)
    if isinstance(layer, nn.ReLU):
        return x.relu_()
    product = torch.bmm(x, weights[f"{name}.weight"].mT)
    return product if layer.bias is None else product.add_(weights[f"{name}.bias"][:, None])
