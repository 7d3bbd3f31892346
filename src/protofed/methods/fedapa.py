"""FedAPA: prototypes of each client's own, weighted by how alike its peers are, and the peers' prototypes beside them.

"Federated Learning with Adaptive Prototype Aggregation Toward Heterogeneous Wi-Fi CSI-based Crowd Counting" (Guo et al.,
2025).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import aggregate, losses
from ..bank import PrototypeBank
from ..schedules import Ramp, ramp
from ..wire import Bundle
from .base import Batch, Method, Network, Received, Setup, Trained, Upload, bank_of, register, uploaded_banks


@register("fedapa")
@dataclass(frozen=True)
class FedAPA(Method):
    """CE + λ_t·(contrast with the client's personalised prototypes + with every client's prototypes)."""

    paper: ClassVar[str] = "Guo et al., 2025"
    travels: ClassVar[tuple[str, ...]] = ("bank", "banks.peers")
    required: ClassVar[tuple[str, ...]] = ("bank",)

    temperature: float = 0.5  # τ of Eq. 6, 9 and 10
    warm_up: Ramp = ramp("cosine", start=0, end=50, maximum=1.0)  # λ_t of Eq. 11
    padding: Literal["mean", "size-weighted"] = "mean"  # Eq. 8 as printed; the text about it says sample-weighted
    variant: Literal["fedapa", "global", "global+clients"] = "fedapa"  # the others are the ablation of Table IV

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError("temperature must be above 0")

    # --- server -------------------------------------------------------------------------------------------------
    def server_start(self, setup: Setup) -> Bundle:
        n, c, d = setup.num_clients, setup.num_classes, setup.dim
        return self._state(PrototypeBank(torch.zeros(n, c, d), torch.zeros(n, c)))

    def send(self, state: Bundle, client: int, round: int) -> Bundle:
        """Q_i and the other clients' P_j: with the bank that comes back, the N + 1 banks of Table V."""
        own = state.banks["personal"][client] if self.variant == "fedapa" else state.bank
        if self.variant == "global":
            return Bundle(bank=own)
        padded = state.banks["padded"]
        return Bundle(bank=own, banks={"peers": _joined(padded[:client], padded[client + 1 :])})

    def server_update(self, state: Bundle, uploads: Sequence[Upload], round: int, setup: Setup) -> Bundle:
        """A client that did not take part keeps what it reported last."""
        old, new = state.banks["clients"], uploaded_banks(uploads)
        rows = torch.tensor([u.client for u in uploads])
        return self._state(
            PrototypeBank(
                old.means.index_copy(0, rows, new.means.to(old.means.dtype)),
                old.counts.index_copy(0, rows, new.counts.to(old.counts.dtype)),
            )
        )

    def _state(self, clients: PrototypeBank) -> Bundle:
        """What will be sent, made once a round. `bank` is the clients' average: the padding, and Table IV's global one."""
        weighted = self.padding == "size-weighted"
        banks = {"clients": clients}
        if self.variant != "global":
            reported = clients.known.any(-1, keepdim=True)  # the others have nothing to contrast with
            banks["padded"] = aggregate.pad(clients, weighted).restricted(reported)  # Eq. 8
        if self.variant == "fedapa":
            banks["personal"] = aggregate.personalised(clients, self.temperature, weighted=weighted)  # Eq. 5–8
        return Bundle(bank=(aggregate.weighted_mean if weighted else aggregate.mean)(clients), banks=banks)

    def bank_shapes(self, setup: Setup) -> Mapping[str, tuple[int | None, ...]]:
        return {"peers": (setup.num_clients - 1, setup.num_classes, setup.dim)}

    def client_banks(self, state: Bundle) -> PrototypeBank:
        return state.banks["clients"]

    # --- client -------------------------------------------------------------------------------------------------
    def client_loss(self, network: Network, batch: Batch, received: Received, round: int) -> dict[str, Tensor]:
        z, logits = network(batch.x)
        y, weight, warm = batch.y, batch.weight, self.warm_up(round)
        personal = losses.prototype_cross_entropy(z, y, bank_of(received), self.temperature, weight)  # Eq. 9
        terms = {"ce": losses.cross_entropy(logits, y, weight), "global": warm * personal}
        if self.variant != "global":
            peers = losses.peer_contrast(z, y, self._everyone(received), self.temperature, weight)  # Eq. 10
            terms["clients"] = warm * peers
        return terms  # Eq. 12

    def _everyone(self, received: Received) -> PrototypeBank:
        """P. Its own part does not travel: Eq. 8 pads it with the rows that Q_i has for the classes it lacks."""
        own, peers = received.memory.bank, received.banks["peers"]
        if own is None:  # never reported
            return peers
        padded = own.filled_from(bank_of(received))
        return _joined(peers, PrototypeBank(padded.means[None], padded.counts[None]))

    def client_return(self, trained: Trained, received: Received, round: int) -> Bundle:
        return Bundle(bank=trained.bank())  # Eq. 4

    def client_remember(self, trained: Trained, received: Received, round: int) -> Bundle:
        return received.memory if self.variant == "global" else Bundle(bank=trained.bank())

    # --- prediction ---------------------------------------------------------------------------------------------
    def evaluation_bank(self, state: Bundle, own: PrototypeBank) -> PrototypeBank:
        """The client's own prototypes, and the average where it has none."""
        return own.filled_from(bank_of(state))


def _joined(first: PrototypeBank, second: PrototypeBank) -> PrototypeBank:
    """Two stacks as one."""
    return PrototypeBank(torch.cat([first.means, second.means]), torch.cat([first.counts, second.counts]))
