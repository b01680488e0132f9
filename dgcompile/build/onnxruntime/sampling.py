"""The sampler in one pass over the vocabulary, as nodes that ONNX Runtime runs fast on a CPU.

The traced sampler makes ten tensors [B, L, V], one after another: at 262,144 tokens 268 MB each for one canvas, through
memory and back. Here a loop (Scan) goes over the vocabulary in chunks that stay in the CPU's cache. For its chunk of
the embedding table it makes logits and weights, and adds to what is kept of all chunks: largest logit, sum of weights,
sum for the entropy, and the soft embeddings, all relative to the largest logit so far, as in online softmax (Milakov
and Gimelshein, arXiv 1805.02867). So the table is read once instead of twice, and of [B, L, V] only the squashed logits
are kept, from which the draw needs one block for each position.

What it computes is the same as :mod:`dgcompile.trace.sampler`, up to rounding: sums are made of partial sums.
"""

from __future__ import annotations

import onnx_ir as ir

from dgcompile.build.onnxruntime.matching import made_by, number_of
from dgcompile.build.onnxruntime.writer import Writer, take_over, view
from dgcompile.errors import TraceError
from dgcompile.trace.sampler import block_size

CHUNK = 4096
"""Tokens of a chunk at most: its logits for one canvas of 256 positions take 4 MB."""


def stream_sampler(graph: ir.Graph) -> None:
    """Replaces everything between the last hidden states and the outputs of the denoiser.

    Raises:
        TraceError: the graph does not end as the traced denoiser does.
    """
    parts = _Parts(graph)
    write = Writer(graph, "sampler")
    outputs = {value.name: value for value in graph.outputs}
    made = _write(graph, write, parts)
    write.put_before(parts.first)
    for name, value in made.items():
        take_over(outputs[name], value)


class _Parts:
    """What the traced sampler is made of.

    Attributes:
        first: the node of the logits.
        hidden: [B, L, H], normed.
        table: the embedding table as it is stored, [V, H].
        softcap: logits are ``softcap * tanh(. / softcap)``.
        embed_scale: scalar.
    """

    def __init__(self, graph: ir.Graph) -> None:
        outputs = {value.name: value for value in graph.outputs}
        scaled = made_by(outputs["next_self_conditioning"], "Mul")
        product = None if scaled is None else made_by(scaled.inputs[0], "MatMul")
        logits = next((node for node in graph if any(value.name == "logits" for value in node.outputs)), None)
        tanh = None if logits is None else made_by(logits.inputs[0], "Tanh")
        inside = None if tanh is None else made_by(tanh.inputs[0], "Div")
        linear = None if inside is None else made_by(inside.inputs[0], "MatMul")
        if scaled is None or product is None or inside is None or linear is None:
            raise TraceError("the denoiser does not end in softcapped logits and soft embeddings")
        softcap = number_of(inside.inputs[1])
        table, hidden, embed_scale = product.inputs[1], linear.inputs[0], scaled.inputs[1]
        cast = made_by(table, "Cast")
        table = table if cast is None else cast.inputs[0]
        if softcap is None or table is None or hidden is None or embed_scale is None or table.shape is None:
            raise TraceError("the denoiser's logits are not products with the embedding table")
        self.first, self.hidden, self.table = linear, hidden, table
        self.softcap, self.embed_scale = softcap, embed_scale
        self.vocab_size, self.width = (int(axis) for axis in table.shape if isinstance(axis, int))


def chunk_of(vocab_size: int, largest: int = CHUNK) -> int:
    """Tokens of a chunk: the largest divisor of the vocabulary, in whole blocks of the draw, up to ``largest``; the
    whole vocabulary where there is none."""
    size = block_size(vocab_size)
    fitting = [count for count in range(size, min(largest, vocab_size) + 1, size) if vocab_size % count == 0]
    return max(fitting, default=vocab_size)


