"""The command `audit`: what the messages of a run give away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import make_console
from .options import Load, load_files


def audit(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN [OTHER_RUN]...", help="A run folder, and others beside it.")
    ],
    clients: Annotated[
        str,
        typer.Option(help="How many clients, spread over all; or which, by name or number: 0,3 or 'site a,site b'."),
    ] = "4",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder to write; default: audit in the first run folder.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
    load: Load = None,
) -> None:
    """Say what the next messages of clients would give away, on a page for a data officer: `protofed audit runs/NAME`."""
    import webbrowser

    from ..auditing import audit as audit_runs
    from ..auditing.words import summary

    load_files(load)
    chosen = int(clients) if clients.isdecimal() else [name.strip() for name in clients.split(",") if name.strip()]
    result = audit_runs(runs, clients=chosen, out=out)
    console = make_console()
    for run in result.runs:
        console.print(f"{run.run}: {run.method} on {run.data}, after round {run.round}", style="bold", markup=False)
        for heading, sentences in summary(run).items():
            console.print(f"{heading}: {' '.join(sentences)}", soft_wrap=True, markup=False)
    assert result.folder is not None
    page = result.folder / "index.html"
    if open_:
        webbrowser.open(page.resolve().as_uri())
    note = " (it shows true samples of the clients)" if any(run.shows_samples for run in result.runs) else ""
    console.print(f"page: {page}{note}", soft_wrap=True, markup=False)
    console.print(f"numbers: {result.folder / 'audit.json'}", soft_wrap=True, markup=False)
