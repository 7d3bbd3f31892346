"""Prototypes as a scikit-learn estimator: class means of any encoder's embeddings, and the nearest one predicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from ..bank import PrototypeBank
from ..errors import unknown
from ..models.skeleton import EVAL_BATCH

METRICS = ("squared", "euclidean", "cosine")


class PrototypeClassifier(ClassifierMixin, BaseEstimator):
    """Classify by the nearest prototype, the mean embedding of a class.

    There is no training beyond the means, so `partial_fit` takes samples in any order and portions, and new classes at
    any time: the result is that of one `fit` of all.

    Args:
        encoder: What turns samples into embeddings `[n, d]`: a function of an array, a torch module (one that returns
            several tensors gives the one called `embedding`, or the first), or None for the samples themselves.
        metric: `"squared"`, `"euclidean"` or `"cosine"`.
        temperature: What scores are divided by before their softmax; it changes probabilities and no class.

    Attributes:
        classes_: The classes, sorted.
        bank_: Their prototypes, a `PrototypeBank`.

    Example: `PrototypeClassifier(encoder=network).fit(x, y).predict(x_new)`
    """

    classes_: np.ndarray
    bank_: PrototypeBank
    n_features_in_: int

    def __init__(
        self,
        encoder: Callable[[Any], Any] | nn.Module | None = None,
        metric: str = "squared",
        temperature: float = 1.0,
    ) -> None:
        self.encoder = encoder
        self.metric = metric
        self.temperature = temperature

    @classmethod
    def from_bank(
        cls,
        bank: PrototypeBank,
        classes: Any = None,
        encoder: Any = None,
        metric: str = "squared",
        temperature: float = 1.0,
    ) -> PrototypeClassifier:
        """An estimator with prototypes that exist already, such as those of a federation.

        Args:
            bank: The prototypes; classes that it does not know are left out.
            classes: The labels of the bank's classes; None numbers them.
            encoder: As in the class.
            metric: As in the class.
            temperature: As in the class.

        Example: `PrototypeClassifier.from_bank(bank, ["cat", "dog"]).predict(z)`
        """
        known = bank.known.cpu().numpy()
        names = np.arange(bank.num_classes) if classes is None else np.asarray(classes)
        if len(names) != bank.num_classes:
            raise ValueError(f"{len(names)} classes for a bank of {bank.num_classes}")
        made = cls(encoder, metric, temperature)
        order = np.argsort(names[known], kind="stable")
        made.classes_ = names[known][order]
        rows = torch.from_numpy(np.flatnonzero(known)[order])
        made.bank_ = PrototypeBank(bank.means.cpu()[rows].double(), bank.counts.cpu()[rows].double())
        if encoder is None:
            made.n_features_in_ = bank.dim
        return made

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> PrototypeClassifier:
        """Compute the prototypes of labelled samples, and forget earlier ones.

        Args:
            X: Samples `[n, ...]`.
            y: Their labels, numbers or texts.
            sample_weight: How much each counts in its class's mean.

        Returns:
            The estimator itself.
        """
        for name in ("classes_", "bank_"):
            if hasattr(self, name):
                delattr(self, name)
        return self._add(X, y, None, sample_weight, reset=True)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> PrototypeClassifier:
        """Add labelled samples to the prototypes. A class that was not there before is a new one.

        Args:
            X: Samples `[n, ...]`.
            y: Their labels.
            classes: Classes that are to come; they are not needed, and only sort in.
            sample_weight: How much each counts in its class's mean.

        Returns:
            The estimator itself.
        """
        return self._add(X, y, classes, sample_weight, reset=not hasattr(self, "bank_"))

    def _add(self, X: Any, y: Any, classes: Any, sample_weight: Any, reset: bool) -> PrototypeClassifier:
        if self.metric not in METRICS:
            raise unknown("metric", str(self.metric), METRICS)
        X, y = self._checked(X, reset, y)
        check_classification_targets(y)
        weight = _check_sample_weight(sample_weight, X, ensure_non_negative=True) if sample_weight is not None else None
        z = self._embedded(X)
        known = getattr(self, "classes_", np.asarray(y)[:0])
        both = np.concatenate([known, np.asarray(y), np.asarray(y)[:0] if classes is None else np.asarray(classes)])
        names, numbers = np.unique(both, return_inverse=True)
        bank = PrototypeBank.empty(len(names), z.shape[1], z)
        if len(known):
            rows = torch.from_numpy(numbers[: len(known)])
            bank.means[rows], bank.counts[rows] = self.bank_.means, self.bank_.counts
        labels = torch.from_numpy(numbers[len(known) : len(known) + len(y)])
        weights = None if weight is None else torch.from_numpy(np.asarray(weight, np.float64))
        self.bank_ = bank.combine(PrototypeBank.from_embeddings(z, labels, len(names), weights))
        self.classes_ = names
        return self

    def _checked(self, X: Any, reset: bool, y: Any = "no_validation") -> Any:
        """Samples, and labels where there are some, as scikit-learn checks them; an encoder's may have any shape."""
        options: dict[str, Any] = {"reset": reset, "dtype": "numeric"}
        if self.encoder is not None:
            options |= {"allow_nd": True, "dtype": None}
        return validate_data(self, X.numpy() if isinstance(X, Tensor) else X, y, **options)

    def _embedded(self, X: np.ndarray) -> Tensor:
        """The embeddings of samples, in double precision."""
        if self.encoder is None:
            return torch.from_numpy(np.array(X, np.float64))
        if not isinstance(self.encoder, nn.Module):
            return torch.as_tensor(np.asarray(self.encoder(X))).double()
        x = torch.from_numpy(np.array(X))
        x = x.float() if x.is_floating_point() else x
        training = self.encoder.training
        self.encoder.eval()
        try:
            with torch.no_grad():
                return torch.cat([_embedding(self.encoder(piece)) for piece in x.split(EVAL_BATCH)]).double()
        finally:
            self.encoder.train(training)

    def decision_function(self, X: Any) -> np.ndarray:
        """The scores `[n, C]` of each class, the highest of which wins; with two classes `[n]`, above 0 for the second."""
        scores = self._scores(X).numpy()
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def _scores(self, X: Any) -> Tensor:
        check_is_fitted(self, "bank_")
        distances = self.bank_.distances(self._embedded(self._checked(X, reset=False)), self.metric)
        return -distances / self.temperature

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probabilities `[n, C]`: the softmax of the scores."""
        return self._scores(X).softmax(-1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The label of the nearest prototype."""
        nearest = self._scores(X).argmax(-1).numpy()
        return self.classes_[nearest]


def _embedding(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output.embedding if hasattr(output, "embedding") else output[0]
