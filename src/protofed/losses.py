"""Every loss term of every method: pure functions of embeddings, labels and a bank.

Shapes are those of one client, `z[n, d]`, `y[n]`, `bank.means[C, d]`; `torch.func.vmap` gives the stack of clients.
Each loss is the mean over the samples whose class the bank knows, 0 where there is none. `weight[n]` weighs samples;
one of weight 0 is padding and touches neither value nor gradient, whatever stands in it.

Half precision (float16, bfloat16) is computed, and given back, in single precision, as `torch.autocast` does with losses.

Masks stand in place of branches. What a mask hides is replaced before it is used and not only afterwards, because
`0 · ∞` in a backward pass is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from .bank import PrototypeBank, single, unit

INF = float("inf")


# --- supervised -----------------------------------------------------------------------------------------------------
def cross_entropy(logits: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Cross-entropy of the classifier's logits (FedSAP Eq. 4).

    Args:
        logits: `[n, C]`.
        y: labels `[n]`.
        weight: `[n]`, how much each sample counts; 0 is padding.

    Returns:
        the mean over the samples.

    >>> round(cross_entropy(torch.zeros(4, 10), torch.arange(4)).item(), 4)  # log 10
    2.3026
    """
    logits, weight = _samples(logits, weight)
    return _mean(-_pick(logits.log_softmax(-1), y), weight)


