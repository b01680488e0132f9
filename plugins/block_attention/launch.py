"""How the BlockAttention kernels are launched: grids, workspace, and the choice of splits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dgcompile.plugins.block_attention.tiles import Tile, resident_programs
from dgcompile.plugins.launch import Launch, lay_out

LOG2_E = 1 / math.log(2)
COMBINE_ROWS = 4
"""Output rows of one program of the combination."""

MAX_SPLITS = 16
"""Parts that the keys of one call are cut into at most."""

ROUNDS_WITH_SPLITS = 2
"""A GPU that is busy for more rounds than this gains nothing from splits; it bounds the workspace too."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one BlockAttention: B batch rows, N tokens, query and KV heads, width of a head, cache slots."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int

    @property
    def rows(self) -> int:
        """Output rows: one for each batch row, token and query head."""
        return self.batch * self.tokens * self.heads


@dataclass(frozen=True)
class Mode:
    """What a BlockAttention computes, see ``reference.block_attention``."""

    scale: float
    window: int
    causal: bool


def attention_grid(shape: Shape, splits: int, block_m: int) -> tuple[int, int, int]:
    """Programs of the attention kernel: tiles of query rows, splits, batch rows x KV heads."""
    rows = shape.tokens * shape.heads // shape.kv_heads
    return -(-rows // block_m), splits, shape.batch * shape.kv_heads


def choose_splits(shape: Shape, sm: int, tile: Tile, multiprocessors: int) -> int:
    """Into how many splits the keys of one call are cut.

    The rule: the number up to MAX_SPLITS with the least rounds x (tiles of keys in a round + 1), the 1 standing for a
    program's start and end, and one more tile's time charged for combining; the smallest on a tie. Splits that take
    more than ROUNDS_WITH_SPLITS rounds are not considered. Lengths are those of a full cache: how full it is stands in
    device memory.

    Args:
        shape: of the call.
        sm, tile: what the kernels are compiled for.
        multiprocessors: of the GPU.
    """
    tiles, _, others = attention_grid(shape, 1, tile.block_m)
    programs = tiles * others
    key_tiles = -(-shape.capacity // tile.block_n) + -(-shape.tokens // tile.block_n)
    slots = multiprocessors * resident_programs(sm, shape.head_dim, tile)

    def cost(splits: int) -> int:
        rounds = -(-programs * splits // slots)
        return rounds * (-(-key_tiles // splits) + 1) + (splits > 1)

    possible = [
        splits
        for splits in range(1, min(MAX_SPLITS, key_tiles) + 1)
        if splits == 1 or programs * splits <= ROUNDS_WITH_SPLITS * slots
    ]
    return min(possible, key=cost)


def workspace(shape: Shape, splits: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Offset and size of the buffers that the splits leave their sums in, and the bytes of all; none without splits."""
    if splits == 1:
        return {}, 0
    return lay_out({"partial_sums": 4 * splits * shape.rows * shape.head_dim, "partial_stats": 8 * splits * shape.rows})


def workspace_limit(largest: Shape, sm: int, tile: Tile, multiprocessors: int) -> int:
    """Bytes that no call up to the shape ``largest`` exceeds: :func:`choose_splits` limits splits x programs."""
    slots = multiprocessors * resident_programs(sm, largest.head_dim, tile)
    rows = min(ROUNDS_WITH_SPLITS * slots * tile.block_m, MAX_SPLITS * largest.rows)
    _, size = lay_out({"partial_sums": 4 * rows * largest.head_dim, "partial_stats": 8 * rows})
    return size


def launches(shape: Shape, mode: Mode, dtype: str, tile: Tile, splits: int) -> list[Launch]:
    """The kernel calls of one BlockAttention, in order.

    Args:
        shape, mode: what is computed.
        dtype: Triton's name of the type of all tensors but ``past_length`` (i32): "bf16", "fp16" or "fp32".
        tile: shape of the work of one program.
        splits: parts that the keys are cut into, each for a program of its own.

    Tensors are named as in ``torch_call.block_attention``, buffers as in :func:`workspace`; without splits the output
    stands in for the pointers to buffers, which are not touched.
    """
    tensors = ("query", "key", "value", "past_key", "past_value")
    buffers = ("output", "output") if splits == 1 else ("partial_sums", "partial_stats")
    steps = [
        Launch(
            "block_attention.kernel.attention_kernel",
            (
                *tensors,
                "past_length",
                "output",
                *buffers,
                shape.batch,
                shape.tokens,
                shape.capacity,
                splits,
                mode.scale * LOG2_E,
            ),
            (*[f"*{dtype}:16"] * 5, "*i32:16", f"*{dtype}:16", "*fp32:16", "*fp32:16", *["i32"] * 4, "fp32"),
            {
                "KV_HEADS": shape.kv_heads,
                "GROUP": shape.heads // shape.kv_heads,
                "D": shape.head_dim,
                "WINDOW": mode.window,
                "CAUSAL": mode.causal,
                "SPLIT": splits > 1,
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
            },
            attention_grid(shape, splits, tile.block_m),
            tile.num_warps,
            tile.num_stages,
        )
    ]
    if splits > 1:
        steps.append(
            Launch(
                "block_attention.kernel.combine_kernel",
                ("partial_sums", "partial_stats", "output", shape.rows, splits),
                ("*fp32:16", "*fp32:16", f"*{dtype}:16", "i32", "i32"),
                {"D": shape.head_dim, "ROWS": COMBINE_ROWS},
                (-(-shape.rows // COMBINE_ROWS), 1, 1),
            )
        )
    return steps


def check(shape: Shape, mode: Mode) -> None:
    """Refuses what the kernels do not compute.

    Raises:
        ValueError: names the size or number that is out of range.
    """
    if min(shape.batch, shape.tokens, shape.heads, shape.kv_heads, shape.capacity) < 1:
        raise ValueError(f"{shape}: expected every size to be 1 or more, the cache's capacity too")
    if shape.head_dim & (shape.head_dim - 1) or not 16 <= shape.head_dim <= 512:
        raise ValueError(f"head_dim is {shape.head_dim}, expected a power of two from 16 to 512")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"{shape.heads} query heads and {shape.kv_heads} KV heads: expected a multiple of the latter")
    if not (math.isfinite(mode.scale) and mode.scale > 0):
        raise ValueError(f"scale is {mode.scale}, expected a positive number")
    if mode.window < 0:
        raise ValueError(f"window is {mode.window}, expected 0 (none) or more")
