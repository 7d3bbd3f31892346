"""Any model's features in a space of one width, so that clients of different architectures can share prototypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor, nn

from ..bank import unit
from ..errors import ProtofedError
from .base import Classifier, Levels, ModelSpec, Output, Shape, adapt, by_stages, projection

ProjectionKind = Literal["linear", "consensus"]
DROPOUT = 0.1  # FedPAGR does not say how much


class Projection(nn.Module):
    """A model in a space of one width: `backbone`, `match` where its width is not `dim`, `consensus` if asked for, head."""

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
        if levels:
            low, features = by_stages(self.backbone, x, self.owner)
            z = self.consensus(self.match(features))
            return Levels(low, z, self.head(z))
        output = self.backbone(x)  # an own network's logits are not used
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
    """Put a network into a space of one width, with a head of its own.

    Args:
        module: a model, of which only the encoder is used where it is a `Classifier`, or a network that `adapt` takes.
        kind: `"linear"` is a linear layer where the width differs; `"consensus"` adds FedPAGR's projection head and the unit
            sphere.
        dim: the width of the space.
        num_classes: the number of classes.
        sample_shape: the shape of one sample.
        owner: what errors call the model.
        dropout: in FedPAGR's projection head.

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
    """A model's settings with those of its projection. It goes by the model's name and stands wherever settings do."""

    model: ModelSpec
    kind: ProjectionKind
    dim: int = 512
    dropout: float = DROPOUT

    def __post_init__(self) -> None:
        _check(self.kind, self.dim, self.dropout)

    @property
    def name(self) -> str:
        return self.model.name

    def build(self, sample_shape: Shape, num_classes: int) -> Projection:
        built = self.model.build(sample_shape, num_classes)
        return project(built, self.kind, self.dim, num_classes, sample_shape, f"model {self.name!r}", self.dropout)


def _check(kind: str, dim: int, dropout: float) -> None:
    if kind not in get_args(ProjectionKind):
        raise ProtofedError(f"projection={kind!r}; expected 'linear' or 'consensus'")
    if dim < 1:
        raise ProtofedError(f"projection: dim={dim}; expected at least 1")
    if not 0 <= dropout < 1:
        raise ProtofedError(f"projection: dropout={dropout}; expected at least 0 and below 1")
