"""The command line: parse, call, print."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from . import __version__, methods, models
from .console import CompareWatch, RunWatch, log_to, make_console, print_table
from .errors import ProtofedError
from .experiment import reproduce as reproductions
from .experiment import resume as resume_run
from .experiment import run as run_method
from .experiment.compare import (
    Comparison,
    Grid,
    is_comparison,
    make_grid,
    parse_axes,
    parse_words,
    read_comparison,
    read_rows,
    resume_comparison,
    run_grid,
)
from .experiment.run import Result, prepare_data
from .experiment.settings import combine, general_keys, parse_pairs, read_toml, resolve
from .parts import Reduce
from .registry import as_text
from .report import (
    Row,
    comparison_latex,
    comparison_markdown,
    comparison_table,
    confusion_table,
    draw_confusions,
    notes,
    parse_column,
    read_confusions,
    results_csv,
    shown_of,
    summary_table,
)

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False
)
data_app = typer.Typer(
    no_args_is_help=False, invoke_without_command=True, help="Data sets; `data show` draws a partition."
)
app.add_typer(data_app, name="data")

Pairs = Annotated[list[str] | None, typer.Argument(help="Settings as key=value, for instance rounds=20 lr=0.05")]
Words = Annotated[
    list[str] | None, typer.Argument(metavar="[[LABEL=]METHOD[?key=value&...]]... [key=value...]", show_default=False)
]
Config = Annotated[
    list[Path] | None,
    typer.Option("--config", "-c", help="Settings in a TOML file; later files and key=value override it."),
]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="The run folder to write; must not exist yet.")]
Load = Annotated[list[Path] | None, typer.Option("--load", help="A Python file that registers what is your own.")]
Seeds = Annotated[str, typer.Option(help="How many seeds, or which: 3, 1234,1235 or 1234-1236.")]
Columns = Annotated[str | None, typer.Option(help="The table's columns: head,weighted_prototype,seconds and so on.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs at a time; default: as many as there are cores.")]


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    """Prototype-based federated learning: compare methods fairly, simulate quickly."""


def _load(files: list[Path] | None) -> None:
    """Run Python files that register methods, models, data sources or partitions of a person's own."""
    for file in files or []:
        if not file.is_file():
            raise ProtofedError(f"--load {file}: no such file")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None:
            raise ProtofedError(f"--load {file}: not a Python file (.py)")
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)


def _given(config: list[Path] | None, pairs: list[str] | None) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for file in config or []:
        given = combine(given, read_toml(file))
    return combine(given, parse_pairs(pairs or []))


def _fresh(label: str) -> Path:
    """A new folder under `runs/`, named by time and content."""
    base = Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{label}"
    candidates = (base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 1000)))
    return next(path for path in candidates if not path.exists())


@app.command()
def run(method: str, settings: Pairs = None, config: Config = None, out: Out = None, load: Load = None) -> None:
    """Run one method: `protofed run fedsap data=digits rounds=20`."""
    _load(load)
    console = make_console()
    chosen = resolve(method, _given(config, settings))
    folder = out or _fresh(f"{chosen.method.name}-{getattr(chosen.data, 'name', 'data')}")
    with RunWatch(console, chosen.method.name).live() as watch:
        result = run_method(chosen, out=folder, watch=watch)
    _print_result(result)


def _print_result(result: Result) -> None:
    console = make_console()
    console.print(summary_table(result.summary))
    dropped = result.summary["dropped_clients"]
    if dropped:
        console.print(f"{dropped} client rounds were dropped; rounds.jsonl says which and why")
    console.print(f"run folder: {result.folder}", soft_wrap=True)


def parse_seeds(text: str) -> int | list[int]:
    """`3`: three seeds from `seed` on; `1234,1235` or `1234-1236`: those."""
    try:
        if "," in text:
            return [int(part) for part in text.split(",") if part.strip()]
        if "-" in text:
            first, last = map(int, text.split("-"))
            return list(range(first, last + 1))
        return int(text)
    except ValueError:
        raise ProtofedError(
            f"--seeds {text!r}: expected a number of seeds, a list (1234,1235) or a range (1234-1236)"
        ) from None


