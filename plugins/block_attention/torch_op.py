"""The torch operator ``dgcompile::block_attention``.

It has a real CPU implementation, so an exported program stays runnable in torch, a fake one that only knows shapes, so
that tracing needs no weights, and on CUDA devices the kernels. ``dgcompile.trace`` turns it into a node of the ONNX
domain ``dgcompile``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library


@library.custom_op("dgcompile::block_attention", mutates_args=())
def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    past_length: Tensor,
    scale: float,
    window: int,
    causal: bool,
) -> Tensor:
    """Attention of a block over the cache and itself; arguments as in ``dgcompile.plugins.block_attention.reference``.

    query [B, N, Hq, D], key and value [B, N, Hkv, D], past_key and past_value [B, C, Hkv, D], past_length i32 [B];
    returns [B, N, Hq, D] in the query's dtype. Softmax runs in fp32.
    """
    batch, tokens, heads, width = query.shape
    capacity, kv_heads = past_key.shape[1], past_key.shape[2]
    past = past_length.to(torch.int64)[:, None]  # [B, 1]
    last = past - 1
    cached = last - torch.remainder(last - torch.arange(capacity), capacity)  # [B, C] position held by each slot
    block = torch.arange(tokens)
    sees_cached = (cached >= 0)[:, None, :].expand(batch, tokens, capacity)
    if window:
        oldest = past + block - window + 1 if causal else (past - window + 1).expand(batch, tokens)  # [B, N]
        sees_cached = sees_cached & (cached[:, None, :] >= oldest[:, :, None])
    distance = block[:, None] - block[None, :]  # [N, N]
    sees_block = torch.ones(tokens, tokens, dtype=torch.bool)
    if causal:
        sees_block = distance >= 0
        if window:
            sees_block = sees_block & (distance < window)
    visible = torch.cat([sees_cached, sees_block.expand(batch, tokens, tokens)], dim=-1)  # [B, N, C + N]

    grouped = query.view(batch, tokens, kv_heads, heads // kv_heads, width)
    scores = torch.cat(
        [torch.einsum("bnhgd,bchd->bhgnc", grouped, past_key), torch.einsum("bnhgd,bmhd->bhgnm", grouped, key)], dim=-1
    )
    scores = scores.float() * scale
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    weights = scores.softmax(dim=-1).to(value.dtype)
    # A slot that was never written may hold anything, NaN included: 0 * NaN must not reach the sum.
    past_value = past_value.masked_fill((cached < 0)[:, :, None, None], 0.0)
    output = torch.einsum("bhgnc,bchd->bnhgd", weights[..., :capacity], past_value)
    output = output + torch.einsum("bhgnm,bmhd->bnhgd", weights[..., capacity:], value)
    return output.reshape(batch, tokens, heads, width)


@block_attention.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@block_attention.register_kernel("cuda")
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    past_length: Tensor,
    scale: float,
    window: int,
    causal: bool,
) -> Tensor:
    # Tracing has no triton.
    from dgcompile.plugins.block_attention import launch, tiles, torch_call
    from dgcompile.plugins.torch_launch import compute_capability

    sm = compute_capability(query.device)
    tile = tiles.tile_for(sm, query.shape[3])
    batch, tokens, heads, head_dim = query.shape
    shape = launch.Shape(batch, tokens, heads, key.shape[2], head_dim, past_key.shape[1])
    multiprocessors = torch.cuda.get_device_properties(query.device).multi_processor_count
    return torch_call.block_attention(
        *(tensor.contiguous() for tensor in (query, key, value, past_key, past_value, past_length.to(torch.int32))),
        scale=scale,
        window=window,
        causal=causal,
        tile=tile,
        splits=launch.choose_splits(shape, sm, tile, multiprocessors),
    )
