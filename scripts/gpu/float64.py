"""The two operations in float64 on the device: yardsticks at sizes where the numpy references take minutes.

The tests hold both against the numpy references at small sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gpu.weights import ExpertWeights, fp8_round_rows


def attention(
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
) -> tuple[Tensor, Tensor]:
    """BlockAttention; arguments as in ``dgcompile.plugins.block_attention.reference``.

    Returns:
        the result [B, N, Hq, D] in float64, and the same weights applied to the values' magnitudes, which is what
        rounding errors of the weights are relative to.
    """
    batch, tokens, heads, width = query.shape
    capacity, kv_heads = past_key.shape[1:3]
    group = heads // kv_heads
    block = torch.arange(tokens, device=query.device)
    results = torch.empty(2, batch, tokens, heads, width, dtype=torch.float64, device=query.device)
    for row in range(batch):
        past = int(past_length[row])
        cached = past - 1 - (past - 1 - torch.arange(capacity, device=query.device)) % capacity  # position of each slot
        lowest = past + (block if causal else torch.zeros_like(block)) - window + 1 if window else block * 0
        sees_cached = (cached >= 0) & (cached >= lowest[:, None])  # [N, C]
        distance = block[:, None] - block
        sees_block = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if causal and window:
            sees_block &= distance < window
        hidden = ~torch.cat([sees_cached, sees_block], dim=1)  # [N, C + N]
        unwritten = (cached < 0)[:, None]
        for head in range(kv_heads):
            # A slot that was never written may hold NaN.
            keys = torch.cat([past_key[row, :, head].masked_fill(unwritten, 0.0), key[row, :, head]]).double()
            values = torch.cat([past_value[row, :, head].masked_fill(unwritten, 0.0), value[row, :, head]]).double()
            members = slice(head * group, (head + 1) * group)
            scores = query[row, :, members].double() @ keys.t() * scale  # [N, G, C + N]
            weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(dim=-1)
            results[0, row, :, members] = weights @ values
            results[1, row, :, members] = weights @ values.abs()
    return results[0], results[1]


def experts(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, weights: ExpertWeights, *, round_activations: bool
) -> Tensor:
    """MixtureOfExperts, [T, H] in float64: hidden [T, H], expert_ids and expert_weights [T, K].

    Args:
        round_activations: round each token's activations to E4M3 before each product, as "w4a8" does.
    """
    output = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    rows = fp8_round_rows(hidden) if round_activations else hidden.double()
    for expert in range(weights.gate_up.shape[0]):
        token, choice = torch.where(expert_ids == expert)
        if not token.numel():
            continue
        gate_up, down = weights.dequantized(expert)
        gate, up = functional.linear(rows[token], gate_up).chunk(2, dim=-1)
        inner = functional.gelu(gate, approximate="tanh") * up
        if round_activations:
            inner = fp8_round_rows(inner)
        result = functional.linear(inner, down)
        output.index_add_(0, token, result * expert_weights[token, choice, None].double())
    return output
