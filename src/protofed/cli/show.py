"""The commands that list methods, models, settings and data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..errors import ProtofedError
from .console import make_console
from .options import Config, Pairs, given_settings


def methods() -> None:
    """List the methods, each with its paper, its parts and its settings."""
    from ..methods import available, registry

    table = Table("method", "what it does", "parts", "settings")
    for name in available():
        entry = registry[name]
        fields = [f"{f.name}={_short(f.default)}" for f in dataclasses.fields(entry)]
        paper = registry.papers[name]
        what = (entry.__doc__ or "").strip().splitlines()[0] + (f"\n{paper}" if paper else "")
        parts = "\n".join(f"{part}: {text}" for part, text in _parts(registry.make(name)).items())
        table.add_row(name, what, parts, "\n".join(fields))
    make_console().print(table)


def _parts(method: Any) -> dict[str, str]:
    """The parts of a method with its default settings, in a word or two each."""
    exchange, predict = method.exchange, method.predict
    tuned = f" after {predict.tuning} epochs of tuning" if predict.tuning else ""
    reduce = type(method.reduce).__name__.lower()
    parts = {
        "down": ", ".join(map(str, exchange.down)) or "nothing",
        "up": ", ".join(map(str, exchange.up)) or "nothing",
        "model": "each client's own" if exchange.keeps_model else "one for all",
        "feed": type(method.feed).__name__.lower(),
        "reduce": reduce + (f" by {method.reduce.by}" if reduce == "mean" else ""),
        "predict": f"{predict.by}{tuned}",
        "teacher": f"{method.teacher.epochs} epochs at the server" if method.teacher else "",
    }
    if not exchange.up:
        del parts["reduce"]
    return {name: text for name, text in parts.items() if text}


def _short(value: Any) -> str:
    """The default of a setting as a table shows it."""
    from ..parts import Reduce
    from ..registry import as_text

    if value is dataclasses.MISSING:
        return "(needed)"
    if isinstance(value, Reduce):
        return as_text(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "(" + ", ".join(f"{f.name}={getattr(value, f.name)}" for f in dataclasses.fields(value)) + ")"
    return str(value)


def models() -> None:
    """List the models with their parameter counts (3 × 32 × 32 images, 10 classes) and settings."""
    from ..models import available, registry

    table = Table("model", "parameters", "settings")
    for name, count in available().items():
        fields = [f"{f.name}={_short(f.default)}" for f in registry.options(name).values()]
        table.add_row(name, "–" if count is None else f"{count:,}", "\n".join(fields))
    make_console().print(table)


def settings() -> None:
    """List the general settings with their defaults; `methods`, `models` and `data` list the rest."""
    from ..experiment.settings import general_keys

    table = Table("setting", "default", "what it is")
    for name, (default, description) in general_keys().items():
        table.add_row(name, str(default), description)
    make_console().print(table)


data = typer.Typer(no_args_is_help=False, invoke_without_command=True, help="Data sets; `data show` draws a partition.")


@data.callback()
def list_data(context: typer.Context) -> None:
    """List data sets and partitions, with their settings."""
    if context.invoked_subcommand is not None:
        return
    from ..data import partitions, sources

    console = make_console()
    for title, registry in (("data sets", sources), ("partitions", partitions)):
        table = Table("name", "what it is", "settings", title=title)
        for name in registry.names():
            fields = [f"{f.name}={_short(f.default)}" for f in registry.options(name).values()]
            doc = (registry[name].__doc__ or "").strip().splitlines()[0]
            table.add_row(name, doc, "\n".join(fields))
        console.print(table)


@data.command("show")
def show_data(
    settings: Pairs = None,
    config: Config = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the picture here (.png, .svg or .pdf).")] = None,
) -> None:
    """Print and draw who holds which classes: `protofed data show data=digits partition=dirichlet alpha=0.1`."""
    from ..data.picture import counts_table, draw_counts
    from ..experiment.run import prepare_data
    from ..experiment.settings import resolve

    console = make_console()
    chosen = resolve("local", given_settings(config, settings))
    federated = prepare_data(chosen)
    console.print(counts_table(federated.class_counts(), federated.class_names))
    file = picture or Path("runs") / f"clients-{getattr(chosen.data, 'name', 'data')}-{chosen.partition.name}.png"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draw_counts(federated.class_counts(), federated.class_names, file)
    except OSError as error:
        raise ProtofedError(f"--picture {file}: cannot be written ({error.strerror})") from None
    console.print(f"picture: {file}", soft_wrap=True)
