"""The server's rules: pure functions on a stack of the clients' banks, `means[N, C, d]` and `counts[N, C]`.

A client takes part in the classes it holds. A class nobody holds stays unknown. Where a rule makes one bank of many,
its counts are the sums of the clients' counts.
"""

from .discriminant import difference, discriminants, shrunk
from .refinement import margin, refine
from .robust import bounded_mean, geometric_median, krum, median, multi_krum, shorter_of_two, trimmed_mean
from .rules import blend, mean, momentum_blend, normalised_mean, pad, personalised, weighted_mean, with_momentum
from .sums import over, total

__all__ = [
    "blend",
    "bounded_mean",
    "difference",
    "discriminants",
    "geometric_median",
    "krum",
    "margin",
    "mean",
    "median",
    "momentum_blend",
    "multi_krum",
    "normalised_mean",
    "over",
    "pad",
    "personalised",
    "refine",
    "shorter_of_two",
    "shrunk",
    "total",
    "trimmed_mean",
    "weighted_mean",
    "with_momentum",
]
