"""What a filter is given at a client, for tests that call filters by hand."""

from __future__ import annotations

from protofed.parts import Received
from protofed.parts.filters import Departure
from protofed.seeds import SeededNormals


def departure(trained=None, client=0, round=1, seed=0, **received) -> Departure:
    return Departure(client, round, Received(**received), trained, SeededNormals(seed, "noise", client, round))
