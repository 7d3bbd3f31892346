"""The client's side of a method: the network in training, what a step gives, and a client after training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..bank import PrototypeBank
from ..models.base import Levels, Output
from ..parts import Batch, Unsupervised, View

Weights = Mapping[str, Tensor]
Terms = dict[str, Tensor]


class Pseudo(NamedTuple):
    """A step's pseudo-labels, for the record: the class, whether it was used (0 or 1), and how sure (more is surer).

    They are compared with labels that only the record has; a method never sees these.
    """

    label: Tensor
    accepted: Tensor
    score: Tensor


class Loss(NamedTuple):
    """A step's loss terms by name, and the pseudo-labels behind them."""

    terms: Terms
    pseudo: Pseudo | None = None


def with_pseudo_labels(supervised: Terms, unsupervised: Unsupervised | None) -> Loss:
    """The loss of a step with labelled samples and, where there are any, unlabelled ones."""
    if unsupervised is None:
        return Loss(supervised)
    terms, *pseudo = unsupervised
    return Loss({**supervised, **terms}, Pseudo(*pseudo))


class Network(Protocol):
    """A client's model as a method sees it: call it for `(embedding, logits)`; `params` are what is being trained.

    `net(x, params)` runs the model with other parameters (the received ones, a half of a sum without gradient).
    """

    params: Weights

    def __call__(self, x: Tensor, params: Weights | None = None) -> Output:
        """Embeddings and logits of a batch, by other parameters where they are given."""
        ...

    def levels(self, x: Tensor) -> Levels:
        """Embedding and logits, and a low-level feature of 64 numbers before them."""
        ...

    def frozen(self, x: Tensor, weights: Weights) -> Output:
        """Another model of this architecture (the received one, a helper's) in eval mode, without gradient."""
        ...


class Trained(Protocol):
    """A client after local training: its weights, and its model in eval mode over its whole labelled set."""

    @property
    def weights(self) -> Weights:
        """Parameters and floating buffers."""
        ...

    @property
    def num_unlabelled(self) -> int:
        """How many unlabelled samples the client has."""
        ...

    @property
    def generator(self) -> torch.Generator:
        """A random stream of this client's own for what it returns."""
        ...

    def bank(self) -> PrototypeBank:
        """Class means of the embeddings of the labelled set."""
        ...

    def outputs(self) -> tuple[Output, Batch]:
        """Embeddings and logits of the labelled set, and the set itself."""
        ...

    def labelled(self, view: View) -> Output:
        """Embeddings and logits of a view of the labelled set."""
        ...

    def low_bank(self) -> PrototypeBank:
        """Class means of the low-level features of the labelled set."""
        ...

    def common(self, x: Tensor) -> Tensor:
        """Features of samples in the space that all clients have in common, of a guided model."""
        ...

    def unlabelled(self, view: View = "none", weights: Weights | None = None) -> Output:
        """Embeddings and logits of the unlabelled set.

        Args:
            view: of the samples; `none` takes them as they are.
            weights: those of another model, the received one for instance; without it the client's own.
        """
        ...

    def run(self, x: Tensor) -> Output:
        """Embeddings and logits of any samples."""
        ...