# --- pull to the own class's prototype --------------------------------------------------------------------------------
def alignment(
    z: Tensor, y: Tensor, bank: PrototypeBank, reduction: str = "mean", weight: Tensor | None = None
) -> Tensor:
    """Squared distance to the prototype of the sample's class: FedProto; FedSAP Eq. 5; Fed-ARPL Eq. 5.

    Args:
        z: embeddings `[n, d]`.
        y: labels `[n]`.
        bank: prototypes, some of which may be unknown.
        reduction: over the dimensions: `"mean"` is the mean squared error, `"sum"` the squared norm that the papers print.
        weight: `[n]`, how much each sample counts; 0 is padding.

    Returns:
        the mean over the samples whose class the bank knows, 0 where there is none.

    >>> bank = PrototypeBank(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([1.0, 1.0]))
    >>> z, y = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> alignment(z, y, bank).item(), alignment(z, y, bank, "sum").item()
    (0.5, 1.0)
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be mean or sum, not {reduction!r}")
    z, weight = _samples(z, weight)
    means, known = _means_of(bank, y)
    square = (z - means) ** 2
    return _mean(square.mean(-1) if reduction == "mean" else square.sum(-1), weight * known)


def consistency(z: Tensor, y: Tensor, bank: PrototypeBank, weight: Tensor | None = None) -> Tensor:
    """Cosine distance to the prototype of the pseudo-label: FedSAP Eq. 12.

    Args:
        z: embeddings `[n, d]`.
        y: pseudo-labels `[n]`.
        bank: prototypes, some of which may be unknown.
        weight: `[n]`, 1 for accepted samples and 0 for the others.

    Returns:
        the mean over the accepted samples whose class the bank knows, 0 where there is none.

    >>> bank = PrototypeBank(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([1.0, 1.0]))
    >>> z, y = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> consistency(z, y, bank).item()
    0.0
    """
    z, weight = _samples(z, weight)
    means, known = _means_of(bank, y)
    cosine = (unit(z) * unit(means)).sum(-1)
    return _mean(1 - cosine, weight * known)


# --- contrast between the classes of a bank, by cosine ----------------------------------------------------------------
def proxy(z: Tensor, y: Tensor, bank: PrototypeBank, scale: float = 32.0, weight: Tensor | None = None) -> Tensor:
    """Cross-entropy over `scale · cos(z, p_c)`, c over the known classes: FedSAP Eq. 8-9.

    Args:
        z: embeddings `[n, d]`.
        y: labels `[n]`.
        bank: prototypes, some of which may be unknown.
        scale: of the cosines.
        weight: `[n]`, how much each sample counts; 0 is padding.

    Returns:
        the mean over the samples whose class the bank knows, 0 where there is none.

    >>> bank = PrototypeBank(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([1.0, 1.0]))
    >>> z, y = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> round(proxy(z, y, bank, scale=1.0).item(), 4)  # log(1 + e⁻¹)
    0.3133
    """
    z, weight = _samples(z, weight)
    known = bank.known[y]
    log_p = _pick(_cosine_log_softmax(z, bank, scale), y)
    return _mean(torch.where(known, -log_p, 0.0), weight * known)


def prototype_cross_entropy(
    z: Tensor, y: Tensor, bank: PrototypeBank, temperature: float = 0.1, weight: Tensor | None = None
) -> Tensor:
    """Cross-entropy over `cos(z, p_c) / temperature`: FedPAGR L_global (Eq. 7), FedAPA L_g (Eq. 9).

    Args:
        z: embeddings `[n, d]`.
        y: labels `[n]`.
        bank: prototypes, some of which may be unknown.
        temperature: what the cosines are divided by.
        weight: `[n]`, how much each sample counts; 0 is padding.

    Returns:
        the mean over the samples whose class the bank knows, 0 where there is none.

    >>> bank = PrototypeBank(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([1.0, 1.0]))
    >>> z, y = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> round(prototype_cross_entropy(z, y, bank, temperature=1.0).item(), 4)
    0.3133
    """
    return proxy(z, y, bank, scale=1 / temperature, weight=weight)


def uniformity(z: Tensor, bank: PrototypeBank, temperature: float = 0.1, weight: Tensor | None = None) -> Tensor:
    """Mean over samples and known classes of `−log softmax(cos(z, p_c) / temperature)`: FedPAGR L_ent (Eq. 7).

    It needs no labels, so every sample takes part where the bank knows any class at all.

    Args:
        z: embeddings `[n, d]`.
        bank: prototypes, some of which may be unknown.
        temperature: what the cosines are divided by.
        weight: `[n]`, how much each sample counts; 0 is padding.

    Returns:
        the mean over the samples, 0 where the bank knows no class.

    >>> bank = PrototypeBank(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([1.0, 1.0]))
    >>> z, y = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> round(uniformity(z, bank, temperature=1.0).item(), 4)
    0.8133
    """
    z, weight = _samples(z, weight)
    known = bank.known
    log_p = torch.where(known, _cosine_log_softmax(z, bank, 1 / temperature), 0.0)
    return _mean(-log_p.sum(-1) / known.sum().clamp_min(1), weight)


def peer_contrast(
    z: Tensor,
    y: Tensor,
    banks: PrototypeBank,
    temperature: float = 0.5,
    weight: Tensor | None = None,
    further: PrototypeBank | None = None,
) -> Tensor:
    """Mean over the peers' banks of the cross-entropy over `cos(z, p_jc) / temperature`: FedAPA Eq. 10.

    A peer's term is the mean over the samples whose class that peer knows. Peers that know none of the batch's classes
    are left out of the mean over peers, so they do not dilute it. With banks padded by Eq. 8 none is left out.

    Args:
        z: embeddings `[n, d]`.
        y: labels `[n]`.
        banks: a stack of the peers' banks `[N, C, d]`.
        temperature: what the cosines are divided by.
        weight: `[n]`, how much each sample counts; 0 is padding.
        further: one more peer's bank `[C, d]`, where it is not among the others.

    Returns:
        the mean over the peers, 0 where none of them knows a class of the batch.

    >>> bank = PrototypeBank(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([1.0, 1.0]))
    >>> z, y = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> round(peer_contrast(z, y, PrototypeBank.stack([bank, bank]), temperature=1.0).item(), 4)
    0.3133
    """
    z, weight = _samples(z, weight)
    directions = unit(z) / temperature
    values, counted = _contrast_with_each(directions, y, banks, weight)
    if further is not None:
        more = _contrast_with_each(directions, y, PrototypeBank(further.means[None], further.counts[None]), weight)
        values, counted = torch.cat([values, more[0]]), torch.cat([counted, more[1]])
    return _mean(values, counted)


def _contrast_with_each(directions: Tensor, y: Tensor, banks: PrototypeBank, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy with each bank of a stack `[N]`, and 1 for those that know a class of the batch, 0 for others.

    A stack may be shared by many clients, of whom each lacks another bank: which prototypes are known enters after the
    one product with all of them, so that nothing of the stack is copied for a client. NaN in an unknown row becomes 0.
    """
    n, classes = len(directions), banks.num_classes
    means = single(banks.means)
    rows = unit(torch.where(means.isfinite(), means, 0.0)).flatten(0, 1)
    known = banks.known
    hidden = torch.where(known | ~known.any(-1, keepdim=True), 0.0, -INF).to(rows.dtype)
    log_p = ((directions @ rows.T).unflatten(-1, (-1, classes)) + hidden).log_softmax(-1)  # [n, N, C]
    of_sample = known[:, y].T  # [n, N]
    picked = log_p.gather(-1, y[:, None, None].expand(n, len(known), 1)).squeeze(-1)
    weights = weight[:, None] * of_sample
    total = weights.sum(0)
    values = (torch.where(of_sample, -picked, 0.0) * weights).sum(0) / torch.where(total > 0, total, 1.0)
    return values, (total > 0).to(values.dtype)


