"""What is measured, on numbers that can be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

import dgcompile.evaluate.metrics as metrics
from dgcompile.evaluate.metrics import LOGITS, ErrorSum, Tally, kl_divergence
from tests.evaluate.conftest import hand_made_report


def test_kl_of_known_distributions() -> None:
    even, sure = np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]])
    assert kl_divergence(even, sure) == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))
    assert kl_divergence(sure, even) == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5))


def test_a_constant_added_to_logits_changes_nothing() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32) * 20
    assert kl_divergence(logits, logits).tolist() == [0.0] * 5
    assert np.abs(kl_divergence(logits, logits + np.float32(8))).max() < 1e-10
    assert kl_divergence(np.array([[1000.0, 0.0]]), np.array([[1000.0, 0.0]])) == 0


def test_kl_is_never_negative_and_small_for_small_changes() -> None:
    random = np.random.default_rng(1)
    logits = random.normal(size=(50, 40)) * 5
    changes = kl_divergence(logits, logits + random.normal(size=logits.shape) * 1e-2)
    # To second order: half the variance of the change under the distribution, at most 1e-4 / 2 here but for its tail.
    assert (changes >= 0).all() and 1e-6 < changes.mean() < 1e-4


def test_large_arrays_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(2)
    expected, found = random.normal(size=(2, 9, 11)).astype(np.float32)
    whole, errors = kl_divergence(expected, found), ErrorSum()
    errors.add(expected, found)
    monkeypatch.setattr(metrics, "_CHUNK_NUMBERS", 25)
    pieces = ErrorSum()
    pieces.add(expected, found)
    assert kl_divergence(expected, found).tolist() == whole.tolist()
    assert pieces.relative == pytest.approx(errors.relative)


def test_relative_errors_weigh_arrays_by_their_size() -> None:
    errors = ErrorSum()
    errors.add(np.array([[3.0, 4.0]]), np.array([[3.0, 4.0]]))
    assert errors.relative == 0
    errors.add(np.array([[0.0, 5.0]]), np.array([[1.0, 5.0]]))
    assert errors.relative == pytest.approx(1 / math.sqrt(50))
    nothing = ErrorSum()
    nothing.add(np.zeros((1, 2)), np.zeros((1, 2)))
    assert nothing.relative == 0
    nothing.add(np.zeros((1, 2)), np.ones((1, 2)))
    assert nothing.relative == math.inf


def test_a_tally_keeps_steps_and_prompts_apart() -> None:
    tally = Tally(layers=2)
    even, sure = np.zeros((3, 2)), np.log(np.tile([0.9, 0.1], (3, 1)))
    hidden = {"hidden_states.0": np.ones((3, 4)), "hidden_states.1": np.ones((3, 4))}
    off = {"hidden_states.0": np.ones((3, 4)), "hidden_states.1": np.full((3, 4), 1.5)}
    tally.add(7, 0, 1, {LOGITS: even, **hidden}, {LOGITS: sure, **off})
    tally.add(8, 0, 1, {LOGITS: even, **hidden}, {LOGITS: even, **off})
    tally.add(7, 0, 2, {LOGITS: even}, {LOGITS: even})
    # The first step of a later canvas is no first step of a prompt.
    tally.add(7, 1, 1, {LOGITS: even}, {LOGITS: sure})
    kl = float(kl_divergence(even, sure)[0])
    assert tally.first_kl == {7: pytest.approx(kl), 8: 0.0}
    assert tally.first_step.kl == pytest.approx(kl / 2)
    assert [(step.step, step.canvases) for step in tally.steps] == [(1, 3), (2, 1)]
    assert [step.kl for step in tally.steps] == [pytest.approx(kl * 2 / 3), 0.0]
    assert tally.trajectory.kl == pytest.approx(kl / 2)
    assert [layer.relative_error for layer in tally.layers] == [0.0, pytest.approx(0.5)]


def test_a_report_adds_up() -> None:
    report = hand_made_report()
    assert (report.answers, report.reference_right, report.candidate_right, report.identical_texts) == (2, 2, 1, 1)
    assert (report.reference_mean_steps, report.candidate_mean_steps, report.steps_ratio) == (3.0, 4.5, 1.5)
    assert (report.stored_bytes, report.bf16_bytes) == (520, 2020)
    assert report.bits_per_weight == pytest.approx(8 * 520 / 1010)
    assert report.weights[0].bits_per_weight == 4.0
    assert report.largest_kl == 0.02 and report.worst_prompt.index == 1
