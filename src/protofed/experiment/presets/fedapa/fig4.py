"""FedAPA, Fig. 4: the labels of the six rooms, here those of the simulator."""

from __future__ import annotations

from ....data.csi_sim import ROOMS, CSISimulation
from .. import Counts


def counts() -> Counts:
    """Count the people and the windows of each simulated room at the simulator's defaults."""
    each = CSISimulation().windows_per_class
    return {
        "fewest people": {room.name: [room.people[0]] for room in ROOMS},
        "most people": {room.name: [room.people[1]] for room in ROOMS},
        "windows": {room.name: [each * (room.people[1] - room.people[0] + 1)] for room in ROOMS},
    }
