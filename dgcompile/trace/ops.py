"""The two custom torch operators that stand for the subgraphs with kernels of their own.

They have a real CPU implementation, so an exported program stays runnable in torch, and a fake one that only knows
shapes, so that tracing needs no weights. :mod:`dgcompile.trace.nodes` turns them into nodes of the ONNX domain
``dgcompile``; their meaning there is in :mod:`dgcompile.trace.functions`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("dgcompile::block_attention", mutates_args=())
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


@torch.library.custom_op("dgcompile::mixture_of_experts", mutates_args=())
def mixture_of_experts(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Each token through its top_k gated experts; arguments as in ``dgcompile.plugins.moe.reference``.

    hidden [T, H], expert_ids [T, K], expert_weights [T, K], gate_up [E, 2 I, H], down [E, H, I]; returns [T, H].
    """
    output = torch.zeros_like(hidden)
    for expert in range(gate_up.shape[0]):
        token, choice = torch.where(expert_ids == expert)
        if token.numel():
            gate, up = torch.nn.functional.linear(hidden[token], gate_up[expert]).chunk(2, dim=-1)
            inner = torch.nn.functional.gelu(gate, approximate="tanh") * up
            result = torch.nn.functional.linear(inner, down[expert])
            output.index_add_(0, token, result * expert_weights[token, choice, None].to(result.dtype))
    return output


@mixture_of_experts.register_fake
def _(hidden: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)
