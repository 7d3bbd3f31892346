"""Multilayer perceptrons of many clients without gradient: what `vmap` computes, with fewer calls and without its copies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from .base import Classifier, Output, Staged

PASSED = (nn.Identity, nn.Dropout)  # layers that do nothing in eval mode


@dataclass(frozen=True)
class DenseNetwork:
    """The layers of a multilayer perceptron by name."""

    encoder: tuple[tuple[str, nn.Module], ...]
    head: nn.Module

    @classmethod
    def of(cls, module: nn.Module, names: Collection[str]) -> DenseNetwork | None:
        """The layers of a network in which all parameters of these names are each client's own.

        Returns:
            The layers; None where the network is more than flattening, linear layers and a ReLU after some of them.
        """
        if type(module) is not Classifier or type(module.encoder) not in (nn.Sequential, Staged):
            return None
        layers = tuple((f"encoder.{name}", layer) for name, layer in module.encoder.named_children())
        kinds = [type(layer) for _, layer in layers]
        known = set(kinds) <= {nn.Flatten, nn.Linear, nn.ReLU} and nn.ReLU not in kinds[:1]
        after_linear = all(before is nn.Linear for before, kind in pairwise(kinds) if kind is nn.ReLU)
        if not (known and after_linear and type(module.head) is nn.Linear and type(module.drop) in PASSED):
            return None
        owned = all(name in names for name, _ in module.named_parameters(remove_duplicate=False))
        return cls(layers, module.head) if owned and not _unusual(module) else None

    def outputs(self, weights: Mapping[str, Tensor], x: Tensor) -> Output:
        """The outputs of K clients' models, with a leading axis, for samples `[K, n, ...]`; the bits are those of `vmap`."""
        for name, layer in self.encoder:
            x = _layer(layer, name, weights, x)
        return Output(x, _layer(self.head, "head", weights, x))


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
