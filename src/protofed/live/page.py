"""The live page: the class of the moment, those before it, and how the stream is doing."""

from __future__ import annotations

import html
import json
import threading
from collections import deque
from importlib import resources
from string import Template
from typing import Any

from ..serving import PageServer
from ..version import __version__
from .stream import Live, Moment

PORT = 8644
SHOWN = 120  # windows that the page remembers


class LivePage(PageServer):
    """A server of the live page, in a thread of its own: `with LivePage(live, 8644) as page: page.show(moment)`."""

    what = "live page"

    def __init__(self, live: Live, port: int = PORT, host: str = "127.0.0.1") -> None:
        super().__init__(port, host)
        self.live, self._moments, self._status, self._ended = live, deque[Moment](maxlen=SHOWN), "", False
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    def __enter__(self) -> LivePage:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join(2)
        self.server_close()

    def show(self, moment: Moment) -> None:
        """Show another window."""
        self._moments.append(moment)

    def say(self, status: str, ended: bool = False) -> None:
        """Show how the stream is doing."""
        self._status, self._ended = status, ended

    def answer(self, path: str) -> tuple[str, str] | None:
        """The page, or what it shows now."""
        if path == "/":
            return "text/html", page(self.live)
        return ("application/json", json.dumps(self.state())) if path == "/state.json" else None

    def state(self) -> dict[str, Any]:
        """What the page shows now."""
        moments = list(self._moments)
        return {
            "status": self._status,
            "ended": self._ended,
            "probabilities": [round(p, 4) for p in moments[-1].probabilities] if moments else [],
            "moments": [
                [m.number, round(m.clock, 3), m.label, round(m.confidence, 4), m.unlike, round(1000 * m.latency, 1)]
                for m in moments
            ],
        }


def page(live: Live) -> str:
    """The page of a stream, which asks for the rest by itself."""
    files = resources.files("protofed")
    template = Template(files.joinpath("live/live.html").read_text(encoding="utf-8"))
    classes = json.dumps(list(live.classifier.classes)).replace("<", "\\u003c")
    return template.substitute(
        style=files.joinpath("report/static/page.css").read_text(encoding="utf-8"),
        client=html.escape(live.classifier.name),
        feed=html.escape(live.account.name),
        method=html.escape(live.classifier.design.method),
        classes=classes,
        version=__version__,
    )
