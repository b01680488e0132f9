"""Every kernel against float64, in every weight format: small cases against the numpy references, real sizes too.

How the bounds come about. u is the largest relative error of one rounding: 2^-8 in bfloat16, 2^-11 in float16. Inputs
are rounded before both sides see them, so inputs cost nothing.

Attention rounds each softmax weight (before the product with the values) and the result. Per output element that is at
most u (A + |o|), with A the same weighted mean over the values' magnitudes: the bound of ``element``. Over many
elements the roundings are independent, half of u each on average, and both together stay near 0.6 u of the output's
norm; 2 u if all of them round alike: the bound of ``norm``. A mask that is off by one of n tokens changes a row by
1 / sqrt(n) of its norm: 2.8e-2 at 1,279 tokens and 1.1e-2 at 8,448, against a bound of 7.8e-3 in bfloat16.

The experts round the inner activations, each expert's result and the sum: about 0.9 u of the norm; the bound is 2 u.
Weights are exact on both sides, because the reference takes what the packed bytes stand for. "w4a8" rounds activations
to E4M3, 4 bits: 2.6 % of a value on average, twice in a row about 4 %; against a reference that rounds likewise, only
values near a tie round differently after the inner activations' own rounding, about one in 60 in bfloat16, each by
2^-3 of itself: 1 %, bound 4 %. Float32 (the interpreter alone) only has the rounding of its sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dgcompile.plugins.block_attention import reference as attention_reference
from dgcompile.plugins.moe import formats
from dgcompile.plugins.moe import reference as moe_reference
from gpu import float64, kernels
from gpu.records import check
from gpu.shapes import FULL, PUBLISHED, PUBLISHED_CONTEXT, SLIDING, TINY, TINY_CONTEXT, DenoiserShape, LayerShape
from gpu.weights import ExpertWeights, Format, random_experts

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18}
"""u of each dtype. For float32 it stands for sums of a few hundred terms, each rounded by 2^-24."""

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ATTENTION_NORM, ATTENTION_ELEMENT, EXPERTS_NORM, EXPERTS_ELEMENT = 2.0, 1.05, 2.0, 8.0
FP8_SAME_ROUNDING, FP8_EXACT = 4e-2, 8e-2

HEAD_DIMS = (32, 64, 128, 256, 512)

# window, cache capacity, past_length of each of two rows
PASTS = [
    (0, 40, [0, 1]),
    (0, 40, [17, 40]),
    (8, 8, [0, 7]),  # window - 1
    (8, 8, [8, 9]),  # window, window + 1: the ring wraps
    (8, 8, [100, 5]),
    (8, 30, [25, 30]),  # a window over a cache that is no ring
    (24, 24, [20, 23]),  # past + block longer than the window
]
FEWER_PASTS = [PASTS[1], PASTS[4], PASTS[6]]

HIDDEN, INNER, EXPERTS, TOP_K = 80, 40, 16, 3
"""Widths of the small cases: one and a quarter blocks of INT4, and less than one; neither is a multiple of a tile."""


def dtypes(device: torch.device) -> list[torch.dtype]:
    """What is checked on this device: the interpreter's product of bfloat16 numbers is wrong."""
    return [torch.bfloat16, torch.float16] if device.type == "cuda" else [torch.float16]


def relative_norm(actual: Tensor, expected: Tensor) -> float:
    """Norm of the error over the norm of what is expected; NaN when anything is."""
    error: float = ((actual.double() - expected).norm() / expected.norm()).item()
    return error


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def attention_inputs(
    generator: torch.Generator,
    dtype: torch.dtype,
    *,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
    past: list[int],
) -> dict[str, Tensor]:
    """Unit normal inputs of BlockAttention; slots that were never written hold NaN, which must not spread."""
    batch = len(past)
    inputs = {
        "query": _normal(generator, batch, tokens, heads, head_dim),
        "key": _normal(generator, batch, tokens, kv_heads, head_dim),
        "value": _normal(generator, batch, tokens, kv_heads, head_dim),
        "past_key": _normal(generator, batch, capacity, kv_heads, head_dim),
        "past_value": _normal(generator, batch, capacity, kv_heads, head_dim),
    }
    for row, length in enumerate(past):
        inputs["past_key"][row, length:] = float("nan")
        inputs["past_value"][row, length:] = float("nan")
    tensors = {name: tensor.to(dtype) for name, tensor in inputs.items()}
    return {**tensors, "past_length": torch.tensor(past, dtype=torch.int32, device=generator.device)}


