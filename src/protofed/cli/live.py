"""`protofed predict RUN --live …`: classes of live packets, in the terminal and on a page."""

from __future__ import annotations

import csv
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from ..errors import ProtofedError
from .console import make_console

if TYPE_CHECKING:
    from ..classifier import By, Classifier
    from ..live import Live, Moment

EVERY = 5.0  # seconds from one line about the stream to the next


def follow(
    classifier: Classifier,
    source: Any,
    text: str,
    by: By | None,
    step: int | None,
    port: int | None,
    out: Path | None,
) -> None:
    """Classify live packets until the feed ends or Ctrl-C.

    Args:
        classifier: The client's classifier.
        source: The data of its run.
        text: Where packets come from, as a person wrote it.
        by: How predictions are made.
        step: The samples from one window's start to the next; None is as in the run.
        port: The port of the page; None serves none.
        out: The `.csv` file that gets a row for each window, if any.
    """
    from ..live import Live, feed_of
    from ..live.page import LivePage

    console = make_console()
    told = time.monotonic()
    shown: list[LivePage] = []

    def tick(live: Live) -> None:
        nonlocal told
        status = live.status()
        for page in shown:
            page.say(status)
        if time.monotonic() - told >= EVERY:
            told = time.monotonic()
            _line(console, status, style="dim")

    live = Live(classifier, source, feed_of(text), by, step, tick)
    with ExitStack() as stack:
        file = None if out is None else stack.enter_context(_opened(out))
        stack.enter_context(live)
        if port is not None:
            shown.append(stack.enter_context(LivePage(live, port)))
            _line(console, f"page: {shown[0].url}")
        _line(console, f"{live.account.name}: {classifier.name} ({classifier.checked(by)}); Ctrl-C ends it")
        writer = None if file is None else csv.writer(file, lineterminator="\n")
        if writer is not None:
            names = [f"probability_{name}" for name in classifier.classes]
            writer.writerow(["clock", "class", *names, "unlike_known", "latency_ms"])
        try:
            for moment in live:
                _line(console, _words(moment))
                for page in shown:
                    page.show(moment)
                if writer is not None and file is not None:
                    writer.writerow(_row(moment))
                    file.flush()
        except KeyboardInterrupt:
            pass
        status = live.status()
        for page in shown:
            page.say(status, ended=True)
        _line(console, status)


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False, style=style)


def _words(moment: Moment) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(moment.clock))
    unlike = "  unlike anything known" if moment.unlike else ""
    return f"{clock}  {moment.name}  {moment.confidence:.1%}  {1000 * moment.latency:.0f} ms{unlike}"


def _row(moment: Moment) -> list[str]:
    flag = "" if moment.unlike is None else str(moment.unlike).lower()
    probabilities = [f"{p:.6g}" for p in moment.probabilities]
    return [f"{moment.clock:.3f}", moment.name, *probabilities, flag, f"{1000 * moment.latency:.1f}"]


def _opened(out: Path) -> TextIO:
    try:
        return out.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise ProtofedError(f"--out {out}: cannot be written ({error.strerror})") from None
