"""The result that a run returns in Python, with its figures and pictures of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .experiment.settings import Settings


@dataclass(frozen=True)
class Result:
    """The figures of a finished run.

    Example: `pf.run("fedsap", data="digits", rounds=20).accuracy_prototype`

    Attributes:
        settings: The settings of the run, complete.
        metrics: One row per evaluated round, as in `metrics.jsonl`.
        summary: The figures over the last rounds, as in `summary.json`.
        folder: The run folder; None where the run wrote none.
    """

    settings: Settings
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    folder: Path | None = None

    @property
    def failure(self) -> str | None:
        """Why the figures mean nothing: no client returned anything usable up to the last round. None where they do."""
        reason = self.summary.get("failure")
        return None if reason is None else str(reason)

    @property
    def accuracy(self) -> float:
        """The accuracy by the prediction of the method's paper: the mean over clients and over the last five rounds."""
        five = self.summary["last_five"]
        return float(five["accuracy"] if "accuracy" in five else five["accuracy_head"])

    @property
    def accuracy_head(self) -> float | None:
        """The accuracy by classifier head; None for a method that trains no head."""
        value = self.summary["last_five"].get("accuracy_head")
        return None if value is None else float(value)

    @property
    def accuracy_prototype(self) -> float | None:
        """The accuracy by nearest prototype; None for a method without prototypes."""
        value = self.summary["last_five"].get("accuracy_prototype")
        return None if value is None else float(value)

    def _source(self) -> Any:
        from .report.figures import in_memory

        return self.folder or in_memory(self.settings.method.name, self.metrics, self.summary)

    def plot_accuracy(self, **options: Any) -> Figure:
        """Draw the accuracy by round. `width` is `"column"` or `"page"`, and `by` is `"head"` or `"prototype"`."""
        from .report.figures import plot_accuracy

        return plot_accuracy(self._source(), **options)

    def plot_loss(self, **options: Any) -> Figure:
        """Draw the loss by round."""
        from .report.figures import plot_loss

        return plot_loss(self._source(), **options)

    def plot_clients(self, **options: Any) -> Figure:
        """Draw each client's accuracy by round. The run must have written a run folder."""
        from .report.figures import plot_clients

        return plot_clients(self._source(), **options)

    def plot_confusion(self, **options: Any) -> Figure:
        """Draw which class was taken for which. The run must have written a run folder."""
        from .report.figures import plot_confusion

        return plot_confusion(self._source(), **options)

    def plot_embedding(self, **options: Any) -> Figure:
        """Draw test embeddings, with prototypes as stars; the run must have written a run folder.

        `projection` is `"pca"` or `"tsne"`.
        """
        from .report.figures import plot_embedding

        return plot_embedding(self._source(), **options)

    def __repr__(self) -> str:
        folder = f", folder={str(self.folder)!r}" if self.folder else ""
        if self.failure:
            return f"Result({self.settings.method.name}: failed, {self.failure}{folder})"
        accuracies = {"head": self.accuracy_head, "prototype": self.accuracy_prototype}
        text = ", ".join(f"{kind} {value:.2%}" for kind, value in accuracies.items() if value is not None)
        return f"Result({self.settings.method.name}: {text}{folder})"