def parse_columns(text: str | None) -> list[str] | None:
    """Names between commas, each checked: a misspelt column is found before anything runs."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ProtofedError(f"--columns {text!r}: expected names of columns between commas")
    return [parse_column(name).key for name in names]


@app.command()
def compare(
    methods_and_settings: Words = None,
    no_local: Annotated[bool, typer.Option("--no-local", help="Leave Local out.")] = False,
    seeds: Seeds = "3",
    config: Config = None,
    out: Out = None,
    jobs: Jobs = None,
    columns: Columns = None,
    load: Load = None,
) -> None:
    """Compare methods under the same settings and seeds, Local among them: `protofed compare fedavg fedsap rounds=20`.

    A method may have a label and settings of its own: `"upper bound=fedavg?labels=all&lr=0.1"`.
    """
    _load(load)
    names, given = parse_words(methods_and_settings or ())
    numbers, shown = parse_seeds(seeds), parse_columns(columns)
    grid = make_grid(names, local=not no_local, seeds=numbers, config=config, columns=shown, given=given)
    _run_grid(grid, out or _fresh("compare"), jobs)


@app.command()
def sweep(
    methods_and_settings: Words = None,
    over: Annotated[list[str] | None, typer.Option(help="An axis, key=v1,v2,v3; several make a product.")] = None,
    seeds: Seeds = "3",
    config: Config = None,
    out: Out = None,
    jobs: Jobs = None,
    columns: Columns = None,
    load: Load = None,
) -> None:
    """Run methods over values of settings: `protofed sweep fedsap --over scale=8,16,32 --over lr=0.01,0.05`."""
    _load(load)
    names, given = parse_words(methods_and_settings or ())
    axes, numbers, shown = parse_axes(over or []), parse_seeds(seeds), parse_columns(columns)
    grid = make_grid(names, over=axes, seeds=numbers, config=config, columns=shown, given=given)
    _run_grid(grid, out or _fresh("sweep"), jobs)


def _run_grid(grid: Grid, folder: Path, jobs: int | None) -> None:
    with CompareWatch(make_console(), len(grid.cells)).live() as watch:
        result = run_grid(grid, out=folder, jobs=jobs, watch=watch)
    _print_comparison(result)


def _print_comparison(result: Comparison) -> None:
    console = make_console()
    _print_table(result.rows(), result.columns)
    console.print(f"run folders: {result.folder}", soft_wrap=True)
    if result.failures:
        make_console(stderr=True).print(
            f"failed: {', '.join(result.failures)}; `protofed resume {result.folder}` tries them again",
            style="red",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(1)


def _print_table(rows: list[Row], columns: list[str] | None) -> None:
    console = make_console()
    print_table(console, comparison_table(rows, columns))
    for note in notes(rows, columns):
        console.out(note, highlight=False)


class Size(str, Enum):
    laptop = "laptop"
    paper = "paper"


@app.command()
def reproduce(
    preset: Annotated[str | None, typer.Argument(metavar="[PAPER/TABLE]", help="Which; without it: a list.")] = None,
    settings: Pairs = None,
    size: Annotated[
        Size, typer.Option(help="Ends within the hour on two cores, or the paper's settings.")
    ] = Size.laptop,
    seeds: Annotated[str | None, typer.Option(help="How many, or which; default: the preset's.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only columns that have this in their names.")] = None,
    jobs: Jobs = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder to write; one that was begun is continued.")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Write the ledger of what is measured in this folder of results.")
    ] = None,
) -> None:
    """Run a paper's table or figure, and print ours beside the paper's: `protofed reproduce fedsap/table1`."""
    if ledger is not None:
        for file in reproductions.write_ledger(ledger):
            make_console().print(str(file), soft_wrap=True, markup=False)
        return
    if preset is None:
        _print_presets()
        return
    numbers = None if seeds is None else parse_seeds(seeds)
    given = parse_pairs(settings or [])
    plan = reproductions.plan(preset, size=size.value, seeds=numbers, only=only or (), given=given)
    _reproduce(plan, out or Path("runs") / reproductions.folder_name(preset, size.value), jobs)


def _reproduce(plan: reproductions.Plan, folder: Path, jobs: int | None) -> None:
    console = make_console()
    with CompareWatch(console, plan.cells).live() as watch:
        result = reproductions.run_plan(plan, out=folder, jobs=jobs, watch=watch)
    for title, (header, *lines) in result.tables():
        table = Table(title=Text(title), title_justify="left")
        for name in header:
            table.add_column(Text(name))
        for line in lines:
            table.add_row(*map(Text, line))
        print_table(console, table)
    for note in plan.preset.file.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    console.print(
        f"also in {folder / reproductions.TABLE}, with the settings that differ", soft_wrap=True, markup=False
    )


def _print_presets() -> None:
    table = Table("preset", "what", "runs", "laptop needs", "paper needs", title="papers' tables and figures")
    for name in reproductions.available():
        preset = reproductions.load_preset(name)
        runs = "none" if preset.file.counted else f"{len(preset.file.rows)} × {len(preset.file.columns)}"
        needs = ("\n".join(preset.all_needs(size)) or "nothing" for size in reproductions.SIZES)
        table.add_row(*map(Text, (name, preset.file.title, runs, *needs)))
    print_table(make_console(), table)


class Format(str, Enum):
    terminal = "terminal"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"


@app.command()
def table(
    folder: Path,
    columns: Columns = None,
    format: Annotated[Format, typer.Option(help="How to write it.")] = Format.terminal,
) -> None:
    """Print the table of a comparison or sweep again, finished or not: `protofed table runs/NAME --format latex`."""
    rows, begun_with = read_rows(folder)
    shown = parse_columns(columns)
    if format is Format.terminal:
        _print_table(rows, shown or begun_with)
        return
    if format is Format.csv:
        text = results_csv(rows, shown)
    else:
        write = comparison_markdown if format is Format.markdown else comparison_latex
        text = write(rows, shown or begun_with)
    make_console().out(text, end="", highlight=False)


class By(str, Enum):
    head = "head"
    prototype = "prototype"


@app.command()
def confusion(
    folder: Path,
    by: Annotated[
        By | None,
        typer.Option(
            help="Predictions by the head, or by the nearest prototype; default: by head where one is trained."
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the picture here (.png, .svg or .pdf); default: in the run folder.")
    ] = None,
) -> None:
    """Print and draw what each client of a run takes for what: `protofed confusion runs/NAME --by prototype`."""
    console = make_console()
    confusions = read_confusions(folder, by.value if by else None)
    print_table(console, confusion_table(confusions))
    place = picture or folder / f"confusion-{confusions.by}.png"
    try:
        draw_confusions(confusions, place)
    except OSError as error:
        raise ProtofedError(f"--picture {place}: cannot be written ({error.strerror})") from None
    console.print(f"picture: {place} ({shown_of(confusions)})", soft_wrap=True, markup=False)


class Projected(str, Enum):
    pca = "pca"
    tsne = "tsne"


class Width(str, Enum):
    column = "column"
    page = "page"


class Picture(str, Enum):
    pdf = "pdf"
    svg = "svg"
    png = "png"


Projection = Annotated[Projected, typer.Option(help="How embedding spaces are brought to the plane.")]


@app.command()
def report(
    folder: Path,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the page here (.html).")] = None,
    projection: Projection = Projected.pca,
) -> None:
    """Write one HTML page of a run, a comparison or a sweep: `protofed report runs/NAME --open`."""
    from .report import commands

    place = commands.report(folder, open_, out, projection.value)
    make_console().print(f"report: {place}", soft_wrap=True, markup=False)


@app.command()
def watch(
    folder: Path,
    port: Annotated[int, typer.Option(help="Of the page; 0: any that is free.")] = 8642,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Serve the report while the run goes on; Ctrl-C stops it: `protofed watch runs/NAME`."""
    from .report import commands

    console = make_console()
    commands.watch(folder, port, host, say=lambda url: console.print(f"live view: {url}", markup=False))


