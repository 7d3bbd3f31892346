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
    """Cross-entropy of the classifier's logits (FedSAP Eq. 4)."""
    logits, weight = _samples(logits, weight)
    return _mean(-_pick(logits.log_softmax(-1), y), weight)


# --- pull to the own class's prototype --------------------------------------------------------------------------------
def alignment(
    z: Tensor, y: Tensor, bank: PrototypeBank, reduction: str = "mean", weight: Tensor | None = None
) -> Tensor:
    """Squared distance to the prototype of the sample's class: FedProto; FedSAP Eq. 5; Fed-ARPL Eq. 5.

    `reduction="mean"` over the dimensions is the mean squared error; `"sum"` is the squared norm the papers print.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be mean or sum, not {reduction!r}")
    z, weight = _samples(z, weight)
    square = (z - _means(bank)[y]) ** 2
    return _mean(square.mean(-1) if reduction == "mean" else square.sum(-1), weight * bank.known[y])


def consistency(z: Tensor, y: Tensor, bank: PrototypeBank, weight: Tensor | None = None) -> Tensor:
    """Cosine distance to the prototype of the pseudo-label: FedSAP Eq. 12. Accepted samples are those of weight 1."""
    z, weight = _samples(z, weight)
    cosine = (unit(z) * unit(_means(bank))[y]).sum(-1)
    return _mean(1 - cosine, weight * bank.known[y])


# --- contrast between the classes of a bank, by cosine ----------------------------------------------------------------
def proxy(z: Tensor, y: Tensor, bank: PrototypeBank, scale: float = 32.0, weight: Tensor | None = None) -> Tensor:
    """Cross-entropy over `scale · cos(z, p_c)`, c over the known classes: FedSAP Eq. 8-9."""
    z, weight = _samples(z, weight)
    known = bank.known[y]
    log_p = _pick(_cosine_log_softmax(z, bank, scale), y)
    return _mean(torch.where(known, -log_p, 0.0), weight * known)


def prototype_cross_entropy(
    z: Tensor, y: Tensor, bank: PrototypeBank, temperature: float = 0.1, weight: Tensor | None = None
) -> Tensor:
    """Cross-entropy over `cos(z, p_c) / temperature`: FedPAGR L_global (Eq. 7), FedAPA L_g (Eq. 9)."""
    return proxy(z, y, bank, scale=1 / temperature, weight=weight)


def uniformity(z: Tensor, bank: PrototypeBank, temperature: float = 0.1, weight: Tensor | None = None) -> Tensor:
    """Mean over samples and known classes of `−log softmax(cos(z, p_c) / temperature)`: FedPAGR L_ent (Eq. 7).

    Needs no labels, so every sample takes part where the bank knows any class at all.
    """
    z, weight = _samples(z, weight)
    known = bank.known
    log_p = torch.where(known, _cosine_log_softmax(z, bank, 1 / temperature), 0.0)
    return _mean(-log_p.sum(-1) / known.sum().clamp_min(1), weight)


def peer_contrast(
    z: Tensor, y: Tensor, banks: PrototypeBank, temperature: float = 0.5, weight: Tensor | None = None
) -> Tensor:
    """Mean over the peers' banks `[N, C, d]` of the cross-entropy over `cos(z, p_jc) / temperature`: FedAPA Eq. 10.

    A peer's term is the mean over the samples whose class that peer knows. Peers that know none of the batch's classes
    are left out of the mean over peers, so they do not dilute it. With banks padded by Eq. 8 none is left out.
    """
    z, weight = _samples(z, weight)
    known = banks.known[..., y]  # [N, n]
    log_p = _pick(_cosine_log_softmax(z, banks, 1 / temperature), y)
    weight = weight * known
    return _mean(_mean(torch.where(known, -log_p, 0.0), weight), (weight.sum(-1) > 0).to(z.dtype))


def prototype_softmax(z: Tensor, bank: PrototypeBank, temperature: float = 0.1) -> Tensor:
    """`[..., n, C]` probabilities softmax(cos(z, p_c) / temperature); 0 for an unknown class (FedPAGR, ensembles)."""
    return torch.where(bank.known[..., None, :], _cosine_log_softmax(z, bank, 1 / temperature).exp(), 0.0)


# --- contrast between the classes of a bank, by distance --------------------------------------------------------------
def distance_softmax(z: Tensor, bank: PrototypeBank, metric: str = "mean") -> Tensor:
    """`[..., n, C]` probabilities softmax(−d(z, p_c)): ProtoFSSL Eq. 6; 0 for an unknown class.

    Rows of a bank that knows nothing are all 0. With a stack of helpers' banks the mean over the leading axis is Eq. 7
    up to a factor, which `sharpen` takes out.
    """
    return torch.where(bank.known[..., None, :], _distance_log_softmax(z, bank, metric).exp(), 0.0)


def distance_cross_entropy(
    z: Tensor, target: Tensor, bank: PrototypeBank, metric: str = "mean", weight: Tensor | None = None
) -> Tensor:
    """Cross-entropy of `target` and softmax(−d(z, p_c)): both terms of ProtoFSSL Eq. 8.

    `target` is labels `[n]` or class probabilities `[n, C]`. Of probabilities only the mass on known classes counts,
    and a sample weighs as much as that mass; labels are the case where the mass is 1 or 0. `metric` is `mean` (squared
    difference, mean over dimensions), `squared` or `euclidean`.
    """
    z, weight = _samples(z, weight)
    log_p = torch.where(bank.known, _distance_log_softmax(z, bank, metric), 0.0)
    if not target.is_floating_point():
        return _mean(-_pick(log_p, target), weight * bank.known[target])
    target = torch.where(bank.known & (weight > 0)[:, None], single(target), 0.0)
    total = (weight * target.sum(-1)).sum()
    return -(weight * (target * log_p).sum(-1)).sum() / torch.where(total > 0, total, 1.0)


def sharpen(p: Tensor, temperature: float) -> Tensor:
    """`p^(1/T)`, normalised over the last axis: ProtoFSSL Eq. 5. A row of zeros stays one.

    Divided by the largest entry first (which changes nothing else), so that a small T does not underflow to 0 / 0.
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
    """Cross-entropy with pseudo-labels, summed over the accepted samples and divided by all: FixMatch; Fed-ARPL Eq. 1."""
    logits, weight = _samples(logits, weight)
    value = -_pick(logits.log_softmax(-1), label) * _of_samples(accepted, weight).to(logits.dtype)
    return _mean(value, weight)


