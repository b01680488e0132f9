"""Shapes of BlockAttention's work per GPU and head_dim, for 16-bit inputs.

A tile of block_m query rows reads every key once, so tall tiles read the cache less often; what limits them is a
thread's 255 registers, which hold the fp32 sums [block_m, head_dim], and the shared memory that
:func:`shared_memory_bytes` predicts. TILES holds tall tiles whose prediction fits and which the assembler compiled
without spilling: about three candidates each were tried, and spills are found by trying, no formula here foresees them.
At head_dim 512 on SM 90 every tile of the 64 rows that wgmma needs spilled: that one runs on mma.sync. On SM 89 its
pipelined tiles of 32 rows spilled too, and those without a pipeline load and multiply by turns.
None was timed on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from dgcompile.plugins.launch import resident_blocks


@dataclass(frozen=True)
class Tile:
    """Work of one program: query rows (tokens x grouped heads), keys in one step, warps, stages of the pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Compute capability -> head_dim -> tile.
TILES: dict[int, dict[int, Tile]] = {
    89: {
        32: Tile(128, 64, 4, 3),
        64: Tile(64, 64, 4, 3),
        128: Tile(128, 32, 8, 2),
        256: Tile(64, 32, 8, 2),
        512: Tile(16, 32, 8, 2),
    },
    90: {
        32: Tile(128, 64, 4, 3),
        64: Tile(128, 64, 4, 3),
        128: Tile(128, 64, 8, 2),
        256: Tile(128, 32, 8, 2),
        512: Tile(32, 64, 8, 2),
    },
    120: {
        32: Tile(128, 64, 4, 3),
        64: Tile(64, 64, 4, 3),
        128: Tile(128, 32, 8, 2),
        256: Tile(64, 32, 8, 2),
        512: Tile(32, 16, 8, 2),
    },
}


def uses_wgmma(sm: int, tile: Tile) -> bool:
    """Whether the products run on a whole warp group's tensor cores: SM 90 only, 64 rows at least."""
    return sm == 90 and tile.block_m >= 64


def shared_memory_bytes(sm: int, head_dim: int, tile: Tile) -> int:
    """Shared memory that a tile takes at most: operands of the loop, or the sums on their way out, which come after.

    wgmma reads queries, keys and values where they lie, so every stage has its own K and V tile. mma.sync takes them
    through registers, which frees one stage, but its weights [block_m, block_n] may change hands between warps.
    """
    queries = tile.block_m * head_dim * 2
    keys_and_values = 2 * tile.block_n * head_dim * 2
    if uses_wgmma(sm, tile):
        loop = queries + tile.num_stages * keys_and_values
    else:
        loop = queries + (tile.num_stages - 1) * keys_and_values + tile.block_m * tile.block_n * 2
    return max(loop, tile.block_m * head_dim * 4)


def tile_for(sm: int, head_dim: int) -> Tile:
    """The tile for ``head_dim`` (a power of two from 16) on compute capability ``sm``.

    Raises:
        ValueError: there is none.
    """
    tiles = TILES.get(sm, {})
    found = tiles.get(max(head_dim, min(tiles, default=0)))
    if found is None:
        raise ValueError(f"BlockAttention has no tile for head_dim {head_dim} on SM {sm}")
    return found


def resident_programs(sm: int, head_dim: int, tile: Tile) -> int:
    """Programs that one multiprocessor runs at once, at least: were each thread to take all its 255 registers."""
    return max(1, resident_blocks(sm, 32 * tile.num_warps, 255, shared_memory_bytes(sm, head_dim, tile)))
