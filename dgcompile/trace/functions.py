"""ONNX functions: the meaning of the custom nodes, so that any ONNX runtime executes the graphs as they are.

Evaluations and comparisons run them in onnxruntime, so they waste little: nothing is computed on cache slots beyond
those in use, and every expert runs once on all of its tokens. Every engine has something of its own in their place.
"""

# mypy: ignore-errors
# (onnxscript reads the bodies below as ONNX: their Python types are those of the recorded graph, not of values.)

from __future__ import annotations

import onnx
from onnxscript import graph, script
from onnxscript import opset21 as op

from dgcompile.plugins.moe.formats import FP8_MAX, INT4_BLOCK, WeightFormat
from dgcompile.trace.nodes import DOMAIN

OPSET = 21
"""Version of the ONNX operator set of the graphs: the first with 4-bit integers and blocked DequantizeLinear."""


@script(DOMAIN, default_opset=op)
def BlockAttention(query, key, value, past_key, past_value, past_length, scale: float, window: int, causal: int):
    """See ``dgcompile.plugins.block_attention.reference``."""
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    minus_one = op.Constant(value_ints=[-1])
    window_ = op.Constant(value_int=window)
    causal_ = op.Cast(op.Constant(value_int=causal), to=9)
    unlimited = window_ == op.Constant(value_int=0)

    batch = op.Shape(query, start=0, end=1)
    tokens = op.Shape(query, start=1, end=2)
    heads = op.Shape(query, start=2, end=3)
    width = op.Shape(query, start=3, end=4)
    kv_heads = op.Shape(key, start=2, end=3)
    capacity = op.Shape(past_key, start=1, end=2)

    # Slots in use by the longest row; the rest of the cache is never touched. At least one, so that no axis is empty.
    past = op.Unsqueeze(op.Cast(past_length, to=7), one)  # [B, 1]
    longest = op.ReduceMax(past, keepdims=0)
    used = op.Max(op.Min(op.Unsqueeze(longest, zero), capacity), one)  # [1]
    used_key = op.Slice(past_key, zero, used, one)  # [B, S, Hkv, D]
    used_value = op.Slice(past_value, zero, used, one)

    # Which position a slot holds: the latest one before past_length that is congruent to it (negative: never written).
    slots = op.Range(op.Constant(value_int=0), op.Squeeze(used, zero), op.Constant(value_int=1))  # [S]
    last = past - one
    cached = last - op.Mod(last - slots, capacity)  # [B, S]
    written = cached >= zero  # [B, S]
    block = op.Range(op.Constant(value_int=0), op.Squeeze(tokens, zero), op.Constant(value_int=1))  # [N]
    queries = op.Unsqueeze(block, one)  # [N, 1]
    start = op.Unsqueeze(past, one)  # [B, 1, 1]
    query_position = op.Where(causal_, start + queries, start + queries * zero)  # [B, N, 1]
    recent = op.Unsqueeze(cached, one) > query_position - window_  # [B, N, S]
    sees_cached = op.And(op.Unsqueeze(written, one), op.Or(unlimited, recent))
    distance = queries - op.Unsqueeze(block, zero)  # [N, N]
    past_or_self = op.And(distance >= zero, op.Or(unlimited, distance < window_))
    sees_block = op.Or(op.Not(causal_), past_or_self)  # [N, N]
    block_shape = op.Concat(batch, tokens, tokens, axis=0)
    visible = op.Concat(sees_cached, op.Expand(sees_block, block_shape), axis=2)  # [B, N, S + N]
    by_head = op.Unsqueeze(visible, op.Constant(value_ints=[1, 2]))  # [B, 1, 1, N, S + N]

    # The query heads of one KV head share its keys: [B, Hkv, G * N, D] against [B, Hkv, S, D].
    group = op.Div(heads, kv_heads)
    by_group = op.Reshape(query, op.Concat(batch, tokens, kv_heads, group, width, axis=0))
    rows = op.Reshape(
        op.Transpose(by_group, perm=[0, 2, 3, 1, 4]), op.Concat(batch, kv_heads, minus_one, width, axis=0)
    )
    cached_scores = op.MatMul(rows, op.Transpose(used_key, perm=[0, 2, 3, 1]))  # [B, Hkv, G * N, S]
    block_scores = op.MatMul(rows, op.Transpose(key, perm=[0, 2, 3, 1]))  # [B, Hkv, G * N, N]
    scores = op.Cast(op.Concat(cached_scores, block_scores, axis=3), to=1) * op.Constant(value_float=scale)
    by_query = op.Reshape(scores, op.Concat(batch, kv_heads, group, tokens, minus_one, axis=0))
    weights = op.Softmax(op.Where(by_head, by_query, op.Constant(value_float=float("-inf"))), axis=4)
    weights_2d = op.CastLike(op.Reshape(weights, op.Shape(scores)), query)
    last_axis = op.Constant(value_ints=[3])
    far = op.Constant(value_ints=[9223372036854775807])
    cached_weights = op.Slice(weights_2d, zero, used, last_axis)
    block_weights = op.Slice(weights_2d, used, far, last_axis)

    # A slot that was never written may hold anything, NaN included: 0 * NaN must not reach the sum.
    nothing = op.CastLike(op.Constant(value_float=0.0), query)
    safe_value = op.Where(op.Unsqueeze(written, op.Constant(value_ints=[2, 3])), used_value, nothing)
    output = op.MatMul(cached_weights, op.Transpose(safe_value, perm=[0, 2, 1, 3])) + op.MatMul(
        block_weights, op.Transpose(value, perm=[0, 2, 1, 3])
    )  # [B, Hkv, G * N, D]
    split = op.Reshape(output, op.Concat(batch, kv_heads, group, tokens, width, axis=0))
    return op.Reshape(op.Transpose(split, perm=[0, 3, 1, 2, 4]), op.Shape(query))


