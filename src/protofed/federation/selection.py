"""The choice of a round's cohort: at random, or so that its prototypes are diverse.

FedAPA's paper asks that the choice keep prototypes diverse and respect the capability of devices. It gives no formula;
this one is ours.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache

import torch
from torch import Tensor

from .. import seeds
from ..bank import PrototypeBank, unit

FLOOR = 1e-6  # a smaller gain is a rounding error; every client has some chance


def random_choice(total: int, k: int, generator: torch.Generator) -> list[int]:
    """`k` of `total` clients, all equally likely, in rising order."""
    return sorted(torch.randperm(total, generator=generator)[:k].tolist())


def participants_per_round(participation: float, clients: int) -> int:
    """The number of clients in a round, ⌊ρN⌋, at least one."""
    return max(1, math.floor(participation * clients + 1e-9))


def random_cohort(seed: int, clients: int, participation: float, round: int) -> list[int]:
    """The clients of a round, all equally likely; all of them where everybody takes part."""
    number = participants_per_round(participation, clients)
    if number >= clients:
        return list(range(clients))
    return random_choice(clients, number, seeds.torch_stream(seed, "participation", round))


@lru_cache(maxsize=4096)
def most_often(seed: int, clients: int, participation: float, rounds: int) -> int:
    """In how many of the first so many rounds the client that takes part most often takes part."""
    if participants_per_round(participation, clients) >= clients:
        return rounds
    cohorts = (random_cohort(seed, clients, participation, r) for r in range(1, rounds + 1))
    return max(Counter(client for cohort in cohorts for client in cohort).values(), default=0)


def diverse_choice(banks: PrototypeBank, capability: Tensor, k: int, generator: torch.Generator) -> list[int]:
    """`k` clients, drawn one after another by `capability[j] · gain_j`, in rising order.

    `gain_j` is a sum over the classes that client j holds: the novelty of its prototype, divided by the number of
    clients that hold the class. Every class thus contributes the same in total, and a rare class contributes more for
    each of its holders. The novelty is 1 where no chosen client holds the class; otherwise it is the cosine distance to
    the nearest chosen prototype of the class, halved to lie in [0, 1]. As in k-means++, clients are drawn with
    probabilities in proportion to this product, so that no client is excluded for ever.

    A client whose prototypes the server has never received gets the largest gain of the others. It is not chosen with
    certainty, because a client that never answers would then be chosen in every round.

    Args:
        banks: The clients' prototypes, `[N, C, d]`.
        capability: A positive number for each client.
        k: The size of the cohort.
        generator: The random stream.

    Returns:
        The numbers of the chosen clients. The cost is O(N · C · d) for each of them.
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
    novelty = torch.ones_like(share)
    has_bank = known.any(-1)
    available = torch.ones(total, dtype=torch.bool)
    for _ in range(k):
        gain = torch.where(has_bank & available, (share * novelty).sum(-1), 0.0).clamp_min(FLOOR)
        probability = torch.where(has_bank, gain, gain.max()) * capable * available
        pick = int(torch.multinomial(probability, 1, generator=generator))
        available[pick] = False
        cosine = torch.einsum("ncd,cd->nc", directions, directions[pick])
        novelty = torch.where(known[pick], torch.minimum(novelty, ((1 - cosine) / 2).clamp_min(0)), novelty)
    return torch.nonzero(~available).squeeze(1).tolist()
