"""Sorts the (token, expert) pairs by expert into tiles of equal height, in the Triton language."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _experts(expert_ids, pair, inside, EXPERTS: tl.constexpr):
    """Experts of pairs. An id out of range counts as the nearest one: it must neither address foreign weights nor
    leave a pair without a result.
    """
    ids = tl.load(expert_ids + pair, mask=inside, other=0).to(tl.int32)
    return tl.minimum(tl.maximum(ids, 0), EXPERTS - 1)


@triton.jit
def route_kernel(
    expert_ids,
    tile_pairs,
    tile_expert,
    tile_count,
    pairs,
    EXPERTS: tl.constexpr,
    EXPERT_BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program e writes the tiles of expert e. A pair is the number ``token * top_k + choice``.

    Args:
        expert_ids: [pairs], of each pair; see :func:`_experts` for ids out of range.
        tile_pairs: i32 [tile_limit, BLOCK_M], out: pairs of each tile, ascending; free places hold ``pairs``.
        tile_expert: i32 [tile_limit], out: the expert of each tile.
        tile_count: i32 [1], out: tiles in use.
        pairs: tokens * top_k.
        EXPERTS: number of experts, and of programs.
        EXPERT_BINS: the next power of two.
        BLOCK_M: rows of a tile.
        CHUNK: pairs read at once.

    Every program counts all experts again, instead of waiting for another kernel to do so: 2048 pairs are two
    steps. Places follow from positions and integer counts alone, so the order never varies.
    """
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros([EXPERT_BINS], tl.int32)
    for start in range(0, pairs, CHUNK):
        inside = start + lane < pairs
        ids = _experts(expert_ids, start + lane, inside, EXPERTS)
        counts += tl.histogram(ids, EXPERT_BINS, mask=inside)

    bins = tl.arange(0, EXPERT_BINS)
    tiles = (counts + (BLOCK_M - 1)) // BLOCK_M
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0))
    own_count = tl.sum(tl.where(bins == expert, counts, 0))
    own_tiles = (own_count + (BLOCK_M - 1)) // BLOCK_M
    if expert == EXPERTS - 1:
        tl.store(tile_count, first_tile + own_tiles)

    row = tl.arange(0, BLOCK_M)
    for tile in range(first_tile, first_tile + own_tiles):
        tl.store(tile_expert + tile, expert)
        free = (tile - first_tile) * BLOCK_M + row >= own_count
        tl.store(tile_pairs + tile * BLOCK_M + row, tl.full([BLOCK_M], 0, tl.int32) + pairs, mask=free)

    placed = first_tile * BLOCK_M
    if own_count > 0:
        for start in range(0, pairs, CHUNK):
            inside = start + lane < pairs
            ids = _experts(expert_ids, start + lane, inside, EXPERTS)
            mine = (inside & (ids == expert)).to(tl.int32)
            place = placed + tl.cumsum(mine, 0) - 1
            tl.store(tile_pairs + place, start + lane, mask=mine == 1)
            placed += tl.sum(mine)
