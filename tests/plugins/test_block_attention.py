"""The torch operator and the ONNX function of BlockAttention against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgcompile.plugins.block_attention.reference import block_attention as reference
from dgcompile.plugins.block_attention.reference import cached_positions
from dgcompile.plugins.block_attention.torch_op import block_attention as torch_op
from tests.trace.onnx_node import run_node

# fp32 sums of at most a few hundred products of unit-size values: rounding stays near 1e-6, a wrong mask gives 1e-1.
TOLERANCE = 2e-5


def implementations(arrays: dict[str, np.ndarray], scale: float, window: int, causal: bool) -> dict[str, np.ndarray]:
    tensors = [torch.from_numpy(array) for array in arrays.values()]
    return {
        "torch": torch_op(*tensors, scale, window, causal).numpy(),
        "onnx": run_node("BlockAttention", arrays, scale=scale, window=window, causal=int(causal)),
    }


def random_case(
    rng: np.random.Generator, tokens: int, heads: int, kv_heads: int, width: int, capacity: int, past: list[int]
) -> dict[str, np.ndarray]:
    batch = len(past)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    arrays = {
        "query": normal(batch, tokens, heads, width),
        "key": normal(batch, tokens, kv_heads, width),
        "value": normal(batch, tokens, kv_heads, width),
        "past_key": normal(batch, capacity, kv_heads, width),
        "past_value": normal(batch, capacity, kv_heads, width),
        "past_length": np.array(past, np.int32),
    }
    for row, length in enumerate(past):
        # Slots never written hold rubbish; whoever lets it through spoils its output.
        arrays["past_key"][row, length:] = np.nan
        arrays["past_value"][row, length:] = np.nan
    return arrays


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("window", "capacity", "past"),
    [
        (0, 40, [0, 0]),
        (0, 40, [1, 40]),
        (0, 40, [17, 3]),
        (8, 8, [0, 1]),
        (8, 8, [6, 7]),  # window - 2, window - 1
        (8, 8, [8, 9]),  # window, window + 1: the ring wraps
        (8, 8, [100, 5]),
        (1, 1, [0, 30]),
        (8, 30, [25, 30]),  # a window over a cache that is no ring
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 32), (4, 1, 64), (2, 2, 16)])
def test_agrees_with_reference(
    causal: bool, window: int, capacity: int, past: list[int], heads: int, kv_heads: int, width: int
) -> None:
    arrays = random_case(np.random.default_rng(0), 11, heads, kv_heads, width, capacity, past)
    expected = reference(**arrays, scale=0.3, window=window, causal=causal)
    for name, actual in implementations(arrays, 0.3, window, causal).items():
        np.testing.assert_allclose(actual, expected, atol=TOLERANCE, err_msg=name)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(1, 12),
    window=st.sampled_from([0, 1, 3, 8]),
    past=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    causal=st.booleans(),
)
def test_any_shape(seed: int, tokens: int, window: int, past: list[int], causal: bool) -> None:
    arrays = random_case(np.random.default_rng(seed), tokens, 4, 2, 8, window or 20, past)
    expected = reference(**arrays, scale=1.0, window=window, causal=causal)
    for name, actual in implementations(arrays, 1.0, window, causal).items():
        np.testing.assert_allclose(actual, expected, atol=TOLERANCE, err_msg=name)


@given(capacity=st.integers(1, 30), past=st.integers(0, 100))
def test_slots_hold_the_latest_tokens(capacity: int, past: int) -> None:
    ring = np.full(capacity, -1)
    for position in range(past):
        ring[position % capacity] = position
    positions = cached_positions(capacity, past)
    np.testing.assert_array_equal(np.where(positions < 0, -1, positions), ring)
