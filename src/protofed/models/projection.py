"""Projection of any model's features to one width, so that clients of different architectures can share prototypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from ..bank import unit
from ..errors import ProtofedError
from .base import Classifier, Levels, ModelSpec, Output, Shape, adapt, by_stages, projection

ProjectionKind = Literal["linear", "consensus"]
DROPOUT = 0.1  # FedPAGR does not say which rate it uses


class Projection(nn.Module):
    """A model whose embedding has a given width.

    It consists of `backbone`, `match` where the backbone's width is not `dim`, `consensus` if its kind has one, and a head.
    """

    def __init__(
        self,
        backbone: nn.Module,
        width: int,
        kind: ProjectionKind,
        dim: int,
        num_classes: int,
        dropout: float,
        owner: str,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.match = projection(width, dim)
        self.consensus = Consensus(dim, dropout) if kind == "consensus" else nn.Identity()
        self.head = nn.Linear(dim, num_classes)
        self.dim = dim
        self.owner = owner

    def forward(self, x: Tensor, levels: bool = False) -> Output | Levels:
        """The projected embedding and logits of a batch, with `levels` the low-level feature too."""
        if levels:
            low, features = by_stages(self.backbone, x, self.owner)
            z = self.consensus(self.match(features))
            return Levels(low, z, self.head(z))
        output = self.backbone(x)  # the logits of a user's own network are not used
        z = self.consensus(self.match(output.embedding if isinstance(output, Output) else output))
        return Output(z, self.head(z))


class Consensus(nn.Sequential):
    """FedPAGR's projection head g_k, which ends on the unit sphere."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__(
            nn.Linear(dim, 2 * dim),
            nn.LayerNorm(2 * dim),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(2 * dim, dim),
            nn.LayerNorm(dim),
        )

    def forward(self, features: Tensor) -> Tensor:
        """The features on the unit sphere."""
        return unit(super().forward(features))


def project(
    module: nn.Module,
    kind: ProjectionKind,
    dim: int,
    num_classes: int,
    sample_shape: Shape,
    owner: str = "model",
    dropout: float = DROPOUT,
) -> Projection:
    """Project a network's features to one width, with a new head.

    Args:
        module: a `Classifier`, of which the encoder is used, or a network that `adapt` accepts.
        kind: `"linear"` is a linear layer where the width differs; `"consensus"` adds FedPAGR's projection head and the
            unit sphere.
        dim: the width of the space.
        num_classes: the number of classes.
        sample_shape: the shape of one sample.
        owner: the model's name in error messages.
        dropout: the dropout of FedPAGR's projection head.

    Returns:
        the model.

    >>> project(nn.Flatten(), "linear", dim=4, num_classes=10, sample_shape=(1, 2, 3)).dim
    4
    """
    _check(kind, dim, dropout)
    model = module if isinstance(module, Classifier) else adapt(module, sample_shape, num_classes, owner)
    width: int = model.dim  # type: ignore[assignment]
    backbone = model.encoder if isinstance(model, Classifier) else model
    return Projection(backbone, width, kind, dim, num_classes, dropout, owner)


@dataclass(frozen=True)
class Projected:
    """A model's settings with those of its projection. They have the model's name and can be used like any settings."""

    model: ModelSpec
    kind: ProjectionKind
    dim: int = 512
    dropout: float = DROPOUT

    def __post_init__(self) -> None:
        _check(self.kind, self.dim, self.dropout)

    @property
    def name(self) -> str:
        """The model's registered name."""
        return self.model.name

    def build(self, sample_shape: Shape, num_classes: int) -> Projection:
        """Build the network, with random initial weights, for samples of one shape."""
        network = self.model.build(sample_shape, num_classes)
        return project(network, self.kind, self.dim, num_classes, sample_shape, f"model {self.name!r}", self.dropout)


def _check(kind: str, dim: int, dropout: float) -> None:
    if kind not in get_args(ProjectionKind):
        raise ProtofedError(f"projection={kind!r}; expected 'linear' or 'consensus'")
    if dim < 1:
        raise ProtofedError(f"projection: dim={dim}; expected at least 1")
    if not 0 <= dropout < 1:
        raise ProtofedError(f"projection: dropout={dropout}; expected at least 0 and below 1")
