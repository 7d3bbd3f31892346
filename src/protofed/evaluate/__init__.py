"""Measures of a federation: accuracy, F1, MAE, AUROC, calibration, ensembles, and what the embedding space is worth."""

from ..geometry import feature_space_separation, silhouette
from .accuracy import Confusion, Scores, Snapshot, ensemble, predicted, score_client, vote
from .board import Board, summarise, whole_set
from .confusion import Confusions
from .embedding import Drawn, Pool, embedding_measures, pooled_measures, pooled_silhouette
from .few_shot import FewShot, few_shot
from .probabilities import auroc, calibration_error
from .retrieval import retrieval

__all__ = [
    "Board",
    "Confusion",
    "Confusions",
    "Drawn",
    "FewShot",
    "Pool",
    "Scores",
    "Snapshot",
    "auroc",
    "calibration_error",
    "embedding_measures",
    "ensemble",
    "feature_space_separation",
    "few_shot",
    "pooled_measures",
    "pooled_silhouette",
    "predicted",
    "retrieval",
    "score_client",
    "silhouette",
    "summarise",
    "vote",
    "whole_set",
]
