"""A model whose parameters are sums σ + ψ of two parts that are trained separately, as in FedMatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from .base import PSI, ModelSpec, Shape


class Decomposed(nn.Module):
    """`module` with every parameter replaced by a sum. σ and ψ are ordinary parameters of this module."""

    def __init__(self, module: nn.Module, start: float) -> None:
        super().__init__()
        self.whole = (
            module,
        )  # in a tuple, so that it is no submodule; its layers are registered under their own names
        for name, child in module.named_children():
            self.add_module(name, child)
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in module.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.dim: int = module.dim  # type: ignore[assignment]
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.psi = _tree({name: nn.Parameter(start * p.detach()) for name, p in trained.items()})
        self.names = tuple(trained)

    @property
    def undivided(self) -> nn.Module:
        """The model itself, whose parameters are σ."""
        return self.whole[0]

    def forward(self, x: Tensor, **options: Any) -> Any:
        """The output of the model with parameters σ + ψ."""
        module = self.undivided
        module.training = self.training  # as it is no submodule, `train` and `eval` do not change it
        parameters = dict(self.named_parameters())
        sums = {name: parameters[name] + parameters[PSI + name] for name in self.names}
        direct = {**dict(self.named_parameters(recurse=False)), **dict(self.named_buffers(recurse=False))}
        return functional_call(module, {**direct, **sums}, (x,), options)


def _tree(parameters: dict[str, nn.Parameter]) -> nn.Module:
    """Modules without layers that give parameters their dotted names."""
    root = nn.Module()
    for name, parameter in parameters.items():
        *path, leaf_name = name.split(".")
        module = root
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module._modules[step]  # type: ignore[assignment]
        module.register_parameter(leaf_name, parameter)
    return root


@dataclass(frozen=True)
class Halved:
    """A model's settings, from which `Decomposed` is built; ψ starts as `start` times σ."""

    model: ModelSpec
    start: float

    @property
    def name(self) -> str:
        """The model's registered name."""
        return self.model.name

    def build(self, sample_shape: Shape, num_classes: int) -> Decomposed:
        """Build the network, with random initial weights, for samples of one shape."""
        return Decomposed(self.model.build(sample_shape, num_classes), self.start)
