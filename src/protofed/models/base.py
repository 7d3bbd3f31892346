"""What every model is: an encoder and a linear head, giving `(embedding, logits)`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor, nn

from ..registry import Registry


class Output(NamedTuple):
    embedding: Tensor
    logits: Tensor


class Classifier(nn.Module):
    """`encoder` gives a flat embedding of `dim` numbers, `head` the class logits."""

    def __init__(self, encoder: nn.Module, dim: int, num_classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(dim, num_classes)
        self.dim = dim

    def forward(self, x: Tensor) -> Output:
        z = self.encoder(x)
        return Output(z, self.head(z))


class ModelSpec(Protocol):
    """A model's settings (a frozen dataclass); `build` makes the network for an input shape and a number of classes."""

    name: str

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> nn.Module: ...


registry: Registry[ModelSpec] = Registry("model")
register = registry.register


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
