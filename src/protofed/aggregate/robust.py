"""Rules that a few clients cannot turn: medians, trimmed means, Krum and bounds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..bank import TINY, PrototypeBank, single
from .sums import known_means, over, total


def median(banks: PrototypeBank) -> PrototypeBank:
    """The median of each coordinate over the clients that hold a class.

    Args:
        banks: a stack of the clients' banks `[N, C, d]`.

    Returns:
        one bank; of an even number of holders it has the mean of the middle two values.

    >>> median(PrototypeBank(torch.tensor([[[0.0]], [[1.0]], [[900.0]]]), torch.ones(3, 1))).means.item()
    1.0
    """
    ordered, holders = _sorted(banks)
    last = (holders - 1).clamp_min(0)
    low, high = (
        ordered.gather(0, middle[None, :, None].expand(1, -1, banks.dim))[0] for middle in (last // 2, (last + 1) // 2)
    )
    means = torch.where((holders > 0)[:, None], (low + high) / 2, 0.0)
    return PrototypeBank(means, banks.counts.sum(0))


def trimmed_mean(banks: PrototypeBank, trim: float = 0.1) -> PrototypeBank:
    """The mean of each coordinate without the ⌈trim · N⌉ smallest and as many largest values of each class.

    N is the number of all clients, because all that lie may be among the few that hold a class. At least one value of an
    odd number of holders, and two of an even number, always remain; a class of two has the mean.

    Args:
        banks: a stack of the clients' banks `[N, C, d]`.
        trim: the share of the clients that is left out at each end, below 0.5.

    Returns:
        one bank.

    >>> trimmed_mean(PrototypeBank(torch.tensor([[[0.0]], [[1.0]], [[900.0]]]), torch.ones(3, 1)), trim=0.1).means.item()
    1.0
    """
    if not 0 <= trim < 0.5:
        raise ValueError(f"trim={trim}: expected a share of at least 0 and below 0.5")
    ordered, holders = _sorted(banks)
    cut = _at_most(trim, banks, (holders - 1) // 2)
    rank = torch.arange(len(ordered), device=ordered.device)[:, None]
    middle = (rank >= cut) & (rank < holders - cut)  # [N, C]
    summed = torch.where(middle[..., None], ordered, 0.0).sum(0)
    return PrototypeBank(over(summed, middle.sum(0)), banks.counts.sum(0))


def geometric_median(banks: PrototypeBank, steps: int = 32) -> PrototypeBank:
    """The point with the least sum of distances to the prototypes of the clients that hold a class.

    It is found by Weiszfeld's steps from the median of each coordinate: each is a mean in which a client counts as
    1 / its distance, as in RFA (Pillutla et al., IEEE TSP 2022). Distances are taken as at least a bound, so that no
    step is caught at a client's own point: half the clients' median distance, halved in each step to a millionth of it.
    Fewer than half of the clients cannot move the result far. Counts do not enter, because a count is what a client says
    of itself.

    Args:
        banks: a stack of the clients' banks `[N, C, d]`.
        steps: how many steps.

    Returns:
        one bank; of two holders it has the mean.

    >>> corners = torch.tensor([[[0.0, 0.0]], [[2.0, 0.0]], [[1.0, 900.0]], [[1.0, -1.0]], [[1.0, 1.0]]])
    >>> geometric_median(PrototypeBank(corners, torch.ones(5, 1))).means.round(decimals=2)
    tensor([[1.0000, 0.5800]])
    """
    means, known = single(known_means(banks)), banks.known
    centre = single(median(banks).means)
    usual = _lower_median(torch.linalg.vector_norm(means - centre, dim=-1, dtype=torch.float64), known)
    for step in range(1, steps + 1):
        least = (usual * max(0.5**step, 1e-6)).clamp_min(TINY)
        distance = torch.linalg.vector_norm(means - centre, dim=-1, dtype=torch.float64)
        share = torch.where(known, 1 / torch.maximum(distance, least), 0.0)
        share = share / torch.where(known.any(0), share.sum(0), 1.0)
        centre = (share[..., None].to(means.dtype) * means).sum(0)
    return PrototypeBank(centre.to(banks.means.dtype), banks.counts.sum(0))


def krum(banks: PrototypeBank, attackers: float = 0.2) -> PrototypeBank:
    """The prototype that is nearest to its neighbours: Krum (Blanchard et al., NeurIPS 2017), for each class by itself.

    A prototype's score is the sum of the squared distances to its n − f − 2 nearest others, at least one, and the
    smallest score wins. n is the number of the class's holders, and f the number of those that may lie: ⌈attackers · N⌉ of
    all N clients, at most as many as Krum's guarantee allows for, n ≥ 2f + 3. Prototypes of the same score, as the
    nearest two of three have, are averaged.

    Args:
        banks: a stack of the clients' banks `[N, C, d]`.
        attackers: the share of the clients that are taken for attackers, below 0.5.

    Returns:
        one bank; of two holders it has the mean.

    >>> krum(PrototypeBank(torch.tensor([[[0.0]], [[1.0]], [[3.0]], [[900.0]], [[1.5]]]), torch.ones(5, 1))).means.item()
    1.0
    """
    score, _ = _krum_scores(banks, attackers)
    return _mean_of(banks, score <= score.amin(0))


def multi_krum(banks: PrototypeBank, attackers: float = 0.2) -> PrototypeBank:
    """The mean of the n − f prototypes with the smallest scores of Krum, for each class by itself.

    n is the number of the class's holders, and f that of those that are left out: ⌈attackers · N⌉ of all N clients, but
    fewer than half of the holders. All prototypes with the same score as the last one are taken.

    Args:
        banks: a stack of the clients' banks `[N, C, d]`.
        attackers: the share of the clients that are taken for attackers, below 0.5.

    Returns:
        one bank; of two holders it has the mean.

    >>> banks = PrototypeBank(torch.tensor([[[0.0]], [[1.0]], [[3.0]], [[900.0]], [[2.0]]]), torch.ones(5, 1))
    >>> multi_krum(banks).means.item()
    1.5
    """
    score, taken = _krum_scores(banks, attackers)
    return _mean_of(banks, score <= score.sort(dim=0).values.gather(0, (taken - 1)[None]))


def bounded_mean(banks: PrototypeBank, factor: float = 1.0) -> PrototypeBank:
    """The mean of the prototypes after those longer than factor · the median norm of their class are scaled to it.

    Of an even number of holders the median norm is the lower one of the middle two.

    Args:
        banks: a stack of the clients' banks `[N, C, d]`.
        factor: how many median norms a prototype may have, above 0.

    Returns:
        one bank.

    >>> bounded_mean(PrototypeBank(torch.tensor([[[2.0]], [[-1.0]], [[900.0]]]), torch.ones(3, 1))).means.item()
    1.0
    """
    if not factor > 0:
        raise ValueError(f"factor={factor}: expected a number above 0")
    means, known = single(known_means(banks)), banks.known
    norm = torch.linalg.vector_norm(means, dim=-1, dtype=torch.float64)
    scale = (factor * _lower_median(norm, known) / norm.clamp_min(TINY)).clamp_max(1.0)
    scale = torch.where(known, scale, 0.0).to(means.dtype)
    summed = (scale[..., None] * means).sum(0).to(banks.means.dtype)
    return PrototypeBank(over(summed, known.sum(0)), banks.counts.sum(0))


def shorter_of_two(banks: PrototypeBank, reduced: PrototypeBank) -> PrototypeBank:
    """For classes with exactly two holders the prototype with the smaller norm, for all others what a rule gave.

    Of two prototypes no rule can tell which one is a lie. One that is to move the result far has to be long, so the
    shorter one does less harm.

    Args:
        banks: a stack of the clients' banks `[N, C, d]`.
        reduced: what a robust rule made of the stack.

    Returns:
        one bank. Two prototypes of the same norm are averaged.

    >>> banks = PrototypeBank(torch.tensor([[[1.0]], [[-900.0]]]), torch.ones(2, 1))
    >>> from protofed.aggregate import mean
    >>> shorter_of_two(banks, mean(banks)).means.item()
    1.0
    """
    norm = torch.linalg.vector_norm(single(known_means(banks)), dim=-1, dtype=torch.float64)
    norm = torch.where(banks.known, norm, float("inf"))
    shorter = _mean_of(banks, norm <= norm.amin(0))
    two = banks.known.sum(0) == 2
    return PrototypeBank(torch.where(two[:, None], shorter.means, reduced.means), reduced.counts)


def _at_most(share: float, banks: PrototypeBank, most: Tensor) -> Tensor:
    """⌈share · N⌉ of a stack's N banks, at least 0 and at most `most`, for each class."""
    number = math.ceil(share * len(banks.counts) - 1e-9)  # 0.28 · 100 must not rise to 29
    return most.clamp(0, number)


