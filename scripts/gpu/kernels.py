"""The project's kernels on torch tensors, with tiles and splits for GPUs that have no table of their own too.

On the CPU the kernels run in Triton's interpreter, with tiny tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from dgcompile.plugins.block_attention import launch as attention_launch
from dgcompile.plugins.block_attention.tiles import Tile as AttentionTile
from dgcompile.plugins.block_attention.tiles import tile_for as attention_tile_for
from dgcompile.plugins.block_attention.torch_call import block_attention
from dgcompile.plugins.moe import launch as moe_launch
from dgcompile.plugins.moe.launch import Tile as MoeTile
from dgcompile.plugins.moe.torch_call import mixture_of_experts
from dgcompile.plugins.torch_launch import compute_capability
from gpu.weights import ExpertWeights

INTERPRETED_ATTENTION = AttentionTile(16, 16, 4, 1)
INTERPRETED_MOE = MoeTile(16, 32, 32, 4, 1)

TileType = TypeVar("TileType", AttentionTile, MoeTile)

# The tile and splits of the latest call of each operation; what took a smaller tile than the table's, and why. Both are
# reported.
used: dict[str, str] = {}
shrunk: dict[str, str] = {}
_fitting: dict[Any, Any] = {}


def table_sm(device: torch.device) -> int:
    """Compute capability whose tables serve this device: 90 for Hopper, 120 for any Blackwell; 0 for the CPU."""
    return compute_capability(device) if device.type == "cuda" else 0


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    past_length: Tensor,
    *,
    scale: float = 1.0,
    window: int,
    causal: bool = False,
    splits: int | None = None,
) -> Tensor:
    """BlockAttention through its kernels; ``splits`` None lets the project's rule choose."""
    sm = table_sm(query.device)
    batch, tokens, heads, head_dim = query.shape
    first = attention_tile_for(sm, head_dim) if sm else INTERPRETED_ATTENTION
    what = f"BlockAttention, head_dim {head_dim}"

    def run(tile: AttentionTile) -> Tensor:
        parts = splits
        if parts is None:
            shape = attention_launch.Shape(batch, tokens, heads, key.shape[2], head_dim, past_key.shape[1])
            parts = attention_launch.choose_splits(shape, sm, tile, _multiprocessors(query.device)) if sm else 2
        used[what] = f"{tile}, splits {parts}"
        return block_attention(
            query,
            key,
            value,
            past_key,
            past_value,
            past_length,
            scale=scale,
            window=window,
            causal=causal,
            tile=tile,
            splits=parts,
        )

    return _with_a_fitting_tile(what, first, _smaller_attention_tiles, run)


def moe_tiles(hidden: Tensor, top_k: int, weights: ExpertWeights) -> tuple[MoeTile, ...]:
    """The tiles that the project has for this format: for few and for many tokens per expert."""
    sm = table_sm(hidden.device)
    if not sm:
        return (INTERPRETED_MOE,)
    return moe_launch.TILES[sm, weights.format.weight_format]  # type: ignore[index]


def experts(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, weights: ExpertWeights, tile: MoeTile | None = None
) -> Tensor:
    """MixtureOfExperts through its kernels; ``tile`` None lets the project's rule choose."""
    form = weights.format
    what = f"MixtureOfExperts, {form.name}"
    if tile is None:
        sm = table_sm(hidden.device)
        shape = moe_launch.Shape(*expert_ids.shape, weights.gate_up.shape[0], weights.hidden, weights.inner)
        tile = moe_launch.tile_for(sm, form.weight_format, shape) if sm else INTERPRETED_MOE  # type: ignore[arg-type]

    def run(tile: MoeTile) -> Tensor:
        used[what] = str(tile)
        return mixture_of_experts(
            hidden,
            expert_ids,
            expert_weights,
            weights.gate_up,
            weights.down,
            tile=tile,
            weight_format=form.weight_format,  # type: ignore[arg-type]
            group_size=form.group_size,
            gate_up_scale=weights.gate_up_scale,
            down_scale=weights.down_scale,
        )

    return _with_a_fitting_tile(what, tile, _smaller_moe_tiles, run)


def _multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _smaller_attention_tiles(tile: AttentionTile) -> Iterator[AttentionTile]:
    for stages in range(tile.num_stages - 1, 0, -1):
        yield replace(tile, num_stages=stages)
    while tile.block_m > 16:
        tile = replace(tile, block_m=tile.block_m // 2, num_stages=1)
        yield tile


def _smaller_moe_tiles(tile: MoeTile) -> Iterator[MoeTile]:
    for stages in range(tile.stages - 1, 0, -1):
        yield replace(tile, stages=stages)


def _with_a_fitting_tile(
    what: str, first: TileType, smaller: Callable[[TileType], Iterator[TileType]], run: Callable[[TileType], Tensor]
) -> Tensor:
    """Runs with the first tile that the GPU has the shared memory for; what did not fit once is not tried again."""
    known = _fitting.get((what, first))
    if known is not None:
        return run(known)
    error: OutOfResources | None = None
    for tile in (first, *smaller(first)):
        try:
            result = run(tile)
        except OutOfResources as caught:
            error = caught
            continue
        if error is not None:
            shrunk[what] = f"{first} does not fit ({error}); {tile} was used"
        _fitting[what, first] = tile
        return result
    assert error is not None
    raise error