def judge_attention(name: str, actual: Tensor, expected: Tensor, magnitude: Tensor, again: Tensor) -> None:
    """Emit the checks of one call: error in norm, worst element, and whether a second run gave the same bits."""
    unit = UNIT[actual.dtype]
    limit = unit * (magnitude + expected.abs()) + 1e-30
    worst: float = ((actual.double() - expected).abs() / limit).max().item()
    norm = relative_norm(actual, expected)
    check(f"{name}: norm", norm, ATTENTION_NORM * unit, f"{ATTENTION_NORM:g} u, u = {unit:g}")
    check(f"{name}: element", worst, ATTENTION_ELEMENT, "in units of u (A + |o|): one rounding of weights and result")
    check(f"{name}: repeated", float(not torch.equal(actual, again)), 0.0, "equal inputs give equal bits")


def check_attention(head_dim: int, device: torch.device, quick: bool) -> None:
    """Small cases: windows, wrapped rings, empty caches, causal and not, with and without splits."""
    generator = torch.Generator(device).manual_seed(head_dim)
    every = head_dim == 32 or (head_dim == 256 and not quick)
    for dtype in dtypes(device):
        # Masks depend on no dtype, so the second one gets fewer.
        pasts = PASTS if every and dtype is dtypes(device)[0] else FEWER_PASTS
        # 11 and 21 tokens fill no tile; 3 query heads to a KV head divide none either.
        sizes = [(11, 4, 2, 1), (21, 3, 1, 4)]
        if device.type == "cpu":  # the interpreter takes seconds for each
            pasts, sizes = FEWER_PASTS[1:2], [(7, 3, 1, 2)]
        modes = (True, False) if dtype is dtypes(device)[0] else (False,)
        for window, capacity, past in pasts:
            for causal in modes:
                for tokens, heads, kv_heads, splits in sizes:
                    inputs = attention_inputs(
                        generator,
                        dtype,
                        tokens=tokens,
                        heads=heads,
                        kv_heads=kv_heads,
                        head_dim=head_dim,
                        capacity=capacity,
                        past=past,
                    )
                    mode: dict[str, Any] = {"scale": head_dim**-0.5, "window": window, "causal": causal}
                    expected, magnitude = _numpy_attention(inputs, mode)
                    name = (
                        f"attention {NAMES[dtype]} head_dim {head_dim} window {window} capacity {capacity} "
                        f"past {past} {'causal' if causal else 'bidirectional'} splits {splits}"
                    )
                    actual, again = (kernels.attention(**inputs, **mode, splits=splits) for _ in range(2))
                    judge_attention(name, actual, expected.to(device), magnitude.to(device), again)


