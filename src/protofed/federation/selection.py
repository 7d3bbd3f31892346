"""Which clients take part in a round: at random, or so that what they know differs.

FedAPA's paper asks of a choice that it keep prototypes diverse and mind what devices can do, and gives no formula; the
one here is ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..bank import PrototypeBank, unit

FLOOR = 1e-6  # a gain below this is rounding; nobody's chance is nothing


def random_choice(total: int, k: int, generator: torch.Generator) -> list[int]:
    """`k` of `total` clients, all equally likely, in rising order."""
    return sorted(torch.randperm(total, generator=generator)[:k].tolist())


def diverse_choice(banks: PrototypeBank, capability: Tensor, k: int, generator: torch.Generator) -> list[int]:
    """`k` clients, drawn one after another by `capability[j] · gain_j`, in rising order.

    `gain_j` is the sum over the classes client j holds of how new its prototype is, divided by how many clients hold
    the class: so every class has the same to give, and holders of a rare one share it among few. New is 1 where no
    chosen client holds the class, else the cosine distance to the nearest chosen prototype of it, halved to lie in
    [0, 1]. Clients are drawn in proportion rather than the best one taken, as k-means++ does, so that no one is left
    out for ever.

    A client never heard of may be worth as much as the best, and is given that gain. It does not go first regardless,
    because one that can never answer would then take a place in every round.

    O(N · C · d) for each client chosen.
    """
    total = banks.means.shape[0]
    if banks.means.ndim != 3 or capability.shape != (total,):
        raise ValueError(
            f"expected banks [N, C, d] and capability [N], got {tuple(banks.means.shape)} and {tuple(capability.shape)}"
        )
    if not 0 < k <= total:
        raise ValueError(f"cannot choose {k} of {total} clients")
    if not bool(((capability > 0) & torch.isfinite(capability)).all()):
        raise ValueError("every capability must be a number above 0")
    capable = capability.double() / capability.max()
    known = banks.known
    directions = unit(torch.where(known[..., None], banks.means, 0.0))
    share = known / known.sum(0).clamp_min(1)  # [N, C]
    new = torch.ones_like(share)
    heard = known.any(-1)
    left = torch.ones(total, dtype=torch.bool)
    for _ in range(k):
        gain = torch.where(heard & left, (share * new).sum(-1), 0.0).clamp_min(FLOOR)
        chance = torch.where(heard, gain, gain.max()) * capable * left
        pick = int(torch.multinomial(chance, 1, generator=generator))
        left[pick] = False
        cosine = torch.einsum("ncd,cd->nc", directions, directions[pick])
        new = torch.where(known[pick], torch.minimum(new, ((1 - cosine) / 2).clamp_min(0)), new)
    return torch.nonzero(~left).squeeze(1).tolist()