def _write(graph: ir.Graph, write: Writer, parts: _Parts) -> dict[str, ir.Value]:
    inputs = {value.name: value for value in graph.inputs}
    vocab_size, width = parts.vocab_size, parts.width
    chunk = chunk_of(vocab_size)
    chunks = vocab_size // chunk
    size = block_size(vocab_size)
    blocks = -(-chunk // size)  # of a chunk
    canvas = write("Shape", inputs["canvas_ids"])  # [B, L]
    ones = write.ints(1)

    hidden = write("Reshape", parts.hidden, write.ints(-1, width))  # [M, H] with M = B * L
    per_row = write("Div", write.number(parts.softcap), inputs["temperature"])
    factor = write("Reshape", write("Expand", write("Unsqueeze", per_row, ones), canvas), write.ints(-1, 1))  # [M, 1]
    rows = write("Shape", hidden, start=0, end=1)
    column = write("Concat", rows, ones, axis=0)
    # tanh is never below -1, so this is below every logit.
    lowest = write("Expand", write.number(-2.0), column)
    nothing = write("Expand", write.number(0.0), column)
    no_embedding = write("Expand", write.number(0.0), write("Shape", hidden))
    table = view(graph, parts.table, f"{parts.table.name} in {chunks}", (chunks, chunk, width))

    body = _body(graph, write, hidden, factor, parts, chunk, size, blocks)
    largest, total, product, soft, squashed, tops, sums, largest_then = write.several(
        8, "Scan", lowest, nothing, nothing, no_embedding, table, body=body, num_scan_inputs=1
    )

    entropy = write("Sub", write("Log", total), write("Div", product, total))  # [M, 1]
    entropy_rows = write("Reshape", entropy, canvas)
    accepted = _accepted(write, entropy_rows, inputs["entropy_bound"])
    soft_embeddings = write("Mul", soft, write("Div", parts.embed_scale, total))
    soft_rows = write("Reshape", soft_embeddings, write("Concat", canvas, write.ints(width), axis=0))

    # Sums of a chunk's blocks are relative to the largest logit that was known then.
    then = write("Exp", write("Mul", write("Sub", largest_then, largest), factor))  # [n, M, 1]
    by_block = _by_row(write, write("Mul", sums, then), chunks * blocks)  # [M, n * blocks]
    flat = write("Reshape", squashed, write.ints(-1, size))  # [n * M * blocks, size]
    numbers = write("Unsqueeze", write("Range", write.integer(0), write("Squeeze", rows), write.integer(1)), ones)

    def block_of(place: ir.Value) -> ir.Value:
        """Squashed logits [M, size] of one block [M, 1] of each row."""
        chunk_number = write("Div", place, write.integer(blocks))
        inside = write("Sub", place, write("Mul", chunk_number, write.integer(blocks)))
        row = write("Add", write("Mul", chunk_number, rows), numbers)
        return write(
            "Gather", flat, write("Squeeze", write("Add", write("Mul", row, write.integer(blocks)), inside), ones)
        )

    best = write("ArgMax", _by_row(write, tops, chunks * blocks), axis=1, keepdims=1)
    best_token = write("ArgMax", block_of(best), axis=1, keepdims=1)

    uniform = write("Reshape", inputs["uniform"], write.ints(-1, 1))
    target = write("Mul", uniform, write("ReduceSum", by_block, write.ints(-1), keepdims=1))
    block, before = _pick(write, by_block, target)
    weights = write("Exp", write("Mul", write("Sub", block_of(block), largest), factor))
    token, _ = _pick(write, weights, write("Sub", target, before))

    def token_ids(block: ir.Value, inside: ir.Value) -> ir.Value:
        ids = write("Add", write("Mul", block, write.integer(size)), inside)
        return write("Cast", write("Reshape", ids, canvas), to=ir.DataType.INT32)

    return {
        "next_canvas_ids": write("Where", accepted, token_ids(block, token), inputs["noise_ids"]),
        "argmax_ids": token_ids(best, best_token),
        "next_self_conditioning": soft_rows,
        "accepted": accepted,
        "entropy": entropy_rows,
    }


def _body(
    graph: ir.Graph,
    outer: Writer,
    hidden: ir.Value,
    factor: ir.Value,
    parts: _Parts,
    chunk: int,
    size: int,
    blocks: int,
) -> ir.Graph:
    """One chunk of the vocabulary.

    Carried over: largest squashed logit [M, 1], sum of weights [M, 1], sum of weight times shifted logit [M, 1], soft
    embeddings [M, H]. Kept of each chunk: squashed logits [M, blocks * size], the largest of each block [M, blocks],
    the sum of each block [M, blocks], the largest so far [M, 1].
    """
    write = outer.inner("chunk")
    column, square = ir.Shape([None, 1]), ir.Shape([None, parts.width])
    kind = ir.TensorType(ir.DataType.FLOAT)
    old, total, product, soft = (
        ir.Value(name=f"sampler/{name}", shape=shape, type=kind)
        for name, shape in (("largest", column), ("total", column), ("product", column), ("soft", square))
    )
    stored_type = ir.TensorType(parts.table.dtype or ir.DataType.FLOAT)
    stored = ir.Value(name="sampler/table", shape=ir.Shape([chunk, parts.width]), type=stored_type)
    table = stored if stored_type.dtype == ir.DataType.FLOAT else write("Cast", stored, to=ir.DataType.FLOAT)

    squashed = write("Tanh", write("FusedMatMul", hidden, table, transB=1, alpha=1 / parts.softcap))  # [M, c]
    missing = blocks * size - chunk

    def in_blocks(values: ir.Value, filling: float) -> ir.Value:
        if missing:
            values = write("Pad", values, write.ints(0, 0, 0, missing), write.number(filling))
        return values

    def split(values: ir.Value) -> ir.Value:
        return write("Reshape", values, write.ints(-1, blocks, size))

    kept = in_blocks(squashed, -float("inf"))
    tops = write("ReduceMax", split(kept), write.ints(-1), keepdims=0)  # [M, blocks]
    largest = write("Max", old, write("ReduceMax", tops, write.ints(-1), keepdims=1))
    shifted = write("Mul", write("Sub", squashed, largest), factor)  # <= 0
    weights = write("Exp", shifted)
    sums = write("ReduceSum", split(in_blocks(weights, 0.0)), write.ints(-1), keepdims=0)
    added = write("ReduceSum", sums, write.ints(-1), keepdims=1)
    row = write.ints(1)
    dot = write("FusedMatMul", write("Unsqueeze", weights, row), write("Unsqueeze", shifted, row), transB=1)
    entropy = write("Squeeze", dot, row)  # [M, 1]

    lower = write("Mul", write("Sub", old, largest), factor)  # <= 0: what the earlier ones are shifted by
    shrink = write("Exp", lower)
    earlier = write("Mul", total, shrink)
    new_total = write("Add", earlier, added)
    moved = write("Add", write("Mul", product, shrink), write("Mul", earlier, lower))
    new_product = write("Add", moved, entropy)
    new_soft = write("Add", write("Mul", soft, shrink), write("MatMul", weights, table))
    then = write("Identity", largest)  # an output of its own
    outputs = [largest, new_total, new_product, new_soft, kept, tops, sums, then]
    return ir.Graph([old, total, product, soft, stored], outputs, nodes=write.nodes, name="sampler_chunk")


def _by_row(write: Writer, values: ir.Value, blocks: int) -> ir.Value:
    """[n, M, blocks of a chunk] -> [M, all blocks]."""
    return write("Reshape", write("Transpose", values, perm=[1, 0, 2]), write.ints(-1, blocks))


def _pick(write: Writer, weights: ir.Value, target: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Index [M, 1] at which the cumulative weight exceeds the target, and the sum before it; see ``trace.sampler``."""
    cumulative = write("CumSum", weights, write.integer(1))
    end = write("Slice", cumulative, write.ints(-1), write.ints(2**62), write.ints(1))

    def count(flags: ir.Value) -> ir.Value:
        return write("ReduceSum", write("Cast", flags, to=ir.DataType.INT64), write.ints(1), keepdims=1)

    index = write("Min", count(write("LessOrEqual", cumulative, target)), count(write("Less", cumulative, end)))
    previous = write("Max", write("Sub", index, write.integer(1)), write.integer(0))
    sum_before = write("GatherElements", cumulative, previous, axis=1)
    return index, write("Where", write("Greater", index, write.integer(0)), sum_before, write.number(0.0))


def _accepted(write: Writer, entropy: ir.Value, entropy_bound: ir.Value) -> ir.Value:
    """bool [B, L]: positions whose more certain ones stay in the bound; see ``trace.sampler.accept``."""
    own, other = write("Unsqueeze", entropy, write.ints(2)), write("Unsqueeze", entropy, write.ints(1))
    length = write("Squeeze", write("Shape", entropy, start=1, end=2))
    position = write("Range", write.integer(0), length, write.integer(1))
    earlier = write("Less", write("Unsqueeze", position, write.ints(0)), write("Unsqueeze", position, write.ints(1)))
    tied = write("And", write("Equal", other, own), earlier)
    counted = write("Where", write("Or", write("Less", other, own), tied), other, write.number(0.0))
    before = write("ReduceSum", counted, write.ints(2), keepdims=0)
    return write("LessOrEqual", before, write("Unsqueeze", entropy_bound, write.ints(1)))
