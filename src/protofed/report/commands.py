"""What the command line does with a folder: write its report, serve it live, draw its figures."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable
from pathlib import Path

from .figures import write_figures
from .live import LiveServer
from .page import check_projection, write_page
from .space import Projection

PORT = 8642


def report(
    folder: str | Path, open_: bool = False, out: str | Path | None = None, projection: Projection = "pca"
) -> Path:
    """Write the HTML page; with `open_` show it in the browser."""
    place = write_page(folder, out, projection)
    if open_:
        webbrowser.open(place.resolve().as_uri())
    return place


def watch(
    folder: str | Path,
    port: int = PORT,
    host: str = "127.0.0.1",
    projection: Projection = "pca",
    say: Callable[[str], None] | None = None,
) -> None:
    """Serve the page while the run goes on, until Ctrl-C. `port=0` takes any that is free; `say` is told the address."""
    check_projection(projection)
    try:
        with LiveServer(Path(folder), port, host, projection) as server:
            if say is not None:
                say(server.url)
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        return


def figures(
    folder: str | Path,
    format: str = "pdf",
    width: str = "column",
    out: str | Path | None = None,
    projection: Projection = "pca",
) -> list[Path]:
    """Write every figure that the folder's files give; see `write_figures`."""
    check_projection(projection)
    return write_figures(folder, format, width, out, projection)
