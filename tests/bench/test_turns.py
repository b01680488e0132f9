"""Who is measured when, and what samples say."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgcompile.bench.turns import Figure, Turn, alternate


def test_everyone_warms_up_before_anyone_is_measured_and_then_they_alternate() -> None:
    turns = list(alternate(2, 3))
    assert [turn.contender for turn in turns] == [0, 1] * 4
    assert [turn.is_warm_up for turn in turns] == [True] * 2 + [False] * 6
    assert [turn.number for turn in turns if not turn.is_warm_up] == [0, 0, 1, 1, 2, 2]


def test_a_single_contender_takes_all_turns() -> None:
    assert list(alternate(1, 2)) == [Turn(-1, 0), Turn(0, 0), Turn(1, 0)]


def test_few_samples_have_their_extremes_as_spread() -> None:
    figure = Figure.of([3.0, 1.0, 2.0])
    assert (figure.median, figure.low, figure.high, figure.spread) == (2.0, 1.0, 3.0, "min-max")
    assert figure.samples == (3.0, 1.0, 2.0) and figure.ratio is None


def test_many_samples_have_percentiles_as_spread() -> None:
    figure = Figure.of([float(value) for value in range(11)])
    assert (figure.median, figure.low, figure.high, figure.spread) == (5.0, 1.0, 9.0, "p10-p90")


def test_the_ratio_is_the_median_of_each_rounds_ratio_not_the_ratio_of_the_medians() -> None:
    # A machine that gets four times slower in the last round slows both.
    first, other = [1.0, 1.0, 4.0], [2.0, 3.0, 8.0]
    assert Figure.of(other, first).ratio == 2.0
    assert Figure.of(first, first).ratio == 1.0


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40))
def test_the_median_lies_within_the_spread(samples: list[float]) -> None:
    figure = Figure.of(samples)
    ordered = [min(samples), figure.low, figure.median, figure.high, max(samples)]
    assert all(one <= other * (1 + 1e-12) for one, other in pairwise(ordered))


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12), st.floats(1e-3, 1e3))
def test_the_ratio_follows_a_common_factor(samples: list[float], factor: float) -> None:
    assert Figure.of([factor * sample for sample in samples], samples).ratio == pytest.approx(factor)
