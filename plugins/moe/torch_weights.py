"""The number formats of :mod:`dgcompile.plugins.moe.formats` in torch: shapes of packed weights, and their values."""

from __future__ import annotations

import torch
from torch import Tensor

from dgcompile.plugins.moe.formats import FP8_MAX, INT4_BLOCK, WeightFormat


def empty_packed(weight: Tensor, weight_format: WeightFormat, group_size: int) -> tuple[Tensor, Tensor]:
    """Uninitialised packed weights and scales for weights [E, N, K], on their device or in their fake mode.

    Args:
        weight: its shape is all that counts.
        weight_format: "fp8", "int4" or "w4a8"; unpacked weights have no scales.
        group_size: 32 or 64 for "int4" and "w4a8", else not used.
    """
    experts, rows, places = weight.shape
    if weight_format == "fp8":
        packed = weight.new_empty((experts, rows, places), dtype=torch.float8_e4m3fn)
        return packed, weight.new_empty((experts, rows), dtype=torch.float32)
    blocks, groups = -(-places // INT4_BLOCK), -(-places // group_size)
    packed = weight.new_empty((experts, blocks, rows, INT4_BLOCK // 2), dtype=torch.uint8)
    return packed, weight.new_empty((experts, groups, rows), dtype=torch.float16)


def dequantize(packed: Tensor, scale: Tensor, weight_format: WeightFormat, group_size: int, places: int) -> Tensor:
    """What one expert's packed weights stand for, float32 [N, K], with K = ``places``.

    Args:
        packed: E4M3 (uint8 or float8_e4m3fn) [N, K] for "fp8"; uint8 [ceil(K / 64), N, 32] for "int4" and "w4a8".
        scale: [N], or [ceil(K / group_size), N].
    """
    if weight_format == "fp8":
        return packed.view(torch.float8_e4m3fn).float() * scale.float()[:, None]
    by_row = packed.transpose(0, 1)  # [N, blocks, 32]
    nibbles = torch.stack([by_row & 15, by_row >> 4], dim=2).flatten(1)[:, :places]
    magnitude = (nibbles & 7).float()
    codes = torch.where(nibbles > 7, -magnitude, magnitude)
    return codes * scale.t().float().repeat_interleave(group_size, dim=1)[:, :places]


def round_rows(rows: Tensor) -> Tensor:
    """What is left of activations [.., K] in E4M3 with one scale per row, float32: how "w4a8" sees them."""
    wide = rows.float()
    scale = wide.abs().amax(dim=-1, keepdim=True) / FP8_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    # A subnormal scale may be rounded down by so much that the quotient passes 448, where torch writes NaN.
    codes = (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.float() * scale
