"""What a remote engine needs of a network: call a function at many sites, and learn of each what came of it.

A `Transport` stands at the server, a `Service` at a site. Messages are bytes and pass unchanged. No engine is named here;
`LocalTransport` joins the two in one process, for tests, and `flare.py` joins them through NVIDIA FLARE.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Literal, Protocol

POLL = 0.2  # seconds between looks at whether a site that is waited for has been lost
Kind = Literal["late", "lost", "refused"]


@dataclass(frozen=True)
class Failure:
    """Why a site has given no reply.

    `late`: it had not answered in time. `lost`: it cannot be reached. `refused`: it answered with the reason why not.
    """

    reason: str
    kind: Kind = "lost"

    def __str__(self) -> str:
        return self.reason


class Service(Protocol):
    """A site's side: it answers one message at a time."""

    def handle(self, function: str, message: bytes, /) -> bytes:
        """Answer a message. An exception's text is the reason the server is given; nothing else of it leaves the site."""
        ...


class Transport(Protocol):
    """The server's side."""

    def sites(self) -> list[str]:
        """The names of the sites that can be called now, in alphabetical order."""
        ...

    def call(self, function: str, messages: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """Send each site its message, all at once, and collect the replies.

        Args:
            function: What the sites are asked to do.
            messages: One message for each site by its name.
            timeout: The seconds after which a site that has not answered is late.

        Returns:
            The reply of each site in `messages`, or the `Failure`. One site's trouble never raises.
        """
        ...


class StillBusy(Exception):
    """A message's time has run out while the site was at work on an earlier one."""

    kind: Kind = "late"


class Turns:
    """A service that answers one message at a time, and not those that nobody waits for any more.

    A site that was late in one round may still be training when the next round's message comes. That message waits;
    if its own time runs out meanwhile, it is left undone.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self._turn = threading.Lock()

    def handle(self, function: str, message: bytes, timeout: float) -> bytes:
        if not self._turn.acquire(timeout=timeout):
            raise StillBusy("still at work on an earlier message")
        try:
            return self.service.handle(function, message)
        finally:
            self._turn.release()


def reason_of(error: BaseException) -> str:
    """An exception as one line."""
    return " ".join(str(error).split()) or type(error).__name__


def together(
    answer: Answer,
    function: str,
    messages: Mapping[str, bytes],
    timeout: float,
    patience: float = 0.0,
    lost: Callable[[str], bool] = lambda site: False,
) -> dict[str, bytes | Failure]:
    """Ask all sites at once, each in a thread of its own, and wait no longer than the time limit.

    Args:
        answer: Gives one site's reply or failure.
        function: What the sites are asked to do.
        messages: One message for each site.
        timeout: The seconds a site has.
        patience: The seconds that an answer about a late site may take beyond that.
        lost: Whether a site is known to be lost, so that nobody need wait for it.
    """
    futures: dict[str, Future[bytes | Failure]] = {site: Future() for site in messages}

    def work(site: str) -> None:
        try:
            result = answer(site, function, messages[site], timeout)
        except Exception as error:
            result = Failure(reason_of(error))
        futures[site].set_result(result)

    for site in messages:
        threading.Thread(target=work, args=(site,), daemon=True, name=f"call-{site}").start()
    end = time.monotonic() + timeout + patience
    while pending := {future for site, future in futures.items() if not future.done() and not lost(site)}:
        remaining = end - time.monotonic()
        if remaining <= 0:
            break
        wait_for(pending, min(remaining, POLL))
    replies: dict[str, bytes | Failure] = {}
    for site, future in futures.items():
        if future.done():
            replies[site] = future.result()
        elif lost(site):
            replies[site] = Failure("lost before it had answered")
        else:
            replies[site] = Failure(f"no answer within {timeout:g} s", "late")
    return replies


class Answer(Protocol):
    def __call__(self, site: str, function: str, message: bytes, timeout: float, /) -> bytes | Failure: ...


class LocalTransport:
    """Services of this process as sites, for tests. `delays` and `lost` can be changed between calls.

    Example: `LocalTransport({"north": service}).call("train", {"north": b"..."}, timeout=5)`
    """

    def __init__(self, services: Mapping[str, Service]) -> None:
        self.services = {site: Turns(service) for site, service in services.items()}
        self._process = threading.Lock()  # sites of one process share its random generator, so they take turns
        self.delays: dict[str, float] = {}  # seconds before a site begins to answer
        self.lost: dict[str, str] = {}  # sites that cannot be reached, and why

    def sites(self) -> list[str]:
        return sorted(self.services.keys() - self.lost.keys())

    def call(self, function: str, messages: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        return together(self._answer, function, messages, timeout)

    def _answer(self, site: str, function: str, message: bytes, timeout: float) -> bytes | Failure:
        if site in self.lost or site not in self.services:
            return Failure(self.lost.get(site, "not connected"))
        time.sleep(self.delays.get(site, 0.0))
        if not self._process.acquire(timeout=timeout):
            return Failure("the process was still at work on other messages", "late")
        try:
            return self.services[site].handle(function, message, timeout)
        except Exception as error:
            return Failure(reason_of(error), getattr(error, "kind", "refused"))
        finally:
            self._process.release()
