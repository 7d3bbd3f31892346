"""What a filter is given at a client, for tests that call filters by hand."""

from __future__ import annotations

from protofed.parts import Mean, Received
from protofed.parts.filters import Departure
from protofed.seeds import SeededNormals


def departure(trained=None, client=0, round=1, seed=0, rule=None, **received) -> Departure:
    normals = SeededNormals(seed, "noise", client, round)
    return Departure(client, round, Received(**received), trained, rule or Mean(), normals)
