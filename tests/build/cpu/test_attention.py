"""Attention as the engines of the cpu target compute it, against the float64 reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgcompile.plugins.block_attention.reference import block_attention as reference
from tests.build.cpu.rewritten import run_node
from tests.plugins.test_block_attention import TOLERANCE, random_case


def check(arrays: dict[str, np.ndarray], scale: float, window: int, causal: bool) -> None:
    expected = reference(*arrays.values(), scale=scale, window=window, causal=causal)
    # The session's caches are finite in every slot; what another sequence left there must not matter.
    rng = np.random.default_rng(0)
    for name in ("past_key", "past_value"):
        unwritten = np.isnan(arrays[name])
        arrays[name][unwritten] = 3 * rng.standard_normal(int(unwritten.sum()))
    actual = run_node("BlockAttention", arrays, Path(), scale=scale, window=window, causal=int(causal))
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("window", "capacity", "past"),
    [
        (0, 40, [0, 0]),
        (0, 40, [1, 40]),
        (0, 40, [17, 3]),
        (8, 8, [0, 1]),
        (8, 8, [6, 7]),
        (8, 8, [8, 9]),
        (8, 8, [50, 2]),
    ],
)
def test_agrees_with_reference(window: int, capacity: int, past: list[int], causal: bool) -> None:
    check(random_case(np.random.default_rng(1), 6, 4, 2, 8, capacity, past), 0.3, window, causal)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    window = data.draw(st.sampled_from([0, 4, 9]))
    capacity = window or data.draw(st.integers(1, 30))
    past = data.draw(st.lists(st.integers(0, capacity if not window else 40), min_size=1, max_size=3))
    kv_heads, group = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 2, 4]))
    tokens, width = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([2, 8]))
    arrays = random_case(np.random.default_rng(0), tokens, kv_heads * group, kv_heads, width, capacity, past)
    check(arrays, data.draw(st.sampled_from([1.0, 0.25])), window, data.draw(st.booleans()))