@app.command()
def figures(
    folder: Path,
    format: Annotated[Picture, typer.Option(help="Of the files.")] = Picture.pdf,
    width: Annotated[Width, typer.Option(help="Of a paper's column, or of its page.")] = Width.column,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write them to.")] = None,
    projection: Projection = Projected.pca,
) -> None:
    """Draw figures for a paper: `protofed figures runs/NAME --format pdf --width column`."""
    from .report import commands

    for file in commands.figures(folder, format.value, width.value, out, projection.value):
        make_console().print(str(file), soft_wrap=True, markup=False)


@app.command()
def resume(folder: Path, jobs: Jobs = None, load: Load = None) -> None:
    """Continue a run, a comparison, a sweep or a reproduction that was stopped, from its last checkpoint."""
    _load(load)
    console = make_console()
    if reproductions.is_reproduction(folder):
        _reproduce(reproductions.resumed_plan(folder), folder, jobs)
        return
    if is_comparison(folder):
        with CompareWatch(console, len(read_comparison(folder).cells)).live() as watch_cells:
            result = resume_comparison(folder, jobs=jobs, watch=watch_cells)
        _print_comparison(result)
        return
    with RunWatch(console, folder.name).live() as watch:
        finished = resume_run(folder, watch=watch)
    _print_result(finished)


