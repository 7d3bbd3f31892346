"""Packets as they come, classified: a feed of packets, the windows and classes of it, and a page that shows them.

from protofed.live import Live, feed_of
with Live(result.model("office"), result.settings.data, feed_of("udp:5500")) as live:
    for moment in live:
        print(moment.name, moment.confidence, moment.latency)
"""

from __future__ import annotations

from .feeds import Feed, Replay, Serial, Udp, feed_of
from .stream import Live, Moment

__all__ = ["Feed", "Live", "Moment", "Replay", "Serial", "Udp", "feed_of"]
