"""BlockAttention in nodes that ONNX Runtime runs fast on a CPU; what it means: ``dgcompile.plugins.block_attention``.

Two things make the difference to a plain reading of the definition. Scores are the largest tensor of a layer by far, so
they are touched as rarely as possible: keys of cache and block are joined first (they are small) instead of scores, and
where a mask depends on the key alone, as in the denoiser, it is one more element of each key, which the queries meet
with a one; it costs no pass over the scores. And the mask is made once for all layers of a kind, not in each.

The session's caches are finite in every slot, used or not: a slot that nobody sees has weight zero.
"""

from __future__ import annotations

import onnx_ir as ir

from dgcompile.build.onnxruntime.writer import Writer, take_over

_UNSEEN = -1e9
"""Score of a key that must not be seen, far below all others: its exponential is zero, as that of -inf would be, but
zero times it is zero."""


def write_attention(graph: ir.Graph) -> int:
    """Replaces the BlockAttention nodes; returns how many there were."""
    masks: dict[tuple[object, ...], _Mask] = {}
    nodes = [node for node in graph if node.op_type == "BlockAttention"]
    for node in nodes:
        key, past_key = node.inputs[1], node.inputs[3]
        assert key is not None and past_key is not None and key.shape is not None
        window, causal = node.attributes.get_int("window", 0), node.attributes.get_int("causal", 0)
        kind = (key.shape[2], key.shape[3], window, causal)
        if kind not in masks:
            masks[kind] = _Mask(graph, node, window, causal)
        _write(graph, node, masks[kind])
    return len(nodes)


class _Mask:
    """Which keys the queries of one kind of layer see. Layers of a kind have caches of the same capacity.

    Attributes:
        used: int64 [1], slots that the longest row uses.
        by_key: float32 [B, S + N, 1, 1]: what is added to the scores of each key; None where it differs by query.
        by_query: float32 [B, 1, 1, N, S + N]: likewise, None where the keys are enough.
    """

    def __init__(self, graph: ir.Graph, node: ir.Node, window: int, causal: int) -> None:
        write = Writer(graph, f"{node.name}/mask")
        query, past_key, past_length = node.inputs[0], node.inputs[3], node.inputs[5]
        tokens = write("Shape", query, start=1, end=2)
        capacity = write("Shape", past_key, start=1, end=2)
        past = write("Unsqueeze", write("Cast", past_length, to=ir.DataType.INT64), write.ints(1))  # [B, 1]
        longest = write("ReduceMax", past, write.ints(0, 1), keepdims=0)
        # At least one slot, so that no axis is empty.
        self.used = write("Max", write("Min", write("Unsqueeze", longest, write.ints(0)), capacity), write.ints(1))
        zero, one = write.integer(0), write.integer(1)
        slots = write("Range", zero, write("Squeeze", self.used), one)  # [S]
        block = write("Range", zero, write("Squeeze", tokens), one)  # [N]
        # A slot holds the latest position before past_length that is congruent to it; negative: never written.
        last = write("Sub", past, one)
        held = write("Sub", last, write("Mod", write("Sub", last, slots), capacity))  # [B, S]
        self.by_key = self.by_query = None
        if causal:
            self.by_query = _causal(write, held, past, block, window)
        else:
            seen = write("GreaterOrEqual", held, zero)
            if window:
                recent = write("Greater", held, write("Sub", past, write.integer(window)))
                seen = write("And", seen, recent)
            cached = write("Where", seen, write.number(0.0), write.number(_UNSEEN))
            whole = write("Concat", write("Shape", past, start=0, end=1), tokens, axis=0)
            both = write("Concat", cached, write("Expand", write.number(0.0), whole), axis=1)  # [B, S + N]
            self.by_key = write("Unsqueeze", both, write.ints(2, 3))
        write.put_before(node)


