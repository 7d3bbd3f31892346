"""The commands that use what a run has learnt: predict, export."""

from __future__ import annotations

import csv
import io
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..errors import ProtofedError
from .console import make_console
from .options import Load, load_files

if TYPE_CHECKING:
    from ..classifier import Classifier, Predictions

SHOWN = 20  # rows of a table in the terminal


class By(str, Enum):
    """How predictions are made."""

    head = "head"
    prototype = "prototype"
    ensemble = "ensemble"
    mix = "mix"


class Format(str, Enum):
    """The format of an exported classifier."""

    safetensors = "safetensors"
    pt2 = "pt2"
    onnx = "onnx"


Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="A run folder, also a site's own, or a classifier that was exported to safetensors."
    ),
]
Client = Annotated[str | None, typer.Option(help="The client, by name or number; not needed where there is only one.")]


def predict(
    run: Run,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="The samples: .npz, .npy, .csv, .tsv, .parquet, .jsonl, an image or a folder of them, or a capture.",
        ),
    ] = None,
    client: Client = None,
    by: Annotated[
        By | None, typer.Option(help="By the head, by the nearest prototype, or by both; default: as the paper does.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The .csv file to write; default: print a table.")
    ] = None,
    live: Annotated[
        str | None,
        typer.Option(
            help="Classify Wi-Fi packets as they come: udp:PORT, serial:DEVICE[@BAUD] or replay:CAPTURE[@SPEED]."
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="With --live: the port of the page.")] = 8644,
    page: Annotated[bool, typer.Option(help="With --live: serve a page that shows what comes.")] = True,
    step: Annotated[
        int | None,
        typer.Option(min=1, help="With --live: samples from one window to the next; default: as in the run."),
    ] = None,
    load: Load = None,
) -> None:
    """Classify new samples by a client of a finished run: `protofed predict runs/NAME new.csv --client "ward 3"`."""
    from ..data.samples import read_samples

    if (file is None) == (live is None):
        raise ProtofedError("predict: expected one of FILE and --live")
    load_files(load)
    classifier, source = _classifier(run, client)
    if file is None:
        from .live import follow

        assert live is not None
        follow(classifier, source, live, None if by is None else by.value, step, port if page else None, out)
        return
    design = classifier.design
    unseen = read_samples(file, source, design.sample_shape, design.tokens, design.columns)
    found = classifier.predict(unseen.x, None if by is None else by.value)
    console = make_console()
    if out is not None:
        _write(out, found)
    else:
        console.print(_table(found))
    parts = [f"{len(found):,} samples by {classifier.name} ({found.by})"]
    right = unseen.accuracy(found.classes, found.names, classifier.candidates.tolist())
    if right:
        of_own = f" ({right[1]:.1%} of those of its own classes)" if len(right) > 1 and right[1] != right[0] else ""
        parts.append(f"{right[0]:.1%} right{of_own}")
    if found.unlike is not None:
        parts.append(f"{int(found.unlike.sum()):,} unlike anything known")
    more = len(found) - SHOWN
    if out is not None:
        parts.append(f"written to {out}")
    elif more > 0:
        parts.append(f"{more:,} more rows with --out FILE.csv")
    console.print("; ".join(parts), soft_wrap=True, markup=False)


def _classifier(run: Path, client: str | None) -> tuple[Classifier, Any]:
    """The classifier of a client, and the source of the data that it was trained on, where that is known."""
    alone = _alone(run, client)
    if alone is not None:
        return alone, None
    from ..data import DataSource
    from ..experiment.run import load as load_run

    result = load_run(run)
    source = result.settings.data
    return result.model(client), source if isinstance(source, DataSource) else None


def _alone(run: Path, client: str | None) -> Classifier | None:
    """The classifier of a file, or of the folder in which a run between sites leaves one; None for any other folder."""
    from ..classifier import Classifiers, load
    from ..classifier.store import CLASSIFIER

    file = run / CLASSIFIER if run.is_dir() else run
    if not file.is_file():
        return None
    found = load(file)
    return Classifiers((found.name,), lambda _: found)[client]


def _write(out: Path, found: Predictions) -> None:
    from ..disk import write_atomically

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(found.header())
    writer.writerows(found.rows())
    if not out.parent.is_dir():
        raise ProtofedError(f"--out {out}: no such folder {out.parent}")
    write_atomically(out, text.getvalue().encode())


def _table(found: Predictions) -> Table:
    """The first predictions: the class, its probability, and the distance to the nearest prototype."""
    table = Table("sample", "class", "probability", "nearest", "distance", "unlike known")
    for n in range(min(SHOWN, len(found))):
        nearest = int(found.distances[n].argmin())
        near = found.unlike is not None
        flag = "" if found.unlike is None else "yes" if found.unlike[n] else "no"
        name, distance = (found.names[nearest], f"{found.distances[n, nearest]:.3g}") if near else ("", "")
        table.add_row(str(n), found.classes[n], f"{found.probabilities[n, found.labels[n]]:.1%}", name, distance, flag)
    return table


def export(
    run: Run,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write; must not exist yet.")],
    client: Client = None,
    format: Annotated[
        Format | None,
        typer.Option(
            help="safetensors (for protofed), pt2 (for PyTorch alone) or onnx; default: by the file's ending."
        ),
    ] = None,
    load: Load = None,
) -> None:
    """Write a client's classifier for other programs, with a model card: `protofed export runs/NAME --out model.onnx`."""
    load_files(load)
    named = None if format is None else format.value
    alone = _alone(run, client)
    if alone is not None:
        from ..classifier.card import export_with_card

        name, difference = alone.name, export_with_card(alone, out, named)
    else:
        from ..experiment.run import load as load_run

        result = load_run(run)
        name, difference = result.model(client).name, result.export(out, client, named)
    console = make_console()
    same = "the same bits as ours" if difference == 0 else f"equal to ours to {difference:.1g}"
    console.print(f"{out}: {name}; run again, its outputs are {same}", soft_wrap=True, markup=False)
    console.print(f"model card: {out.with_suffix('.md')}", soft_wrap=True, markup=False)
