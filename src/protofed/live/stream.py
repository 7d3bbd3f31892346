"""Windows of a live stream, classified as soon as their last packet has come."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from ..classifier import By, Classifier
from ..data.csi import CSI, Account, Packet, Window
from ..data.csi.read import alike, of_sender
from ..data.sources import reshaped
from ..errors import ProtofedError
from .feeds import Feed

RECENT = 5.0  # seconds over which the rate is measured
REMEMBERED = 10_000  # latencies of the last windows


@dataclass(frozen=True)
class Moment:
    """A window that was classified.

    Attributes:
        number: Windows are counted from 0 on.
        clock: When it was classified, in seconds since 1970.
        label: The number of the predicted class.
        name: Its name.
        confidence: Its probability.
        unlike: Whether the window is unlike anything known; None where the client has no prototypes to tell by.
        probabilities: Those of all classes.
        latency: Seconds from the arrival of the window's last packet to the class.
    """

    number: int
    clock: float
    label: int
    name: str
    confidence: float
    unlike: bool | None
    probabilities: tuple[float, ...]
    latency: float


class Live:
    """The classes of a stream of packets, by a client's classifier. Iterate over it for `Moment`s, in a `with`.

    Attributes:
        account: What became of the packets.
        latencies: Seconds from packet to class of the last windows.
    """

    def __init__(
        self,
        classifier: Classifier,
        source: Any,
        feed: Feed,
        by: By | None = None,
        step: int | None = None,
        tick: Callable[[Live], None] | None = None,
    ) -> None:
        """
        Args:
            classifier: The classifier.
            source: The data of the run, captures, whose settings say how packets become windows.
            feed: Where packets come from.
            by: How predictions are made; by default as the method's paper does.
            step: The samples from one window's start to the next; by default those of the run.
            tick: Is called a few times a second, whether packets come or not.
        """
        if not isinstance(source, CSI):
            name = getattr(source, "name", "unknown")
            raise ProtofedError(f"live packets need a run on captures, data=csi; this one's data is {name}")
        if step is not None and step < 1:
            raise ProtofedError(f"step={step}: expected at least 1")
        self.classifier, self.source, self.feed, self.by, self.step = classifier, source, feed, by, step
        self.account, self.latencies = Account(feed.name), deque[float](maxlen=REMEMBERED)
        self._tick = tick
        self._came: deque[float] = deque(maxlen=100_000)
        self._at, self._ticked = 0.0, 0.0
        classifier.checked(by)

    def __enter__(self) -> Live:
        with ExitStack() as stack:
            # One window is little work, and threads that wait for each other take seconds where the host has other work.
            stack.enter_context(threadpool_limits(1, user_api="blas"))
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            self.warm_up()
            self.feed.prepare(self.source.wanted, self.antennas)
            stack.enter_context(self.feed)
            self._held = stack.pop_all()
        self.account.name = self.feed.name
        return self

    def __exit__(self, *given: object) -> None:
        self._held.close()

    @property
    def antennas(self) -> int | None:
        """The number of antennas of the packets that the run was trained on, where its samples still show it."""
        if self.source.image_channels is not None:
            return None
        return self.source.signal.antennas(self.classifier.design.sample_shape[0])

    @property
    def shape(self) -> tuple[int, int] | None:
        """The numbers of antennas and subcarriers of those packets, likewise."""
        if self.antennas is None or self.source.resize is not None:
            return None
        return self.antennas, self.classifier.design.sample_shape[-1]

    @property
    def rate(self) -> float:
        """Packets a second, of late."""
        now = time.monotonic()
        while self._came and self._came[0] < now - RECENT:
            self._came.popleft()
        if len(self._came) < 2:
            return 0.0
        return (len(self._came) - 1) / max(now - self._came[0], 1e-9)

    def warm_up(self) -> None:
        """Run the chain and the network once, because the first time loads libraries and takes much longer."""
        shape = self.shape or (self.antennas or 1, 56)
        window = np.random.default_rng(0).random((shape[0], self.source.window, shape[1]), np.float32)
        for step in self.source.chain:
            step.on(window, self.source.rate or 1e6)
        sample = torch.zeros(1, *self.classifier.design.sample_shape)
        for _ in range(2):
            self.classifier.predict(sample, self.by)

    def __iter__(self) -> Iterator[Moment]:
        found = of_sender(self._packets(), self.source.wanted, self.account.tally)
        windows = self.source.stream(alike(found, self.shape, self.account.tally), self.account, self.step)
        for window in windows:
            yield self._classified(window)

    def _packets(self) -> Iterator[Packet]:
        for packet, at in self.feed.arrivals(self.account.tally):
            now = time.monotonic()
            if self._tick is not None and now - self._ticked >= 0.2:
                self._ticked = now
                self._tick(self)
            if packet is not None:
                self._at = at
                self._came.append(now)
                yield packet

    def _classified(self, window: Window) -> Moment:
        value = self.source.processed(window, self.account.name)
        sample = reshaped(torch.from_numpy(value)[None], self.source)
        found = self.classifier.predict(sample, self.by)
        label = int(found.labels[0])
        moment = Moment(
            self.account.windows,
            time.time(),
            label,
            found.names[label],
            float(found.probabilities[0, label]),
            None if found.unlike is None else bool(found.unlike[0]),
            tuple(map(float, found.probabilities[0])),
            time.monotonic() - self._at,
        )
        self.account.windows += 1
        self.latencies.append(moment.latency)
        return moment

    def status(self) -> str:
        """One line: rate, packets, what was left out and dropped, windows and how long they took."""
        parts = [f"{self.rate:.1f} packets/s", self.account.tally.text()]
        if self.feed.dropped:
            parts.append(f"{self.feed.dropped:,} dropped, because too many waited")
        if self.account.gaps:
            parts.append(f"{self.account.gaps:,} gaps")
        parts.append(f"{self.account.windows:,} windows")
        if self.latencies:
            p50, p95 = (1000 * float(np.quantile(self.latencies, q)) for q in (0.5, 0.95))
            longest = 1000 * max(self.latencies)
            parts.append(f"packet to class {p50:.0f} ms (95 %: {p95:.0f} ms, longest {longest:.0f} ms)")
        return "; ".join(parts)
