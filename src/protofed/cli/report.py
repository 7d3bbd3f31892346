"""The commands that show what a folder holds: table, confusion, report, watch, figures, pack."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ProtofedError
from .console import make_console, print_rows, print_table
from .options import Columns, parse_columns


class Format(str, Enum):
    """The format of a table."""

    terminal = "terminal"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"


ENDINGS = {".md": Format.markdown, ".tex": Format.latex, ".csv": Format.csv}
"""The format of a file by its ending."""


class By(str, Enum):
    """The prediction of a client."""

    head = "head"
    prototype = "prototype"
    mix = "mix"


class Projected(str, Enum):
    """The projection of an embedding space to the plane."""

    pca = "pca"
    tsne = "tsne"


class Width(str, Enum):
    """The width of a figure."""

    column = "column"
    page = "page"


class Picture(str, Enum):
    """The format of figures."""

    pdf = "pdf"
    svg = "svg"
    png = "png"


Projection = Annotated[Projected, typer.Option(help="How embedding spaces are brought to the plane.")]


def table(
    folder: Path,
    columns: Columns = None,
    format: Annotated[
        Format | None,
        typer.Option(help="The format of the table; default: by the ending of --out, else the terminal's."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write it here (.md, .tex or .csv).")] = None,
) -> None:
    """Print the table of a comparison, sweep or reproduction, finished or not: `protofed table runs/NAME --format latex`."""
    from ..disk import write_atomically
    from ..experiment.reproduce import is_reproduction

    if format is None:
        format = Format.terminal if out is None else ENDINGS.get(out.suffix, Format.terminal)
    if out is not None and format is Format.terminal:
        raise ProtofedError(
            f"--out {out}: the format of a file is markdown, latex or csv, by its ending ({', '.join(ENDINGS)})"
        )
    text = (_reproduction_table if is_reproduction(folder) else _comparison_table)(folder, columns, format)
    if out is not None:
        write_atomically(out, (text or "").encode())
    elif text is not None:
        make_console().out(text, end="", highlight=False)


def _comparison_table(folder: Path, columns: str | None, format: Format) -> str | None:
    """The table of a comparison or sweep as text; the terminal's is printed."""
    from ..results.read import read_rows
    from ..results.tables import comparison_latex, comparison_markdown, results_csv

    rows, stored_columns = read_rows(folder)
    chosen = parse_columns(columns)
    if format is Format.terminal:
        print_rows(rows, chosen or stored_columns)
        return None
    if format is Format.csv:
        return results_csv(rows, chosen)
    return (comparison_markdown if format is Format.markdown else comparison_latex)(rows, chosen or stored_columns)


def _reproduction_table(folder: Path, columns: str | None, format: Format) -> str | None:
    """Our numbers of a reproduction in one table, all of its columns side by side, as text; the terminal's is printed."""
    from ..experiment.reproduce import stored_reproduction
    from ..report.terminal import plain_table
    from ..results.tables import Cell, cells_latex, cells_markdown

    if format is Format.csv:
        raise ProtofedError(f"--format csv: {folder} is a reproduction; name the folder of one of its columns")
    names = None if columns is None else [name.strip() for name in columns.split(",") if name.strip()]
    reproduction = stored_reproduction(folder, names)
    header, lines = reproduction.overview()
    if format is Format.terminal:
        console = make_console()
        print_table(console, plain_table(header, lines))
        for note in reproduction.below():
            console.print(note, soft_wrap=True, markup=False, highlight=False)
        return None
    cells = [[Cell(text) for text in line] for line in lines]
    return (cells_markdown if format is Format.markdown else cells_latex)(header, cells, reproduction.below())


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
    from ..report.confusion import confusion_table, draw_confusions, shown_of
    from ..results.confusions import read_confusions

    console = make_console()
    confusions = read_confusions(folder, by.value if by else None)
    print_table(console, confusion_table(confusions))
    file = picture or folder / f"confusion-{confusions.by}.png"
    try:
        draw_confusions(confusions, file)
    except OSError as error:
        raise ProtofedError(f"--picture {file}: cannot be written ({error.strerror})") from None
    console.print(f"picture: {file} ({shown_of(confusions)})", soft_wrap=True, markup=False)


def report(
    folder: Path,
    open_: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the page here (.html).")] = None,
    projection: Projection = Projected.pca,
) -> None:
    """Write one HTML page of a run, a comparison or a sweep: `protofed report runs/NAME --open`."""
    import webbrowser

    from ..report.page import write_page

    file = write_page(folder, out, projection.value)
    if open_:
        webbrowser.open(file.resolve().as_uri())
    make_console().print(f"report: {file}", soft_wrap=True, markup=False)


def watch(
    folder: Path,
    port: Annotated[int, typer.Option(help="The port of the page; 0: any that is free.")] = 8642,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Serve the report while the run goes on; Ctrl-C stops it: `protofed watch runs/NAME`."""
    from ..report.live import serve

    serve(folder, port, host, say=lambda url: make_console().print(f"live view: {url}", markup=False))


def figures(
    folder: Path,
    format: Annotated[Picture, typer.Option(help="The format of the files.")] = Picture.pdf,
    width: Annotated[Width, typer.Option(help="The width of a paper's column, or of its page.")] = Width.column,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write them to.")] = None,
    projection: Projection = Projected.pca,
) -> None:
    """Draw figures for a paper: `protofed figures runs/NAME --format pdf --width column`."""
    from ..report.figures import write_figures

    for file in write_figures(folder, format.value, width.value, out, projection.value):
        make_console().print(str(file), soft_wrap=True, markup=False)


def pack(
    folder: Path,
    out: Annotated[Path, typer.Argument(help="The folder to write; it must not hold anything yet.")],
) -> None:
    """Write a comparison as few files, to keep and to share: `protofed pack runs/NAME results/NAME`."""
    from ..results.archive import pack as pack_comparison

    for file in pack_comparison(folder, out):
        make_console().print(str(file), soft_wrap=True, markup=False)
