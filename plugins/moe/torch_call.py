"""The MixtureOfExperts kernels on torch tensors through Triton's own launcher, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import torch
from torch import Tensor

from dgcompile.plugins.moe.formats import WeightFormat
from dgcompile.plugins.moe.launch import Shape, Tile, check, launches, workspace
from dgcompile.plugins.torch_launch import TRITON_TYPES, allocate, call


def mixture_of_experts(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    tile: Tile,
    weight_format: WeightFormat = "float",
    group_size: int = 0,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> Tensor:
    """MixtureOfExperts of contiguous tensors.

    Args:
        hidden: [T, H].
        expert_ids: i32 or i64 [T, K].
        expert_weights: [T, K].
        gate_up: [E, 2 I, H] in the weight format, gate rows first: bytes are uint8, E4M3 may be float8_e4m3fn too.
        down: [E, H, I] likewise.
        tile: see :func:`dgcompile.plugins.moe.launch.tile_for`.
        weight_format, group_size: see :mod:`dgcompile.plugins.moe.formats`.
        gate_up_scale, down_scale: scales of the weights, if the format has any.

    Returns:
        [T, H] in the dtype of ``hidden``.

    Raises:
        ValueError: a tensor is not contiguous, or a size or attribute is out of range.
    """
    if weight_format == "fp8":
        gate_up, down = gate_up.view(torch.float8_e4m3fn), down.view(torch.float8_e4m3fn)
    inner = gate_up.shape[1] if weight_format in ("float", "fp8") else gate_up.shape[2]
    tokens, top_k = expert_ids.shape
    shape = Shape(tokens, top_k, gate_up.shape[0], hidden.shape[1], inner // 2)
    check(shape, weight_format, group_size)
    given = {
        "hidden": hidden,
        "expert_ids": expert_ids,
        "expert_weights": expert_weights,
        "gate_up": gate_up,
        "down": down,
        "gate_up_scale": gate_up_scale,
        "down_scale": down_scale,
    }
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    if loose := [name for name, tensor in tensors.items() if not tensor.is_contiguous()]:
        raise ValueError(f"tensors must be contiguous: {', '.join(loose)}")
    dtypes = {
        "tile_pairs": torch.int32,
        "tile_expert": torch.int32,
        "tile_count": torch.int32,
        "inner": hidden.dtype,
        "outer": hidden.dtype,
        "hidden_codes": torch.float8_e4m3fn,
        "inner_codes": torch.float8_e4m3fn,
        "hidden_scale": torch.float32,
        "inner_scale": torch.float32,
    }
    buffers = allocate(*workspace(shape, weight_format, tile, hidden.itemsize), dtypes, hidden.device)
    output = torch.empty_like(hidden)
    steps = launches(shape, weight_format, group_size, tile, TRITON_TYPES[hidden.dtype])
    call(steps, {**tensors, **buffers, "output": output})
    return output
