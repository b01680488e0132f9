"""Sizes that are checked and timed: the published model's, and tiny ones for a run without a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """One layer.

    Attributes:
        num_key_value_heads, head_dim: of its attention.
        window: of a sliding layer; 0 on a full-attention layer, which has no v_proj and rotates a part of each head.
    """

    num_key_value_heads: int
    head_dim: int
    window: int


@dataclass(frozen=True)
class DenoiserShape:
    """Shape of a denoiser; fields have the names of the Hugging Face config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_experts: int
    top_k_experts: int
    moe_intermediate_size: int
    canvas_length: int
    layers: tuple[LayerShape, ...]
    final_logit_softcapping: float = 30.0
    rms_norm_eps: float = 1e-6
    sliding_rope_theta: float = 1e4
    full_rope_theta: float = 1e6
    full_partial_rotary_factor: float = 0.25

    def dense_parameters(self) -> int:
        """Weights of matrix products but the experts' and the embedding: attention, dense MLP, router, all layers."""
        hidden = self.hidden_size
        total = 3 * hidden * self.intermediate_size  # self-conditioning
        for layer in self.layers:
            kv = layer.num_key_value_heads * layer.head_dim * (2 if layer.window else 1)
            total += hidden * (2 * self.num_attention_heads * layer.head_dim + kv)
            total += hidden * (3 * self.intermediate_size + self.num_experts)
        return total

    def expert_parameters(self) -> int:
        """Weights of one layer's experts."""
        return 3 * self.num_experts * self.moe_intermediate_size * self.hidden_size


SLIDING = LayerShape(num_key_value_heads=8, head_dim=256, window=1024)
FULL = LayerShape(num_key_value_heads=2, head_dim=512, window=0)

# google/diffusiongemma-26B-A4B-it: every sixth of its 30 layers attends to everything.
PUBLISHED = DenoiserShape(
    vocab_size=262144,
    hidden_size=2816,
    intermediate_size=2112,
    num_attention_heads=16,
    num_experts=128,
    top_k_experts=8,
    moe_intermediate_size=704,
    canvas_length=256,
    layers=(SLIDING, SLIDING, SLIDING, SLIDING, SLIDING, FULL) * 5,
)
PUBLISHED_CONTEXT = 8192
"""Tokens in the cache of a full-attention layer."""

PUBLISHED_TOKENS_PER_STEP = 16
"""Tokens of a finished text for each denoising step, as the model's authors give it. It is not measured here."""

TINY = DenoiserShape(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=32,
    num_attention_heads=2,
    num_experts=4,
    top_k_experts=2,
    moe_intermediate_size=32,
    canvas_length=8,
    layers=(LayerShape(1, 16, 8), LayerShape(1, 32, 0)),
)
TINY_CONTEXT = 16
