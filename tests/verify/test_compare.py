"""Margins: a decision can only change when its inputs move by more than its margin."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dgcompile.verify.compare import (
    Outcome,
    acceptance_margin,
    compare_step,
    compare_stop,
    draw,
    relative_error,
    sample_margin,
)
from dgcompile.verify.reference import ReferenceStep

LENGTH, VOCAB = 4, 6

entropies = arrays.arrays(np.float32, 8, elements=st.floats(0, 0.125, width=32))
tables = arrays.arrays(np.float32, (LENGTH, VOCAB), elements=st.floats(0, 1, width=32)).filter(
    lambda table: bool((table.sum(axis=-1) > 0.01).all())
)
uniforms = arrays.arrays(np.float32, LENGTH, elements=st.floats(0, 1, width=32, exclude_max=True))


def step_of(**changes: Any) -> ReferenceStep:
    """A step whose first position is certain and whose last is not accepted."""
    logits = np.log(np.array([[0.9, 0.1, 0, 0, 0, 0], *[[0.3, 0.25, 0.2, 0.15, 0.05, 0.05]] * 3]) + 1e-9)
    values: dict[str, Any] = {
        "canvas": 2,
        "step": 5,
        "canvas_ids": np.zeros(LENGTH, np.int32),
        "self_conditioning": np.zeros((LENGTH, 3), np.float32),
        "logits": logits.astype(np.float32),
        "probabilities": np.exp(logits).astype(np.float32),
        "uniform": np.array([0.5, 0.29, 0.6, 0.1], np.float32),
        "noise_ids": np.array([5, 5, 5, 5], np.int32),
        "argmax_ids": np.array([0, 0, 0, 0], np.int32),
        "next_canvas_ids": np.array([0, 0, 2, 5], np.int32),
        "accepted": np.array([True, True, True, False]),
        "entropy": np.array([0.3, 1.6, 1.7, 1.8], np.float32),
        "router_margin": np.inf,
    }
    return ReferenceStep(**{**values, **changes})


def outcome_of(step: ReferenceStep, **changes: npt.NDArray[Any]) -> Outcome:
    values: dict[str, npt.NDArray[Any]] = {
        "argmax_ids": step.argmax_ids,
        "next_canvas_ids": step.next_canvas_ids,
        "accepted": step.accepted,
        "next_self_conditioning": step.self_conditioning,
    }
    return Outcome(**{**values, **changes})


def changed(array: npt.NDArray[Any], position: int, value: int) -> npt.NDArray[Any]:
    copy = array.copy()
    copy[position] = value
    return copy


@given(tables, uniforms)
def test_draws_the_token_whose_interval_holds_the_target(
    table: npt.NDArray[np.float32], uniform: npt.NDArray[np.float32]
) -> None:
    for position, token in enumerate(draw(table, uniform).tolist()):
        row = [float(weight) for weight in table[position]]
        target = float(uniform[position]) * sum(row)
        assert row[token] > 0
        assert sum(row[:token]) <= target * (1 + 1e-12) and target < sum(row[: token + 1]) + 1e-12


@given(tables, uniforms)
def test_the_drawn_token_alone_has_no_margin_and_the_others_count_what_lies_between(
    table: npt.NDArray[np.float32], uniform: npt.NDArray[np.float32]
) -> None:
    step = step_of(probabilities=table, uniform=uniform)
    for position, token in enumerate(draw(table, uniform).tolist()):
        shares = table[position].astype(np.float64) / table[position].astype(np.float64).sum()
        assert sample_margin(step, token, position) == 0
        for other in range(VOCAB):
            between = shares[min(token, other) + 1 : max(token, other)].sum()
            assert sample_margin(step, other, position) >= between - 1e-12


@given(entropies, st.floats(0.01, 0.5), arrays.arrays(np.float64, 8, elements=st.floats(-1, 1)))
def test_acceptance_does_not_change_within_its_margin(
    entropy: npt.NDArray[np.float32], bound: float, direction: npt.NDArray[np.float64]
) -> None:
    def accept(values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        order = np.argsort(values, kind="stable")
        before = np.cumsum(values[order]) - values[order]
        decision = np.empty(len(values), np.bool_)
        decision[order] = before <= bound
        return decision

    exact = entropy.astype(np.float64)
    decision = accept(exact)
    margins = [acceptance_margin(entropy, decision, bound, position) for position in range(8)]
    # Moving every entropy by d moves a sum of seven by at most 7 d, and the order of two by 2 d.
    moved = accept(exact + direction * min(margins) / 8)
    assert moved.tolist() == decision.tolist()


def test_equal_outcomes_are_no_difference() -> None:
    step = step_of()
    assert compare_step(step, outcome_of(step), 0.1, np.inf) is None


def test_another_argmax_is_a_failure_unless_the_logits_are_nearly_equal() -> None:
    step = step_of()
    found = outcome_of(step, argmax_ids=changed(step.argmax_ids, 1, 3))
    difference = compare_step(step, found, 0.1, np.inf)
    assert difference is not None and difference.reason is None
    assert (difference.kind, difference.canvas, difference.step, difference.position) == ("argmax", 2, 5, 1)
    assert (difference.expected, difference.found) == (0, 3)
    assert difference.margin == pytest.approx(np.log(0.3 / 0.15) / abs(np.log(0.3)), rel=1e-5)

    logits = step.logits.copy()
    logits[1, 3] = logits[1, 0] - 3e-6
    near = compare_step(step_of(logits=logits), found, 0.1, np.inf)
    assert near is not None and near.reason == "margin"


def test_another_sample_is_a_failure_unless_the_draw_is_at_the_boundary() -> None:
    step = step_of()
    found = outcome_of(step, next_canvas_ids=changed(step.next_canvas_ids, 1, 1))
    difference = compare_step(step, found, 0.1, np.inf)
    assert difference is not None and difference.reason is None
    assert difference.kind == "sample" and difference.margin == pytest.approx(0.01, abs=1e-6)

    near = compare_step(step_of(uniform=np.array([0.5, 0.299999, 0.6, 0.1], np.float32)), found, 0.1, np.inf)
    assert near is not None and near.reason == "margin"


def test_another_acceptance_is_a_failure_unless_the_sum_is_at_the_bound() -> None:
    step = step_of()
    found = outcome_of(
        step, accepted=changed(step.accepted, 2, False), next_canvas_ids=changed(step.next_canvas_ids, 2, 5)
    )
    difference = compare_step(step, found, 2.0, np.inf)
    assert difference is not None and difference.reason is None
    assert (difference.kind, difference.position, difference.expected, difference.found) == ("acceptance", 2, 1, 0)
    assert difference.margin == pytest.approx(0.1, abs=1e-6)  # sum before is 1.9; the next entropy is 0.1 away too

    near = compare_step(step, found, 1.900001, np.inf)
    assert near is not None and near.reason == "margin"


def test_other_noise_is_never_a_tie() -> None:
    step = step_of()
    found = outcome_of(step, next_canvas_ids=changed(step.next_canvas_ids, 3, 4))
    difference = compare_step(step, found, 0.1, np.inf)
    assert difference is not None and difference.reason is None
    assert difference.kind == "noise" and difference.margin is None


def test_one_unexplained_position_outweighs_explained_ones() -> None:
    logits = step_of().logits.copy()
    logits[1, 3] = logits[1, 0] - 1e-7
    step = step_of(logits=logits)
    found = outcome_of(step, argmax_ids=np.array([0, 3, 3, 0], np.int32))
    difference = compare_step(step, found, 0.1, np.inf)
    assert difference is not None and difference.reason is None
    assert (difference.position, difference.positions) == (2, 2)


def test_a_router_tie_explains_a_difference_and_a_router_gap_does_not() -> None:
    step = step_of()
    found = outcome_of(step, argmax_ids=changed(step.argmax_ids, 1, 3))
    for gap, reason in ((1e-6, "router"), (1e-3, None)):
        difference = compare_step(step, found, 0.1, gap)
        assert difference is not None and difference.reason == reason and difference.router_margin == gap


def test_stopping_apart_is_a_failure_unless_the_entropy_is_at_the_threshold() -> None:
    entropy = np.full(4, 0.004, np.float32)
    apart = compare_stop(1, (6, 7), entropy, 0.005, np.inf)
    assert (apart.kind, apart.canvas, apart.step, apart.expected, apart.found) == ("stop", 1, 6, 1, 0)
    assert apart.reason is None and apart.margin == pytest.approx(0.2, rel=1e-5)
    assert compare_stop(1, (6, 7), entropy, 0.00400001, np.inf).reason == "margin"


def test_relative_error() -> None:
    expected = np.array([0.0, -4.0, 2.0], np.float32)
    assert relative_error(np.array([0.0, -4.0, 2.5], np.float32), expected) == 0.125
    assert relative_error(np.zeros(3, np.float32), np.zeros(3, np.float32)) == 0
    assert relative_error(np.full(3, np.nan, np.float32), expected) == np.inf
    assert relative_error(np.ones(3, np.float32), np.zeros(3, np.float32)) == np.inf
