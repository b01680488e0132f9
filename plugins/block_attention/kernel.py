"""BlockAttention for GPUs: flash attention over two K/V sources, the cache and the new block, that are never joined.

One program takes a tile of query rows that share a KV head: row r of a (batch row, KV head) is query head ``r % GROUP``
of the group at token ``r // GROUP``, so every key and value that is read serves the whole group. It walks over tiles of
keys: first the cache slots in use, then the block. The walk may be cut into splits; each leaves its unnormalised
sums in a workspace and :func:`combine_kernel` adds them in a fixed order, so the result does not vary between runs.

Running maximum and sum are fp32, in units of log2: ``exp2(score * scale * log2(e) - maximum)``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _attend(
    query,  # [BLOCK_M, D]
    sums,  # [BLOCK_M, D] fp32
    maximum,  # [BLOCK_M] fp32
    total,  # [BLOCK_M] fp32
    key_tile,  # pointers [BLOCK_N, D]
    value_tile,  # pointers [BLOCK_N, D]
    exists,  # [BLOCK_N] bool: the row may be read
    visible,  # [BLOCK_M, BLOCK_N] bool
    scale_log2,
):
    """Take one tile of keys and values into the running sums."""
    # Rows that may not be read count as zeros: 0 x NaN would be NaN in the product with the values.
    keys = tl.load(key_tile, mask=exists[:, None], other=0.0)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    scores = tl.where(visible, scores, float("-inf"))
    # The scale is positive, so it can wait until after the maximum and become part of the exponent's multiply-add.
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale_log2)
    # A row that has seen nothing yet has maximum -inf, and -inf - -inf is NaN.
    pivot = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores * scale_log2 - pivot[:, None])
    shrink = tl.exp2(maximum - pivot)
    total = total * shrink + tl.sum(weights, 1)
    values = tl.load(value_tile, mask=exists[:, None], other=0.0)
    sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee")
    return sums, new_maximum, total


@triton.jit
def attention_kernel(
    query,  # [B, N, KV_HEADS * GROUP, D]
    key,  # [B, N, KV_HEADS, D]
    value,  # [B, N, KV_HEADS, D]
    past_key,  # [B, capacity, KV_HEADS, D]
    past_value,  # [B, capacity, KV_HEADS, D]
    past_length,  # i32 [B]
    output,  # [B, N, KV_HEADS * GROUP, D]; not touched when SPLIT
    partial_sums,  # fp32 [splits, B * N * KV_HEADS * GROUP, D]; not touched unless SPLIT
    partial_stats,  # fp32 [splits, B * N * KV_HEADS * GROUP, 2]: maximum and sum; not touched unless SPLIT
    batch,  # B
    tokens,  # N
    capacity,
    splits,
    scale_log2,  # fp32, positive: scale * log2(e)
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a KV head
    D: tl.constexpr,  # head_dim
    WINDOW: tl.constexpr,  # 0: none
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,  # whether there is more than one split
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (tile of query rows, split, batch row x KV head)."""
    split = tl.program_id(1)
    row = tl.program_id(2) // KV_HEADS
    kv_head = tl.program_id(2) % KV_HEADS

    # Query rows of this tile.
    member = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    token = member // GROUP
    head = kv_head * GROUP + member % GROUP
    first_token = tl.program_id(0) * BLOCK_M // GROUP
    last_token = tl.minimum((tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // GROUP, tokens - 1)
    width = tl.arange(0, D)
    # Index of the (token, query head) within its batch row; 32 bits, because 64 for each pointer would cost registers.
    place = token * (KV_HEADS * GROUP) + head
    row_start = row.to(tl.int64) * tokens * (KV_HEADS * GROUP)
    real = token < tokens
    queries = tl.load(query + row_start * D + (place[:, None] * D + width[None, :]), mask=real[:, None], other=0.0)

    # Cache slots [cache_low, used) are read. Before the cache wraps, slots are positions and the window's far end can
    # be left out; in a wrapped one any slot may be young enough. A tile beyond the window's reach reads none.
    # A negative length would be somebody's mistake; it must not become an address.
    past = tl.maximum(tl.load(past_length + row), 0)
    used = tl.minimum(past, capacity)
    cache_low = 0
    if WINDOW > 0:
        oldest = past - WINDOW + 1
        if CAUSAL:
            oldest += first_token
        if past <= capacity or oldest >= past:
            cache_low = tl.minimum(tl.maximum(oldest, 0), used)
        if oldest >= past:
            cache_low = used
    # Slots up to `newest` were written in the current lap, which began at position `lap`; the others one lap before.
    newest = (past - 1) % capacity
    lap = past - 1 - newest

    # Block tokens [block_low, block_high) are read.
    block_low = 0
    block_high = tokens
    if CAUSAL:
        block_high = last_token + 1
        if WINDOW > 0:
            block_low = tl.maximum(first_token - WINDOW + 1, 0)

    # Tiles of both sources are numbered through, so that the splits' loads are even.
    cache_tiles = tl.cdiv(used - cache_low, BLOCK_N)
    block_tiles = tl.cdiv(block_high - block_low, BLOCK_N)
    share = tl.cdiv(cache_tiles + block_tiles, splits)
    begin = split * share
    end = tl.minimum(begin + share, cache_tiles + block_tiles)

    sums = tl.zeros([BLOCK_M, D], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    column = tl.arange(0, BLOCK_N)
    # 64 bits for whole tiles, 32 within one: a long cache has more than 2^31 elements.
    inside = column[:, None] * (KV_HEADS * D) + width[None, :]  # [BLOCK_N, D]
    cache_start = (row.to(tl.int64) * capacity * KV_HEADS + kv_head) * D
    block_start = (row.to(tl.int64) * tokens * KV_HEADS + kv_head) * D

    for tile in range(begin, tl.minimum(end, cache_tiles)):
        first = cache_low + tile * BLOCK_N
        slot = first + column
        exists = slot < used
        visible = exists[None, :]
        if WINDOW > 0:
            position = lap + slot - tl.where(slot > newest, capacity, 0)
            if CAUSAL:
                visible = visible & (position[None, :] > past + token[:, None] - WINDOW)
            else:
                visible = visible & (position > past - WINDOW)[None, :]
        offset = cache_start + first.to(tl.int64) * (KV_HEADS * D)
        sums, maximum, total = _attend(
            queries,
            sums,
            maximum,
            total,
            past_key + offset + inside,
            past_value + offset + inside,
            exists,
            visible,
            scale_log2,
        )

    for tile in range(tl.maximum(begin, cache_tiles) - cache_tiles, end - cache_tiles):
        first = block_low + tile * BLOCK_N
        other = first + column
        exists = other < block_high
        visible = exists[None, :]
        if CAUSAL:
            visible = visible & (other[None, :] <= token[:, None])
            if WINDOW > 0:
                visible = visible & (other[None, :] > token[:, None] - WINDOW)
        offset = block_start + first.to(tl.int64) * (KV_HEADS * D)
        sums, maximum, total = _attend(
            queries,
            sums,
            maximum,
            total,
            key + offset + inside,
            value + offset + inside,
            exists,
            visible,
            scale_log2,
        )

    if not SPLIT:
        # Rows past the last token have seen nothing; they are not stored, but 0 / 0 is not worth having.
        result = sums / tl.where(total > 0, total, 1.0)[:, None]
        to = output + row_start * D
        tl.store(to + (place[:, None] * D + width[None, :]), result.to(output.dtype.element_ty), mask=real[:, None])
    else:
        row_start += split.to(tl.int64) * batch * tokens * (KV_HEADS * GROUP)
        tl.store(partial_sums + row_start * D + (place[:, None] * D + width[None, :]), sums, mask=real[:, None])
        tl.store(partial_stats + row_start * 2 + place * 2, maximum, mask=real)
        tl.store(partial_stats + row_start * 2 + place * 2 + 1, total, mask=real)


@triton.jit
def combine_kernel(
    partial_sums,  # fp32 [splits, rows, D]
    partial_stats,  # fp32 [splits, rows, 2]
    output,  # [rows, D]
    rows,  # B * N * query heads
    splits,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add the splits of ROWS output rows, first to last."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = place < rows
    width = tl.arange(0, D)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    for split in range(splits):
        found = tl.load(partial_stats + (tl.cast(split, tl.int64) * rows + place) * 2, mask=real, other=0.0)
        maximum = tl.maximum(maximum, found)
    sums = tl.zeros([ROWS, D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for split in range(splits):
        there = tl.cast(split, tl.int64) * rows + place
        # A split that saw nothing has maximum -inf: factor 0. Every row sees something in one of them.
        factor = tl.exp2(tl.load(partial_stats + there * 2, mask=real, other=0.0) - maximum)
        total += factor * tl.load(partial_stats + there * 2 + 1, mask=real, other=1.0)
        sums += factor[:, None] * tl.load(partial_sums + there[:, None] * D + width[None, :], mask=real[:, None])
    result = sums / total[:, None]
    tl.store(output + place[:, None] * D + width[None, :], result.to(output.dtype.element_ty), mask=real[:, None])
