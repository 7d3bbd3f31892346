"""Fed-ARPL, appendix F: bytes of one client and round, both directions."""

from __future__ import annotations

from .. import NUMBER_BYTES, Counts, parameters, prototype_bytes


def counts() -> Counts:
    """Count WRN-28-2 for 100 classes with d = 128; phase 2 also sends prototypes down, and phase 3 both down and up."""
    model = 2 * NUMBER_BYTES * parameters("wideresnet", (3, 32, 32), 100, norm="static")
    bank = prototype_bytes(classes=100, dim=128)
    totals = {"phase 1": model, "phase 2": model + bank, "phase 3": model + 2 * bank}
    return {"a client and round": {phase: [t / 1e6, 100 * (t / model - 1)] for phase, t in totals.items()}}
