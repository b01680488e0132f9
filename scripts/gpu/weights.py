"""Random weights made on the device, and the experts' weights in each number format, as torch tensors.

The bytes of a format are those of ``dgcompile.plugins.moe.formats``, whose numpy functions the tests compare these to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu.shapes import DenoiserShape

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Format:
    """How expert weights are stored: "float", "fp8", "int4" or "w4a8", and weights in a group of the latter two."""

    weight_format: str
    group_size: int = 0

    @property
    def name(self) -> str:
        """For people: "int4 g64"."""
        return f"{self.weight_format} g{self.group_size}" if self.group_size else self.weight_format

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of a weight with its share of the scales, in a 16-bit model."""
        if self.weight_format in ("float", "fp8"):
            return 2.0 if self.weight_format == "float" else 1.0
        return 0.5 + 2 / self.group_size


FORMATS = {
    found.name: found
    for found in (
        Format("float"),
        Format("fp8"),
        Format("int4", 32),
        Format("int4", 64),
        Format("w4a8", 32),
        Format("w4a8", 64),
    )
}


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of one layer's experts, ready for the kernels.

    Attributes:
        gate_up, down: [E, 2 I, H] and [E, H, I] in the format's layout; bytes of FP8 and INT4 are uint8.
        gate_up_scale, down_scale: their scales; None for "float".
        hidden, inner: H and I.
    """

    format: Format
    gate_up: Tensor
    down: Tensor
    gate_up_scale: Tensor | None
    down_scale: Tensor | None
    hidden: int
    inner: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.gate_up, self.down, self.gate_up_scale, self.down_scale)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def dequantized(self, expert: int) -> tuple[Tensor, Tensor]:
        """What one expert's bytes stand for: gate_up [2 I, H] and down [H, I] in float64."""
        return (
            _dequantized(self.format, self.gate_up[expert], self.gate_up_scale, expert, self.hidden),
            _dequantized(self.format, self.down[expert], self.down_scale, expert, self.inner),
        )


def _dequantized(form: Format, weight: Tensor, scales: Tensor | None, expert: int, places: int) -> Tensor:
    if scales is None:
        return weight.double()
    scale = scales[expert].double()
    if form.weight_format == "fp8":
        return weight.view(FP8).double() * scale[:, None]
    codes = int4_codes(weight)[:, :places]  # [N, K]
    return codes * scale.t().repeat_interleave(form.group_size, dim=1)[:, :places]


def int4_codes(packed: Tensor) -> Tensor:
    """Bytes [ceil(K / 64), N, 32] -> codes [N, 64 ceil(K / 64)], float64."""
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-2)  # [blocks, N, 2, 32]
    magnitude = (nibbles & 7).double()
    codes = torch.where((nibbles & 8) > 0, -magnitude, magnitude)
    return codes.permute(1, 0, 2, 3).reshape(packed.shape[1], -1)


def fp8_round_rows(rows: Tensor) -> Tensor:
    """What is left of activations [.., K] in E4M3 with one scale per row, float64: how "w4a8" sees them."""
    largest = rows.abs().amax(dim=-1, keepdim=True).float()
    scale = torch.where(largest > 0, largest / 448.0, torch.ones_like(largest)).double()
    codes = (rows.double() / scale).clamp(-448.0, 448.0).float().to(FP8)
    return codes.double() * scale


def random_experts(
    form: Format, experts: int, hidden: int, inner: int, dtype: torch.dtype, generator: torch.Generator
) -> ExpertWeights:
    """Experts whose products keep the size of their inputs: every output of unit inputs is about one."""
    gate_up, gate_up_scale = _random_weight(form, experts, 2 * inner, hidden, dtype, generator)
    down, down_scale = _random_weight(form, experts, hidden, inner, dtype, generator)
    return ExpertWeights(form, gate_up, down, gate_up_scale, down_scale, hidden, inner)


