"""Measures: accuracy by head and by nearest prototype, and the geometry of the embedding space."""

from .accuracy import Scores, score_client, summarise
from .geometry import feature_space_separation, silhouette

__all__ = ["Scores", "feature_space_separation", "score_client", "silhouette", "summarise"]
