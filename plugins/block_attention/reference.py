"""What BlockAttention computes, in float64 and without any cleverness: the yardstick for every other implementation."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating]


def cached_positions(capacity: int, past_length: int) -> npt.NDArray[np.int64]:
    """Position of the token held by each cache slot, [capacity]; a slot never written has a negative one.

    Token p lies in slot ``p % capacity``, so slot s holds the latest p < past_length with ``p % capacity == s``. The
    same rule serves a ring (capacity = window) and a cache that never wraps (capacity >= past_length).
    """
    slots = np.arange(capacity)
    return past_length - 1 - (past_length - 1 - slots) % capacity


def block_attention(
    query: FloatArray,
    key: FloatArray,
    value: FloatArray,
    past_key: FloatArray,
    past_value: FloatArray,
    past_length: npt.NDArray[np.integer],
    *,
    scale: float,
    window: int,
    causal: bool,
) -> npt.NDArray[np.float64]:
    """Attention of a block of N new tokens over the cached tokens and the block.

    Row b's block stands at positions ``past_length[b] .. past_length[b] + N - 1``. A query at position p sees

    * causal (encoder): tokens at positions ``p - window + 1 .. p``, cached or in the block;
    * otherwise (denoiser): the last ``window - 1`` cached tokens and the whole block, whatever its distance;

    with ``window`` 0 there is no lower limit. Queries and keys carry their rotary embedding already.

    Args:
        query: [B, N, Hq, D].
        key, value: the block's own, [B, N, Hkv, D]; query head h reads KV head ``h // (Hq / Hkv)``.
        past_key, past_value: the cache, [B, C, Hkv, D], see :func:`cached_positions`.
        past_length: [B], tokens cached so far.
        scale: multiplies the scores (1.0 in DiffusionGemma, whose queries and keys are normed).
        window: tokens that a query looks back on including itself; 0 = all.
        causal: see above.

    Returns:
        [B, N, Hq, D] in float64.
    """
    batch, tokens, heads, width = query.shape
    group = heads // key.shape[2]
    output = np.zeros((batch, tokens, heads, width))
    for row in range(batch):
        past = int(past_length[row])
        cached = cached_positions(past_key.shape[1], past)
        block = past + np.arange(tokens)
        for index, position in enumerate(block):
            if causal:
                lowest = position - window + 1 if window else 0
                sees_cached = (cached >= 0) & (cached >= lowest)
                sees_block = (block <= position) & (block >= lowest)
            else:
                sees_cached = (cached >= 0) & (cached >= (past - window + 1 if window else 0))
                sees_block = np.ones(tokens, dtype=bool)
            for head in range(heads):
                kv_head = head // group
                keys = np.concatenate([past_key[row, sees_cached, kv_head], key[row, sees_block, kv_head]])
                values = np.concatenate([past_value[row, sees_cached, kv_head], value[row, sees_block, kv_head]])
                scores = keys.astype(np.float64) @ query[row, index, head].astype(np.float64) * scale
                weights = np.exp(scores - scores.max())
                output[row, index, head] = weights @ values.astype(np.float64) / weights.sum()
    return output
