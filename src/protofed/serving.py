"""A small HTTP server of pages on this host: it answers the addresses it is told and no other."""

from __future__ import annotations

import hashlib
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .errors import ProtofedError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class PageHandler(BaseHTTPRequestHandler):
    """Answers a request by the server's `answer`."""

    server: PageServer
    timeout = 20  # seconds without a byte, after which a connection is closed

    def do_GET(self) -> None:
        if self.server.loopback and self._host() not in LOOPBACK:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "this address is not served under that name")
            return
        try:
            found = self.server.answer(self.path.partition("?")[0])
        except ProtofedError as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error))
            return
        if found is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", f"there is only the {self.server.what} here: /")
        else:
            self._send(HTTPStatus.OK, *found)

    def _host(self) -> str:
        """The host name that the browser used: a page of another site must not read this one under a name of its own."""
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
        """Log nothing, because a page asks every few moments."""


class PageServer(ThreadingHTTPServer):
    """A server of one page and what it asks for. Several requests are answered at a time, each in a thread of its own."""

    daemon_threads = True
    request_queue_size = 256  # connections that may wait; the standard library's 5 are too few for a busy browser
    what = "page"

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        """
        Args:
            port: The port to listen on; 0 takes any that is free.
            host: The address to listen on.
        """
        self.loopback = host.lower() in LOOPBACK
        try:
            super().__init__((host, port), PageHandler)
        except (OSError, OverflowError) as error:
            raise ProtofedError(f"{host}:{port}: cannot be served there ({error}); choose another port") from None

    def answer(self, path: str) -> tuple[str, str] | None:
        """The kind and the text of what is at an address.

        Args:
            path: The address, `/` for the page.

        Returns:
            A media type and the text, or None where nothing is.
        """
        raise NotImplementedError

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{self.server_address[0]!s}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that closed its connection; anything else is a bug and shows its traceback."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)
