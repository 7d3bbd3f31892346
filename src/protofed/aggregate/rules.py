"""Averages, what each client is given of its own, and blends of a new bank or model with an old one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..bank import PrototypeBank, unit
from ..pieces import in_pieces
from .sums import known_means, over, total

STATISTICS = ("running_mean", "running_var")  # of batch norm


def mean(banks: PrototypeBank) -> PrototypeBank:
    """The unweighted mean over the clients that hold a class: FedSAP Eq. 2.

    Args:
        banks: a stack of the clients' banks `[N, C, d]`.

    Returns:
        one bank, whose counts are the sums of the clients' counts.

    >>> means, counts = torch.tensor([[[0.0]], [[4.0]]]), torch.tensor([[1.0], [3.0]])
    >>> banks = PrototypeBank(means, counts)  # two clients, one class
    >>> mean(banks).means.item(), mean(banks).counts.item()
    (2.0, 4.0)
    """
    holders = banks.known.to(banks.means.dtype)
    return PrototypeBank(over(total(banks), holders.sum(0)), banks.counts.sum(0))


def weighted_mean(banks: PrototypeBank) -> PrototypeBank:
    """The mean over the clients, weighted by their counts: FedProto Eq. 6, Fed-ARPL Eq. 6.

    Args:
        banks: a stack of the clients' banks `[N, C, d]`.

    Returns:
        one bank, whose counts are the sums of the clients' counts.

    >>> means, counts = torch.tensor([[[0.0]], [[4.0]]]), torch.tensor([[1.0], [3.0]])
    >>> banks = PrototypeBank(means, counts)  # two clients, one class
    >>> weighted_mean(banks).means.item()
    3.0
    """
    counts = banks.counts.to(banks.means.dtype)
    return PrototypeBank(over(total(banks, counts), counts.sum(0)), banks.counts.sum(0))


def normalised_mean(banks: PrototypeBank) -> PrototypeBank:
    """The mean of the clients' directions, put back on the unit sphere: FedPAGR Eq. 3.

    Args:
        banks: a stack of the clients' banks `[N, C, d]`.

    Returns:
        one bank, whose counts are the sums of the clients' counts.

    >>> banks = PrototypeBank(torch.tensor([[[5.0, 0.0]], [[0.0, 1.0]]]), torch.ones(2, 1))
    >>> normalised_mean(banks).means
    tensor([[0.7071, 0.7071]])
    """
    return mean(banks.normalised()).normalised()


def personalised(
    banks: PrototypeBank, temperature: float = 0.5, block: int = 128, weighted: bool = False
) -> PrototypeBank:
    """For each client the holders' prototypes, weighted by their likeness to its own: FedAPA Eq. 5-8.

    The weights are a softmax of cosine / temperature over the clients that hold the class, the client itself among them.
    A class the client lacks is padded as in `pad`. Clients go in blocks, so that memory is O(block · N · C).

    Args:
        banks: a stack of the clients' banks `[N, C, d]`.
        temperature: what the cosines are divided by.
        block: how many clients are worked on at a time.
        weighted: as in `pad`.

    Returns:
        a stack `[N, C, d]`, one bank for each client.

    >>> means, counts = torch.tensor([[[0.0]], [[4.0]]]), torch.tensor([[1.0], [3.0]])
    >>> banks = PrototypeBank(means, counts)  # two clients, one class
    >>> personalised(banks).means.flatten()  # all cosines with the first client's zero prototype are 0
    tensor([2.0000, 3.5232])
    """
    filled = pad(banks, weighted)
    means = known_means(banks).transpose(0, 1)  # [C, N, d]
    directions = unit(means)
    held = banks.known.T[:, None, :]  # [C, 1, N]
    # Where nobody holds a class, everybody counts as a peer: the weights are then finite, and their result is not used.
    peers = held | ~held.any(-1, keepdim=True)

    def weighted_by_likeness(clients: Tensor) -> Tensor:
        likeness = clients @ directions.transpose(1, 2) / temperature  # Eq. 5
        share = torch.where(peers, likeness, -float("inf")).softmax(-1)  # Eq. 6
        return share @ means  # Eq. 7

    q = torch.cat(in_pieces(weighted_by_likeness, directions.split(block, dim=1)), dim=1).transpose(0, 1)
    return PrototypeBank(torch.where(banks.known[..., None], q, filled.means), filled.counts)  # Eq. 8


def pad(banks: PrototypeBank, weighted: bool = False) -> PrototypeBank:
    """Fill each client's missing classes with the mean of those that hold them: FedAPA Eq. 8.

    Args:
        banks: a stack of the clients' banks `[N, C, d]`.
        weighted: whether the mean is weighted by counts, as the text about the equation says; the equation itself is not.

    Returns:
        a stack `[N, C, d]`. A padded prototype counts as much as the mean count of the holders.

    >>> banks = PrototypeBank(torch.tensor([[[0.0]], [[4.0]]]), torch.tensor([[0.0], [3.0]]))
    >>> pad(banks).means.flatten(), pad(banks).counts.flatten()
    (tensor([4., 4.]), tensor([3., 3.]))
    """
    average = weighted_mean(banks) if weighted else mean(banks)
    counts = average.counts / banks.known.sum(0).clamp_min(1)
    return PrototypeBank(
        torch.where(banks.known[..., None], banks.means, average.means),
        torch.where(banks.known, banks.counts, counts.to(banks.counts.dtype)),
    )


def blend(teacher: PrototypeBank, student: PrototypeBank, alpha: float | Tensor) -> PrototypeBank:
    """`alpha · teacher + (1 − alpha) · student`: Fed-ARPL Eq. 7. Counts are blended alike.

    Args:
        teacher: prototypes.
        student: prototypes.
        alpha: the teacher's share.

    Returns:
        one bank. A class that only one of the two knows is taken from that one.

    >>> teacher, student = (PrototypeBank(torch.tensor([[v]]), torch.ones(1)) for v in (1.0, 2.0))
    >>> blend(teacher, student, alpha=0.75).means.item()
    1.25
    """
    both = teacher.known & student.known
    mixed = PrototypeBank(
        alpha * teacher.means + (1 - alpha) * student.means, alpha * teacher.counts + (1 - alpha) * student.counts
    )
    either = teacher.filled_from(student)
    return PrototypeBank(
        torch.where(both[..., None], mixed.means, either.means), torch.where(both, mixed.counts, either.counts)
    )


def momentum_blend(old: PrototypeBank, new: PrototypeBank, momentum: float | Tensor) -> PrototypeBank:
    """`momentum · old + (1 − momentum) · new`: Fed-ARPL Eq. 8.

    Args:
        old: the prototypes so far.
        new: those of this round.
        momentum: the share of the old ones.

    Returns:
        one bank, by the rules of `blend`.

    >>> old, new = (PrototypeBank(torch.tensor([[v]]), torch.ones(1)) for v in (1.0, 2.0))
    >>> momentum_blend(old, new, momentum=0.5).means.item()
    1.5
    """
    return blend(old, new, momentum)


def with_momentum(
    weights: Mapping[str, Tensor], average: Mapping[str, Tensor], velocity: Mapping[str, Tensor], momentum: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The server's step from its weights θ towards the clients' average, with momentum: SemiFL, Fed-ARPL.

    v ← momentum · v + (θ − average), θ ← θ − v: SGD with learning rate 1. Statistics of batch norm are averages of data and
    are taken as they come, because a variance with momentum could fall below 0.

    Args:
        weights: θ by name.
        average: the clients' average, by the same names.
        velocity: v by name; empty in the first round.
        momentum: of the step.

    Returns:
        the new weights, and the new velocities.

    >>> weights, velocity = with_momentum({"w": torch.tensor(4.0)}, {"w": torch.tensor(3.0)}, {"w": torch.tensor(1.0)}, 0.5)
    >>> weights["w"].item(), velocity["w"].item()
    (2.5, 1.5)
    """
    stepped, speed = dict(average), {}
    for name, value in average.items():
        if not name.endswith(STATISTICS):
            speed[name] = weights[name] - value
            if name in velocity:
                speed[name] = momentum * velocity[name] + speed[name]
            stepped[name] = weights[name] - speed[name]
    return stepped, speed
