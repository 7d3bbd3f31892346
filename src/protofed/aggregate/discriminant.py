"""The linear discriminant rule as a map and prototypes, and how far one client differs from all."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bank import PrototypeBank


def discriminants(
    bank: PrototypeBank, within: Tensor, shrinkage: float = 0.1, scale: float = 1.0
) -> tuple[PrototypeBank, Tensor]:
    """The linear discriminant rule of class means and a covariance, as a map and prototypes of what it maps.

    The nearest prototype of mapped features is the class whose mean is nearest by Mahalanobis' distance under the
    covariance within classes; distances are squared and multiplied by `scale`. The map is the symmetric one, so that it
    changes little where the statistics do.

    Args:
        bank: the class means `[C, w]` of features, and how many samples stand behind each.
        within: `[w, w]`, the covariance of features within classes.
        shrinkage: from above 0 to 1, the share of a covariance with equal variances in the one within classes.
        scale: what squared distances are multiplied by.

    Returns:
        the prototypes `[C, C]`, and the map `[C, w]`; rows of unknown classes are 0.

    >>> bank = PrototypeBank(torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([9.0, 9.0]))
    >>> within = torch.diag(torch.tensor([0.1, 9.0]))  # the second feature says little of the class
    >>> prototypes, map = discriminants(bank, within)
    >>> prototypes.nearest(torch.tensor([[0.9, -1.0]]) @ map.T).tolist()
    [1]
    """
    known, counts = bank.known, bank.counts.double()
    means = torch.where(known[:, None], bank.means, 0.0).double()
    total = counts.sum().clamp_min(1.0)
    within = (within + within.T).double() / 2
    equal = within.diagonal().mean().clamp_min(1e-12) * torch.eye(len(within), dtype=within.dtype, device=within.device)
    within = (1 - shrinkage) * within + shrinkage * equal
    centred = torch.where(known[:, None], means - (counts[:, None] * means).sum(0) / total, 0.0)
    directions = torch.linalg.solve(within, centred.T).T
    inner = directions @ centred.T  # of two centred means under the inverse covariance
    values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
    root = torch.where(values > 1e-9 * values.amax().clamp_min(1e-12), values.clamp_min(1e-300).rsqrt(), 0.0)
    map = scale**0.5 * (vectors * root) @ vectors.T @ directions
    return PrototypeBank((means @ map.T).to(bank.means), bank.counts), map.to(bank.means)


def shrunk(own: PrototypeBank, others: PrototypeBank, variance: float) -> PrototypeBank:
    """A client's own prototypes, drawn towards those of all clients as far as its samples are too few to tell them apart.

    Empirical Bayes: a client's class means lie around those of all with a variance τ², which is what their squared
    distances have beyond the variance of a mean of n samples. Where clients are alike τ² is 0 and the result is the mean
    of all; where they differ, it is the client's own.

    Args:
        own: the client's prototypes `[C, d]`, with the number of samples of each.
        others: the prototypes of all clients.
        variance: of the samples of a class, in every direction in which classes differ.

    Returns:
        the prototypes of all classes that one of the two knows.

    >>> others = PrototypeBank(torch.tensor([[0.0, 0.0], [9.0, 0.0]]), torch.tensor([50.0, 50.0]))
    >>> own = PrototypeBank(torch.tensor([[5.0, 0.0], [14.0, 0.0]]), torch.tensor([4.0, 4.0]))
    >>> [shrunk(own, others, variance).means[:, 0].round().tolist() for variance in (1.0, 1e6)]
    [[5.0, 14.0], [0.0, 9.0]]
    """
    both, apart, noise, between = _between(own, others, variance)
    share = torch.where(both, between / (between + noise).clamp_min(1e-12), 0.0)
    return PrototypeBank(others.means + share[:, None] * apart, others.counts).filled_from(own)


def difference(own: PrototypeBank, others: PrototypeBank, variance: float) -> Tensor:
    """How much a client differs from all: the variance of its class means around theirs, in units of that between classes.

    Args:
        own: the client's prototypes `[C, d]`, with the number of samples of each.
        others: the prototypes of all clients.
        variance: of the samples of a class, in every direction in which classes differ.

    Returns:
        one number; 0 where no more than chance tells them apart.

    >>> others = PrototypeBank(torch.tensor([[0.0, 0.0], [10.0, 0.0]]), torch.tensor([50.0, 50.0]))
    >>> own = PrototypeBank(torch.tensor([[5.0, 0.0], [15.0, 0.0]]), torch.tensor([4.0, 4.0]))
    >>> [round(float(difference(own, others, variance)), 2) for variance in (4.0, 1e6)]
    [0.96, 0.0]
    """
    _, _, _, between = _between(own, others, variance)
    known = others.known.to(others.means.dtype)
    number = known.sum().clamp_min(1)
    centre = known @ others.means / number
    spread = (known[:, None] * (others.means - centre).square()).sum() / number / _directions(others)
    return between / spread.clamp_min(1e-12)


def _between(own: PrototypeBank, others: PrototypeBank, variance: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The classes that both know, how far apart their prototypes are, the variance of each of a client's class means by
    chance, and the variance between clients beyond it."""
    both = own.known & others.known
    noise = variance / torch.where(own.known, own.counts, 1.0)  # of each class mean, in every direction
    apart = torch.where(both[:, None], own.means - others.means, 0.0)
    beyond = torch.where(both, apart.square().sum(-1) / _directions(others) - noise, 0.0)
    between = (beyond.sum() / both.sum().clamp_min(1)).clamp_min(0)
    return both, apart, noise, between


def _directions(bank: PrototypeBank) -> Tensor:
    """In how many directions the known classes differ."""
    return (bank.known.sum() - 1).clamp_min(1)
