"""FedPAGR's refinement of the server's prototypes, and FedTGP's margin."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bank import TINY, PrototypeBank, unit
from ..pieces import in_pieces
from .sums import total

TOGETHER = 8  # blocks of pairs whose sums are held at once


@torch.no_grad()
def refine(
    banks: PrototypeBank,
    start: PrototypeBank,
    steps: int = 5,
    lr: float = 0.01,
    margin: float = 0.3,
    separation: float = 0.5,
    momentum: float = 0.9,
    block: int = 512,
) -> PrototypeBank:
    """Gradient steps from an average that hold classes apart while they stay near the clients: FedPAGR Eq. 4-6.

    It is SGD with momentum on the matrix of known classes, its rows u_c normalised in the forward pass, of
    Σ_c Σ_k (1 − p_kc·u_c) + separation · Σ_{c≠c'} max(0, u_c·u_c' − margin) over ordered pairs; at the end the rows go
    to the sphere. The clients' prototypes are taken as sent (FedPAGR's lie on the sphere). The gradient is in closed
    form, pairs in blocks of rows, so that memory is O(C · (block + d)).

    The pair sum grows with the number of classes C, and with the paper's settings the steps overshoot from about 1,000
    classes on; there `separation · 100 / C` acts as `separation` does at 100 classes.

    Args:
        banks: a stack of the clients' banks `[N, C, d]`.
        start: the average to begin from. Classes that it does not know stay unknown.
        steps: how many gradient steps.
        lr: their learning rate.
        margin: the cosine below which two classes are far enough apart.
        separation: the weight of the second sum.
        momentum: of the steps.
        block: how many rows of pairs are worked on at a time.

    Returns:
        one bank with the counts of `start`.

    >>> banks = PrototypeBank(unit(torch.tensor([[[1.0, 0.1], [1.0, -0.1]]])), torch.ones(1, 2))
    >>> from protofed.aggregate import normalised_mean
    >>> apart = refine(banks, normalised_mean(banks), steps=20, lr=0.1).means
    >>> bool(apart[0] @ apart[1] < banks.means[0, 0] @ banks.means[0, 1])
    True
    """
    known = start.known[..., None]
    w = torch.where(known, start.means, 0.0)  # an unknown class is a zero row: it has no cosine and gets no gradient
    agreed = torch.where(known, total(banks), 0.0)  # all the agreement term needs of the clients is Σ_k p_kc
    velocity = torch.zeros_like(w)
    for _ in range(steps):
        u = unit(w)
        gradient = 2 * separation * _neighbours(u, start.known, margin, block) - agreed
        velocity = momentum * velocity + _through_unit(gradient, w, u)
        w = w - lr * velocity
    return PrototypeBank(unit(w), start.counts)


def _neighbours(u: Tensor, known: Tensor, margin: float, block: int) -> Tensor:
    """For each row the sum of the other rows whose cosine with it exceeds the margin: half of Eq. 6's gradient."""
    if len(u) <= block:  # one product, which also runs under vmap
        others = ~torch.eye(len(u), dtype=torch.bool, device=u.device)
        return ((u @ u.T > margin) & known[:, None] & known & others).to(u.dtype) @ u

    def near_to(i: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a block of rows from the i-th gets from itself and later rows, which later rows get any, and what."""
        rows = u[i : i + block]
        near = (rows @ u[i:].T > margin).triu(1)  # each pair once; it adds to both its rows
        near &= known[i : i + block, None] & known[i:]
        columns = near.any(0).nonzero().squeeze(1)  # few, once the classes stand apart
        pairs = near[:, columns].to(u.dtype)
        return pairs @ u[i + columns], i + columns, pairs.T @ rows

    total = torch.zeros_like(u)
    blocks = range(0, len(u), block)
    for some in (blocks[k : k + TOGETHER] for k in range(0, len(blocks), TOGETHER)):
        for i, (own, columns, theirs) in zip(some, in_pieces(near_to, some), strict=True):
            total[i : i + block] += own
            total.index_add_(0, columns, theirs)
    return total


def _through_unit(gradient: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """The gradient by `w`, from the one by `u = unit(w)`."""
    square = (w * w).sum(-1, keepdim=True)
    radial = torch.where(square > TINY, (gradient * u).sum(-1, keepdim=True), 0.0)
    return (gradient - radial * u) * torch.rsqrt(square.clamp_min(TINY))


def margin(bank: PrototypeBank, most: float = 100.0) -> Tensor:
    """FedTGP's adaptive margin: the largest over classes of the distance to the nearest other class.

    Args:
        bank: prototypes.
        most: the margin is at most this.

    Returns:
        a scalar, 0 where fewer than two classes are known, since nothing stands apart.

    >>> margin(PrototypeBank(torch.tensor([[0.0], [3.0], [4.0]]), torch.ones(3))).item()
    3.0
    """
    known = bank.known
    means = torch.where(known[:, None], bank.means, 0.0)
    pairs = known[:, None] & known & ~torch.eye(len(known), dtype=torch.bool, device=known.device)
    nearest = torch.where(pairs, torch.cdist(means, means), float("inf")).amin(-1)
    return torch.where(pairs.any(-1), nearest, 0.0).amax().clamp_max(most)