def _causal(write: Writer, held: ir.Value, past: ir.Value, block: ir.Value, window: int) -> ir.Value:
    zero = write.integer(0)
    queries = write("Unsqueeze", block, write.ints(1))  # [N, 1]
    seen = write("Unsqueeze", write("GreaterOrEqual", held, zero), write.ints(1))  # [B, 1, S]
    distance = write("Sub", queries, write("Unsqueeze", block, write.ints(0)))  # [N, N]
    earlier = write("GreaterOrEqual", distance, zero)
    position = write("Add", write("Unsqueeze", past, write.ints(1)), queries)  # [B, N, 1]
    if window:
        size = write.integer(window)
        recent = write("Greater", write("Unsqueeze", held, write.ints(1)), write("Sub", position, size))
        seen = write("And", seen, recent)  # [B, N, S]
        earlier = write("And", earlier, write("Less", distance, size))
    else:
        seen = write("Expand", seen, write("Shape", position))
    wide = write("Concat", write("Shape", position, start=0, end=2), write("Shape", block), axis=0)
    visible = write("Concat", seen, write("Expand", earlier, wide), axis=2)
    scores = write("Where", visible, write.number(0.0), write.number(_UNSEEN))
    return write("Unsqueeze", scores, write.ints(1, 2))  # [B, 1, 1, N, S + N]


def _write(graph: ir.Graph, node: ir.Node, mask: _Mask) -> None:
    query, key, value, past_key, past_value, _ = node.inputs
    assert query is not None and key is not None and query.shape is not None and key.shape is not None
    heads, width, kv_heads = query.shape[2], query.shape[3], key.shape[2]
    assert isinstance(heads, int) and isinstance(width, int) and isinstance(kv_heads, int)
    group = heads // kv_heads
    scale = node.attributes.get_float("scale")
    write = Writer(graph, f"{node.name}")

    def joined(past: ir.Value | None, new: ir.Value | None, *more: ir.Value) -> ir.Value:
        """Cache and block by head, [B, Hkv, S + N, D]."""
        used = write("Slice", past, write.ints(0), mask.used, write.ints(1))
        states = write("Concat", used, new, axis=1)  # [B, S + N, Hkv, D]
        for extra in more:
            states = write("Concat", states, extra, axis=3)
        return write("Transpose", states, perm=[0, 2, 1, 3])

    # The query heads of one KV head share its keys: [B, Hkv, G * N, D].
    grouped = write("Reshape", query, write.ints(0, 0, kv_heads, group, width))
    by_head = write("Transpose", grouped, perm=[0, 2, 3, 1, 4])  # [B, Hkv, G, N, D]
    rows = write("Reshape", by_head, write.ints(0, kv_heads, -1, width))
    if mask.by_key is not None:
        count = write("Shape", rows, start=0, end=3)
        ones = write("Expand", write.number(1.0), write("Concat", count, write.ints(1), axis=0))
        rows = write("Concat", rows, ones, axis=3)
        lengths = write("Shape", mask.by_key, start=0, end=2)
        extra = write("Expand", mask.by_key, write("Concat", lengths, write.ints(kv_heads, 1), axis=0))
        scores = write("FusedMatMul", rows, joined(past_key, key, extra), transB=1, alpha=scale)
    else:
        scores = write("FusedMatMul", rows, joined(past_key, key), transB=1, alpha=scale)
        assert mask.by_query is not None
        apart = write("Concat", write("Shape", by_head, start=0, end=4), write.ints(-1), axis=0)
        masked = write("Add", write("Reshape", scores, apart), mask.by_query)  # [B, Hkv, G, N, S + N]
        scores = write("Reshape", masked, write("Shape", scores))
    output = write("MatMul", write("Softmax", scores, axis=-1), joined(past_value, value))  # [B, Hkv, G * N, D]
    split = write("Concat", write("Shape", by_head, start=0, end=4), write.ints(width), axis=0)
    back = write("Transpose", write("Reshape", output, split), perm=[0, 3, 1, 2, 4])
    result = write("Reshape", back, write.ints(0, 0, heads, width))
    write.put_before(node)
    take_over(node.outputs[0], result)
