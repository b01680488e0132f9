"""A checkpoint as transformers' own model, with weights that dgcompile reads: it knows more kinds of checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma import generation_diffusion_gemma
from transformers.utils import logging

from dgcompile.checkpoint import Checkpoint, is_vision_tensor
from dgcompile.errors import CheckpointError
from dgcompile.generation_config import GenerationConfig

# Hardly annotated, so nothing can be checked against it.
transformers_logging: Any = logging
_generation: Any = generation_diffusion_gemma

# Only text is read: the smallest vision tower that the constructor accepts stands in for the real one.
NO_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def load_model(checkpoint: Checkpoint) -> DiffusionGemmaForBlockDiffusion:
    """The text model in float32 with the plain implementations of attention and experts.

    transformers itself must not load quantized checkpoints: where their experts are stored one by one, it finds none
    and fills in random numbers.

    Args:
        checkpoint: four bytes of memory per parameter are taken; for quantized weights, eight for a while.

    Raises:
        CheckpointError: transformers does not take config or weights.
    """
    settings = copy.deepcopy(checkpoint.config)
    for key in ("dtype", "torch_dtype", "quantization_config"):
        settings.pop(key, None)
    settings["text_config"].pop("quantization_config", None)
    settings["vision_config"] = dict(NO_VISION)
    model_class: Any = DiffusionGemmaForBlockDiffusion
    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    # It would list the vision tower's weights as missing; what matters is checked below.
    transformers_logging.set_verbosity_error()
    try:
        model, found = model_class.from_pretrained(
            None,
            config=DiffusionGemmaConfig(**settings),
            state_dict={name: checkpoint.read(name) for name in checkpoint.spec.expected_tensors()},
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint.path}: transformers cannot load it: {error}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
    missing = sorted(name for name in found["missing_keys"] if not is_vision_tensor(name))
    wrong = [*missing, *sorted(found["unexpected_keys"]), *sorted(map(str, found["mismatched_keys"]))]
    if wrong:
        raise CheckpointError(f"{checkpoint.path}: transformers' model and its weights differ in {wrong[0]}")
    loaded: DiffusionGemmaForBlockDiffusion = model.eval()
    return loaded


def their_config(config: GenerationConfig) -> Any:
    """``config`` as transformers' ``generate()`` takes it."""
    return _generation.DiffusionGemmaGenerationConfig(
        max_new_tokens=config.max_new_tokens,
        max_denoising_steps=config.max_denoising_steps,
        sampler_config=_generation.EntropyBoundSamplerConfig(entropy_bound=config.entropy_bound),
        t_min=config.t_min,
        t_max=config.t_max,
        stability_threshold=config.stability_threshold,
        confidence_threshold=config.confidence_threshold,
        eos_token_id=list(config.eos_token_ids) or None,
        pad_token_id=config.pad_token_id,
        bos_token_id=config.bos_token_id,
    )
