"""The torch operator ``dgcompile::mixture_of_experts``.

It has a real CPU implementation, so an exported program stays runnable in torch, a fake one that only knows shapes, so
that tracing needs no weights, and on CUDA devices the kernels. ``dgcompile.trace`` turns it into a node of the ONNX
domain ``dgcompile``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("dgcompile::mixture_of_experts", mutates_args=())
def mixture_of_experts(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Each token through its top_k gated experts; arguments as in ``dgcompile.plugins.moe.reference``.

    hidden [T, H], expert_ids [T, K], expert_weights [T, K], gate_up [E, 2 I, H], down [E, H, I]; returns [T, H].
    """
    # Experts' results are rounded to the dtype of the hidden states, their weighted sum once more, as in the kernels.
    output = torch.zeros(hidden.shape, dtype=torch.float32)
    for expert in range(gate_up.shape[0]):
        token, choice = torch.where(expert_ids == expert)
        if token.numel():
            gate, up = torch.nn.functional.linear(hidden[token], gate_up[expert]).chunk(2, dim=-1)
            inner = torch.nn.functional.gelu(gate, approximate="tanh") * up
            result = torch.nn.functional.linear(inner, down[expert])
            output.index_add_(0, token, result.float() * expert_weights[token, choice, None].float())
    return output.to(hidden.dtype)


@mixture_of_experts.register_fake
def _(hidden: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


@mixture_of_experts.register_kernel("cuda")
def _(hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    # Tracing has no triton.
    from dgcompile.plugins.moe import launch, torch_call
    from dgcompile.plugins.torch_launch import compute_capability

    tokens, top_k = expert_ids.shape
    shape = launch.Shape(tokens, top_k, gate_up.shape[0], hidden.shape[1], down.shape[2])
    return torch_call.mixture_of_experts(
        *(tensor.contiguous() for tensor in (hidden, expert_ids, expert_weights, gate_up, down)),
        tile=launch.tile_for(compute_capability(hidden.device), "float", shape),
    )