def prototype_softmax(z: Tensor, bank: PrototypeBank, temperature: float = 0.1) -> Tensor:
    """Class probabilities softmax(cos(z, p_c) / temperature), as FedPAGR's ensembles take them.

    Args:
        z: embeddings `[n, d]`.
        bank: prototypes, or a stack of banks.
        temperature: what the cosines are divided by.

    Returns:
        `[..., n, C]`, 0 for an unknown class.

    >>> bank = PrototypeBank(torch.eye(2), torch.tensor([1.0, 0.0]))
    >>> prototype_softmax(torch.ones(1, 2), bank)
    tensor([[1., 0.]])
    """
    return torch.where(bank.known[..., None, :], _cosine_log_softmax(z, bank, 1 / temperature).exp(), 0.0)


# --- contrast between the classes of a bank, by distance --------------------------------------------------------------
def distance_softmax(z: Tensor, bank: PrototypeBank, metric: str = "mean") -> Tensor:
    """Class probabilities softmax(−d(z, p_c)): ProtoFSSL Eq. 6.

    With a stack of helpers' banks the mean over the leading axis is Eq. 7 up to a factor, which `sharpen` takes out.

    Args:
        z: embeddings `[n, d]`.
        bank: prototypes, or a stack of banks.
        metric: `mean` (squared difference, mean over dimensions), `squared` or `euclidean`.

    Returns:
        `[..., n, C]`, 0 for an unknown class. The rows of a bank that knows nothing are all 0.

    >>> bank = PrototypeBank(torch.eye(2), torch.tensor([1.0, 1.0]))
    >>> distance_softmax(torch.ones(1, 2), bank)
    tensor([[0.5000, 0.5000]])
    """
    return torch.where(bank.known[..., None, :], _distance_log_softmax(z, bank, metric).exp(), 0.0)


def distance_cross_entropy(
    z: Tensor, target: Tensor, bank: PrototypeBank, metric: str = "mean", weight: Tensor | None = None
) -> Tensor:
    """Cross-entropy of `target` and softmax(−d(z, p_c)): both terms of ProtoFSSL Eq. 8.

    Args:
        z: embeddings `[n, d]`.
        target: labels `[n]`, or class probabilities `[n, C]`. Of probabilities only the mass on known classes counts, and
            a sample weighs as much as that mass; labels are the case where the mass is 1 or 0.
        bank: prototypes, some of which may be unknown.
        metric: `mean` (squared difference, mean over dimensions), `squared` or `euclidean`.
        weight: `[n]`, how much each sample counts; 0 is padding.

    Returns:
        the mean over the samples, 0 where no sample has mass on a known class.

    >>> bank = PrototypeBank(torch.eye(2), torch.tensor([1.0, 1.0]))
    >>> round(distance_cross_entropy(torch.ones(1, 2), torch.tensor([0]), bank).item(), 4)  # log 2
    0.6931
    """
    z, weight = _samples(z, weight)
    log_p = torch.where(bank.known, _distance_log_softmax(z, bank, metric), 0.0)
    if not target.is_floating_point():
        return _mean(-_pick(log_p, target), weight * bank.known[target])
    target = torch.where(bank.known & (weight > 0)[:, None], single(target), 0.0)
    total = (weight * target.sum(-1)).sum()
    return -(weight * (target * log_p).sum(-1)).sum() / torch.where(total > 0, total, 1.0)


def sharpen(p: Tensor, temperature: float) -> Tensor:
    """`p^(1/T)`, normalised over the last axis: ProtoFSSL Eq. 5.

    Entries are divided by the largest one first, which changes nothing else, so that a small T does not underflow to 0 / 0.

    Args:
        p: probabilities `[..., C]`, up to a factor.
        temperature: T; the smaller, the sharper.

    Returns:
        probabilities `[..., C]`. A row of zeros stays one.

    >>> sharpen(torch.tensor([1.0, 3.0]), temperature=0.5)
    tensor([0.1000, 0.9000])
    """
    top = p.detach().amax(-1, keepdim=True)
    positive = p > 0
    power = torch.where(
        positive, (torch.where(positive, p, 1.0) / torch.where(top > 0, top, 1.0)) ** (1 / temperature), 0
    )
    total = power.sum(-1, keepdim=True)
    return power / torch.where(total > 0, total, 1.0)


