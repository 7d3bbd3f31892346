"""A method of your own in one file: FedProto with a cosine pull. Run it with `python examples/own_method.py`."""

from dataclasses import dataclass

import protofed as pf
from protofed.methods import PROTOTYPES, Method, register
from protofed.parts import Mean, Nearest, bank_of


@register("fedproto-cosine", paper="after Tan et al., AAAI 2022")
@dataclass(frozen=True)
class FedProtoCosine(Method):
    exchange, reduce, predict = PROTOTYPES, Mean("holders"), Nearest("cosine")
    weight: float = 1.0  # λ of the loss: cross-entropy + λ·(1 − cosine to the received prototype of the sample's class)

    def terms(self, net, batch, received, round):
        z, logits = net(batch.x)
        pull = pf.losses.consistency(z, batch.y, bank_of(received), weight=batch.weight)
        return {"ce": pf.losses.cross_entropy(logits, batch.y, weight=batch.weight), "pull": self.weight * pull}


if __name__ == "__main__":
    comparison = pf.compare(["fedproto", "fedproto-cosine"], data="digits", shot=15, lr=0.05, rounds=20, seeds=2)
    for method, runs in comparison.results.items():
        print(method, *(f"head {r.accuracy_head:.1%}, prototype {r.accuracy_prototype:.1%}" for r in runs), sep="  ")
