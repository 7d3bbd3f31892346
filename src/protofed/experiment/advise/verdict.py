"""What the measured accuracies say: paired differences with intervals, and how sure they make us.

All of it is arithmetic on accuracies by seed and site; nothing here knows where they come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...results.gains import LEVEL, half_interval

LEAST = 3  # seeds, or sites, that an interval needs
Accuracies = Mapping[int, Sequence[float | None]]  # by seed, of each site


@dataclass(frozen=True)
class Interval:
    """A mean difference with its interval, which is None where there are too few seeds and sites for one.

    Attributes:
        mean: The mean.
        low: The lower end.
        high: The upper end.
        over: What the interval is over.
        number: How many of them there are.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    over: Literal["seeds", "sites", ""] = ""
    number: int = 0

    @property
    def above_zero(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.low is not None and self.low > 0

    @property
    def below_zero(self) -> bool:
        """Whether the whole interval is below 0."""
        return self.high is not None and self.high < 0

    @property
    def open(self) -> bool:
        """Whether 0 is in the interval, or there is none."""
        return not (self.above_zero or self.below_zero)


def differences(ours: Accuracies, theirs: Accuracies) -> np.ndarray:
    """The paired differences of two entries.

    Args:
        ours: The accuracies by seed.
        theirs: Those of the entry that is subtracted.

    Returns:
        `[seeds, sites]`, of the seeds that both have; NaN where a site was not evaluated.

    >>> differences({1: [0.5, 0.6], 2: [0.9, 0.9]}, {1: [0.25, 0.1]}).tolist()
    [[0.25, 0.5]]
    """
    seeds = [seed for seed in ours if seed in theirs]
    pairs = [np.array(ours[s], float) - np.array(theirs[s], float) for s in seeds]
    return np.array(pairs) if pairs else np.empty((0, 0))


def interval(found: np.ndarray, held_out: float, rows: int = 0, level: float = LEVEL) -> Interval:
    """The mean of paired differences over sites and seeds, with its interval.

    From three seeds on it is over seeds. Every seed draws another validation part of the same rows, so that seeds are not
    independent; the variance is corrected for that (Nadeau and Bengio 2003): 1/n becomes 1/n + held/(1 − held). With
    fewer seeds it is over sites, if there are three. It is never narrower than n rows allow of which none differs, which
    at 95 % is 3/n to each side: a few rows that happen to agree prove nothing.

    Args:
        found: `[seeds, sites]`, NaN where there is none.
        held_out: The share of rows in the validation part.
        rows: The number of validation rows of one seed; with 0 the interval may be as narrow as it is.
        level: The probability with which the interval is to hold the true mean.

    Returns:
        The mean and its interval.

    >>> interval(np.array([[0.1, 0.3]]), 0.2)
    Interval(mean=0.2, low=None, high=None, over='', number=1)
    """
    found = found[:, ~np.isnan(found).all(0)] if found.size else found
    if not found.size:
        return Interval(math.nan)
    mean = float(np.nanmean(found))
    seeds, sites = found.shape
    if seeds >= LEAST:
        values, overlap, over = np.nanmean(found, 1), held_out / (1 - held_out), "seeds"
    elif sites >= LEAST:
        values, overlap, over = np.nanmean(found, 0), 0.0, "sites"
    else:
        return Interval(mean, number=seeds)
    half = half_interval(values.tolist(), level, overlap)
    assert half is not None
    if rows:
        half = max(half, -math.log(1 - level) / (rows * min(seeds, 1 / held_out)))
    return Interval(mean, mean - half, mean + half, over, len(values))  # type: ignore[arg-type]


def mean_of(accuracies: Accuracies) -> float:
    """The mean over sites and then over seeds.

    >>> mean_of({1: [0.5, None], 2: [0.7, 0.9]})
    0.65
    """
    by_seed = [[v for v in sites if v is not None] for sites in accuracies.values()]
    means = [math.fsum(sites) / len(sites) for sites in by_seed if sites]
    return math.fsum(means) / len(means) if means else math.nan


# --- entries ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Measured:
    """An entry of the race by one way of predicting: a variant of a method, by head or by prototype."""

    label: str
    method: str
    by: str
    accuracies: Accuracies

    @property
    def mean(self) -> float:
        """The mean accuracy over sites and seeds."""
        return mean_of(self.accuracies)


def scores(entries: Sequence[Measured]) -> list[float]:
    """The mean accuracy of each entry as if all had the same seeds.

    Some entries have more seeds than others, and a seed may be an easy one. So an entry's score is that of the entry with
    the most seeds, Local before others, and the mean paired difference between the two on the seeds that both have.

    Args:
        entries: The entries.

    Returns:
        A score for each; NaN where it shares no seed with that entry.
    """
    if not entries:
        return []
    common = max(entries, key=lambda e: (len(e.accuracies), e.method == "local"))
    pairs = [differences(entry.accuracies, common.accuracies) for entry in entries]
    return [common.mean + float(np.nanmean(found)) if found.size else math.nan for found in pairs]


def better_ways(entries: Sequence[Measured]) -> list[Measured]:
    """Of each variant the better way of predicting, the best variant first. Ties keep their order.

    Args:
        entries: Variants by all their ways.

    Returns:
        One entry for each variant.
    """
    best: dict[str, Measured] = {}
    for entry in entries:  # all ways of a variant have the same seeds
        if not math.isnan(entry.mean) and (entry.label not in best or entry.mean > best[entry.label].mean):
            best[entry.label] = entry
    ranked = zip(scores(list(best.values())), best.values(), strict=True)
    return [entry for score, entry in sorted(ranked, key=lambda found: -found[0]) if not math.isnan(score)]


def close_to(leader: Measured, others: Sequence[Measured], held_out: float, rows: int = 0) -> list[Measured]:
    """The entries that cannot be told from the leader: the interval of the paired difference has 0 in it.

    Args:
        leader: The entry that leads.
        others: The others.
        held_out: The share of rows in the validation part.
        rows: The number of validation rows of one seed.

    Returns:
        Those that are close, in their order.
    """
    return [
        other
        for other in others
        if other.label != leader.label
        and interval(differences(leader.accuracies, other.accuracies), held_out, rows).open
    ]


# --- the answer -------------------------------------------------------------------------------------------------------
Certainty = Literal["sure", "fairly sure", "not different", "unknown"]


@dataclass(frozen=True)
class SiteGain:
    """What one site has of the exchange: its validation accuracy with Local and with the contender."""

    name: str
    samples: int
    local: float
    contender: float
    gain: Interval


@dataclass(frozen=True)
class Verdict:
    """The answer of a race.

    Attributes:
        contender: The best entry that is not Local.
        local: Local's best entry.
        gain: The contender's accuracy minus Local's.
        certainty: `sure` where the interval is above 0 even when it allows for the number of methods that were compared;
            `fairly sure` where the plain interval is; `not different` where it is not; `unknown` where there is none.
        close: What cannot be told from the contender, Local left out.
        sites: The gain of each site.
    """

    contender: Measured
    local: Measured
    gain: Interval
    certainty: Certainty
    close: tuple[Measured, ...]
    sites: tuple[SiteGain, ...]

    @property
    def seeds(self) -> list[int]:
        """The seeds that the contender and Local both have."""
        return [seed for seed in self.contender.accuracies if seed in self.local.accuracies]

    @property
    def advised(self) -> Measured:
        """The entry to go on with: Local, unless the contender is better by more than chance."""
        return self.contender if self.certainty in ("sure", "fairly sure") else self.local

    @property
    def losers(self) -> list[str]:
        """The sites that the contender gives less than Local."""
        return [site.name for site in self.sites if site.gain.mean < 0]


def judge(
    entries: Sequence[Measured], held_out: float, names: Sequence[str], samples: Sequence[int], stable: bool = True
) -> Verdict | None:
    """Judge a race.

    Args:
        entries: What reached the same round, by all ways of predicting.
        held_out: The share of rows in the validation part.
        names: The sites' names.
        samples: The number of validation samples of each site.
        stable: Whether a site is the same with every seed. Where the sites are drawn anew by each seed, those of the
            first seed stand in the list of sites.

    Returns:
        The verdict; None where Local or everything else is missing.
    """
    ranked = better_ways(entries)
    local = next((e for e in ranked if e.method == "local"), None)
    others = [e for e in ranked if e.method != "local"]
    if local is None or not others:
        return None
    contender = others[0]
    found = differences(contender.accuracies, local.accuracies)
    rows = sum(samples)
    gain = interval(found, held_out, rows)
    methods = len({e.method for e in others})
    certainty: Certainty
    if gain.low is None:
        certainty = "unknown"
    elif not gain.above_zero:
        certainty = "not different"
    else:
        strict = interval(found, held_out, rows, 1 - (1 - LEVEL) / methods)
        certainty = "sure" if strict.above_zero else "fairly sure"
    sites = _site_gains(contender, local, held_out, names, samples, stable)
    return Verdict(contender, local, gain, certainty, tuple(close_to(contender, others, held_out, rows)), sites)


def _site_gains(
    contender: Measured, local: Measured, held_out: float, names: Sequence[str], samples: Sequence[int], stable: bool
) -> tuple[SiteGain, ...]:
    seeds = [seed for seed in contender.accuracies if seed in local.accuracies]
    seeds = seeds if stable else seeds[:1]
    gains = []
    for site, name in enumerate(names):
        ours = {s: [contender.accuracies[s][site]] for s in seeds}
        theirs = {s: [local.accuracies[s][site]] for s in seeds}
        both = {s for s in seeds if ours[s][0] is not None and theirs[s][0] is not None}
        if not both:
            continue
        ours, theirs = ({s: v for s, v in one.items() if s in both} for one in (ours, theirs))
        gain = interval(differences(ours, theirs), held_out, samples[site])
        gains.append(SiteGain(name, samples[site], mean_of(theirs), mean_of(ours), gain))
    return tuple(gains)
