"""Measures of a federation: accuracy, F1, MAE, ensembles, and the geometry of the embedding space."""

from ..geometry import feature_space_separation, silhouette
from .accuracy import Confusion, Scores, Snapshot, ensemble, score_client, summarise, vote

__all__ = [
    "Confusion",
    "Scores",
    "Snapshot",
    "ensemble",
    "feature_space_separation",
    "score_client",
    "silhouette",
    "summarise",
    "vote",
]
