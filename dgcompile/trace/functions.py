"""ONNX functions: the meaning of the custom nodes, so that any ONNX runtime executes the graphs as they are.

They are written for onnxruntime's CPU provider: nothing is computed on cache slots beyond those in use, and every
expert runs once on all of its tokens. Engines with a kernel of their own strip them.
"""

# mypy: ignore-errors
# (onnxscript reads the bodies below as ONNX: their Python types are those of the recorded graph, not of values.)

from __future__ import annotations

import onnx
from onnxscript import opset21 as op
from onnxscript import script

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
def MixtureOfExperts(hidden, expert_ids, expert_weights, gate_up, down):
    """See ``dgcompile.plugins.moe.reference``: tokens are sorted into a table [E, C], C = the busiest expert's load."""
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
    slot = ids * load + rank  # [T * K] place in the table
    pairs = op.Range(op.Constant(value_int=0), op.Squeeze(op.Shape(ids), zero), op.Constant(value_int=1))
    table = op.ScatterElements(op.Expand(op.Constant(value_int=0), experts * load), slot, op.Div(pairs, top_k), axis=0)
    gathered = op.Reshape(op.Gather(hidden, table), op.Concat(experts, load, width, axis=0))  # [E, C, H]
    gate, up = op.Split(op.MatMul(gathered, op.Transpose(gate_up, perm=[0, 2, 1])), num_outputs=2, axis=2)
    inner = op.Gelu(gate, approximate="tanh") * up  # [E, C, I]
    results = op.Reshape(op.MatMul(inner, op.Transpose(down, perm=[0, 2, 1])), op.Concat(minus_one, width, axis=0))
    by_choice = op.Reshape(op.Gather(results, slot), op.Concat(minus_one, top_k, width, axis=0))  # [T, K, H]
    weighted = by_choice * op.CastLike(op.Unsqueeze(expert_weights, op.Constant(value_ints=[2])), hidden)
    return op.ReduceSum(weighted, one, keepdims=0)


def function_protos() -> list[onnx.FunctionProto]:
    """The functions to attach to a model, with every attribute that a node may carry declared."""
    attention = BlockAttention.to_function_proto()
    experts = MixtureOfExperts.to_function_proto()
    # The function above serves unpacked weights; the attributes tell kernels what they get.
    declared = {*experts.attribute, *(attribute.name for attribute in experts.attribute_proto)}
    experts.attribute.extend(name for name in ("activation", "weight_format", "group_size") if name not in declared)
    return [attention, experts]
