"""Measures of predicted class probabilities: whether they rank right, and whether they can be believed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BINS = 15  # of the calibration error, as is usual


def probabilities(scores: Tensor) -> np.ndarray:
    """The softmax of scores.

    Args:
        scores: Logits, or scores by prototypes, `[n, C]`; −∞ for a class that cannot be predicted.

    Returns:
        Probabilities `[n, C]`, as doubles.
    """
    return np.asarray(scores.detach().cpu().double().softmax(-1).numpy())


def log_odds(scores: Tensor) -> np.ndarray:
    """log p/(1 − p) of the softmax of scores, which orders samples as p does, and those that are all but sure too.

    Args:
        scores: As for `probabilities`.

    Returns:
        `[n, C]`.
    """
    wide = scores.detach().cpu().double()
    if wide.shape[1] == 2:  # exactly opposite, so that the area is the same for either class
        return np.asarray((wide - wide.flip(1)).numpy())
    log_p = wide.log_softmax(-1)
    top = wide.argmax(-1, keepdim=True)
    others = wide.scatter(1, top, -torch.inf).logsumexp(-1, keepdim=True)
    odds = log_p - torch.log1p(-log_p.exp().scatter(1, top, 0.0))
    return np.asarray(odds.scatter(1, top, wide.gather(1, top) - others).numpy())


def auroc(scores: np.ndarray, y: np.ndarray) -> float | None:
    """The area under the ROC curve, one class against the rest, as the mean over the classes that `y` has.

    For a class it is the chance that a sample of it has a larger score of it than a sample of another class has; a tie
    counts half. With two classes it is the ordinary area. Scores are compared in single precision.

    Args:
        scores: Probabilities, or other scores of each class, `[n, C]`.
        y: The true classes `[n]`.

    Returns:
        The area; None where all samples are of one class.

    >>> auroc(np.array([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8]]), np.array([0, 1, 1]))
    1.0
    """
    classes, of_class = np.unique(y, return_inverse=True)
    n = len(y)
    if len(classes) < 2:
        return None
    member = of_class == np.arange(len(classes))[:, None]
    # The bits of floats are put into the order of whole numbers. A last bit that says who is a member makes all ranks of
    # one sort; among equals members come last in this order, and first in that of the second sort.
    bits = (scores[:, classes].T.astype(np.float32, order="C") + np.float32(0.0)).view(np.int32)
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).astype(np.int64) << 1
    ranks = np.arange(n, dtype=np.float64)
    ordered = np.sort(keys | member, axis=1)
    total = (ordered & 1) @ ranks
    tied = (ordered[:, 1:] ^ ordered[:, :-1] == 1).any(1)
    if tied.any():
        first = np.sort(keys[tied] | ~member[tied], axis=1) & 1
        total[tied] = (total[tied] + (1 - first) @ ranks) / 2
    members = member.sum(1)
    return float(((total - members * (members - 1) / 2) / (members * (n - members))).mean())


def calibration_error(p: np.ndarray, y: np.ndarray, bins: int = BINS) -> float:
    """The expected calibration error: how far confidence and accuracy are apart, over bins of equal width.

    Args:
        p: Probabilities `[n, C]`.
        y: The true classes `[n]`.
        bins: Their number.

    Returns:
        Σ over bins of |accuracy − mean confidence|, weighted by the share of samples.

    >>> calibration_error(np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([0, 1]))
    0.5
    """
    predicted = p.argmax(1)
    confidence = p[np.arange(len(y)), predicted]
    number = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    difference = np.bincount(number, (predicted == y) - confidence, bins)
    return float(np.abs(difference).sum() / len(y))
