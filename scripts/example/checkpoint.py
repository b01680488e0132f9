"""The example's configuration and its files, in the layout of the published checkpoint."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.generation_diffusion_gemma import DiffusionGemmaGenerationConfig

from example import tokenizer as tok

CANVAS_LENGTH = 40
PROMPT_LENGTH = 74  # <bos>, 36 cell names, 36 values, <sep>
SLIDING_WINDOW = 72  # shorter than the prompt, so that the sliding cache really drops its oldest entries

TEXT_CONFIG: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": tok.BOS,
    "dtype": "bfloat16",
    "eos_token_id": tok.EOS,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 64,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 4096,
    "model_type": "diffusion_gemma_text",
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": tok.PAD,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
    },
    "sliding_window": SLIDING_WINDOW,
    "tie_word_embeddings": True,
    "top_k_experts": 2,
    "use_bidirectional_attention": "vision",
    "vocab_size": tok.VOCAB_SIZE,
}

# The example never sees an image, but the published layout has a vision tower: this is the smallest sensible one.
VISION_CONFIG: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "intermediate_size": 64,
    "model_type": "gemma4_vision",
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
}

CONFIG: dict[str, Any] = {
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "boi_token_id": tok.IMAGE_BEGIN,
    "canvas_length": CANVAS_LENGTH,
    "dtype": "bfloat16",
    "eoi_token_id": tok.IMAGE_END,
    "image_token_id": tok.IMAGE,
    "initializer_range": 0.02,
    "model_type": "diffusion_gemma",
    "text_config": TEXT_CONFIG,
    "tie_word_embeddings": True,
    "vision_config": VISION_CONFIG,
}

GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": tok.BOS,
    "confidence_threshold": 0.005,
    "eos_token_id": [tok.EOS],
    "max_denoising_steps": 16,
    "max_new_tokens": CANVAS_LENGTH,
    "pad_token_id": tok.PAD,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
    "stability_threshold": 1,
    "t_max": 0.8,
    "t_min": 0.4,
}


def build_model(seed: int, qk_start: float = 1.4) -> DiffusionGemmaForBlockDiffusion:
    """A new float32 model, started for training.

    transformers' own start (normal, 0.02) is replaced where it slows so narrow a model down: matrices start at
    1/sqrt(inputs), the embedding at unit length after its sqrt(hidden) scale, and the query and key norms below one,
    because unit norms with attention scale 1.0 make the first attention maps nearly one-hot.
    """
    torch.manual_seed(seed)
    model = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**deepcopy(CONFIG))).float()
    model.generation_config = DiffusionGemmaGenerationConfig(**deepcopy(GENERATION_CONFIG))
    with torch.no_grad():
        for name, parameter in model.model.decoder.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(qk_start * parameter.numel() ** -0.25)
            elif parameter.dim() >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        embedding = model.model.decoder.embed_tokens.weight
        embedding.normal_(std=TEXT_CONFIG["hidden_size"] ** -0.5)
        start_cell_embeddings(embedding)
    return model


def start_cell_embeddings(embedding: torch.Tensor) -> None:
    """Write structure into the fresh embedding [64, hidden], in place.

    A cell's name is the sum of its row, its column and its box; a cell at a line's end starts as the same cell
    elsewhere. The model would learn both, only later.
    """
    hidden = embedding.shape[1]
    noise = 0.1 * hidden**-0.5 * torch.randn(tok.VOCAB_SIZE, hidden)
    row, column, box = torch.randn(3, 6, hidden) * (3 * hidden) ** -0.5
    for cell in range(36):
        r, c = divmod(cell, 6)
        name = tok.FIRST_NAME + cell
        embedding[name] = row[r] + column[c] + box[r // 2 * 2 + c // 3] + noise[name]
    for token in range(tok.BLANK, tok.NEWLINE):
        embedding[token + tok.LINE_END_OFFSET] = embedding[token] + noise[token]


def stored_tensors(model: DiffusionGemmaForBlockDiffusion) -> dict[str, torch.Tensor]:
    """The tensors to store, in bfloat16: shared ones once, under their decoder names."""
    kept = {}
    for name, tensor in model.state_dict().items():
        shared = name.startswith("model.encoder.language_model.") and not name.endswith("layer_scalar")
        if name != "lm_head.weight" and not shared:
            kept[name] = tensor.detach().to(torch.bfloat16).contiguous().clone()
    return kept


def save_checkpoint(model: DiffusionGemmaForBlockDiffusion, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("config.json", CONFIG), ("generation_config.json", GENERATION_CONFIG)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    weights = folder / "model.safetensors"
    save_file(stored_tensors(model), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors leaves it readable by its owner only
    tok.build_tokenizer().save_pretrained(folder)