@script(DOMAIN, default_opset=op)
def GatherRows(hidden, expert_ids, gate_up):
    """Tokens sorted into a table of experts: rows [E, C, H], C the busiest expert's load, and each choice's place.

    ``slot`` [T * K] is where a token's k-th choice lies among the E * C rows. Places that no token fills hold token 0.
    """
    zero = op.Constant(value_ints=[0])
    one = op.Constant(value_ints=[1])
    minus_one = op.Constant(value_ints=[-1])
    experts = op.Shape(gate_up, start=0, end=1)
    top_k = op.Shape(expert_ids, start=1, end=2)
    width = op.Shape(hidden, start=1, end=2)
    ids = op.Cast(op.Reshape(expert_ids, minus_one), to=7)  # [T * K]
    chosen = op.OneHot(ids, experts, op.Constant(value_ints=[0, 1]))  # [T * K, E]
    before = op.CumSum(chosen, op.Constant(value_int=0), exclusive=1)
    rank = op.ReduceSum(chosen * before, one, keepdims=0)  # [T * K] how many earlier tokens chose the same expert
    load = op.ReduceMax(op.ReduceSum(chosen, zero, keepdims=0), keepdims=1)  # [1]
    slot = ids * load + rank
    pairs = op.Range(op.Constant(value_int=0), op.Squeeze(op.Shape(ids), zero), op.Constant(value_int=1))
    table = op.ScatterElements(op.Expand(op.Constant(value_int=0), experts * load), slot, op.Div(pairs, top_k), axis=0)
    rows = op.Reshape(op.Gather(hidden, table), op.Concat(experts, load, width, axis=0))
    return rows, slot


@script(DOMAIN, default_opset=op)
def SumOfChoices(results, slot, expert_weights):
    """Results [E, C, H] of the rows back at their tokens: the weighted sum over each token's choices, [T, H]."""
    one = op.Constant(value_ints=[1])
    minus_one = op.Constant(value_ints=[-1])
    top_k = op.Shape(expert_weights, start=1, end=2)
    width = op.Shape(results, start=2, end=3)
    rows = op.Reshape(results, op.Concat(minus_one, width, axis=0))
    by_choice = op.Reshape(op.Gather(rows, slot), op.Concat(minus_one, top_k, width, axis=0))  # [T, K, H]
    weighted = op.Cast(by_choice, to=1) * op.Unsqueeze(expert_weights, op.Constant(value_ints=[2]))
    return op.CastLike(op.ReduceSum(weighted, one, keepdims=0), results)


