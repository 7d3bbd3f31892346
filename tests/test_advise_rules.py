"""The rules of `advise`, without any training: who is dropped from a race, and what differences of accuracies say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from protofed.experiment.advise.race import (
    Curve,
    Standing,
    affordable,
    beaten,
    in_order,
    level,
    makespan,
    projected,
    rungs,
)
from protofed.experiment.advise.verdict import (
    Interval,
    Measured,
    better_ways,
    close_to,
    differences,
    interval,
    judge,
    scores,
)

ROUNDS = 300


def curve(function, until=ROUNDS, every=6):
    rounds = tuple(range(every, until + 1, every))
    return Curve(rounds, tuple(function(r) for r in rounds))


def averaging(r):
    """FedAvg on rotated digits as it was measured: 37 % after 30 rounds, 70 after 100, 80 after 300."""
    return float(np.interp(math.log(r), np.log([1, 30, 100, 300]), [0.10, 0.37, 0.70, 0.80]))


def early(r):
    """A method that is at its end after 20 rounds."""
    return 0.55 * min(1.0, r / 20)


# --- rungs and curves -------------------------------------------------------------------------------------------------
@given(st.integers(1, 5000), st.integers(1, 60))
def test_rungs_rise_to_the_last_round_and_can_be_judged(rounds, every):
    found = rungs(rounds, every)
    assert found == sorted(set(found)) and found[-1] == rounds and found[0] >= 1 and len(found) <= 3
    assert all(r % every == 0 for r in found[:-1] if r < rounds)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 10))
def test_a_projection_is_never_below_the_level_nor_above_one(values, every):
    c = Curve(tuple(range(every, every * len(values) + 1, every)), tuple(values))
    at = c.rounds[-1]
    now = level(c, at)
    assert min(values) - 1e-9 <= now <= max(values) + 1e-9
    assert now - 1e-9 <= projected(c, at, at * 9) <= 1 + 1e-9
    assert projected(c, at, at) == pytest.approx(min(1, now))


def test_a_projection_is_generous_to_a_curve_that_flattens():
    """For every curve that rises ever more slowly in the logarithm of the round, the projection is not below the truth."""
    for power in (0.3, 0.6, 1.0):
        truth = lambda r, p=power: 0.8 * (math.log(r) / math.log(ROUNDS)) ** p  # noqa: E731
        c = curve(truth)
        for at in rungs(ROUNDS, 6)[:-1]:
            assert projected(c, at, ROUNDS) >= level(c, ROUNDS) - 0.03  # the level lags by a tenth of the rounds


# --- who is dropped ---------------------------------------------------------------------------------------------------
def standings(curves, at, **more):
    return [Standing(n, n.split()[0], level(c, at), projected(c, at, ROUNDS), **more) for n, c in curves.items()]


def test_averaging_that_starts_slowly_is_not_dropped_and_wins_in_the_end():
    curves = {"local": curve(lambda r: 0.5 * min(1.0, r / 10)), "fedavg": curve(averaging)}
    curves |= {f"fedproto weight={k}": curve(lambda r, k=k: early(r) - 0.002 * k) for k in range(6)}
    for at in rungs(ROUNDS, 6)[:-1]:
        found = standings(curves, at)
        assert "fedavg" not in beaten(found) and "local" not in beaten(found)
        assert [s.name for s in in_order(found)[:2]] == ["local", "fedavg"]
    assert max(curves, key=lambda n: level(curves[n], ROUNDS)) == "fedavg"


def test_another_method_that_rises_as_averaging_does_is_kept_too():
    curves = {"local": curve(early), "fedavg": curve(early), "slow": curve(averaging)}
    curves |= {f"flat {k}": curve(lambda r, k=k: 0.3 - 0.01 * k) for k in range(4)}
    assert level(curves["slow"], 36) < level(curves["local"], 36) - 0.1
    for at in rungs(ROUNDS, 6)[:-1]:
        gone = beaten(standings(curves, at))
        assert "slow" not in gone and gone and all(name.startswith("flat") for name in gone)


def test_what_is_flat_and_far_behind_is_dropped_unless_it_is_close_or_not_mature():
    base = [Standing("local", "local", 0.6, 0.6), Standing("fedavg", "fedavg", 0.7, 0.7)]
    bad = {"name": "bad", "method": "bad", "now": 0.4, "later": 0.45}
    assert beaten([*base, Standing(**bad)]) == ["bad"]
    assert beaten([*base, Standing(**bad, margin=0.3)]) == []
    assert beaten([*base, Standing(**bad, mature=False)]) == []
    assert beaten([*base, Standing("fedavg lr=1", "fedavg", 0.1, 0.1), Standing(**bad)]) == ["bad", "fedavg lr=1"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["local", "fedavg", "a", "b"]), st.floats(0, 1), st.floats(0, 0.5), st.floats(0, 0.2)
        ),
        min_size=1,
        max_size=20,
    )
)
def test_half_is_kept_and_so_are_the_leader_and_the_best_of_local_and_fedavg(drawn):
    found = [
        Standing(f"{k}", method, now, min(1.0, now + rise), margin)
        for k, (method, now, rise, margin) in enumerate(drawn)
    ]
    gone = beaten(found)
    left = [s for s in found if s.name not in gone]
    assert len(gone) <= len(found) // 2
    leader = max(found, key=lambda s: s.now)
    assert any(s.now == leader.now for s in left)
    for method in ("local", "fedavg"):
        assert any(s.method == method for s in left) == any(s.method == method for s in found)
    assert all(s.later < leader.now for s in found if s.name in gone)
    assert sorted(s.name for s in in_order(found)) == sorted(s.name for s in found)


# --- time -------------------------------------------------------------------------------------------------------------
@given(st.lists(st.floats(0.1, 50), min_size=0, max_size=12), st.floats(0, 200), st.integers(1, 4))
def test_what_is_affordable_fits_and_one_more_would_not(costs, seconds, jobs):
    names = [str(k) for k in range(len(costs))]
    taken = affordable(names, lambda n: costs[int(n)], seconds, jobs)
    assert taken == names[: len(taken)] and makespan(costs[: len(taken)], jobs) <= seconds
    if len(taken) < len(names):
        assert makespan(costs[: len(taken) + 1], jobs) > seconds


# --- intervals --------------------------------------------------------------------------------------------------------
def test_an_interval_over_seeds_is_the_corrected_resampled_t_test():
    rng = np.random.default_rng(0)
    found = rng.normal(0.05, 0.02, (5, 4))
    means = found.mean(1)
    half = stats.t.ppf(0.975, 4) * means.std(ddof=1) * math.sqrt(1 / 5 + 0.2 / 0.8)
    got = interval(found, 0.2)
    assert got.over == "seeds" and got.number == 5
    assert (got.low, got.high) == pytest.approx((found.mean() - half, found.mean() + half))


def test_an_interval_of_one_seed_is_over_sites_and_of_too_few_is_none():
    found = np.array([[0.1, 0.2, 0.3, np.nan]])
    got = interval(found, 0.2)
    low, high = stats.t.interval(0.95, 2, loc=0.2, scale=0.1 / math.sqrt(3))
    assert (got.over, got.number) == ("sites", 3) and (got.low, got.high) == pytest.approx((low, high))
    assert interval(np.array([[0.1, 0.2]]), 0.2).open and interval(np.array([[0.1, 0.2]]), 0.2).low is None
    assert math.isnan(interval(np.empty((0, 0)), 0.2).mean)
    assert Interval(0.1, 0.05, 0.2).above_zero and Interval(-0.1, -0.2, -0.05).below_zero


def test_where_nothing_differs_an_interval_seldom_says_that_something_does():
    """Repeated splits of the same rows, and two classifiers that are right by chance as often as each other."""
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(400):
        ours, theirs = rng.random((2, 60)) < 0.7
        parts = [rng.permutation(60)[:12] for _ in range(5)]
        found = np.array([[ours[rows].mean() - theirs[rows].mean()] for rows in parts])
        wrong += not interval(found, 0.2).open
    assert wrong / 400 < 0.08  # without the correction it is 0.11


def test_a_few_rows_that_agree_prove_nothing():
    """Three sites with one row each, right with ours and wrong with theirs: the rule of three allows for a gain of 0."""
    found = np.ones((1, 3))
    assert interval(found, 0.2).low == 1.0
    assert interval(found, 0.2, rows=3).low == pytest.approx(1 - math.log(20) / 3) and interval(found, 0.2, 2).open
    assert interval(np.zeros((5, 3)), 0.2, rows=30).high == pytest.approx(math.log(20) / 150)
    assert interval(np.zeros((50, 3)), 0.2, rows=30).high == pytest.approx(math.log(20) / 150)  # 30 of 150 rows a seed


def measured(label, method, by="head", **accuracies):
    return Measured(label, method, by, {int(k[1:]): v for k, v in accuracies.items()})


def test_pairs_are_of_the_seeds_that_both_have():
    a = measured("a", "a", s1=[0.5, 0.75], s2=[1.0, None])
    b = measured("b", "b", s2=[0.5, 0.5], s3=[0.0, 0.0])
    found = differences(a.accuracies, b.accuracies)
    assert found.shape == (1, 2) and found[0, 0] == 0.5 and np.isnan(found[0, 1])


def test_an_entry_with_an_easy_seed_does_not_lead_for_that():
    local = measured("local", "local", s1=[0.5], s2=[0.9])
    steady = measured("steady", "x", s1=[0.6], s2=[1.0])
    once = measured("once", "y", s2=[0.92])
    assert once.mean > steady.mean  # which says nothing, because only it lacks the hard seed
    assert [e.label for e in better_ways([local, once, steady])] == ["steady", "once", "local"]
    assert scores([local, steady]) == pytest.approx([0.7, 0.8])


def test_the_way_of_predicting_is_part_of_the_choice():
    ways = [
        measured("a", "a", "head", s1=[0.5, 0.5]),
        measured("a", "a", "prototype", s1=[0.6, 0.7]),
        measured("local", "local", "head", s1=[0.6, 0.6]),
        measured("local", "local", "prototype", s1=[0.4, 0.4]),
    ]
    assert [(e.label, e.by) for e in better_ways(ways)] == [("a", "prototype"), ("local", "head")]


SITES = ["a", "b", "c", "d"]


def race(gain, noise=0.01, seeds=5, seed=0):
    rng = np.random.default_rng(seed)
    local = {s: (0.6 + rng.normal(0, noise, 4)).tolist() for s in range(seeds)}
    ours = {s: (np.array(local[s]) + gain + rng.normal(0, noise, 4)).tolist() for s in range(seeds)}
    return [Measured("local", "local", "head", local), Measured("x", "x", "head", ours)]


def test_a_clear_gain_is_sure_and_none_is_not_different_and_local_is_advised():
    clear = judge(race(0.2), 0.2, SITES, [90] * 4)
    assert clear.certainty == "sure" and clear.advised.label == "x" and clear.losers == []
    assert [site.name for site in clear.sites] == SITES
    assert all(site.gain.mean == pytest.approx(site.contender - site.local) for site in clear.sites)
    none = judge(race(0.0), 0.2, SITES, [90] * 4)
    assert none.certainty == "not different" and none.advised.label == "local"
    worse = judge(race(-0.2), 0.2, SITES, [90] * 4)
    assert worse.certainty == "not different" and worse.advised.label == "local" and worse.losers == SITES
    one = judge(race(0.2, noise=0.001, seeds=1), 0.2, SITES[:2], [90] * 2)
    assert one.gain.over == "sites"  # 4 accuracies, of which two have names here


def test_two_sites_and_one_seed_say_nothing():
    entries = [
        Measured("local", "local", "head", {0: [0.1, 0.1]}),
        Measured("x", "x", "head", {0: [0.9, 0.9]}),
    ]
    found = judge(entries, 0.2, ["a", "b"], [5, 5])
    assert found.certainty == "unknown" and found.advised.label == "local"
    assert judge(entries[:1], 0.2, ["a", "b"], [5, 5]) is None
    assert judge(entries[1:], 0.2, ["a", "b"], [5, 5]) is None


def test_the_more_methods_were_compared_the_more_it_takes_to_be_sure():
    local, x = race(0.03, noise=0.02)
    one = interval(differences(x.accuracies, local.accuracies), 0.2)
    assert one.above_zero
    others = [Measured(f"m{k}", f"m{k}", "head", local.accuracies) for k in range(30)]
    assert judge([local, x], 0.2, SITES, [90] * 4).certainty == "sure"
    assert judge([local, x, *others], 0.2, SITES, [90] * 4).certainty == "fairly sure"


def test_what_is_close_to_the_leader_is_named():
    local, x = race(0.2)
    near = Measured("near", "near", "head", {s: [v - 0.001 * (-1) ** s for v in a] for s, a in x.accuracies.items()})
    assert [e.label for e in close_to(x, [local, near, x], 0.2)] == ["near"]
    assert [e.label for e in judge([local, x, near], 0.2, SITES, [90] * 4).close] == ["near"]


def test_sites_drawn_anew_by_each_seed_are_those_of_the_first():
    entries = race(0.2)
    found = judge(entries, 0.2, SITES, [90] * 4, stable=False)
    assert found.sites[0].contender == entries[1].accuracies[0][0] and found.sites[0].gain.low is None
