"""The torch operator ``dgcompile::mixture_of_experts``.

It has a real CPU implementation, so an exported program stays runnable in torch, a fake one that only knows shapes, so
that tracing needs no weights, and on CUDA devices the kernels. ``dgcompile.trace`` turns it into a node of the ONNX
domain ``dgcompile``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, library
from torch.nn.functional import gelu, linear

from dgcompile.plugins.moe.formats import WeightFormat
from dgcompile.plugins.moe.torch_weights import dequantize, round_rows


@library.custom_op("dgcompile::mixture_of_experts", mutates_args=())
def mixture_of_experts(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    weight_format: str = "float",
    group_size: int = 0,
) -> Tensor:
    """Each token through its top_k gated experts; arguments as in ``dgcompile.plugins.moe.reference``.

    Args:
        hidden: [T, H].
        expert_ids: [T, K].
        expert_weights: [T, K].
        gate_up: [E, 2 I, H] in the weight format, gate rows first.
        down: [E, H, I] likewise.
        gate_up_scale, down_scale: scales of the weights, if the format has any.
        weight_format, group_size: see :mod:`dgcompile.plugins.moe.formats`.

    Returns:
        [T, H] in the dtype of ``hidden``.
    """
    # Experts' results are rounded to the dtype of the hidden states, their weighted sum once more, as in the kernels.
    output = torch.zeros(hidden.shape, dtype=torch.float32)
    for expert in range(gate_up.shape[0]):
        token, choice = torch.where(expert_ids == expert)
        if not token.numel():
            continue
        if gate_up_scale is None or down_scale is None:
            result = _expert(hidden[token], gate_up[expert], down[expert])
        else:
            # One expert's weights at a time: all of them would be several times what they are packed.
            scales = gate_up_scale[expert], down_scale[expert]
            result = _packed_expert(
                hidden[token], gate_up[expert], down[expert], *scales, cast(WeightFormat, weight_format), group_size
            )
        output.index_add_(0, token, result.float() * expert_weights[token, choice, None].float())
    return output.to(hidden.dtype)


def _expert(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = linear(rows, gate_up).chunk(2, dim=-1)
    return linear(gelu(gate, approximate="tanh") * up, down)


def _packed_expert(
    rows: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor,
    down_scale: Tensor,
    weight_format: WeightFormat,
    group_size: int,
) -> Tensor:
    """Sums in float32, from which the inner activations and the result are rounded to the dtype of ``rows``."""
    seen = round_rows if weight_format == "w4a8" else Tensor.float
    weight = dequantize(gate_up, gate_up_scale, weight_format, group_size, rows.shape[-1])
    gate, up = linear(seen(rows), weight).chunk(2, dim=-1)
    inner = (gelu(gate, approximate="tanh") * up).to(rows.dtype)
    weight = dequantize(down, down_scale, weight_format, group_size, inner.shape[-1])
    return linear(seen(inner), weight).to(rows.dtype)


@mixture_of_experts.register_fake
def _(hidden: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


@mixture_of_experts.register_kernel("cuda")
def _(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    weight_format: str = "float",
    group_size: int = 0,
) -> Tensor:
    # Tracing has no triton.
    from dgcompile.plugins.moe import launch, torch_call
    from dgcompile.plugins.torch_launch import compute_capability

    known = cast(WeightFormat, weight_format)
    tokens, top_k = expert_ids.shape
    rows = gate_up.shape[1 if known in ("float", "fp8") else 2]
    shape = launch.Shape(tokens, top_k, gate_up.shape[0], hidden.shape[1], rows // 2)
    return torch_call.mixture_of_experts(
        *(tensor.contiguous() for tensor in (hidden, expert_ids, expert_weights, gate_up, down)),
        tile=launch.tile_for(compute_capability(hidden.device), known, shape),
        weight_format=known,
        group_size=group_size,
        gate_up_scale=None if gate_up_scale is None else gate_up_scale.contiguous(),
        down_scale=None if down_scale is None else down_scale.contiguous(),
    )
