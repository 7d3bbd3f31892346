"""The server's rules: pure functions on a stack of the clients' banks, `means[N, C, d]` and `counts[N, C]`.

A client takes part in the classes it holds. A class nobody holds stays unknown. Where a rule makes one bank of many,
its counts are the sums of the clients' counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .bank import TINY, PrototypeBank, single, unit
from .pieces import in_pieces

TOGETHER = 8  # blocks of pairs whose sums are held at once


# --- averages ---------------------------------------------------------------------------------------------------------
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


# --- personalised -----------------------------------------------------------------------------------------------------
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
    means = _known_means(banks).transpose(0, 1)  # [C, N, d]
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


# --- refinement -------------------------------------------------------------------------------------------------------
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


# --- margin -----------------------------------------------------------------------------------------------------------
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


# --- blends -----------------------------------------------------------------------------------------------------------
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


# --- weights ----------------------------------------------------------------------------------------------------------
STATISTICS = ("running_mean", "running_var")  # of batch norm


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


# --- robust rules -----------------------------------------------------------------------------------------------------
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
    means, known = single(_known_means(banks)), banks.known
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
    means, known = single(_known_means(banks)), banks.known
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
    >>> shorter_of_two(banks, mean(banks)).means.item()
    1.0
    """
    norm = torch.linalg.vector_norm(single(_known_means(banks)), dim=-1, dtype=torch.float64)
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
    means = _known_means(banks).detach().transpose(0, 1).double()  # [C, N, d]; which are taken has no gradient
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


# --- parts ------------------------------------------------------------------------------------------------------------
def _known_means(banks: PrototypeBank) -> Tensor:
    """The prototypes of a stack, with zeros where a class is unknown."""
    if banks.means.ndim != 3:
        raise ValueError(f"expected a stack of banks [N, C, d], got means of shape {tuple(banks.means.shape)}")
    return torch.where(banks.known[..., None], banks.means, 0.0)


def total(banks: PrototypeBank, weight: Tensor | None = None) -> Tensor:
    """The sum over the clients that hold each class.

    Args:
        banks: a stack of the clients' banks `[N, C, d]`.
        weight: `[N, C]`, how much each client counts for each class; 1 where it is not given.

    Returns:
        `[C, d]`.

    >>> means, counts = torch.tensor([[[0.0]], [[4.0]]]), torch.tensor([[1.0], [3.0]])
    >>> banks = PrototypeBank(means, counts)  # two clients, one class
    >>> total(banks, banks.counts).item()
    12.0
    """
    means = _known_means(banks)
    return (means if weight is None else means * weight[..., None]).sum(0)


def over(summed: Tensor, number: Tensor) -> Tensor:
    """Sums divided by how many stand behind each class.

    Args:
        summed: `[C, d]`.
        number: `[C]`.

    Returns:
        `[C, d]`; a class without any stays as it is.

    >>> over(torch.tensor([[6.0], [0.0]]), torch.tensor([3.0, 0.0])).flatten()
    tensor([2., 0.])
    """
    return summed / torch.where(number > 0, number, 1)[:, None]


# --- the linear discriminant rule -------------------------------------------------------------------------------------
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
