"""FedProto: clients align their embeddings with the global class prototypes; only prototypes travel."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..parts import CE, Align, Batch, Mean, Nearest, Predict, Received, Reduce, terms_of
from ..schedules import Weight
from ..wire import Exchange
from .base import PROTOTYPES, Method, register
from .checks import not_negative
from .client import Network, Terms


@register("fedproto", paper="Tan et al., AAAI 2022")
@dataclass(frozen=True)
class FedProto(Method):
    """CE + λ·alignment with the mean of the clients' prototypes."""

    exchange: ClassVar[Exchange] = PROTOTYPES
    predict: ClassVar[Predict] = Nearest()

    weight: Weight = 1.0  # λ, 0 is Local; the unit of distance is the mean squared difference over dimensions
    reduction: Literal["mean", "sum"] = "mean"
    reduce: Reduce = Mean("size")  # the paper's Eq. 6; its published code: mean?by=holders

    def __post_init__(self) -> None:
        not_negative(self, "weight")

    def terms(self, net: Network, batch: Batch, received: Received, round: int) -> Terms:  # Eq. 7
        return terms_of((CE(), Align(self.weight, self.reduction)), net, net(batch.x), batch, received, round)
