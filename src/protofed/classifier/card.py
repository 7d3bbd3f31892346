"""The model card beside an exported classifier: where it comes from, what it knows, how good it is, and how it is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..disk import write_atomically
from ..errors import ProtofedError
from ..version import __version__
from .core import Classifier
from .export import FORMATS, export

RUN = {
    "safetensors": """import numpy as np

from protofed.classifier import load

classifier = load("{file}")
x = np.zeros({shape}, {numpy})  # raw samples: scaling is done inside
predictions = classifier.predict(x)
print(predictions.classes, predictions.unlike)
""",
    "pt2": """import torch

classes = {classes}
program = torch.export.load("{file}").module()
out = program(torch.zeros({shape}, dtype=torch.{torch}))  # raw samples: scaling is done inside
print([classes[k] for k in out["{deciding}"].argmax(-1)], out["unlike"])
""",
    "onnx": """import numpy as np
import onnxruntime

classes = {classes}
session = onnxruntime.InferenceSession("{file}")
x = np.zeros({shape}, {numpy})  # raw samples: scaling is done inside
{deciding}, unlike = session.run(["{deciding}", "unlike"], {{"x": x}})
print([classes[k] for k in {deciding}.argmax(-1)], unlike)
""",
}


DECIDING = {"head": "logits", "prototype": "scores", "mix": "mix"}
NAMES = {"accuracy": "accuracy", "balanced": "balanced accuracy", "auroc": "AUROC", "ece": "calibration error"}


def export_with_card(
    classifier: Classifier,
    file: Path,
    format: str | None = None,
    figures: Mapping[str, float] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> float:
    """Export a classifier, and write its model card beside it, with the ending `.md`.

    Args:
        classifier: The classifier.
        file: The file to write, which must not exist yet.
        format: The format; None is by the file's ending.
        figures: As for `card`.
        settings: As for `card`.

    Returns:
        By how much the file's outputs differ from ours.
    """
    chosen = file.suffix.lower().removeprefix(".") if format is None else format
    if format is None and chosen not in FORMATS:
        raise ProtofedError(f"{file}: name the format with --format, or by the ending {', '.join(FORMATS)}")
    about = file.with_suffix(".md")
    for path in (file, about):
        if path.exists():
            raise ProtofedError(f"{file}: {path} exists already; choose another")
    difference = export(classifier, file, chosen)
    write_atomically(about, card(classifier, file, chosen, difference, figures, settings).encode())
    return difference


def card(
    classifier: Classifier,
    file: Path,
    format: str,
    difference: float,
    figures: Mapping[str, float] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> str:
    """The text of a model card.

    Args:
        classifier: The classifier.
        file: The exported file.
        format: Its format.
        difference: By how much its outputs differ from ours.
        figures: What the run measured of this client, as shares by name, such as `accuracy_head`.
        settings: The settings of the run that matter, by key.

    Returns:
        Markdown.
    """
    design = classifier.design
    known = [name for name, may in zip(classifier.classes, classifier.candidates.tolist(), strict=True) if may]
    prototypes = f"{', '.join(known)}" if classifier.has_prototypes else "none"
    head = ", ".join(design.classes) if design.predict.trains_head else "none: the method trains no head"
    scaling = "in the file" if classifier.mean is not None else "none"
    measured = [f"- {_named(name)}: {value:.1%}" for name, value in (figures or {}).items()] or ["- not known here"]
    chosen = [f"- `{key}`: {value}" for key, value in (settings or {}).items()] or ["- not known here"]
    kind = "token ids" if design.tokens else "numbers, before any scaling"
    lines = [
        f"# {classifier.name}: {design.data}, {design.method}",
        "",
        f"A classifier of one client of a federation, exported by protofed {__version__} as `{file.name}`.",
        "",
        "| | |",
        "| --- | --- |",
        f"| data | {design.data} |",
        f"| a sample | {kind}, of shape {list(design.sample_shape)} |",
        f"| scaling | {scaling} |",
        f"| network | `{classifier.model.name}` |",
        f"| classes of the head | {head} |",
        f"| classes with a prototype | {prototypes} |",
        f"| the method predicts by | {design.predict.by} |",
        f"| checked | the file was run, and its outputs differ from protofed's by at most {difference:.1g} |",
        "",
        *_columns(classifier),
        "## Figures of this client",
        "",
        "On its own test samples, mean of the run's last five rounds.",
        "",
        *measured,
        "",
        "## Settings",
        "",
        *chosen,
        "",
        "## What it must not be used for",
        "",
        f"- Samples of other classes than the {len(classifier.classes)} above: it always names one of them. `unlike` warns,",
        "  and misses many.",
        "- Samples that were measured, prepared or encoded in another way than the training data.",
        "- Decisions about people without a test on data of the place where it is used: the figures above are of one client",
        "  and one seed.",
        "- Publication, before somebody has asked what it gives away: weights and prototypes are computed from the client's",
        "  samples (`protofed audit`).",
        "",
        "## How to run it",
        "",
        "```python",
        _snippet(classifier, file, format).rstrip(),
        "```",
        "",
    ]
    if format != "safetensors":
        mix = " `mix` are the logarithms of the probabilities by both." if classifier.design.predict.by == "mix" else ""
        lines[-1:] = [
            "",
            "Outputs: `logits` of the head, `embedding`, `scores` of the prototypes (the highest wins), `distances` to each",
            f"class's prototype (infinite without one), and `unlike`, whether a sample is unlike anything known.{mix}",
            "",
        ]
    return "\n".join(lines)


def _named(figure: str) -> str:
    """`balanced_head` in words."""
    what, _, by = figure.rpartition("_")
    return f"{NAMES[what]} by {by}" if what in NAMES else figure


def _columns(classifier: Classifier) -> list[str]:
    """What each number of a sample stands for, where samples are rows of a table."""
    if classifier.design.columns is None:
        return []
    features = classifier.design.columns.features
    return [
        "## A sample",
        "",
        "The numbers of a sample are these, in this order. `NAME=WORD` is 1 where the column has that word, and else 0; "
        "`inputs` of a classifier makes them of a table.",
        "",
        *(f"{place}. {feature}" for place, feature in enumerate(features)),
        "",
    ]


def _snippet(classifier: Classifier, file: Path, format: str) -> str:
    tokens = classifier.design.tokens
    return RUN[format].format(
        file=file.name,
        shape=(2, *classifier.design.sample_shape),
        classes=list(classifier.classes),
        numpy="np.int64" if tokens else "np.float32",
        torch="int64" if tokens else "float32",
        deciding=DECIDING[classifier.design.predict.by],
    )
