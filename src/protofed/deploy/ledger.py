"""What a site has spent of its privacy: all runs of its life together, in a file that only the site writes.

Gaussian releases add up whatever run they belong to: a release with noise multiplier z counts 1/z², and what adds up to s
costs what one release with multiplier 1/√s costs. A release is written down before it leaves.
"""

from __future__ import annotations

import math
from pathlib import Path

from .. import disk
from ..errors import ProtofedError
from ..privacy import accountant
from ..privacy.mechanism import Privacy
from .policy import Policy, Refusal


class PrivacyLedger:
    """The account of one site, `privacy.json` in its folder.

    Example: `PrivacyLedger(folder / "privacy.json").spend("trial", mechanism, 1, Policy(epsilon=4.0))`
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def spent(self) -> dict[str, float]:
        """What the site has spent in each run, as sums of 1/z²."""
        if not self.file.exists():
            return {}
        content = disk.opened(self.file.read_bytes(), self.file)
        try:
            return {str(run): float(value) for run, value in content["spent"].items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ProtofedError(f"{self.file}: not an account of privacy") from None

    def epsilon(self, delta: float) -> float:
        """The ε that all releases so far cost together."""
        total = sum(self.spent().values())
        return accountant.epsilon(1 / math.sqrt(total), 1, delta) if total else 0.0

    def spend(self, run: str, mechanism: Privacy, releases: int, policy: Policy) -> None:
        """Write down releases that are about to leave, or refuse them where the site's budget does not allow them.

        Args:
            run: The name of the run.
            mechanism: Its noise.
            releases: How many of the message's parts carry noise.
            policy: The site's, which may have a budget.
        """
        spent = self.spent()
        more = releases / mechanism.noise**2 if mechanism.noise else math.inf
        total = sum(spent.values()) + more
        if policy.epsilon is not None:
            cost = accountant.epsilon(1 / math.sqrt(total), 1, policy.delta) if math.isfinite(total) else math.inf
            if cost > policy.epsilon:
                raise Refusal(
                    f"this site's privacy budget is spent: another message would cost ε = {cost:.3g} of {policy.epsilon:g}"
                )
        if math.isfinite(more):
            spent[run] = spent.get(run, 0.0) + more
            disk.write_durably(self.file, disk.sealed({"spent": spent}))
