"""A method of your own in one file: FedProto with a cosine pull. Run it with `python examples/own_method.py`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

import protofed as pf
from protofed import PrototypeBank, aggregate, losses
from protofed.methods import Batch, Network, Received, Setup, SharedBank, Upload, bank_of, register, uploaded_banks
from protofed.wire import Bundle


@register("fedproto-cosine")
@dataclass(frozen=True)
class FedProtoCosine(SharedBank):
    """CE + λ·(1 − cosine) to the global prototype of the sample's class."""

    weight: float = 1.0  # λ

    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> dict[str, Tensor]:
        z, logits = network(batch.x)
        pull = losses.consistency(z, batch.y, bank_of(received), weight=batch.weight)
        return {"ce": losses.cross_entropy(logits, batch.y, weight=batch.weight), "pull": self.weight * pull}

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        return replace(state, bank=aggregate.mean(uploaded_banks(uploads)).filled_from(bank_of(state)))

    def prototype_scores(self, z: Tensor, bank: PrototypeBank) -> Tensor:
        return -bank.distances(z, "cosine")


if __name__ == "__main__":
    comparison = pf.compare(["fedproto", "fedproto-cosine"], data="digits", shot=15, lr=0.05, rounds=20, seeds=2)
    for method, runs in comparison.results.items():
        print(method, *(f"head {r.accuracy:.1%}, prototype {r.accuracy_prototype:.1%}" for r in runs), sep="  ")
