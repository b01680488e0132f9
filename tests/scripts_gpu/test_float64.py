"""The float64 yardsticks on torch tensors agree with the numpy references, and so do the formats' bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu import float64
from gpu.weights import FORMATS, fp8_round_rows, random_experts

from dgcompile.plugins.block_attention.reference import block_attention
from dgcompile.plugins.moe import formats
from dgcompile.plugins.moe.reference import mixture_of_experts


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "capacity", "past"), [(0, 12, [0, 7]), (6, 6, [5, 17]), (6, 10, [3, 13])])
def test_attention(window: int, capacity: int, past: list[int], causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = {"query": (9, 4), "key": (9, 2), "value": (9, 2), "past_key": (capacity, 2), "past_value": (capacity, 2)}
    tensors = {name: torch.randn(2, *size, 8, generator=generator) for name, size in sizes.items()}
    for row, length in enumerate(past):
        tensors["past_key"][row, length:] = torch.nan
        tensors["past_value"][row, length:] = torch.nan
    tensors["past_length"] = torch.tensor(past, dtype=torch.int32)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    absolute = arrays | {name: np.abs(arrays[name]) for name in ("value", "past_value")}
    result, magnitude = float64.attention(**tensors, scale=0.3, window=window, causal=causal)
    for actual, given in ((result, arrays), (magnitude, absolute)):
        expected = block_attention(**given, scale=0.3, window=window, causal=causal)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FORMATS)
def test_experts(name: str) -> None:
    """Widths of one and a quarter blocks of INT4, and less than one."""
    form, hidden_size, inner, experts = FORMATS[name], 80, 40, 4
    generator = torch.Generator().manual_seed(1)
    weights = random_experts(form, experts, hidden_size, inner, torch.float16, generator)
    real = []
    for packed, scale, places in (
        (weights.gate_up.numpy(), weights.gate_up_scale, hidden_size),
        (weights.down.numpy(), weights.down_scale, inner),
    ):
        if scale is None:
            real.append(packed)
        elif form.weight_format == "fp8":
            real.append(formats.fp8_dequantize(packed, scale.numpy()))
        else:
            real.append(formats.int4_dequantize(packed, scale.numpy(), places, form.group_size))
    for expert in range(experts):
        for actual, expected in zip(weights.dequantized(expert), real, strict=True):
            np.testing.assert_array_equal(actual.numpy(), expected[expert])
    hidden = torch.randn(7, hidden_size, generator=generator)
    hidden[3] = 0
    ids = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(7)])
    shares = torch.rand(7, 2, generator=generator)
    for rounds in (False, True):
        actual = float64.experts(hidden, ids, shares, weights, round_activations=rounds)
        arguments = (hidden.numpy(), ids.numpy(), shares.numpy(), *real)
        expected = mixture_of_experts(*arguments, *([formats.fp8_round_rows] if rounds else []))
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-9, atol=1e-12)
        assert 0.3 < actual.std() < 3  # products keep the size of their inputs


def test_fp8_rounding_is_that_of_the_formats() -> None:
    rows = torch.randn(50, 33, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 7
    rows[4] = 0
    np.testing.assert_array_equal(fp8_round_rows(rows).numpy(), formats.fp8_round_rows(rows.numpy()))
