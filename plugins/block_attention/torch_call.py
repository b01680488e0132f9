"""The BlockAttention kernels on torch tensors through Triton's own launcher, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from dgcompile.plugins.block_attention.launch import Mode, Shape, check, launches, workspace
from dgcompile.plugins.block_attention.tiles import Tile
from dgcompile.plugins.torch_launch import TRITON_TYPES, allocate, call


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    past_length: Tensor,
    *,
    scale: float,
    window: int,
    causal: bool,
    tile: Tile,
    splits: int = 1,
) -> Tensor:
    """Run the kernels; arguments and result as in ``reference.block_attention``, ``past_length`` i32.

    Args:
        tile: shape of the work of one program.
        splits: parts that the keys are cut into, each for a program of its own.

    Raises:
        ValueError: a tensor is not contiguous or of another dtype, or a size or number is out of range.
    """
    tensors = {
        "query": query,
        "key": key,
        "value": value,
        "past_key": past_key,
        "past_value": past_value,
        "past_length": past_length,
    }
    if loose := [name for name, tensor in tensors.items() if not tensor.is_contiguous()]:
        raise ValueError(f"tensors must be contiguous: {', '.join(loose)}")
    if past_length.dtype != torch.int32:
        raise ValueError(f"past_length is {past_length.dtype}, expected int32")
    batch, tokens, heads, head_dim = query.shape
    capacity, kv_heads = past_key.shape[1:3]
    shape, mode = Shape(batch, tokens, heads, kv_heads, head_dim, capacity), Mode(scale, window, causal)
    check(shape, mode)

    output = torch.empty_like(query)
    dtypes = {"partial_sums": torch.float32, "partial_stats": torch.float32}
    buffers = allocate(*workspace(shape, splits), dtypes, query.device)
    steps = launches(shape, mode, TRITON_TYPES[query.dtype], tile, splits)
    call(steps, {**tensors, **buffers, "output": output})
    return output
