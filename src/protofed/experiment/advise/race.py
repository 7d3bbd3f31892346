"""The rules of the race, as functions of curves and seconds alone: who goes on, in which order, and what fits the time.

The race is successive halving with two differences. A curve that is still rising is judged by where it may get to, not
by where it is, because averaging starts slowly; and the best entry of Local and of FedAvg is never dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

FACTOR = 3  # between the rounds of two rungs
RUNGS = 3
WINDOW = 0.8  # the level of a curve is its mean over what follows this share of the rounds
KEPT = ("local", "fedavg")  # methods whose best entry is never dropped
LEAST_MARGIN = 0.01


def rungs(rounds: int, every: int = 1) -> list[int]:
    """The rounds at which the race is judged: a ninth, a third and all of them.

    Args:
        rounds: The number of rounds of a whole run.
        every: Every which round is evaluated. A rung is one of these, so that it can be judged.

    Returns:
        The rounds, rising; the last is `rounds`.

    >>> rungs(300, 6), rungs(2)
    ([36, 102, 300], [1, 2])
    """
    exact = [rounds / FACTOR**k for k in range(RUNGS - 1, 0, -1)]
    return sorted({*(min(rounds, math.ceil(r / every) * every) for r in exact), rounds})


@dataclass(frozen=True)
class Curve:
    """The mean validation accuracy over clients at the evaluated rounds, which rise."""

    rounds: tuple[int, ...]
    values: tuple[float, ...]


def level(curve: Curve, at: int) -> float:
    """The level of a curve at a round: its mean over the last fifth of the rounds until then.

    Args:
        curve: The curve, with at least one evaluation.
        at: The round.

    Returns:
        The mean; where nothing was evaluated in that fifth, the last value before it, or the first there is.

    >>> level(Curve((1, 5, 9, 10), (0.1, 0.5, 0.7, 0.9)), 10)
    0.8
    """
    points = [(r, v) for r, v in zip(curve.rounds, curve.values, strict=True) if r <= at]
    recent = [v for r, v in points if r > WINDOW * at] or [v for _, v in points[-1:]] or [curve.values[0]]
    return math.fsum(recent) / len(recent)


def projected(curve: Curve, at: int, rounds: int) -> float:
    """Where a curve may get to: for each further tripling of the rounds as much again as the last tripling gave.

    Curves rise ever more slowly, so this is generous to what is still rising. A falling curve stays where it is.

    Args:
        curve: The curve until round `at`.
        at: The round at which it is judged.
        rounds: The round it is projected to.

    Returns:
        The projection, at most 1.

    >>> round(projected(Curve((10, 30), (0.2, 0.4)), 30, 270), 6)
    0.8
    """
    now, before = level(curve, at), level(curve, max(1, round(at / FACTOR)))
    steps = max(0.0, math.log(rounds / at, FACTOR))
    return min(1.0, now + max(0.0, now - before) * steps)


@dataclass(frozen=True)
class Standing:
    """An entry at a rung.

    Attributes:
        name: The entry.
        method: Its method.
        now: Its level, by its better way of predicting.
        later: Where it may get to.
        margin: Half the width of the interval of its difference to the leader.
        mature: Whether what the method does is fully at work by now; a weight that still grows is not judged.
    """

    name: str
    method: str
    now: float
    later: float
    margin: float = 0.0
    mature: bool = True


def in_order(standings: Sequence[Standing]) -> list[Standing]:
    """The standings in the order in which they are to run: Local's and FedAvg's best first, then the most promising.

    What is promising is half way between where an entry is and where it may get to.

    Args:
        standings: The entries at a rung.

    Returns:
        The same entries, the most needed first.
    """
    ranked = sorted(standings, key=lambda s: (-(s.now + s.later), -s.now))
    first = [next((s for s in ranked if s.method == method), None) for method in KEPT]
    return [*(s for s in first if s is not None), *(s for s in ranked if s not in first)]


def beaten(standings: Sequence[Standing]) -> list[str]:
    """The entries that are dropped at a rung.

    An entry is dropped where all of this holds: it is neither Local's nor FedAvg's best; what it does is fully at work;
    even where it may get to is below where the leader is now, by more than the margin; and it is in the worse half.

    Args:
        standings: The entries at a rung.

    Returns:
        The names, the best of them first.

    >>> beaten([Standing("a", "a", 0.9, 0.9), Standing("b", "b", 0.5, 0.6), Standing("c", "c", 0.5, 0.95)])
    ['b']
    """
    if not standings:
        return []
    leader = max(s.now for s in standings)
    order = in_order(standings)
    kept = {next(s.name for s in order if s.method == method) for method in {s.method for s in order} & {*KEPT}}
    ranked = sorted(standings, key=lambda s: (-s.later, -s.now))
    worse = ranked[math.ceil(len(ranked) / 2) :]
    return [s.name for s in worse if s.name not in kept and s.mature and s.later + max(s.margin, LEAST_MARGIN) < leader]


def affordable(names: Sequence[str], cost: Callable[[str], float], seconds: float, jobs: int) -> list[str]:
    """As many of the first entries as fit the time, several at a time.

    Args:
        names: The entries, the most needed first.
        cost: The seconds of each.
        seconds: The time there is.
        jobs: How many run at a time.

    Returns:
        The first so many of the names.

    >>> affordable(["a", "b", "c"], lambda name: 10.0, 20.0, 1)
    ['a', 'b']
    """
    ends = [0.0] * max(1, jobs)
    for number, name in enumerate(names):
        first = min(range(len(ends)), key=ends.__getitem__)
        ends[first] += cost(name)
        if max(ends) > seconds:
            return list(names[:number])
    return list(names)


def makespan(costs: Collection[float], jobs: int) -> float:
    """The seconds that runs take, several at a time, each begun when one before it ends.

    >>> makespan([3.0, 2.0, 2.0], 2)
    4.0
    """
    ends = [0.0] * max(1, jobs)
    for seconds in costs:
        first = min(range(len(ends)), key=ends.__getitem__)
        ends[first] += seconds
    return max(ends)