@script(DOMAIN, default_opset=op)
def RoundRows(rows):
    """What is left of activations [.., K] in E4M3 with one scale per row, float32.

    A row of zeros has scale 1. A subnormal scale may be rounded down by so much that the quotient passes 448.
    """
    wide = op.Cast(rows, to=1)
    limit = op.Constant(value_float=FP8_MAX)
    largest = op.ReduceMax(op.Abs(wide), op.Constant(value_ints=[-1]), keepdims=1)
    wanted = largest / limit
    scale = op.Where(wanted > op.Constant(value_float=0.0), wanted, op.Constant(value_float=1.0))
    codes = op.Cast(op.Clip(wide / scale, op.Neg(limit), limit), to=17)
    return op.Cast(codes, to=1) * scale


@script(DOMAIN, default_opset=op)
def UnpackInt4(packed, scales):
    """One expert's weights of bytes [blocks, N, 32] and scales [groups, N]: float32 [N, 64 * blocks].

    Bits 0 to 2 of a nibble are the magnitude, bit 3 is the sign; the high nibble is 32 places after the low one.
    """
    zero = op.Constant(value_ints=[0])
    two = op.Constant(value_ints=[2])
    minus_one = op.Constant(value_ints=[-1])
    blocks = op.Shape(packed, start=0, end=1)
    rows = op.Shape(packed, start=1, end=2)
    by_row = op.Transpose(packed, perm=[1, 0, 2])
    high = op.BitShift(by_row, op.Cast(op.Constant(value_int=4), to=2), direction="RIGHT")
    # Nibbles in the lower half of each byte, [N, blocks, 2, 32]; the upper half is masked off below.
    nibbles = op.Concat(op.Unsqueeze(by_row, two), op.Unsqueeze(high, two), axis=2)
    magnitude = op.Cast(op.BitwiseAnd(nibbles, op.Cast(op.Constant(value_int=7), to=2)), to=1)
    sign = op.Cast(op.BitwiseAnd(nibbles, op.Cast(op.Constant(value_int=8), to=2)), to=1)  # 0 or 8
    codes = magnitude * (op.Constant(value_float=1.0) - sign * op.Constant(value_float=0.25))

    # More groups than blocks: two groups in a block, though the last block may lack its second one.
    groups = op.Shape(scales, start=0, end=1)
    all_groups = op.Where(groups > blocks, blocks + blocks, blocks)
    missing = op.Concat(zero, zero, zero, all_groups - groups, axis=0)
    by_group = op.Pad(op.Transpose(op.Cast(scales, to=1), perm=[1, 0]), missing)  # [N, all_groups]
    grouped = op.Reshape(codes, op.Concat(rows, all_groups, minus_one, axis=0))
    return op.Reshape(grouped * op.Unsqueeze(by_group, two), op.Concat(rows, minus_one, axis=0))


@script(DOMAIN, default_opset=op)
def MultiplyInt4(rows, packed, scales):
    """Rows [C, K] times one expert's weights of :func:`UnpackInt4`: float32 [C, N]."""
    zero = op.Constant(value_ints=[0])
    wide = op.Cast(rows, to=1)
    places = op.Shape(packed, start=0, end=1) * op.Constant(value_ints=[INT4_BLOCK])
    missing = places - op.Shape(rows, start=1, end=2)
    filled = op.Pad(wide, op.Concat(zero, zero, zero, missing, axis=0))  # weights are zero in the rest of their block
    return op.Gemm(filled, UnpackInt4(packed, scales), transB=1)


@script(DOMAIN, default_opset=op)
def FloatExperts(hidden, expert_ids, expert_weights, gate_up, down):
    """See ``dgcompile.plugins.moe.reference``; every expert runs once, on all of its tokens."""
    rows, slot = GatherRows(hidden, expert_ids, gate_up)
    gate, up = op.Split(op.MatMul(rows, op.Transpose(gate_up, perm=[0, 2, 1])), num_outputs=2, axis=2)
    inner = op.Gelu(gate, approximate="tanh") * up  # [E, C, I]
    return SumOfChoices(op.MatMul(inner, op.Transpose(down, perm=[0, 2, 1])), slot, expert_weights)


