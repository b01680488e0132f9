"""Device memory that a run of either graph needs besides weights and cache, and the traffic of the logits.

The rules were read off engines that TensorRT-RTX 1.7 built for an RTX 5090 from two layers of the published widths; the
builder says of each how much memory its activations take. They are upper bounds there (docs/plan.md has the figures)
and estimates elsewhere: other versions and TensorRT may fuse otherwise.
"""

from __future__ import annotations

from dgcompile.contract import GraphName
from dgcompile.plan.workload import Workload
from dgcompile.plugins.block_attention import launch as attention
from dgcompile.plugins.block_attention.tiles import tile_for
from dgcompile.plugins.moe import launch as moe

FLOAT32_COPIES = 5
"""Values of shape [B, L, V] in float32 that are in memory at once, by the list of the denoiser engine's layers: logits
by temperature, the same below their maximum, exponentials, probabilities, and these in the blocks of the draw."""

ITEM_COPIES = 1
"""Such values in the dtype of activations: the logits, later the probabilities that multiply the embedding."""

CPU_COPIES = 1
"""Such float32 values in the CPU target's denoiser, which goes over the vocabulary in chunks: the squashed logits."""

CPU_CHUNKS = 6 * 4096
"""Values for each position that it holds of a chunk: logits, weights and what is between them."""

FLOAT32_PASSES = 9
"""How often such a float32 value is written or read in a step, by the same list: five written, four read whole."""

ITEM_PASSES = 4
"""Likewise in the dtype of activations: logits and probabilities, written and read."""

HIDDEN_ROWS = 8
"""Rows of the hidden width that a token's intermediate results in a layer come to, the experts' and the attention's
workspaces aside: heads before and after rotation, the gated halves of the MLP, residuals, some of them in float32."""


def activation_bytes(workload: Workload) -> dict[GraphName, int]:
    """Bytes of the intermediate results of one run of each graph, at the limits.

    Runs follow one another, so both graphs share the larger of the two. The denoiser's peak is at the logits, where no
    layer's results are needed any more.
    """
    vocabulary = workload.canvas_tokens * workload.spec.vocab_size
    if workload.on_gpu:
        logits = vocabulary * (4 * FLOAT32_COPIES + workload.item_bytes * ITEM_COPIES)
    else:
        logits = 4 * (vocabulary * CPU_COPIES + workload.canvas_tokens * CPU_CHUNKS)
    hidden = workload.canvas_tokens * workload.spec.hidden_size * workload.item_bytes * HIDDEN_ROWS
    return {
        "encoder": _layer_bytes(workload, workload.new_tokens),
        "denoiser": max(logits + hidden, _layer_bytes(workload, workload.spec.canvas_length)),
    }


def vocabulary_traffic(workload: Workload) -> int:
    """Bytes of logits and probabilities that a denoising step writes and reads in device memory."""
    elements = workload.canvas_tokens * workload.spec.vocab_size
    return elements * (4 * FLOAT32_PASSES + workload.item_bytes * ITEM_PASSES)


def _layer_bytes(workload: Workload, tokens: int) -> int:
    """Bytes of one layer's intermediate results and its plugins' workspaces, for ``tokens`` tokens of every row."""
    spec, item = workload.spec, workload.item_bytes
    rows = workload.max_batch * tokens
    results = rows * spec.hidden_size * item * HIDDEN_ROWS
    shape = moe.Shape(rows, spec.top_k_experts, spec.num_experts, spec.hidden_size, spec.moe_intermediate_size)
    if not workload.on_gpu:
        # The operators' bodies in ONNX: the experts' pairs, and a layer's scores over the whole cache.
        pairs = shape.pairs * (shape.hidden + 3 * shape.inner) * item
        keys = workload.max_context + tokens
        return results + pairs + workload.max_batch * spec.num_attention_heads * tokens * keys * item
    weight_format, _ = workload.recipe.expert_format
    sm, multiprocessors = workload.target.sm, workload.target.multiprocessors or 1
    workspaces = [moe.workspace_limit(shape, sm, weight_format, item)]
    for layer in {(layer.num_key_value_heads, layer.head_dim, layer.window): layer for layer in spec.layers}.values():
        called = attention.Shape(
            workload.max_batch,
            tokens,
            spec.num_attention_heads,
            layer.num_key_value_heads,
            layer.head_dim,
            workload.max_context,
        )
        workspaces.append(attention.workspace_limit(called, sm, tile_for(sm, layer.head_dim), multiprocessors))
    return results + workspaces[0] + max(workspaces[1:])
