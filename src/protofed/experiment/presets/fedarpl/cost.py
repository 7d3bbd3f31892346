"""Fed-ARPL, appendix F: bytes of one client and round, both directions."""

from __future__ import annotations

from .. import NUMBER_BYTES, Counts, parameters, prototype_bytes


def counts() -> Counts:
    """Phase 2 sends prototypes down, phase 3 also up. WRN-28-2 for 100 classes, d = 128."""
    model = 2 * NUMBER_BYTES * parameters("wideresnet", (3, 32, 32), 100, norm="static")
    bank = prototype_bytes(classes=100, dim=128)
    totals = {"phase 1": model, "phase 2": model + bank, "phase 3": model + 2 * bank}
    return {"a client and round": {phase: [t / 1e6, 100 * (t / model - 1)] for phase, t in totals.items()}}
