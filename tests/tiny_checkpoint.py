"""Checkpoints of a few kilobytes, written without transformers: for tests that never run the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dgcompile.model_spec import ModelSpec

TENSORS_PER_CHECKPOINT = 51


def tiny_config(**text: Any) -> dict[str, Any]:
    """A parsed config.json in the published form; ``text`` changes its text_config, None removes a key."""
    values = {
        "model_type": "diffusion_gemma_text",
        "vocab_size": 24,
        "hidden_size": 8,
        "intermediate_size": 6,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 4,
        "global_head_dim": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 12,
        "max_position_embeddings": 256,
        "num_experts": 3,
        "top_k_experts": 2,
        "moe_intermediate_size": 5,
        "final_logit_softcapping": 30.0,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": 2,
        **text,
    }
    return {
        "model_type": "diffusion_gemma",
        "canvas_length": 8,
        "tie_word_embeddings": True,
        "text_config": {key: value for key, value in values.items() if value is not None},
    }


def tiny_tensors(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random text tensors of :func:`tiny_config`'s model, by canonical name."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ModelSpec.from_config(tiny_config()).expected_tensors()
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    shards: Sequence[Sequence[str]] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint and returns its folder.

    Args:
        folder: made when missing.
        tensors: all that is stored; :func:`tiny_tensors` by default.
        shards: names per shard; one ``model.safetensors`` by default.
        config: :func:`tiny_config` by default.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tiny_tensors() if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(config or tiny_config()))
    if shards is None:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def split(names: Sequence[str], count: int) -> list[list[str]]:
    """The names dealt out to ``count`` shards."""
    return [list(names[start::count]) for start in range(count)]
