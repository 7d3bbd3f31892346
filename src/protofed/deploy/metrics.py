"""A page of numbers for monitoring: `/metrics` for Prometheus, and `/health`."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..errors import ProtofedError
from ..federation import Record
from .transport import Transport


class Metrics:
    """Numbers of a run between sites, served on a port of this machine.

    Example: `with Metrics(transport, port=9464) as metrics: serve(..., watch=metrics.round)`
    """

    def __init__(self, transport: Transport, sites: int, port: int = 0, host: str = "127.0.0.1") -> None:
        """
        Args:
            transport: What knows which sites are connected.
            sites: How many sites the project has.
            port: The port to listen on; 0 takes any that is free.
            host: The address to listen on.
        """
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
        except ImportError:
            raise ProtofedError("prometheus-client is not installed; install protofed[deploy]") from None
        self.registry = CollectorRegistry()
        self._text = generate_latest
        self.progress = {"round": 0, "rounds": 0}

        def gauge(name: str, text: str) -> Any:
            return Gauge(f"protofed_{name}", text, registry=self.registry)

        self.current, self.planned = (
            gauge("round", "Rounds that have ended."),
            gauge("rounds", "Rounds that are planned."),
        )
        self.loss = gauge("loss", "Training loss of the last round.")
        self.last = gauge("round_seconds", "Seconds of the last round, without evaluation.")
        gauge("sites", "Sites of the project.").set(sites)
        gauge("sites_connected", "Sites that can be called now.").set_function(lambda: len(transport.sites()))
        self.bytes = Counter("protofed_bytes", "Bytes of messages.", ["direction"], registry=self.registry)
        self.dropped = Counter("protofed_dropped", "Client rounds that were dropped.", registry=self.registry)
        metrics = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 20

            def do_GET(self) -> None:
                content = metrics.page(self.path)
                self.send_response(200 if content is not None else 404)
                self.send_header(
                    "Content-Type", "text/plain; charset=utf-8" if self.path == "/metrics" else "application/json"
                )
                self.end_headers()
                self.wfile.write(content or b"{}")

            def log_message(self, format: str, *args: Any) -> None:
                """Requests are not logged."""

        try:
            self.server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ProtofedError(f"--metrics {port}: cannot listen there ({error.strerror})") from None
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True, name="metrics")

    def page(self, path: str) -> bytes | None:
        """The content of a path; None where there is none."""
        if path == "/metrics":
            return bytes(self._text(self.registry))
        if path == "/health":
            return json.dumps({"status": "ok", **self.progress}).encode()
        return None

    def round(self, record: Record, rounds: int) -> None:
        """Take in a round that has ended."""
        self.progress = {"round": record.round, "rounds": rounds}
        self.current.set(record.round)
        self.planned.set(rounds)
        self.loss.set(record.loss)
        self.last.set(record.seconds)
        self.bytes.labels("up").inc(sum(record.up.values()))
        self.bytes.labels("down").inc(sum(record.down.values()))
        self.dropped.inc(len(record.dropped))

    def __enter__(self) -> Metrics:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
