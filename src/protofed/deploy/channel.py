"""A way between two processes of one machine: a Unix socket in a folder that only its owner can open.

A question is a line of JSON about it and bytes; so is the answer. Each question has a connection of its own.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from .transport import Kind, reason_of

SERVER_FOLDER = "PROTOFED_RELAYS"  # variable: the folder of the server relays' sockets
SITE_SOCKET = "PROTOFED_SERVICE"  # variable: the socket of the site's service

Handler = Callable[[dict[str, Any], bytes], bytes]


class Refused(Exception):
    """The other process answered with a reason instead of bytes. `kind` is that of a `Failure`."""

    def __init__(self, reason: str, kind: Kind = "refused") -> None:
        super().__init__(reason)
        self.kind = kind


def _send(file: Any, about: Mapping[str, Any], payload: bytes) -> None:
    file.write(json.dumps({**about, "bytes": len(payload)}).encode() + b"\n")
    file.write(payload)
    file.flush()


def _receive(file: Any) -> tuple[dict[str, Any], bytes]:
    line = file.readline(2**20)
    if not line:
        raise ConnectionError("the other process is gone")
    about = json.loads(line)
    payload = file.read(about.pop("bytes"))
    return about, payload


def ask(path: str | Path, about: Mapping[str, Any], payload: bytes, timeout: float) -> bytes:
    """Ask the process that listens at `path`.

    Raises:
        Refused: It answered with a reason.
        TimeoutError: It did not answer in time.
        OSError: Nobody listens there.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(str(path))
        with connection.makefile("rwb") as file:
            _send(file, about, payload)
            answer, payload = _receive(file)
    if "refused" in answer:
        raise Refused(answer["refused"], answer["kind"])
    return payload


class Desk:
    """Answers the questions that come to a socket, each in a thread of its own, until it is closed.

    Example: `with Desk(path, lambda about, message: message): ...`
    """

    def __init__(self, path: str | Path, handler: Handler) -> None:
        class Conversation(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError), self.request.makefile("rwb") as file:  # who asked may wait no more
                    about, payload = _receive(file)
                    try:
                        _send(file, {}, handler(about, payload))
                    except Exception as error:
                        _send(file, {"refused": reason_of(error), "kind": getattr(error, "kind", "refused")}, b"")

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True
            request_queue_size = 128

        Path(path).unlink(missing_ok=True)
        self._server = Server(str(path), Conversation)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="desk")
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Desk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
