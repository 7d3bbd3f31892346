"""The live view serves the report's page on this host while the run goes on. It answers two addresses and no other."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..errors import ProtofedError
from .content import content
from .page import check_projection, embedded, render
from .space import Projection

LOOPBACK = ("127.0.0.1", "localhost", "::1")
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
        return tuple(sorted(stamps))


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = 20  # seconds without a byte, after which a connection is closed

    def do_GET(self) -> None:
        if self.server.loopback and self._host() not in LOOPBACK:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "this address is not served under that name")
            return
        path = self.path.partition("?")[0]
        if path not in ("/", "/content.json"):
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is only the report here: /")
            return
        try:
            parts = self.server.cache.content()
        except ProtofedError as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error))
            return
        if path == "/":
            self._send(HTTPStatus.OK, "text/html", render(parts, live=True))
        else:
            self._send(HTTPStatus.OK, "application/json", embedded(parts))

    def _host(self) -> str:
        """The host name that the browser used: a page of another site must not read the report under a name of its own."""
        host = self.headers.get("Host", "")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        return name.lower()

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        unchanged = status is HTTPStatus.OK and self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if unchanged else status)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if not unchanged:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not unchanged:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because a page sends a request every two seconds."""


class LiveServer(ThreadingHTTPServer):
    """A server of one folder's report. It answers several requests at the same time, each in a thread of its own."""

    daemon_threads = True
    request_queue_size = 256  # connections that may wait; the standard library's 5 are too few for a busy browser

    def __init__(self, folder: Path, port: int, host: str, projection: Projection = "pca") -> None:
        check_projection(projection)
        self.cache = ContentCache(folder, projection)
        self.cache.content()  # a problem of the folder is an error before anything is served
        self.loopback = host.lower() in LOOPBACK
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ProtofedError(f"{host}:{port}: cannot be served there ({error}); choose another port") from None

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{self.server_address[0]!s}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that closed its connection; anything else is a bug and shows its traceback."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


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
