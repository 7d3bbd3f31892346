"""The live view: the report's page, served on this host while the run goes on. It answers two addresses and no other."""

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


class Source:
    """The content of a folder, made anew only when one of its files has changed."""

    def __init__(self, folder: Path, projection: Projection = "pca") -> None:
        self.folder, self.projection = folder, projection
        self._lock = threading.Lock()
        self._seen: tuple[tuple[str, int, int], ...] | None = None
        self._shown: dict[str, Any] = {}

    def shown(self) -> dict[str, Any]:
        with self._lock:
            seen = self._stamps()
            if seen != self._seen:
                self._shown = content(self.folder, self.projection)
                self._seen = seen
            return self._shown

    def _stamps(self) -> tuple[tuple[str, int, int], ...]:
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
            shown = self.server.source.shown()
        except ProtofedError as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error))
            return
        if path == "/":
            self._send(HTTPStatus.OK, "text/html", render(shown, live=True))
        else:
            self._send(HTTPStatus.OK, "application/json", embedded(shown))

    def _host(self) -> str:
        """Whom the browser believes to talk to: a foreign page must not read the report under its own name."""
        host = self.headers.get("Host", "")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        return name.lower()

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        same = status is HTTPStatus.OK and self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if same else status)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if not same:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not same:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: a page asks every two seconds."""


class LiveServer(ThreadingHTTPServer):
    """A server of one folder's report. It serves whoever asks at the same time, each in a thread of its own."""

    daemon_threads = True
    request_queue_size = 256  # how many may wait to be accepted; the standard library's 5 turns away a busy browser

    def __init__(self, folder: Path, port: int, host: str, projection: Projection = "pca") -> None:
        check_projection(projection)
        self.source = Source(folder, projection)
        self.source.shown()  # what is wrong with the folder is said before anything is served
        self.loopback = host.lower() in LOOPBACK
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ProtofedError(f"{host}:{port}: cannot be served there ({error}); choose another port") from None

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away; anything else is a bug and shows its traceback."""
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
        say: A function that is told the address of the page once it can be opened.
    """
    try:
        with LiveServer(Path(folder), port, host, projection) as server:
            if say is not None:
                say(server.url)
            server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        return