# Packed weights are scanned over, so that never more than one expert's are unpacked. As in the kernels, sums are
# float32, and the inner activations and the results are rounded to the type of the hidden states.


@script(DOMAIN, default_opset=op)
def Fp8Experts(hidden, expert_ids, expert_weights, gate_up, down, gate_up_scale, down_scale):
    """The same with weights in E4M3, one scale per output channel."""

    @graph()
    def expert(x, gate_up_codes, gate_up_scales, down_codes, down_scales):
        both = op.Gemm(op.Cast(x, to=1), op.Cast(gate_up_codes, to=1), transB=1) * gate_up_scales
        gate, up = op.Split(both, num_outputs=2, axis=1)
        inner = op.CastLike(op.Gelu(gate, approximate="tanh") * up, x)
        result = op.Gemm(op.Cast(inner, to=1), op.Cast(down_codes, to=1), transB=1) * down_scales
        return op.CastLike(result, x)

    rows, slot = GatherRows(hidden, expert_ids, gate_up)
    results = op.Scan(rows, gate_up, gate_up_scale, down, down_scale, body=expert, num_scan_inputs=5)
    return SumOfChoices(results, slot, expert_weights)


@script(DOMAIN, default_opset=op)
def Int4Experts(hidden, expert_ids, expert_weights, gate_up, down, gate_up_scale, down_scale):
    """The same with weights in INT4."""

    @graph()
    def expert(x, gate_up_bytes, gate_up_scales, down_bytes, down_scales):
        gate, up = op.Split(MultiplyInt4(x, gate_up_bytes, gate_up_scales), num_outputs=2, axis=1)
        inner = op.CastLike(op.Gelu(gate, approximate="tanh") * up, x)
        return op.CastLike(MultiplyInt4(inner, down_bytes, down_scales), x)

    rows, slot = GatherRows(hidden, expert_ids, gate_up)
    results = op.Scan(rows, gate_up, gate_up_scale, down, down_scale, body=expert, num_scan_inputs=5)
    return SumOfChoices(results, slot, expert_weights)


@script(DOMAIN, default_opset=op)
def W4a8Experts(hidden, expert_ids, expert_weights, gate_up, down, gate_up_scale, down_scale):
    """The same with weights in INT4, and activations rounded to E4M3 before each product."""

    @graph()
    def expert(x, gate_up_bytes, gate_up_scales, down_bytes, down_scales):
        gate, up = op.Split(MultiplyInt4(RoundRows(x), gate_up_bytes, gate_up_scales), num_outputs=2, axis=1)
        inner = op.CastLike(op.Gelu(gate, approximate="tanh") * up, x)
        return op.CastLike(MultiplyInt4(RoundRows(inner), down_bytes, down_scales), x)

    rows, slot = GatherRows(hidden, expert_ids, gate_up)
    results = op.Scan(rows, gate_up, gate_up_scale, down, down_scale, body=expert, num_scan_inputs=5)
    return SumOfChoices(results, slot, expert_weights)


_EXPERTS = {
    "float": [FloatExperts],
    "fp8": [Fp8Experts],
    "int4": [Int4Experts, MultiplyInt4, UnpackInt4],
    "w4a8": [W4a8Experts, RoundRows, MultiplyInt4, UnpackInt4],
}


def function_protos(weight_format: WeightFormat = "float") -> list[onnx.FunctionProto]:
    """The functions to attach to a model: what its custom nodes mean, and what those functions call.

    Every attribute that a node may carry is declared.

    Args:
        weight_format: of the experts. ``MixtureOfExperts`` has one name and another body for each format.
    """
    experts, *called = (script.to_function_proto() for script in [*_EXPERTS[weight_format], GatherRows, SumOfChoices])
    experts.name = "MixtureOfExperts"
    # The bodies know what they serve; the attributes tell kernels what they get.
    experts.attribute.extend(["activation", "weight_format", "group_size"])
    return [BlockAttention.to_function_proto(), experts, *called]
