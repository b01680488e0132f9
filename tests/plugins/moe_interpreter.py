"""Runs the MixtureOfExperts kernels in Triton's interpreter and prints what they are off by in one weight format.

A process of its own: TRITON_INTERPRET must be set before triton is imported, and then nothing can be compiled.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from dgcompile.plugins.moe import formats
from dgcompile.plugins.moe.launch import Tile
from dgcompile.plugins.moe.reference import mixture_of_experts as reference
from dgcompile.plugins.moe.torch_call import mixture_of_experts

# Widths: 80 is one and a quarter blocks of INT4, 40 less than one; neither is a multiple of the tile.
HIDDEN, INNER, TILE = 80, 40, Tile(block_m=16, block_n=32, block_k=32, warps=4, stages=1)

# dtype and group of the cases. The first two run on every load, the others on the random one.
FLOATS = [("float32", 0), ("float16", 0)]
INTEGERS = [("float32", 32), ("float16", 64), ("float32", 64), ("float16", 32)]
VARIANTS = {"float": FLOATS, "fp8": FLOATS, "int4": INTEGERS, "w4a8": INTEGERS}


def loads() -> dict[str, tuple[np.ndarray, int]]:
    """Expert ids [T, K] and the number of experts, by what they are."""
    rng = np.random.default_rng(0)
    return {
        "random": (np.stack([rng.permutation(6)[:3] for _ in range(33)]), 6),
        "one token": (np.array([[3, 1]]), 4),
        "all tokens on one expert": (np.full((21, 1), 2), 4),
        "whole tiles": (np.tile([[1, 0]], (32, 1)), 2),
        "empty experts": (np.array([[0, 15], [15, 0], [0, 14]]), 16),
        "single expert": (np.zeros((5, 1), int), 1),
        "ids out of range": (np.array([[-1, 1], [2, 7], [4, 0], [3, -(2**31)]]), 4),
    }


def quantize(weight: np.ndarray, weight_format: str, group: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Packed weights, their scales, and the weights that those stand for."""
    if weight_format == "float":
        return weight, None, weight
    if weight_format == "fp8":
        codes, scale = formats.fp8_quantize(weight)
        return codes, scale, formats.fp8_dequantize(codes, scale)
    packed, scale = formats.int4_quantize(weight, group)
    return packed, scale, formats.int4_dequantize(packed, scale, weight.shape[-1], group)


def check(weight_format: str, load: str, dtype: str, group: int) -> dict[str, Any]:
    """One case: error relative to the largest and to the mean square value, and whether two runs agree."""
    rng = np.random.default_rng(1)
    expert_ids, experts = loads()[load]
    tokens, top_k = expert_ids.shape
    hidden = rng.standard_normal((tokens, HIDDEN)).astype(dtype)
    if load == "random":
        hidden[7] = 0  # as the self-conditioning signal is at first: no scale may become a division by zero
    expert_weights = rng.random((tokens, top_k), dtype=np.float32)
    gate_up = (rng.standard_normal((experts, 2 * INNER, HIDDEN)) / HIDDEN**0.5).astype(dtype)
    down = (rng.standard_normal((experts, HIDDEN, INNER)) / INNER**0.5).astype(dtype)
    packed_gate_up, gate_up_scale, real_gate_up = quantize(gate_up, weight_format, group)
    packed_down, down_scale, real_down = quantize(down, weight_format, group)
    arrays = (hidden, expert_ids.astype(np.int32), expert_weights, packed_gate_up, packed_down)
    scales = {} if gate_up_scale is None else {"gate_up_scale": gate_up_scale, "down_scale": down_scale}

    def once() -> np.ndarray:
        return mixture_of_experts(
            *(torch.from_numpy(array) for array in arrays),
            tile=TILE,
            weight_format=weight_format,
            group_size=group,
            **{name: torch.from_numpy(scale) for name, scale in scales.items()},
        ).numpy()

    actual = once()
    result: dict[str, Any] = {}
    yardsticks = {"": (lambda rows: rows)}
    if weight_format == "w4a8":
        yardsticks["_rounded"] = formats.fp8_round_rows
    for suffix, round_rows in yardsticks.items():
        # An id out of range counts as the nearest one.
        nearest = np.clip(expert_ids, 0, experts - 1)
        expected = reference(hidden, nearest, expert_weights, real_gate_up, real_down, round_rows)
        error = actual.astype(np.float64) - expected
        result[f"largest{suffix}"] = float(np.abs(error).max() / np.abs(expected).max())
        result[f"norm{suffix}"] = float(np.linalg.norm(error) / np.linalg.norm(expected))
    if load == "random":
        result["same_bits"] = actual.tobytes() == once().tobytes()
        result["zero_row"] = bool((actual[7] == 0).all())
    return result


if __name__ == "__main__":
    variants = VARIANTS[sys.argv[1]]
    cases = [(load, *variant) for load in loads() for variant in (variants if load == "random" else variants[:2])]
    print(json.dumps([[*case, check(sys.argv[1], *case)] for case in cases]))
