"""Schedules: end points, shapes, bad settings by either way in."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofed.errors import ProtofedError
from protofed.registry import coerce
from protofed.schedules import SHAPES, Ramp, ramp

RISING = [s for s in SHAPES if s != "constant"]


@pytest.mark.parametrize("shape", RISING)
@given(start=st.integers(0, 50), length=st.integers(0, 100), maximum=st.floats(0, 10))
def test_end_points_and_growth(shape, start, length, maximum):
    weight = ramp(shape, start, start + length, maximum)
    values = [weight(t) for t in range(start + length + 5)]
    assert values[: start + 1] == [0.0] * (start + 1)
    assert all(v == maximum for v in values[max(start + length, start + 1) :])
    assert all(a <= b for a, b in itertools.pairwise(values))


def test_constant_is_constant():
    assert ramp("constant", 20, 100, 0.7).values(3) == [0.7] * 3
    assert ramp("constant", 0, 0, 0.7)(0) == 0.7


def test_fedsap():
    weight = ramp("linear", start=20, end=100, maximum=0.7)
    assert weight(20) == 0 and weight(100) == 0.7 and weight(101) == 0.7
    assert weight(60) == pytest.approx(0.35)
    main_text = ramp("linear", 0, 40, 0.7)
    for t in range(1, 80):
        assert main_text(t) == pytest.approx(0.7 * min(t / 40, 1))


def test_fedapa():
    weight = ramp("cosine", 0, 50, 1)
    for t, value in enumerate(weight.values(70), start=1):
        assert value == pytest.approx((1 - math.cos(math.pi * min(t, 50) / 50)) / 2)
        assert isinstance(value, float)


def test_step_jumps_after_the_middle():
    assert ramp("step", 20, 100, 2.0).values(100) == [0.0] * 60 + [2.0] * 40


def test_sigmoid_is_symmetric_and_steep():
    weight = ramp("sigmoid", 0, 100, 1.0)
    assert weight(50) == pytest.approx(0.5)
    for t in range(101):
        assert weight(t) + weight(100 - t) == pytest.approx(1)
    assert weight(25) < 0.1 < 0.9 < weight(75)
    assert 0 < ramp("sigmoid", 0, 10**6, 1.0)(1) < 1e-5  # leaves 0 without a jump


def test_values_are_of_rounds_from_one():
    weight = ramp("linear", 0, 4, 1.0)
    assert weight.values(5) == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("liner", 0, 1, 1.0), "did you mean 'linear'"),
        (("linear", 5, 4, 1.0), "end=4 lies before start=5"),
        (("linear", 0, 4, -0.1), "maximum=-0.1"),
        (("linear", 0, 4, math.nan), "maximum=nan"),
        (("linear", 0, 4, math.inf), "maximum=inf"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ProtofedError, match=message):
        ramp(*arguments)
    with pytest.raises(ProtofedError, match=message):
        coerce(Ramp, dict(zip(("shape", "start", "end", "maximum"), arguments, strict=True)), "schedule")
    with pytest.raises(ValueError, match=message):
        Ramp(*arguments)


@dataclass(frozen=True)
class Settings:
    alignment: Ramp = ramp("linear", 20, 100, 0.7)


def test_parsed_as_a_nested_setting():
    assert coerce(Settings, {}, "method").alignment == ramp("linear", 20, 100, 0.7)
    given = {"alignment": {"shape": "cosine", "start": "0", "end": "50", "maximum": "1"}}
    assert coerce(Settings, given, "method").alignment == ramp("cosine", 0, 50, 1.0)
    with pytest.raises(ProtofedError, match=r"alignment.*did you mean 'cosine'"):
        coerce(Settings, {"alignment": {"shape": "cosin", "start": 0, "end": 50, "maximum": 1}}, "method")
    with pytest.raises(ProtofedError, match=r"alignment\.maximum is missing"):
        coerce(Settings, {"alignment": {"shape": "cosine", "start": 0, "end": 50}}, "method")