def divergence(target: Tensor, logits: Tensor, accepted: Tensor, weight: Tensor | None = None) -> Tensor:
    """KL(target ‖ softmax(logits)), `target [n, C]` probabilities, averaged like `pseudo_cross_entropy` (FedMatch)."""
    logits, weight = _samples(logits, weight)
    target = torch.where((weight > 0)[:, None], single(target), 0.0)
    value = torch.xlogy(target, target).sum(-1) - (target * logits.log_softmax(-1)).sum(-1)
    return _mean(value * _of_samples(accepted, weight).to(logits.dtype), weight)


# --- contrast within the batch, and soft labels -----------------------------------------------------------------------
def supervised_contrast(
    z: Tensor, y: Tensor, bank: PrototypeBank, temperature: float = 0.5, weight: Tensor | None = None
) -> Tensor:
    """Supervised contrast of each sample with the rest of the batch and the known prototypes, by cosine: FedMPS.

    Of sample i the mean over its positives p of `−log softmax(cos(z_i, a) / temperature)[p]`, a over the other samples and
    the known prototypes; positives are those of its class. Its class's prototype is one, so no sample that counts is
    without. Samples of a class the bank does not know are contrasted with, but have no term of their own.
    """
    z, weight = _samples(z, weight)
    z = unit(z)
    n, classes = len(z), torch.arange(bank.num_classes, device=y.device)
    others = (weight > 0) & ~torch.eye(n, dtype=torch.bool, device=y.device)
    there = torch.cat([others, bank.known.expand(n, -1)], -1)
    positive = there & (y[:, None] == torch.cat([y, classes]))
    log_p = _log_softmax(torch.cat([z @ z.T, z @ unit(_means(bank)).T], -1) / temperature, there)
    value = -torch.where(positive, log_p, 0.0).sum(-1) / positive.sum(-1).clamp_min(1)
    return _mean(value, weight * bank.known[y])


def soft_labels(
    logits: Tensor, y: Tensor, targets: Tensor, known: Tensor, temperature: float = 5.0, weight: Tensor | None = None
) -> Tensor:
    """KL(softmax(t_y / T) ‖ softmax(logits / T)), t_y the row of `targets[C, C]` for the sample's class: FedMPS.

    Rows exist where `known[C]`. Without the factor T² that distillation often has.
    """
    logits, weight = _samples(logits, weight)
    target = (torch.where(known[:, None], single(targets), 0.0)[y] / temperature).log_softmax(-1)
    divergence = (target.exp() * (target - (logits / temperature).log_softmax(-1))).sum(-1)
    return _mean(divergence, weight * known[y])


# --- weights ----------------------------------------------------------------------------------------------------------
def proximal(params: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Tensor:
    """`½ ‖w − w_t‖²` over the names in `params`: FedProx Eq. 2 without its μ. `reference` may hold more names."""
    terms = [((value - reference[name]) ** 2).sum() for name, value in params.items()]
    return torch.stack(terms).sum() / 2 if terms else torch.zeros(())


def ascent(
    params: Mapping[str, Tensor], gradient: Mapping[str, Tensor], radius: float, eta: float
) -> dict[str, Tensor]:
    """The step of that radius up a loss, in the measure of ASAM (Kwon et al., 2021): (FL)²'s perturbation.

    ρ T² g / ‖T g‖ with T = |w| + η for weights and 1 for biases; 0 where the gradient is.
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