# --- pseudo-labels ---------------------------------------------------------------------------------------------------
def pseudo_cross_entropy(logits: Tensor, label: Tensor, accepted: Tensor, weight: Tensor | None = None) -> Tensor:
    """Cross-entropy with pseudo-labels: FixMatch; Fed-ARPL Eq. 1.

    Args:
        logits: `[n, C]`.
        label: pseudo-labels `[n]`.
        accepted: `[n]`, 1 for samples whose pseudo-label is used.
        weight: `[n]`, how much each sample counts; 0 is padding.

    Returns:
        the sum over the accepted samples, divided by the number of all samples.

    >>> round(pseudo_cross_entropy(torch.zeros(2, 10), torch.tensor([3, 4]), torch.tensor([1, 0])).item(), 4)
    1.1513
    """
    logits, weight = _samples(logits, weight)
    value = -_pick(logits.log_softmax(-1), label) * _of_samples(accepted, weight).to(logits.dtype)
    return _mean(value, weight)


def divergence(target: Tensor, logits: Tensor, accepted: Tensor, weight: Tensor | None = None) -> Tensor:
    """KL(target ‖ softmax(logits)), averaged like `pseudo_cross_entropy` (FedMatch).

    Args:
        target: probabilities `[n, C]`.
        logits: `[n, C]`.
        accepted: `[n]`, 1 for samples that count.
        weight: `[n]`, how much each sample counts; 0 is padding.

    Returns:
        the sum over the accepted samples, divided by the number of all samples.

    >>> round(divergence(torch.eye(2), torch.zeros(2, 2), torch.ones(2)).item(), 4)  # log 2
    0.6931
    """
    logits, weight = _samples(logits, weight)
    target = torch.where((weight > 0)[:, None], single(target), 0.0)
    value = torch.xlogy(target, target).sum(-1) - (target * logits.log_softmax(-1)).sum(-1)
    return _mean(value * _of_samples(accepted, weight).to(logits.dtype), weight)


# --- contrast within the batch, and soft labels -----------------------------------------------------------------------
def supervised_contrast(
    z: Tensor, y: Tensor, bank: PrototypeBank, temperature: float = 0.5, weight: Tensor | None = None
) -> Tensor:
    """Supervised contrast of each sample with the rest of the batch and the known prototypes, by cosine: FedMPS.

    Of sample i it is the mean over its positives p of `−log softmax(cos(z_i, a) / temperature)[p]`, a over the other
    samples and the known prototypes; positives are those of its class. The prototype of its class is a positive, so every
    sample that counts has one. Samples of a class the bank does not know are contrasted with, but have no term themselves.

    Args:
        z: embeddings `[n, d]`.
        y: labels `[n]`.
        bank: prototypes, some of which may be unknown.
        temperature: what the cosines are divided by.
        weight: `[n]`, how much each sample counts; 0 is padding.

    Returns:
        the mean over the samples whose class the bank knows, 0 where there is none.

    >>> bank = PrototypeBank(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([1.0, 1.0]))
    >>> z, y = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> round(supervised_contrast(z, y, bank, temperature=1.0).item(), 4)
    0.3133
    """
    z, weight = _samples(z, weight)
    z = unit(z)
    n, classes = len(z), torch.arange(bank.num_classes, device=y.device)
    others = (weight > 0) & ~torch.eye(n, dtype=torch.bool, device=y.device)
    contrasted = torch.cat([others, bank.known.expand(n, -1)], -1)
    positive = contrasted & (y[:, None] == torch.cat([y, classes]))
    log_p = _log_softmax(torch.cat([z @ z.T, z @ unit(_means(bank)).T], -1) / temperature, contrasted)
    value = -torch.where(positive, log_p, 0.0).sum(-1) / positive.sum(-1).clamp_min(1)
    return _mean(value, weight * bank.known[y])


def soft_labels(
    logits: Tensor, y: Tensor, targets: Tensor, known: Tensor, temperature: float = 5.0, weight: Tensor | None = None
) -> Tensor:
    """KL(softmax(t_y / T) ‖ softmax(logits / T)), t_y the target of the sample's class: FedMPS.

    The factor T² that distillation often has is left out.

    Args:
        logits: `[n, C]`.
        y: labels `[n]`.
        targets: `[C, C]`, a row of logits for each class.
        known: `[C]`, which rows exist.
        temperature: T.
        weight: `[n]`, how much each sample counts; 0 is padding.

    Returns:
        the mean over the samples whose class has a row, 0 where there is none.

    >>> soft_labels(torch.eye(2), torch.tensor([0, 1]), torch.eye(2), torch.tensor([True, True])).item()
    0.0
    """
    logits, weight = _samples(logits, weight)
    known = known[y]
    target = (torch.where(known[:, None], single(targets[y]), 0.0) / temperature).log_softmax(-1)
    divergence = (target.exp() * (target - (logits / temperature).log_softmax(-1))).sum(-1)
    return _mean(divergence, weight * known)


