"""Inversion: an input whose embedding matches a prototype, and whether it shows more than what a class looks like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, lgamma

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..federation.optimiser import LocalSettings, Optimiser
from .message import ClientMessage, Encoder, Sent
from .samples import Labelled

STEPS = 300
RATE = 0.1
PENALTY = 0.001  # the weight of the prior beside 1 − cosine
DIRECTIONS = 100  # the most directions of variation that the prior knows
MOST_CLASSES = 6  # a client's prototypes that are inverted: those of the fewest samples
TINY = 1e-12


@dataclass(frozen=True)
class Prior:
    """What samples of this kind look like in general: their mean, their main directions of variation, and their range.

    An attacker has it from samples of other people. A direction is scaled by its standard deviation.
    """

    mean: Tensor
    directions: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, samples: Tensor) -> Prior:
        """The prior that samples `[n, ...]` give."""
        mean = samples.mean(0)
        _, strength, directions = torch.linalg.svd((samples - mean).flatten(1), full_matrices=False)
        number = min(DIRECTIONS, int((strength > 1e-3 * strength[0]).sum())) if len(strength) else 0
        scale = strength[:number, None] / max(1, len(samples)) ** 0.5
        return cls(mean, directions[:number] * scale, samples.amin(0), samples.amax(0))

    def samples(self, amounts: Tensor) -> Tensor:
        """The samples with some amounts `[n, directions]` of each direction, within the range."""
        varied = self.mean + (amounts @ self.directions).view(len(amounts), *self.mean.shape)
        return varied.clamp(self.low, self.high)


@dataclass(frozen=True)
class Shown:
    """The samples that belong to one inversion: what was computed, and the true ones it is compared with."""

    inverted: Tensor
    class_mean: Tensor
    nearest_own: Tensor
    nearest_other: Tensor | None


@dataclass(frozen=True)
class Inversion:
    """The inversion of one prototype.

    `match` is the cosine between the embedding that was reached and the prototype. `own` and `others` are the
    similarities (correlations) to the nearest of the client's samples and to the nearest of as many samples of other
    people. `own_nearer` is the probability that the former is the larger one: 0.5 says that nothing individual is
    shown. `others` and `own_nearer` are None where nobody else has samples of the class.
    """

    label: int
    samples: int
    match: float
    own: float
    others: float | None
    own_nearer: float | None
    shown: Shown = field(repr=False)


def inversions(
    message: ClientMessage, sent: Sent, others: Labelled, generator: torch.Generator, steps: int = STEPS
) -> list[Inversion]:
    """Invert the prototypes of a client's message, those of the fewest samples first.

    Args:
        message: The client's message, with the samples it trains on.
        sent: The message as it leaves, or as the method returns it.
        others: Samples of other people, in random order. Half of them, at most 1,000, make the attacker's prior; the
            rest are what the result is compared with.
        generator: The random stream that the search starts from.
        steps: The number of steps of the search.

    Returns:
        One inversion for each of at most six classes; none where no prototypes are sent.
    """
    bank = sent.content.bank
    x, y = message.members.take()
    if bank is None or len(others[1]) < 4:
        return []
    counts = torch.bincount(y, minlength=bank.num_classes)
    classes = [c for c in counts.argsort(stable=True).tolist() if counts[c] and bank.known[c]][:MOST_CLASSES]
    if not classes:
        return []
    half = min(1000, len(others[1]) // 2)
    prior, (other_x, other_y) = Prior.of(others[0][:half]), (others[0][half:], others[1][half:])
    found, match = invert(message.encoder(sent), bank.means[classes], prior, generator, steps)
    results = []
    for k, label in enumerate(classes):
        own, other = x[y == label], other_x[other_y == label]
        own_similarity, other_similarity = similarity(found[k], own), similarity(found[k], other)
        shown = Shown(
            found[k],
            own.mean(0),
            own[own_similarity.argmax()],
            other[other_similarity.argmax()] if len(other) else None,
        )
        numbers = nearer(own_similarity.tolist(), other_similarity.tolist())
        results.append(Inversion(label, len(own), float(match[k]), *numbers, shown))
    return results


def invert(
    encoder: Encoder, prototypes: Tensor, prior: Prior, generator: torch.Generator, steps: int = STEPS
) -> tuple[Tensor, Tensor]:
    """Search inputs whose embeddings have the direction of prototypes, by gradient descent within a prior.

    The direction alone is matched, so that a bound on the norm of what is sent does not hinder the search.

    Args:
        encoder: The model.
        prototypes: The prototypes `[n, d]`.
        prior: What samples look like in general.
        generator: The random stream that the search starts from.
        steps: The number of steps.

    Returns:
        The inputs `[n, ...]`, and the cosine of each one's embedding with its prototype.
    """
    amounts = 0.01 * torch.randn(len(prototypes), len(prior.directions), generator=generator)
    amounts.requires_grad_()
    optimiser = Optimiser(LocalSettings(optimiser="adam", lr=RATE), {"amounts": amounts}, {})
    for _ in range(steps):
        match = F.cosine_similarity(encoder.embedding(prior.samples(amounts)), prototypes)
        loss = (1 - match + PENALTY * amounts.square().mean(1)).sum()
        optimiser.step(torch.autograd.grad(loss, [amounts]))
    with torch.no_grad():
        found = prior.samples(amounts)
        return found, F.cosine_similarity(encoder.outputs(found).embedding, prototypes)


def similarity(sample: Tensor, samples: Tensor) -> Tensor:
    """The correlation of one sample with each of some others: 1 is the same up to brightness and contrast.

    Args:
        sample: One sample.
        samples: Others `[n, ...]`.

    Returns:
        The correlations `[n]`.

    >>> similarity(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([[2.0, 4.0, 8.0], [-1.0, -2.0, -4.0]])).tolist()
    [1.0, -1.0]
    """
    a, b = sample.flatten().double(), samples.flatten(1).double()
    a, b = a - a.mean(), b - b.mean(1, keepdim=True)
    return (b @ a / (b.norm(dim=1) * a.norm()).clamp_min(TINY)).float()


def nearer(own: Sequence[float], others: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Compare the nearest of some samples with the nearest of as many others.

    The nearest of many is nearer than the nearest of few, so equal numbers are drawn from both, without replacement.
    The result is the expectation over all such draws.

    Args:
        own: Similarities to the client's own samples.
        others: Similarities to samples of other people.

    Returns:
        The expected largest similarity of `own` and of `others`, and the probability that the former is larger, where
        ties count half; None for both where there are no others.

    >>> nearer([0.9], [0.1, 0.5, 0.95, 0.2])
    (0.9, 0.4375, 0.75)
    """
    number = min(len(own), len(others))
    if number == 0:
        return max(own), None, None
    mine, theirs = np.sort(own), np.sort(others)
    my_chance, their_chance = _chances_of_largest(len(mine), number), _chances_of_largest(len(theirs), number)
    below = np.concatenate([[0.0], np.cumsum(their_chance)])
    less = below[np.searchsorted(theirs, mine, side="left")]
    not_more = below[np.searchsorted(theirs, mine, side="right")]
    wins = my_chance @ (less + not_more) / 2
    return float(my_chance @ mine), float(their_chance @ theirs), float(min(wins, 1.0))


def _chances_of_largest(total: int, number: int) -> np.ndarray:
    """The probability of each of `total` sorted values to be the largest of `number` that are drawn."""

    def log_ways(n: int, k: int) -> float:
        return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)

    chances = [exp(log_ways(i, number - 1) - log_ways(total, number)) if i >= number - 1 else 0.0 for i in range(total)]
    return np.array(chances) / sum(chances)
