"""The command `advise`: which method for a person's own data."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import AdviceWatch, make_console, print_table
from .options import Config, Jobs, Load, Pairs, given_settings, load_files, method_names, out_folder

if TYPE_CHECKING:
    from ..experiment.advise import Advice


def advise(
    data: Annotated[str, typer.Argument(help="The data, as the setting data takes it: a name, a file or a folder.")],
    settings: Pairs = None,
    budget: Annotated[str, typer.Option(help="The time there is: 90s, 10m or 1h30m.")] = "10m",
    methods: Annotated[
        str | None,
        typer.Option(help="The methods to race beside Local: fedavg,fedproto.", autocompletion=method_names),
    ] = None,
    no_weights: Annotated[
        bool, typer.Option("--no-weights", help="No weights may travel, only prototypes and numbers.")
    ] = False,
    config: Config = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder to write; a race that was begun there goes on.")
    ] = None,
    jobs: Jobs = None,
    load: Load = None,
) -> None:
    """Race methods on your data and say which to go on with: `protofed advise mine.npz --budget 10m --out advice`."""
    from ..experiment.advise import advise as advise_on
    from ..experiment.advise.plan import parse_budget

    load_files(load)
    parse_budget(budget)
    given = given_settings(config, settings)
    names = [name.strip() for name in (methods or "").split(",") if name.strip()]
    folder = out_folder(out, f"advise-{Path(data).stem}")
    console = make_console()
    logging.getLogger("protofed").setLevel(logging.WARNING)  # which engine each of many runs has is of no interest here
    try:
        with AdviceWatch(console).live() as watch:
            advice = advise_on(
                data, budget=budget, out=folder, methods=names, weights=not no_weights, jobs=jobs, watch=watch, **given
            )
    finally:
        if out is None and not any(folder.iterdir()):
            folder.rmdir()
    _print(advice)
    if advice.stopped:
        line = f"stopped; the same command with --out {shlex.quote(str(folder))} goes on"
        make_console(stderr=True).print(line, soft_wrap=True, markup=False)
        raise typer.Exit(advice.stopped)


def _print(advice: Advice) -> None:
    """Print an answer: sentences, the table, what was not tried, and how to go on."""
    from rich.table import Table
    from rich.text import Text

    from ..experiment.advise.words import table

    console = make_console()
    first, *others = advice.sentences
    console.print(first, style="bold", soft_wrap=True, markup=False)
    for sentence in others:
        console.print(sentence, soft_wrap=True, markup=False)
    head, rows = table(advice.record)
    lines = Table()
    for number, name in enumerate(head):
        lines.add_column(Text(name), justify="left" if number in (0, 1, len(head) - 1) else "right")
    for row in rows:
        lines.add_row(*map(Text, row))
    print_table(console, lines)
    console.print("Not tried:", style="bold")
    for sentence in advice.not_tried:
        console.print(f"- {sentence}", soft_wrap=True, markup=False)
    assert advice.folder is not None
    console.print(f"page: {advice.folder / 'advice.html'}", soft_wrap=True, markup=False)
    console.print(f"go on with: {advice.record['command']}", soft_wrap=True, markup=False)
    site = shlex.quote(advice.sites[0]["name"])
    console.print(f"and then: protofed predict RUN FILE --client {site} --by {advice.by}", soft_wrap=True, markup=False)