def _random_weight(
    form: Format, experts: int, rows: int, places: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    device = generator.device
    size = places**-0.5

    def spread(*shape: int) -> Tensor:
        """Scales that differ by up to a factor of two, so that a wrong one is seen."""
        return torch.rand(shape, generator=generator, device=device) * 0.6 + 0.7

    if form.weight_format in ("float", "fp8"):
        values = torch.empty(experts, rows, places, dtype=dtype, device=device)
        values.normal_(generator=generator)
        if form.weight_format == "float":
            return values.mul_(size), None
        # One expert at a time: a whole layer in fp32 would be 2 GB.
        codes = torch.empty(experts, rows, places, dtype=torch.uint8, device=device)
        for expert in range(experts):
            codes[expert] = (values[expert].float() * 100.0).clamp_(-448.0, 448.0).to(FP8).view(torch.uint8)
        return codes, spread(experts, rows) * (size / 100.0)
    blocks = -(-places // 64)
    packed = torch.randint(0, 256, (experts, blocks, rows, 32), dtype=torch.uint8, device=device, generator=generator)
    groups = -(-places // form.group_size)
    # Sixteen equally frequent nibbles, -7 to 7 and one zero more, have a root mean square of 4.18.
    return packed, (spread(experts, groups, rows) * (size / 4.18)).to(torch.float16)


def random_dense(shape: DenoiserShape, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """All weights but the experts', by the names that :class:`gpu.denoiser.Denoiser` looks up.

    Scales keep each residual contribution near a third of the stream, so that no value grows over 30 layers.
    """
    device = generator.device
    hidden, inner = shape.hidden_size, shape.intermediate_size

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device).normal_(generator=generator).mul_(columns**-0.5)

    def vector(size: int, mean: float = 1.0) -> Tensor:
        noise = torch.randn(size, generator=generator, device=device)
        return (mean * (1 + 0.1 * noise)).to(dtype)

    weights = {
        "embed_tokens.weight": matrix(shape.vocab_size, hidden),
        "norm.weight": vector(hidden),
        "self_conditioning.pre_norm.weight": vector(hidden),
        "self_conditioning.gate_proj.weight": matrix(inner, hidden),
        "self_conditioning.up_proj.weight": matrix(inner, hidden),
        "self_conditioning.down_proj.weight": matrix(hidden, inner),
    }
    for index, layer in enumerate(shape.layers):
        prefix = f"layers.{index}."
        query, kv = shape.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
        weights |= {
            prefix + "self_attn.q_proj.weight": matrix(query, hidden),
            prefix + "self_attn.k_proj.weight": matrix(kv, hidden),
            **({prefix + "self_attn.v_proj.weight": matrix(kv, hidden)} if layer.window else {}),
            prefix + "self_attn.o_proj.weight": matrix(hidden, query),
            # The attention's scale is 1: these keep scores at a few units.
            prefix + "self_attn.q_norm.weight": vector(layer.head_dim, 1.3 * layer.head_dim**-0.25),
            prefix + "self_attn.k_norm.weight": vector(layer.head_dim, 1.3 * layer.head_dim**-0.25),
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner),
            prefix + "input_layernorm.weight": vector(hidden),
            prefix + "post_attention_layernorm.weight": vector(hidden, 0.35),
            prefix + "pre_feedforward_layernorm.weight": vector(hidden),
            prefix + "pre_feedforward_layernorm_2.weight": vector(hidden),
            prefix + "post_feedforward_layernorm.weight": vector(hidden, 0.35),
            prefix + "post_feedforward_layernorm_1.weight": vector(hidden),
            prefix + "post_feedforward_layernorm_2.weight": vector(hidden),
            prefix + "router.proj.weight": matrix(shape.num_experts, hidden) * hidden**0.5,
            prefix + "router.scale": vector(hidden),
            prefix + "router.per_expert_scale": vector(shape.num_experts),
            prefix + "layer_scalar": vector(1),
        }
    return weights