@app.command()
def bench(
    workloads: Annotated[list[str] | None, typer.Argument(metavar="[WORKLOAD]...", help="Which; default: all.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything that was measured here.")] = None,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="Write the tables here.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Turns of each contender; default: 3.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, to see that it works.")] = False,
    beside: Annotated[
        Path | None, typer.Option(help="Another checkout of protofed: train in turns with its code, and compare.")
    ] = None,
) -> None:
    """Measure the engines beside a hand-written loop and beside the limit: `protofed bench cnn28`."""
    from .bench import run_bench

    files = {"json_file": json_file, "markdown_file": markdown_file, "beside": beside}
    run_bench(workloads or (), repeats=repeats, quick=quick, console=make_console(), **files)


@app.command("methods")
def list_methods() -> None:
    """List the methods: paper, what each is made of, and its settings."""
    table = Table("method", "what it does", "parts", "settings")
    for name in methods.available():
        entry = methods.registry[name]
        fields = [f"{f.name}={_short(f.default)}" for f in dataclasses.fields(entry)]
        paper = methods.registry.papers[name]
        what = (entry.__doc__ or "").strip().splitlines()[0] + (f"\n{paper}" if paper else "")
        parts = "\n".join(f"{part}: {text}" for part, text in _parts(methods.registry.make(name)).items())
        table.add_row(name, what, parts, "\n".join(fields))
    make_console().print(table)


def _parts(method: Any) -> dict[str, str]:
    """The parts of a method, in a word or two each; where they depend on settings, those of the defaults."""
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
    if value is dataclasses.MISSING:
        return "(needed)"
    if isinstance(value, Reduce):
        return as_text(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "(" + ", ".join(f"{f.name}={getattr(value, f.name)}" for f in dataclasses.fields(value)) + ")"
    return str(value)


@app.command("models")
def list_models() -> None:
    """List the models with their parameter counts (3 × 32 × 32 images, 10 classes) and settings."""
    table = Table("model", "parameters", "settings")
    for name, count in models.available().items():
        fields = [f"{f.name}={_short(f.default)}" for f in models.registry.options(name).values()]
        table.add_row(name, "–" if count is None else f"{count:,}", "\n".join(fields))
    make_console().print(table)


@app.command("settings")
def list_settings() -> None:
    """List the general settings with their defaults; `methods`, `models` and `data` list the rest."""
    table = Table("setting", "default", "what it is")
    for name, (default, description) in general_keys().items():
        table.add_row(name, str(default), description)
    make_console().print(table)


@data_app.callback()
def list_data(context: typer.Context) -> None:
    """List data sets and partitions, with their settings."""
    if context.invoked_subcommand is not None:
        return
    from .data import partitions, sources

    console = make_console()
    for title, registry in (("data sets", sources), ("partitions", partitions)):
        table = Table("name", "what it is", "settings", title=title)
        for name in registry.names():
            fields = [f"{f.name}={_short(f.default)}" for f in registry.options(name).values()]
            doc = (registry[name].__doc__ or "").strip().splitlines()[0]
            table.add_row(name, doc, "\n".join(fields))
        console.print(table)


@data_app.command("show")
def show_data(
    settings: Pairs = None,
    config: Config = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the picture here (.png, .svg or .pdf).")] = None,
) -> None:
    """Print and draw who holds which classes: `protofed data show data=digits partition=dirichlet alpha=0.1`."""
    from .data.picture import counts_table, draw_counts

    console = make_console()
    chosen = resolve("local", _given(config, settings))
    data = prepare_data(chosen)
    console.print(counts_table(data.class_counts(), data.class_names))
    place = picture or Path("runs") / f"clients-{getattr(chosen.data, 'name', 'data')}-{chosen.partition.name}.png"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        draw_counts(data.class_counts(), data.class_names, place)
    except OSError as error:
        raise ProtofedError(f"--picture {place}: cannot be written ({error.strerror})") from None
    console.print(f"picture: {place}", soft_wrap=True)


def main() -> None:
    """Bad input: one clear line and exit code 2. Anything else that goes wrong is a bug, and shows its traceback."""
    if sys.argv[1:] == ["--version"]:
        make_console().print(f"protofed {__version__}")
        return
    errors = make_console(stderr=True)
    log_to(errors)
    try:
        app()
    except ProtofedError as error:
        errors.print(f"error: {' '.join(str(error).split())}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("stopped; `protofed resume FOLDER` continues from the last checkpoint")
        sys.exit(130)
