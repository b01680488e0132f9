"""DiffusionGemma's denoising step in plain torch: canvas in, next canvas out, without transformers.

It computes what ``DenoiserGraph`` of ``dgcompile.trace.modules`` computes, from the same tensors under the same names;
the two operations with kernels of their own are passed in, so the same step runs on any implementation of them.
``tests/scripts_gpu/test_denoiser.py`` holds it against the traced modules.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from gpu.shapes import DenoiserShape, LayerShape

ROOT = Path(__file__).resolve().parents[2]


def load_sampler() -> ModuleType:
    """``dgcompile/trace/sampler.py``, which needs torch alone; its package needs pydantic and more."""
    name = "dgcompile_sampler"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "dgcompile" / "trace" / "sampler.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before it runs: NamedTuple looks its own module up
        spec.loader.exec_module(module)
    return sys.modules[name]


class Attention(Protocol):
    """BlockAttention with scale 1, bidirectional: see ``dgcompile.plugins.block_attention.reference``.

    Tensors are query, key, value, past_key, past_value and past_length, in this order.
    """

    def __call__(self, *tensors: Tensor, window: int) -> Tensor: ...


class Experts(Protocol):
    """MixtureOfExperts of one layer: hidden [T, H], expert_ids i32 [T, K], expert_weights f32 [T, K] -> [T, H]."""

    def __call__(self, layer: int, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor: ...


class Denoiser:
    """One parameter set and the two operations.

    Args:
        shape: of the model.
        weights: by the checkpoint's names, ``model.decoder.`` left out; the experts' are not looked at.
        attention, experts: the operations.
    """

    def __init__(
        self, shape: DenoiserShape, weights: Mapping[str, Tensor], attention: Attention, experts: Experts
    ) -> None:
        self.shape = shape
        self.weights = weights
        self.attention = attention
        self.experts = experts
        embedding = weights["embed_tokens.weight"]
        self.dtype = embedding.dtype
        # transformers rounds the factor to the model's dtype before it multiplies.
        self.embed_scale = torch.tensor(shape.hidden_size**0.5, device=embedding.device).to(self.dtype)
        self.frequencies = {
            layer: rotary_frequencies(shape, layer).to(embedding.device) for layer in dict.fromkeys(shape.layers)
        }
        self.sampler = load_sampler()

    def step(
        self,
        canvas_ids: Tensor,
        self_conditioning: Tensor,
        past_length: Tensor,
        temperature: Tensor,
        entropy_bound: Tensor,
        uniform: Tensor,
        noise_ids: Tensor,
        past_key_values: list[tuple[Tensor, Tensor]],
    ) -> Any:
        """One denoising step; arguments as the denoiser graph's inputs, returns the sampler's ``SamplerOutput``."""
        logits = self.logits(canvas_ids, self_conditioning, past_length, past_key_values)
        return self.sample(logits, temperature, entropy_bound, uniform, noise_ids)

    def sample(
        self, logits: Tensor, temperature: Tensor, entropy_bound: Tensor, uniform: Tensor, noise_ids: Tensor
    ) -> Any:
        """The sampler's part of :meth:`step`."""
        embedding = self.weights["embed_tokens.weight"]
        return self.sampler.denoising_sample(
            logits, temperature, entropy_bound, uniform, noise_ids, embedding, self.embed_scale
        )

    def logits(
        self,
        canvas_ids: Tensor,
        self_conditioning: Tensor,
        past_length: Tensor,
        past_key_values: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Softcapped logits, f32 [B, L, V], of canvas_ids i32 [B, L]."""
        hidden = self.embed(canvas_ids, self_conditioning)
        positions = past_length[:, None] + torch.arange(canvas_ids.shape[1], device=past_length.device)  # [B, L]
        rotations = self.rotations(positions)
        for index in range(len(self.shape.layers)):
            hidden = self.layer(index, hidden, rotations, past_length, past_key_values[index])
        return self.head(hidden)

    def embed(self, canvas_ids: Tensor, self_conditioning: Tensor) -> Tensor:
        """Token embeddings with the self-conditioning signal [B, L, H] worked in, [B, L, H]."""
        embedded = functional.embedding(canvas_ids, self.weights["embed_tokens.weight"]) * self.embed_scale
        signal = self.gated_mlp("self_conditioning.", self.norm(self_conditioning, "self_conditioning.pre_norm.weight"))
        return self.norm(embedded + signal, None)

    def head(self, hidden: Tensor) -> Tensor:
        """Softcapped logits, f32 [B, L, V], of the last layer's output [B, L, H]."""
        logits = functional.linear(self.norm(hidden, "norm.weight"), self.weights["embed_tokens.weight"]).float()
        cap = self.shape.final_logit_softcapping
        return logits.div_(cap).tanh_().mul_(cap)

    def rotations(self, positions: Tensor) -> dict[LayerShape, tuple[Tensor, Tensor]]:
        """Cosines and sines [B, L, 1, D] of each kind of layer."""
        result = {}
        for layer, frequencies in self.frequencies.items():
            angles = positions[..., None].float() * frequencies
            angles = torch.cat([angles, angles], dim=-1)[:, :, None]
            result[layer] = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        return result

    def layer(
        self,
        index: int,
        hidden: Tensor,
        rotations: Mapping[LayerShape, tuple[Tensor, Tensor]],
        past_length: Tensor,
        past: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Layer ``index``: hidden [B, L, H] -> [B, L, H]; ``past`` holds its cached keys and values, [B, C, Hkv, D]."""
        prefix = f"layers.{index}."
        layer = self.shape.layers[index]
        attended = self.attend(prefix, layer, hidden, rotations[layer], past_length, past)
        residual = hidden + self.norm(attended, prefix + "post_attention_layernorm.weight")

        dense = self.gated_mlp(prefix + "mlp.", self.norm(residual, prefix + "pre_feedforward_layernorm.weight"))
        dense = self.norm(dense, prefix + "post_feedforward_layernorm_1.weight")

        # The experts run beside the dense MLP, on the same input; the router sees it before the norm.
        flat = residual.flatten(0, 1)  # [B * L, H]
        expert_ids, expert_weights = self.route(prefix + "router.", flat)
        flat = self.norm(flat, prefix + "pre_feedforward_layernorm_2.weight")
        mixed = self.experts(index, flat, expert_ids, expert_weights).view_as(residual)
        mixed = self.norm(mixed, prefix + "post_feedforward_layernorm_2.weight")

        result = residual + self.norm(dense + mixed, prefix + "post_feedforward_layernorm.weight")
        return result * self.weights[prefix + "layer_scalar"]

    def attend(
        self,
        prefix: str,
        layer: LayerShape,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        past_length: Tensor,
        past: tuple[Tensor, Tensor],
    ) -> Tensor:
        """The attention block of a layer: hidden [B, L, H] -> [B, L, H]."""
        hidden = self.norm(hidden, prefix + "input_layernorm.weight")
        prefix += "self_attn."

        def heads(name: str) -> Tensor:
            projected = functional.linear(hidden, self.weights[f"{prefix}{name}.weight"])
            return projected.unflatten(-1, (-1, layer.head_dim))

        query = rotate(self.norm(heads("q_proj"), prefix + "q_norm.weight"), rotation)  # [B, L, Hq, D]
        unrotated = heads("k_proj")  # [B, L, Hkv, D]
        # Full-attention layers have no v_proj: the projected key is the value too, normed without a weight.
        value = self.norm(heads("v_proj") if layer.window else unrotated, None)
        key = rotate(self.norm(unrotated, prefix + "k_norm.weight"), rotation)
        output = self.attention(query, key, value, *past, past_length, window=layer.window)
        return functional.linear(output.flatten(2), self.weights[prefix + "o_proj.weight"])

    def route(self, prefix: str, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each token: hidden [T, H] -> ids i32 [T, K] and weights f32 [T, K]."""
        normed = self.norm(hidden, None) * self.weights[prefix + "scale"] * self.shape.hidden_size**-0.5
        scores = functional.linear(normed, self.weights[prefix + "proj.weight"])
        weights, ids = scores.softmax(dim=-1, dtype=torch.float32).topk(self.shape.top_k_experts, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return ids.to(torch.int32), (weights * self.weights[prefix + "per_expert_scale"][ids]).float()

    def gated_mlp(self, prefix: str, hidden: Tensor) -> Tensor:
        """``down(gelu(gate x) * up x)``."""
        gate = functional.linear(hidden, self.weights[prefix + "gate_proj.weight"])
        up = functional.linear(hidden, self.weights[prefix + "up_proj.weight"])
        inner = functional.gelu(gate, approximate="tanh") * up
        return functional.linear(inner, self.weights[prefix + "down_proj.weight"])

    def norm(self, hidden: Tensor, name: str | None) -> Tensor:
        """RMSNorm over the last axis in fp32, times the weight of that name if there is one."""
        weight = None if name is None else self.weights[name]
        return functional.rms_norm(hidden, hidden.shape[-1:], weight, self.shape.rms_norm_eps)


def rotary_frequencies(shape: DenoiserShape, layer: LayerShape) -> Tensor:
    """Angle per position of each pair of a head's dimensions, f32 [D / 2]; full layers rotate the first pairs only."""
    width = layer.head_dim
    if layer.window:
        return shape.sliding_rope_theta ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
    rotated = int(shape.full_partial_rotary_factor * width // 2)
    pairs = shape.full_rope_theta ** -(torch.arange(0, 2 * rotated, 2, dtype=torch.float32) / width)
    return functional.pad(pairs, (0, width // 2 - rotated))


def rotate(states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of states [B, L, heads, D]: dimension d is paired with d + D / 2."""
    cosines, sines = rotation
    first, second = states.chunk(2, dim=-1)
    return states * cosines + torch.cat([-second, first], dim=-1) * sines
