"""What a run and a comparison return in Python: figures, tables and pictures of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ProtofedError
from .results.columns import Row
from .results.comparison import Variant, failures_of
from .results.tables import comparison_html, comparison_text, html_table, summary_cells
from .results.verdict import verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .classifier import By, Classifier, Classifiers, Predictions
    from .experiment.settings import Settings

# the settings that a model card names, beside the four choices
MATTER = ("rounds", "clients", "participation", "seed", "epochs", "batch", "lr", "labels", "privacy", "filters")


@dataclass(frozen=True)
class Result:
    """The figures of a finished run.

    Example: `pf.run("fedsap", data="digits", rounds=20).accuracy_prototype`

    Attributes:
        settings: The settings of the run, complete.
        metrics: One row per evaluated round, as in `metrics.jsonl`.
        summary: The figures over the last rounds, as in `summary.json`.
        folder: The run folder; None where the run wrote none.
        remake: Makes the classifiers of the clients, where the run folder does not hold them.
    """

    settings: Settings
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    folder: Path | None = None
    remake: Callable[[], Classifiers] | None = field(default=None, repr=False, compare=False)

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

    @property
    def accuracy_mix(self) -> float | None:
        """The accuracy by head and prototypes together; None for a method that does not mix them."""
        value = self.summary["last_five"].get("accuracy_mix")
        return None if value is None else float(value)

    @cached_property
    def _classifiers(self) -> Classifiers:
        """The classifiers of the clients: those that the run folder holds, or else made again."""
        from .classifier.store import stored_models

        place = self.settings.method.name if self.folder is None else self.folder
        if self.failure:
            raise ProtofedError(f"{place}: the run failed, so it has no models: {self.failure}")
        found = None if self.folder is None else stored_models(self.folder, self.remake)
        if found is None and self.remake is not None:
            found = self.remake()
        if found is None:
            advice = (
                "give it a folder (out=...)" if self.folder is None else f"pf.load({str(self.folder)!r}) makes them"
            )
            raise ProtofedError(f"{place}: no models were kept of this run; {advice}")
        return found

    @property
    def clients(self) -> tuple[str, ...]:
        """The names of the clients; `client 0` and so on where they have none of their own."""
        return self._classifiers.clients

    def model(self, client: str | int | None = None) -> Classifier:
        """The classifier of a client: its network with classes, scaling and prototypes, as a torch module.

        Args:
            client: Its name or number; it may be left out where there is one client only.

        Returns:
            The classifier, on the CPU and in eval mode.

        Example: `pf.load("runs/digits").model("client 3").predict(x).classes`
        """
        return self._classifiers[client]

    def predict(self, x: Any, client: str | int | None = None, by: By | None = None) -> Predictions:
        """Classify samples by the classifier of a client.

        Args:
            x: The samples, as they are before scaling: an array or a tensor `[n, ...]`, or where the data was a table, a
                frame or a file with the same columns.
            client: Its name or number; it may be left out where there is one client only.
            by: `"head"`, `"prototype"`, `"ensemble"`, the mean of both probabilities, or `"mix"`, both in the shares that
                the client has chosen, where the method mixes them; None is as the method's paper
                predicts.

        Returns:
            The classes with their names, probabilities, distances to prototypes, and which samples are unlike anything
            known.

        Example: `pf.run("fedproto", data="digits").predict(x, client=0).classes`
        """
        return self.model(client).predict(x, by)

    def export(self, file: str | Path, client: str | int | None = None, format: str | None = None) -> float:
        """Write the classifier of a client for other programs, and a model card beside it.

        Args:
            file: The file to write, which must not exist yet.
            client: Its name or number; it may be left out where there is one client only.
            format: `"safetensors"`, `"pt2"` or `"onnx"`; None is by the file's ending.

        Returns:
            The largest difference between the outputs of the file, which is run again, and ours.

        Example: `pf.load("runs/digits").export("model.onnx", client="client 3")`
        """
        from .classifier.card import export_with_card

        classifier = self.model(client)
        number, tree = self.clients.index(classifier.name), self.settings.to_dict()
        figures = {k: v[number] for k, v in self.summary.get("per_client", {}).items() if v[number] is not None}
        choices: dict[str, Any] = {
            key: tree[key]["name"] for key in ("method", "data", "partition", "model") if key in tree
        }
        choices |= {key: tree[key] for key in MATTER if tree.get(key) not in (None, "", [])}
        return export_with_card(classifier, Path(file), format, figures, choices)

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
        accuracies = {"head": self.accuracy_head, "prototype": self.accuracy_prototype, "mix": self.accuracy_mix}
        text = ", ".join(f"{kind} {value:.2%}" for kind, value in accuracies.items() if value is not None)
        return f"Result({self.settings.method.name}: {text}{folder})"

    def _repr_html_(self) -> str:
        header, lines = summary_cells(self.summary)
        text = (
            f"{self.settings.method.name}, seed {self.summary['seed']}: accuracy and F1 in %, ± deviation over clients"
        )
        return html_table(header, lines, [text, *([f"failed: {self.failure}"] if self.failure else [])])


@dataclass(frozen=True, repr=False)
class Comparison:
    """The results of a comparison.

    Attributes:
        results: By the label of the variant, one result for each seed whose run has finished.
        folder: The comparison's folder; None where nothing was written.
        variants: The variants.
        columns: The columns of the tables, where a person has chosen them.
        failures: By the name of the cell, such as `fedavg-seed1234`, why its run failed.
        seeds: The seeds.
        left: The names of cells that other parts of the comparison have not finished yet.
    """

    results: dict[str, list[Result]]
    folder: Path | None = None
    variants: list[Variant] = field(default_factory=list)
    columns: list[str] | None = None
    failures: dict[str, str] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def summaries(self) -> dict[str, list[dict[str, Any]]]:
        """The summaries of the finished runs, by the label of the variant."""
        return {label: [r.summary for r in runs] for label, runs in self.results.items()}

    def failed(self) -> dict[str, str]:
        """By the name of the cell, why a run has no usable figures: it failed, or no client returned anything to the end."""
        empty = {
            variant.cell(result.summary["seed"]): result.failure
            for variant in self.variants
            for result in self.results[variant.label]
            if result.failure is not None
        }
        return {**self.failures, **empty}

    def rows(self) -> list[Row]:
        """The lines of a table, one for each variant."""
        return [
            Row(v.label, v.method, v.settings, runs, failures_of(v, self.seeds, self.failures))
            for v in self.variants
            for runs in [[result.summary for result in self.results[v.label]]]
        ]

    def plot_gains(self, **options: Any) -> Figure:
        """Draw the gain over Local site by site. `by` is `"head"` or `"prototype"`, `width` `"column"` or `"page"`."""
        from .report.figures import plot_gains

        return plot_gains(self.rows(), **options)

    def verdict(self) -> list[str]:
        """What the comparison says, in sentences that follow from the gains over Local."""
        return verdict(self.rows())

    def __repr__(self) -> str:
        folder = f"\nfolder: {self.folder}" if self.folder else ""
        return comparison_text(self.rows(), self.columns) + folder

    def _repr_html_(self) -> str:
        return comparison_html(self.rows(), self.columns)