# --- weights ----------------------------------------------------------------------------------------------------------
def proximal(params: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Tensor:
    """`½ ‖w − w_t‖²` over the names in `params`: FedProx Eq. 2 without its μ.

    Args:
        params: the parameters w by name.
        reference: w_t; it may hold more names.

    Returns:
        a scalar.

    >>> proximal({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0]), "running_mean": torch.zeros(1)}).item()
    2.0
    """
    terms = [((value - reference[name]) ** 2).sum() for name, value in params.items()]
    return torch.stack(terms).sum() / 2 if terms else torch.zeros(())


def ascent(
    params: Mapping[str, Tensor], gradient: Mapping[str, Tensor], radius: float, eta: float
) -> dict[str, Tensor]:
    """The step of that radius up a loss, in the measure of ASAM (Kwon et al., 2021): (FL)²'s perturbation.

    It is ρ T² g / ‖T g‖ with T = |w| + η for weights and 1 for biases.

    Args:
        params: the parameters w by name.
        gradient: g, for some or all of the names.
        radius: ρ.
        eta: η.

    Returns:
        the step for each name of the gradient, 0 where the gradient is.

    >>> ascent({"bias": torch.zeros(2)}, {"bias": torch.tensor([3.0, 4.0])}, radius=0.5, eta=0.01)
    {'bias': tensor([0.3000, 0.4000])}
    """
    scale = {n: p.abs() + eta if n.endswith("weight") else torch.ones_like(p) for n, p in params.items()}
    square = torch.stack([((scale[n] * g) ** 2).sum() for n, g in gradient.items()]).sum()
    factor = radius / torch.where(square > 0, square, 1.0).sqrt()
    return {n: factor * scale[n] ** 2 * g for n, g in gradient.items()}


# --- parts ------------------------------------------------------------------------------------------------------------
def _samples(z: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows of padding become zeros, so that nothing in them reaches a value or a gradient; half precision becomes single."""
    z = single(z)
    if weight is None:
        return z, z.new_ones(z.shape[0])
    weight = weight.to(z.dtype)
    return torch.where((weight > 0)[:, None], z, 0.0), weight


def _of_samples(values: Tensor, weight: Tensor) -> Tensor:
    """One number a sample, 0 for padding."""
    return torch.where(weight > 0, values.to(weight.dtype), 0.0)


def _means(bank: PrototypeBank) -> Tensor:
    """The prototypes, with zeros where a class is unknown, at least in single precision."""
    return torch.where(bank.known[..., None], single(bank.means), 0.0)


def _means_of(bank: PrototypeBank, y: Tensor) -> tuple[Tensor, Tensor]:
    """The prototype of each sample's class, zeros where it is unknown, and whether it is known. Other rows are not read."""
    known = bank.known[y]
    return torch.where(known[:, None], single(bank.means[y]), 0.0), known


def _mean(values: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean over the last axis, 0 where there is no weight."""
    total = weight.sum(-1)
    return (values * weight).sum(-1) / torch.where(total > 0, total, 1.0)


def _pick(log_p: Tensor, y: Tensor) -> Tensor:
    """`log_p[..., i, y_i]`."""
    return log_p.gather(-1, y.expand(log_p.shape[:-1])[..., None]).squeeze(-1)


def _log_softmax(logits: Tensor, known: Tensor) -> Tensor:
    """Log-softmax over the known classes, −∞ at the others; finite everywhere where no class is known at all."""
    logits = torch.where(known, logits, -INF)
    return torch.where(known.any(-1, keepdim=True), logits, 0.0).log_softmax(-1)


def _cosine_log_softmax(z: Tensor, bank: PrototypeBank, scale: float) -> Tensor:
    cosine = unit(single(z)) @ unit(_means(bank)).transpose(-1, -2)
    return _log_softmax(scale * cosine, bank.known[..., None, :])


def _distance_log_softmax(z: Tensor, bank: PrototypeBank, metric: str) -> Tensor:
    if metric not in ("mean", "squared", "euclidean"):
        raise ValueError(f"metric must be mean, squared or euclidean, not {metric!r}")
    distance = replace(bank, means=_means(bank)).distances(
        single(z), "euclidean" if metric == "euclidean" else "squared"
    )
    return _log_softmax(-distance / (bank.dim if metric == "mean" else 1), bank.known[..., None, :])
