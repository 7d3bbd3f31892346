"""Few-shot accuracy: how well an embedding tells classes apart of which it is shown a few samples."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import seeds
from ..bank import PrototypeBank
from ..errors import ProtofedError

WAY, EPISODES = 5, 100
NORMAL = 1.96  # deviations of the mean that a 95 % interval has on either side


class FewShot(NamedTuple):
    """The mean accuracy over episodes, and half the width of its 95 % interval."""

    accuracy: float
    interval: float


def few_shot(
    z: Tensor,
    y: Tensor,
    way: int = WAY,
    shot: int = 1,
    episodes: int = EPISODES,
    queries: int = 15,
    seed: int = 0,
    metric: str = "squared",
) -> FewShot:
    """Classify by the nearest class mean of a few samples, in episodes that are drawn anew.

    An episode draws `way` classes and of each `shot` samples, whose mean is the class's prototype, and up to `queries`
    others, which are classified.

    Args:
        z: Embeddings `[n, d]`.
        y: Classes `[n]`.
        way: The number of classes in an episode.
        shot: The samples of a class that are shown.
        episodes: How many are drawn.
        queries: The most samples of a class that are classified.
        seed: What the draws follow from.
        metric: As in `PrototypeBank.distances`.

    Returns:
        The mean accuracy of an episode, and half the width of its interval over the episodes.

    Raises:
        ProtofedError: Too few classes have more than `shot` samples.

    >>> z = torch.tensor([[0.0], [0.1], [5.0], [5.1]])
    >>> few_shot(z, torch.tensor([0, 0, 1, 1]), way=2, episodes=3)
    FewShot(accuracy=1.0, interval=0.0)
    """
    if way < 2 or shot < 1 or episodes < 1 or queries < 1:
        raise ProtofedError(
            f"few_shot: way={way}, shot={shot}, episodes={episodes}, queries={queries}; expected way of at least 2 and the "
            "others of at least 1"
        )
    rows = [torch.nonzero(y == c).squeeze(1).cpu() for c in y.unique().tolist()]
    rows = [of_class for of_class in rows if len(of_class) > shot]
    if len(rows) < way:
        raise ProtofedError(
            f"few_shot: {len(rows)} classes have more than {shot} samples; expected at least way={way} of them"
        )
    stream = seeds.torch_stream(seed, "few-shot", way, shot)
    accuracies = []
    for _ in range(episodes):
        classes = torch.randperm(len(rows), generator=stream)[:way].tolist()
        drawn = [rows[c][torch.randperm(len(rows[c]), generator=stream)] for c in classes]
        shown = torch.cat([r[:shot] for r in drawn])
        asked = [r[shot : shot + queries] for r in drawn]
        labels = torch.arange(way).repeat_interleave(shot)
        bank = PrototypeBank.from_embeddings(z[shown], labels.to(z.device), way)
        truth = torch.cat([torch.full((len(r),), k) for k, r in enumerate(asked)]).to(z.device)
        accuracies.append((bank.nearest(z[torch.cat(asked)], metric) == truth).double().mean())
    values = torch.stack(accuracies)
    deviation = float(values.std()) if episodes > 1 else 0.0
    return FewShot(float(values.mean()), NORMAL * deviation / math.sqrt(episodes))
