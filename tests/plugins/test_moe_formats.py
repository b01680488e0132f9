"""Packing of expert weights: exact round trips, and numbers where other software has an opinion."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dgcompile.plugins.moe import formats

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 200))


@given(SIZES, st.integers(0, 2**32 - 1))
def test_int4_round_trip(size: tuple[int, int, int], seed: int) -> None:
    codes = np.random.default_rng(seed).integers(-7, 8, size).astype(np.int8)
    packed = formats.int4_pack(codes)
    assert packed.shape == (size[0], -(-size[2] // 64), size[1], 32)
    np.testing.assert_array_equal(formats.int4_unpack(packed, size[2]), codes)
    again = formats.int4_pack(formats.int4_unpack(packed, size[2]))
    np.testing.assert_array_equal(again, packed)


def test_int4_bytes() -> None:
    """The layout, by hand: the kernels read these very bytes."""
    codes = np.zeros((2, 70), np.int8)
    codes[1, 0], codes[1, 32], codes[1, 31], codes[1, 69] = 7, -1, -7, 3
    packed = formats.int4_pack(codes)
    assert packed.shape == (2, 2, 32)
    assert packed[0, 1, 0] == 0x97 and packed[0, 1, 31] == 0x0F and packed[1, 1, 5] == 0x03
    assert np.count_nonzero(packed) == 3


def test_int4_nibbles_are_e4m3_numbers() -> None:
    """What lets FP8 tensor cores take them: sign moved to bit 7, a nibble is its code * 2**-9."""
    codes = np.arange(-7, 8).astype(np.int8)
    nibbles = formats.int4_pack(codes[None])[0, 0, :15].astype(int)
    moved = ((nibbles & 8) << 4) | (nibbles & 7)
    np.testing.assert_array_equal(formats.fp8_decode(moved.astype(np.uint8)) * 512, codes)


def test_int4_code_out_of_range() -> None:
    with pytest.raises(ValueError, match="-8 to 0"):
        formats.int4_pack(np.array([[0, -8]]))
    with pytest.raises(ValueError, match="not 128"):
        formats.int4_quantize(np.ones((2, 128)), 128)


@given(SIZES, st.sampled_from(formats.INT4_GROUPS), st.sampled_from(["float16", "float32"]), st.integers(0, 2**32 - 1))
def test_int4_error_is_half_a_step(size: tuple[int, int, int], group: int, dtype: str, seed: int) -> None:
    weight = np.random.default_rng(seed).standard_normal(size)
    packed, scale = formats.int4_quantize(weight, group, dtype)
    assert scale.shape == (size[0], -(-size[2] // group), size[1]) and scale.dtype == dtype
    step = np.repeat(np.swapaxes(scale, -1, -2).astype(np.float64), group, axis=-1)[..., : size[2]]
    error = np.abs(formats.int4_dequantize(packed, scale, size[2], group) - weight)
    # A scale rounded down to its dtype leaves the largest weight, 7 steps, up to 7 * 2**-11 of a step further away.
    assert (error <= step * (0.5 + 7 * 2**-11)).all()


def test_int4_group_of_zeros() -> None:
    packed, scale = formats.int4_quantize(np.zeros((3, 64)), 32)
    assert (scale == 1).all() and not packed.any()


def test_fp8_codes_are_those_of_torch() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(formats.fp8_decode(codes), values)
    numbers = codes[~np.isnan(values)]
    np.testing.assert_array_equal(formats.fp8_encode(formats.fp8_decode(numbers)), numbers)


@given(st.lists(st.floats(-448, 448, width=32), min_size=1, max_size=50))
def test_fp8_rounds_as_torch_does(values: list[float]) -> None:
    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(formats.fp8_encode(array), expected)


def test_fp8_ties_and_saturation() -> None:
    middles = (formats.E4M3_VALUES[:126] + formats.E4M3_VALUES[1:127]) / 2
    expected = torch.from_numpy(middles).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(formats.fp8_encode(middles), expected)
    np.testing.assert_array_equal(formats.fp8_decode(formats.fp8_encode(np.array([1e9, -460.0]))), [448, -448])


@given(SIZES, st.integers(0, 2**32 - 1))
def test_fp8_weights(size: tuple[int, int, int], seed: int) -> None:
    weight = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    weight[0, 0] = 0
    codes, scale = formats.fp8_quantize(weight)
    assert scale.shape == size[:2] and scale[0, 0] == 1
    error = np.abs(formats.fp8_dequantize(codes, scale) - weight)
    # Half of the last of 4 bits; below 2**-6 half of 2**-9. A scale rounded up or down moves neither visibly.
    assert (error <= np.maximum(np.abs(weight) * 2**-4, scale[..., None] * 2**-10) * 1.001).all()
    again, _ = formats.fp8_quantize(formats.fp8_dequantize(codes, scale))
    np.testing.assert_array_equal(again, codes)
