"""Classifiers: what a client of a finished run has learnt, to predict with, to export, and to teach a new class."""

from __future__ import annotations

from .core import By, Classifier, Outputs, Predictions
from .design import Design, Learnt
from .shelf import Classifiers
from .store import load, save

__all__ = ["By", "Classifier", "Classifiers", "Design", "Learnt", "Outputs", "Predictions", "load", "save"]
