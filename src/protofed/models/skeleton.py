"""A network's structure, into which weights are loaded, and the model in training as a method sees it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call

from . import norm
from .base import Levels, Output
from .dense import DenseNetwork

EVAL_BATCH = 512
SMALL_SAMPLE, SMALL_BATCH = 256, 2048  # vectors of at most so many values are evaluated in larger pieces
Weights = Mapping[str, Tensor]


def piece_size(x: Tensor) -> int:
    """The number of samples that are evaluated at once: `EVAL_BATCH`, or more of short vectors."""
    short = x.ndim == 2 and x.shape[1] <= SMALL_SAMPLE and x.is_floating_point()
    return SMALL_BATCH if short else EVAL_BATCH


class Skeleton:
    """A network's structure, shared by all clients of that architecture; the weights are values kept outside it."""

    def __init__(self, module: nn.Module, channels_last: bool = False) -> None:
        self.module = module
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        if channels_last:
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.dim: int = module.dim  # type: ignore[assignment]
        self.params: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        # frozen parameters are the same for all clients, and integer buffers (a count of batches) are not used
        buffers = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
        self.slots = {**self.params, **buffers}
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        self.tied = len(names) > len(dict(module.named_parameters()))  # whether a parameter has two names

    @cached_property
    def dense(self) -> DenseNetwork | None:
        """The layers, where the network is a multilayer perceptron of which each client has all parameters."""
        return DenseNetwork.of(self.module, self.slots)

    def loaded(self) -> dict[str, Tensor]:
        """The module's trained parameters and floating buffers themselves, until the next client's are loaded."""
        return {name: v.detach() for name, v in self.slots.items()}

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights that are loaded."""
        return {name: v.clone() for name, v in self.loaded().items()}

    def load(self, weights: Weights) -> None:
        """Put a client's weights into the module."""
        with torch.no_grad():
            for name, slot in self.slots.items():
                slot.copy_(weights[name])

    def arranged(self, x: Tensor) -> Tensor:
        """A batch in the memory format of this network."""
        return x.contiguous(memory_format=self.layout) if x.ndim == 4 else x

    def outputs(self, x: Tensor, weights: Weights | None = None) -> Output:
        """Embeddings and logits in eval mode, without gradient, in pieces of `piece_size`.

        Args:
            x: Samples.
            weights: The weights to use; by default those that are loaded.

        Returns:
            The outputs of all samples.
        """
        self.module.eval()
        run = self.module if weights is None else lambda piece: functional_call(self.module, dict(weights), (piece,))
        with torch.no_grad():
            parts = [run(self.arranged(piece)) for piece in x.split(piece_size(x))]
        return Output(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))

    def collect(self, pieces: Iterable[Tensor]) -> None:
        """Give static batch norm its statistics: those of a pass over data with the weights that are loaded."""
        self.module.eval()  # without dropout; the layers that collect use the batch's own statistics also in eval mode
        with torch.no_grad():
            for k, piece in enumerate(pieces, 1):
                with norm.collecting(self.module, k):
                    self.module(self.arranged(piece))

    def low(self, x: Tensor) -> Tensor:
        """The low-level features of the weights that are loaded, in eval mode, without gradient, in pieces."""
        self.module.eval()
        with torch.no_grad():
            return torch.cat([self.module(self.arranged(piece), levels=True).low for piece in x.split(EVAL_BATCH)])

    def common(self, x: Tensor) -> Tensor:
        """The features of samples in the space that all clients have in common, of a guided network, in pieces."""
        space: nn.Module = self.module.space  # type: ignore[assignment]
        with torch.no_grad():
            return torch.cat([space(self.arranged(piece)) for piece in x.split(EVAL_BATCH)])


class TrainingNetwork:
    """The model in training as a method sees it."""

    def __init__(self, skeleton: Skeleton, params: Weights) -> None:
        self.skeleton, self.module, self.params = skeleton, skeleton.module, params

    def __call__(self, x: Tensor, params: Weights | None = None) -> Output:
        x = self.skeleton.arranged(x)
        return self.module(x) if params is None else functional_call(self.module, dict(params), (x,))

    def levels(self, x: Tensor) -> Levels:
        """Embedding, logits and a low-level feature of samples."""
        return self.module(self.skeleton.arranged(x), levels=True)

    def frozen(self, x: Tensor, weights: Weights) -> Output:
        """Outputs of another model of this architecture in eval mode, without gradient."""
        return frozen(self.module, self.skeleton.arranged(x), weights)


def frozen(module: nn.Module, x: Tensor, weights: Weights) -> Output:
    """The output of the module with other weights in eval mode; the module is in training mode again afterwards."""
    module.eval()
    try:
        with torch.no_grad():
            return functional_call(module, dict(weights), (x,))
    finally:
        module.train()
