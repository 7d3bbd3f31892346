"""The rule from differences to a verdict. A difference is that of `results/gains.py`: seed by seed, with a 95 % interval.

| verdict | when |
| --- | --- |
| cannot be tested here | what it needs is not to be had; the claim says why |
| not measured yet | no comparison has three seeds that both of its rows were run with |
| holds | every comparison shows it: the whole interval is above the least difference |
| only against a weaker baseline | every comparison with the paper's rows shows it, and one with a stronger row does not |
| holds in part | some comparisons with the paper's rows show it; others do not, or have not been measured |
| does not hold here | no comparison with the paper's rows shows it: no interval is wholly above the least difference |

*Does not hold here* says that these seeds, at this size, do not show it. It does not say that the opposite is true: how many
comparisons show the opposite, with their whole interval on the other side, is counted beside every verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...results.gains import Gain

SEEDS = 3
Verdict = Literal[
    "holds",
    "holds in part",
    "does not hold here",
    "only against a weaker baseline",
    "cannot be tested here",
    "not measured yet",
]


@dataclass(frozen=True)
class Finding:
    """The difference of two rows, and whether it shows what the claim says.

    Attributes:
        better: The row that the claim says to be better.
        worse: The row that it is compared with.
        stronger: Whether that is a row that the paper has not, and which is the harder one to be above.
        gain: The difference; None where one of the rows was not run.
        least: The difference that must be passed.
        within: In place of that, by how much they may differ.
        counted: Whether the numbers are counted, and have no seeds.
        source: The folders, or the preset, that it was read from.
        heading: What is compared where: the column, where there are several, and the measure.
        command: What measures it.
    """

    better: str
    worse: str
    stronger: bool
    gain: Gain | None
    least: float = 0.0
    within: float | None = None
    counted: bool = False
    source: str = ""
    heading: str = ""
    command: str = ""

    @property
    def seeds(self) -> int:
        """The number of seeds that both rows were run with."""
        return 0 if self.gain is None else len(self.gain.by_seed)

    @property
    def measured(self) -> bool:
        """Whether there is enough to judge by."""
        return self.counted or self.seeds >= SEEDS

    @property
    def shows(self) -> bool:
        """Whether the whole interval lies where the claim says: above the least difference, or within the bounds."""
        if self.gain is None or not self.measured:
            return False
        if self.within is not None:
            return abs(self.gain.mean) + self.half <= self.within + 1e-9
        return self.gain.mean - self.half > self.least + 1e-9

    @property
    def opposes(self) -> bool:
        """Whether it shows the opposite: the whole interval is below the least difference, or outside the bounds."""
        if self.gain is None or not self.measured:
            return False
        if self.within is not None:
            return abs(self.gain.mean) - self.half > self.within + 1e-9
        return self.gain.mean + self.half < self.least - 1e-9

    @property
    def half(self) -> float:
        """Half of the interval; 0 of counted numbers."""
        return 0.0 if self.counted or self.gain is None else self.gain.half or 0.0


def deciding(findings: Sequence[Finding]) -> list[Finding]:
    """The measured comparisons that decide: those with the paper's rows; where there are none, those with stronger ones."""
    measured = [finding for finding in findings if finding.measured]
    return [finding for finding in measured if not finding.stronger] or measured


def verdict_of(findings: Sequence[Finding], cannot: str = "") -> Verdict:
    """The verdict on a claim, by the rule in the table above.

    Args:
        findings: The differences of all comparisons that test the claim.
        cannot: Why it cannot be tested here, where it cannot.

    Returns:
        The verdict. Stronger rows that have not been measured do not enter it.
    """
    if cannot:
        return "cannot be tested here"
    papers = [finding.shows for finding in deciding(findings)]
    ours = [finding.shows for finding in findings if finding.measured and finding.stronger]
    if not papers:
        return "not measured yet"
    if not any(papers):
        return "does not hold here"
    missing = any(not finding.measured and not finding.stronger for finding in findings)
    if not all(papers) or missing:
        return "holds in part"
    return "holds" if all(ours) else "only against a weaker baseline"
