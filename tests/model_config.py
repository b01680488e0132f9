"""config.json of stand-ins for the published checkpoint, in the published form. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PAD, EOS, BOS, UNKNOWN, TURN, END_OF_TURN = range(6)

MAX_LAYERS = 30
"""Layers of the published model."""

PUBLISHED_SIZES: dict[str, Any] = {
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "num_global_key_value_heads": 2,
    "global_head_dim": 512,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "vocab_size": 262144,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "canvas_length": 256,
}
"""Sizes of google/diffusiongemma-26B-A4B-it by their keys in config.json, ``canvas_length`` outside its text_config."""

SMALL_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_global_key_value_heads": 1,
    "global_head_dim": 32,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
    "vocab_size": 320,
    "sliding_window": 24,
    "max_position_embeddings": 512,
    "canvas_length": 16,
}
"""The same keys for a stand-in of a megabyte, with widths that every number format and kernel takes."""


def published_config(layers: int = MAX_LAYERS, *, dtype: str = "bfloat16", **sizes: int) -> dict[str, Any]:
    """The published config.json, with a tiny vision tower, cut to its first layers.

    Args:
        layers: how many. Every sixth is a full-attention layer; the last one becomes one, as the model must end in one.
        dtype: of the stored tensors, in torch's spelling.
        sizes: instead of those of :data:`PUBLISHED_SIZES`.

    Raises:
        TypeError: a size that :data:`PUBLISHED_SIZES` lacks.
    """
    if unknown := sorted(set(sizes) - set(PUBLISHED_SIZES)):
        raise TypeError(f"no size of the model: {', '.join(unknown)}")
    kinds = ["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(layers)]
    kinds[-1] = "full_attention"
    return published_form(dtype=dtype, layer_types=kinds, num_hidden_layers=layers, **{**PUBLISHED_SIZES, **sizes})


def vision_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of :func:`published_form`'s vision tower, which dgcompile does not read."""
    vision, hidden = config["vision_config"], config["text_config"]["hidden_size"]
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    query, kv = (vision[key] * vision["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    tower = "model.encoder.vision_tower."
    tensors: dict[str, tuple[int, ...]] = {
        tower + "patch_embedder.position_embedding_table": (2, vision["position_embedding_size"], width),
        tower + "patch_embedder.input_proj.weight": (width, 3 * vision["patch_size"] ** 2),
    }
    for index in range(vision["num_hidden_layers"]):
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.linear": (query, width),
            "self_attn.k_proj.linear": (kv, width),
            "self_attn.v_proj.linear": (kv, width),
            "self_attn.o_proj.linear": (width, query),
            "self_attn.q_norm": (vision["head_dim"],),
            "self_attn.k_norm": (vision["head_dim"],),
            "mlp.gate_proj.linear": (inner, width),
            "mlp.up_proj.linear": (inner, width),
            "mlp.down_proj.linear": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
            "pre_feedforward_layernorm": (width,),
            "post_feedforward_layernorm": (width,),
        }
        tensors |= {f"{tower}encoder.layers.{index}.{name}.weight": shape for name, shape in shapes.items()}
    return {**tensors, "model.encoder.embed_vision.embedding_projection.weight": (hidden, width)}


def published_form(*, canvas_length: int, dtype: str, **text: Any) -> dict[str, Any]:
    """config.json in the published form, with the smallest vision tower.

    Args:
        canvas_length: tokens of a canvas.
        dtype: of the stored tensors, in torch's spelling.
        text: further keys of text_config.

    Raises:
        ValueError: a vocabulary too small for the special tokens.
    """
    if text["vocab_size"] < 16:
        raise ValueError(f"vocab is {text['vocab_size']}, at least 16 are needed for the special tokens")
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "canvas_length": canvas_length,
        "image_token_id": text["vocab_size"] - 3,
        "boi_token_id": text["vocab_size"] - 2,
        "eoi_token_id": text["vocab_size"] - 1,
        "dtype": dtype,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "diffusion_gemma_text",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "dtype": dtype,
            "final_logit_softcapping": 30.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
            "tie_word_embeddings": True,
            "use_bidirectional_attention": "vision",
            **text,
        },
        "vision_config": {
            "model_type": "gemma4_vision",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": dtype,
            "head_dim": 8,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "num_key_value_heads": 2,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 16,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
        },
    }
