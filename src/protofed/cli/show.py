"""The commands that list methods, models, settings and data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import ProtofedError
from .console import make_console
from .options import Config, Pairs, given_settings

if TYPE_CHECKING:
    from ..data.csi import CSI
    from ..registry import Registry


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


def parts() -> None:
    """List the parts of which `compose` makes a method, and those that stand around any method."""
    from ..parts import Filter, Predict, Reduce, ServerStep, Term, UnlabelledSamples
    from ..parts.attacks import Attack

    table = Table("setting", "part", "what it is", "settings")
    registries: dict[str, Registry[Any]] = {
        "loss": Term.registry,
        "reduce": Reduce.registry,
        "after": ServerStep.registry,
        "predict": Predict.registry,
        "unlabelled_samples": UnlabelledSamples.registry,
        "filters": Filter.registry,
        "attack": Attack.registry,
    }
    for setting, registry in registries.items():
        for name in registry.names():
            fields = "\n".join(f"{f.name}={_short(f.default)}" for f in registry.options(name).values())
            table.add_row(setting, name, (registry[name].__doc__ or "").strip().splitlines()[0], fields)
            setting = ""
        table.add_section()
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
    from ..registry import as_text, is_part

    if value is dataclasses.MISSING:
        return "(needed)"
    if is_part(value):
        return as_text(value)
    if isinstance(value, tuple) and any(map(is_part, value)):
        return "[" + ", ".join(map(as_text, value)) + "]"
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
    """List data sets, partitions and shifts, with their settings."""
    if context.invoked_subcommand is not None:
        return
    from ..data import partitions, sources
    from ..data.shift import Shift

    console = make_console()
    registries: dict[str, Any] = {"data sets": sources, "partitions": partitions, "shifts": Shift.registry}
    for title, registry in registries.items():
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
    samples: Annotated[
        Path | None, typer.Option(help="Draw some samples as each client sees them here; by default where they differ.")
    ] = None,
) -> None:
    """Print and draw who holds which classes: `protofed data show data=digits partition=dirichlet alpha=0.1`.

    Of Wi-Fi captures it also draws a window before and after each setting of the signal chain.
    """
    from ..data.csi import CSI
    from ..data.picture import counts_table, draw_counts, draw_samples
    from ..data.remarks import say
    from ..experiment.build import prepare_data
    from ..experiment.settings import resolve

    console = make_console()
    chosen = resolve("local", given_settings(config, settings))
    federated = prepare_data(chosen)
    counts, classes, clients = federated.class_counts(), federated.class_names, federated.client_names
    console.print(counts_table(counts, classes, clients=clients))
    say(federated.remarks)
    file = picture or Path("runs") / f"clients-{getattr(chosen.data, 'title', 'data')}-{chosen.partition.name}.png"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draw_counts(counts, classes, file, clients=clients)
    except OSError as error:
        raise ProtofedError(f"--picture {file}: cannot be written ({error.strerror})") from None
    console.print(f"picture: {file}", soft_wrap=True)
    differ = chosen.general.shift or chosen.partition.name == "domains"
    if samples is None and differ and len(federated.sample_shape) == 3:
        samples = file.with_name(f"{file.stem}-samples{file.suffix}")
    if samples is not None:
        try:
            draw_samples(federated, samples)
        except OSError as error:
            raise ProtofedError(f"--samples {samples}: cannot be written ({error.strerror})") from None
        console.print(f"samples: {samples}", soft_wrap=True)
    if isinstance(chosen.data, CSI):
        _show_captures(console, chosen.data, file)


def _show_captures(console: Console, source: CSI, counts: Path) -> None:
    """Print what became of each capture, and draw a window of the first one, beside the other picture."""
    from ..data.csi import read_manifest
    from ..data.csi.picture import accounts_table, draw_stages

    captures = read_manifest(Path(source.manifest).expanduser(), source.label, source.group)
    console.print(accounts_table(source.accounts()))
    file = counts.with_name(f"{counts.stem}-signal{counts.suffix}")
    draw_stages(source.stages(captures[0]), file, f"The signal chain: one window of {captures[0].file.name}")
    console.print(f"signal chain: {file}", soft_wrap=True)