def _numpy_attention(inputs: dict[str, Tensor], mode: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The numpy reference's result, and the one with the values' magnitudes."""
    arrays = {
        name: tensor.cpu().numpy() if name == "past_length" else tensor.cpu().double().numpy()
        for name, tensor in inputs.items()
    }
    absolute = {**arrays, "value": np.abs(arrays["value"]), "past_value": np.abs(arrays["past_value"])}
    results = [attention_reference.block_attention(**given, **mode) for given in (arrays, absolute)]
    return torch.from_numpy(results[0]), torch.from_numpy(results[1])


def check_attention_at_real_size(device: torch.device, quick: bool) -> None:
    """The model's two kinds of layers, one canvas on a full cache, with the splits that the project chooses."""
    real = device.type == "cuda"
    shape, context = (PUBLISHED, PUBLISHED_CONTEXT) if real else (TINY, TINY_CONTEXT)
    generator = torch.Generator(device).manual_seed(1)
    for layer in (SLIDING, FULL) if real else shape.layers:
        # A wrapped ring, and a cache that is three quarters full.
        past = [layer.window + layer.window // 3] if layer.window else [context - context // 4]
        for dtype in dtypes(device)[: 1 if quick else 2]:
            inputs = layer_inputs(shape, layer, layer.window or context, past, dtype, generator)
            # Scale 1 as in the model, whose queries and keys are normed: inputs with scores of a few units.
            for name in ("query", "key", "past_key"):
                inputs[name] = inputs[name] * layer.head_dim**-0.25
            mode: dict[str, Any] = {"scale": 1.0, "window": layer.window, "causal": False}
            expected, magnitude = float64.attention(**inputs, **mode)
            name = f"attention {NAMES[dtype]} real size head_dim {layer.head_dim} past {past[0]}"
            actual, again = (kernels.attention(**inputs, **mode) for _ in range(2))
            judge_attention(name, actual, expected, magnitude, again)


def layer_inputs(
    shape: DenoiserShape,
    layer: LayerShape,
    capacity: int,
    past: list[int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Unit normal inputs of one layer's attention over a canvas."""
    return attention_inputs(
        generator,
        dtype,
        tokens=shape.canvas_length,
        heads=shape.num_attention_heads,
        kv_heads=layer.num_key_value_heads,
        head_dim=layer.head_dim,
        capacity=capacity,
        past=past,
    )


def quantized(weight: np.ndarray, form: Format) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Packed weights, their scales, and the weights that those stand for."""
    if form.weight_format == "float":
        return weight, None, weight
    if form.weight_format == "fp8":
        codes, scale = formats.fp8_quantize(weight)
        return codes, scale, formats.fp8_dequantize(codes, scale)
    packed, int4_scale = formats.int4_quantize(weight, form.group_size)
    real = formats.int4_dequantize(packed, int4_scale, weight.shape[-1], form.group_size)
    return packed, np.asarray(int4_scale), real


def expert_loads(device: torch.device) -> dict[str, np.ndarray]:
    """Expert ids [T, K] of the small cases, by what they are."""
    rng = np.random.default_rng(0)
    if device.type == "cpu":  # the interpreter takes seconds for each expert
        return {"random": rng.permuted(np.tile(np.arange(TOP_K), (9, 1)), axis=1)}
    return {
        "random": np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(33)]),
        "one token": np.array([[3, 1, 15]]),
        "all tokens on one expert": np.full((21, TOP_K), 2),
        "empty experts": np.array([[0, 15, 14], [15, 0, 3], [0, 14, 3]]),
    }


def check_experts(form: Format, device: torch.device) -> None:
    """Small cases of one format: loads that leave tiles partly empty, with each tile that the project has."""
    rng = np.random.default_rng(1)
    experts = EXPERTS if device.type == "cuda" else TOP_K
    for dtype in dtypes(device):
        gate_up = rng.standard_normal((experts, 2 * INNER, HIDDEN)) / HIDDEN**0.5
        down = rng.standard_normal((experts, HIDDEN, INNER)) / INNER**0.5
        packed_gate_up, gate_up_scale, real_gate_up = quantized(_rounded(gate_up, dtype), form)
        packed_down, down_scale, real_down = quantized(_rounded(down, dtype), form)

        def on_device(array: np.ndarray | None, dtype: torch.dtype = dtype) -> Tensor | None:
            if array is None:
                return None
            tensor = torch.from_numpy(array).to(device)
            return tensor.to(dtype) if tensor.dtype == torch.float64 else tensor

        weights = ExpertWeights(
            form,
            on_device(packed_gate_up),  # type: ignore[arg-type]
            on_device(packed_down),  # type: ignore[arg-type]
            on_device(gate_up_scale),
            on_device(down_scale),
            HIDDEN,
            INNER,
        )
        for load, expert_ids in expert_loads(device).items():
            tokens = expert_ids.shape[0]
            hidden = _rounded(rng.standard_normal((tokens, HIDDEN)), dtype)
            if load == "random":
                hidden[7] = 0  # as the self-conditioning signal is at first: no scale may become a division by zero
            expert_weights = rng.random((tokens, TOP_K), dtype=np.float32)
            arguments = (hidden, expert_ids, expert_weights, real_gate_up, real_down)
            exact = torch.from_numpy(moe_reference.mixture_of_experts(*arguments)).to(device)
            rounded = None
            if form.weight_format == "w4a8":
                found = moe_reference.mixture_of_experts(*arguments, formats.fp8_round_rows)
                rounded = torch.from_numpy(found).to(device)
            inputs = (
                torch.from_numpy(hidden).to(device, dtype),
                torch.from_numpy(expert_ids).to(device, torch.int32),
                torch.from_numpy(expert_weights).to(device),
            )
            for tile in kernels.moe_tiles(inputs[0], TOP_K, weights):
                name = f"experts {form.name} {NAMES[dtype]} {load}, tile of {tile.block_m}"
                actual, again = (kernels.experts(*inputs, weights, tile) for _ in range(2))
                judge_experts(name, actual, exact, rounded, again)


def _rounded(array: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The float64 values that are left of an array in ``dtype``."""
    values: np.ndarray = torch.from_numpy(array).to(dtype).double().numpy()
    return values


def judge_experts(name: str, actual: Tensor, exact: Tensor, rounded: Tensor | None, again: Tensor) -> None:
    """Emit the checks of one call.

    Args:
        exact: float64, with exact activations.
        rounded: float64, with activations rounded to E4M3, of the format that does so; else None.
        again: a second run.
    """
    unit = UNIT[actual.dtype]
    if rounded is None:
        check(f"{name}: norm", relative_norm(actual, exact), EXPERTS_NORM * unit, f"{EXPERTS_NORM:g} u, u = {unit:g}")
        worst: float = ((actual.double() - exact).abs().max() / exact.abs().max()).item()
        check(f"{name}: element", worst, EXPERTS_ELEMENT * unit, f"{EXPERTS_ELEMENT:g} u of the largest value")
    else:
        norm = relative_norm(actual, rounded)
        check(f"{name}: norm, same rounding", norm, FP8_SAME_ROUNDING, "few activations near a tie round differently")
        check(f"{name}: norm", relative_norm(actual, exact), FP8_EXACT, "two roundings to E4M3: 4 % on average")
    check(f"{name}: repeated", float(not torch.equal(actual, again)), 0.0, "equal inputs give equal bits")


def check_experts_at_real_size(form: Format, device: torch.device, quick: bool) -> None:
    """One layer's experts on a canvas of 256 tokens (few for each expert), and on 2,048 (many)."""
    shape = PUBLISHED if device.type == "cuda" else TINY
    generator = torch.Generator(device).manual_seed(2)
    for dtype in dtypes(device)[:1]:
        weights = random_experts(
            form, shape.num_experts, shape.hidden_size, shape.moe_intermediate_size, dtype, generator
        )
        for tokens in (shape.canvas_length,) if quick else (shape.canvas_length, 8 * shape.canvas_length):
            inputs = expert_inputs(shape, tokens, dtype, generator)
            exact = float64.experts(*inputs, weights, round_activations=False)
            quantizes = form.weight_format == "w4a8"
            rounded = float64.experts(*inputs, weights, round_activations=True) if quantizes else None
            actual, again = (kernels.experts(*inputs, weights) for _ in range(2))
            name = f"experts {form.name} {NAMES[dtype]} real size {tokens} tokens"
            judge_experts(name, actual, exact, rounded, again)


def expert_inputs(
    shape: DenoiserShape, tokens: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Unit normal hidden states [T, H], and top_k different experts of each token with their weights, [T, K]."""
    hidden = _normal(generator, tokens, shape.hidden_size).to(dtype)
    scores = _normal(generator, tokens, shape.num_experts)
    weights, ids = scores.softmax(dim=-1).topk(shape.top_k_experts, dim=-1)
    return hidden, ids.to(torch.int32), weights / weights.sum(dim=-1, keepdim=True)
