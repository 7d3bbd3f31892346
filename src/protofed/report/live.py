"""The live view serves the report's page on this host while the run goes on. It answers two addresses and no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..results.lock import is_held
from ..serving import PageServer
from .content import content
from .page import check_projection, embedded, render
from .space import Projection

PORT = 8642
FILES = ("*.json", "*.jsonl", "*.toml", "snapshots/*.npz")


class ContentCache:
    """The content of a folder, made anew only when one of its files has changed."""

    def __init__(self, folder: Path, projection: Projection = "pca") -> None:
        self.folder, self.projection = folder, projection
        self._lock = threading.Lock()
        self._stamps: tuple[tuple[str, int, int], ...] | None = None
        self._content: dict[str, Any] = {}

    def content(self) -> dict[str, Any]:
        """What the page shows now."""
        with self._lock:
            stamps = self._current_stamps()
            if stamps != self._stamps:
                self._content = content(self.folder, self.projection)
                self._stamps = stamps
            return self._content

    def _current_stamps(self) -> tuple[tuple[str, int, int], ...]:
        stamps = []
        for pattern in FILES:
            for file in (*self.folder.glob(pattern), *self.folder.glob(f"*/{pattern}")):
                try:
                    stat = file.stat()
                except OSError:
                    continue  # replaced at this very moment
                stamps.append((str(file), stat.st_mtime_ns, stat.st_size))
        stamps += [
            (str(file), is_held(file.parent), 0) for file in self.folder.glob("**/.lock")
        ]  # a killed run's is free
        return tuple(sorted(stamps))


class LiveServer(PageServer):
    """A server of one folder's report."""

    what = "report"

    def __init__(self, folder: Path, port: int, host: str, projection: Projection = "pca") -> None:
        check_projection(projection)
        self.cache = ContentCache(folder, projection)
        self.cache.content()  # a problem of the folder is an error before anything is served
        super().__init__(port, host)

    def answer(self, path: str) -> tuple[str, str] | None:
        """The page, or its content alone."""
        if path not in ("/", "/content.json"):
            return None
        parts = self.cache.content()
        return ("text/html", render(parts, live=True)) if path == "/" else ("application/json", embedded(parts))


def serve(
    folder: str | Path,
    port: int = PORT,
    host: str = "127.0.0.1",
    projection: Projection = "pca",
    say: Callable[[str], None] | None = None,
) -> None:
    """Serve the page of a folder while its run goes on, until Ctrl-C.

    Args:
        folder: The folder of a run, a comparison or a sweep.
        port: The port to listen on; 0 takes any that is free.
        host: The address to listen on.
        projection: How embedding spaces are brought to the plane.
        say: A function that is called with the address of the page once it can be opened.

    Example: `serve("runs/digits", port=8000)`
    """
    try:
        with LiveServer(Path(folder), port, host, projection) as server:
            if say is not None:
                say(server.url)
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        return