def _lower_median(values: Tensor, known: Tensor) -> Tensor:
    """The median `[C]` over the known ones of values `[N, C]`, of an even number the lower one of the middle two; infinite
    where none is known."""
    middle = (known.sum(0) - 1).clamp_min(0) // 2
    return torch.where(known, values, float("inf")).sort(dim=0).values.gather(0, middle[None])[0]


def _krum_scores(banks: PrototypeBank, attackers: float) -> tuple[Tensor, Tensor]:
    """Krum's score of each prototype `[N, C]`, infinite where there is none, and how many of a class are taken."""
    if not 0 <= attackers < 0.5:
        raise ValueError(f"attackers={attackers}: expected a share of at least 0 and below 0.5")
    known, holders = banks.known, banks.known.sum(0)
    means = known_means(banks).detach().transpose(0, 1).double()  # [C, N, d]; which are taken has no gradient
    squares = torch.cdist(means, means, compute_mode="donot_use_mm_for_euclid_dist") ** 2
    others = known.T[:, :, None] & known.T[:, None, :] & ~torch.eye(len(known), dtype=torch.bool, device=known.device)
    nearest = torch.where(others, squares, float("inf")).sort(dim=-1).values
    neighbours = (holders - _at_most(attackers, banks, (holders - 3) // 2) - 2).clamp_min(1)
    neighbours = torch.minimum(neighbours, holders - 1)
    near = torch.arange(len(known), device=known.device) < neighbours[:, None, None]
    score = torch.where(near, nearest, 0.0).sum(-1).T
    taken = (holders - _at_most(attackers, banks, (holders - 1) // 2)).clamp_min(1)
    return torch.where(known, score, float("inf")), taken


def _mean_of(banks: PrototypeBank, chosen: Tensor) -> PrototypeBank:
    """The mean over the chosen clients `[N, C]` that hold a class."""
    chosen = (chosen & banks.known).to(banks.means.dtype)
    return PrototypeBank(over(total(banks, chosen), chosen.sum(0)), banks.counts.sum(0))


def _sorted(banks: PrototypeBank) -> tuple[Tensor, Tensor]:
    """Each coordinate's values over the clients in order, those of no holder last, and the number of holders `[C]`."""
    values = torch.where(banks.known[..., None], banks.means, float("inf"))
    return values.sort(dim=0).values, banks.known.sum(0)
