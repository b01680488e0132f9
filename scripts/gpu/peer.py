"""The denoising step as transformers runs it, at the same size and with random weights: something to compare with."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional
from transformers import DiffusionGemmaConfig, DynamicCache
from transformers import __version__ as transformers_version
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationMixin,
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
)
from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaDecoderModel

from gpu.shapes import DenoiserShape


class TransformersStep:
    """A decoder with a filled cache; calling it runs transformers' own ``_denoising_step``, from Python as it does.

    Args:
        shape: of the model.
        context: tokens in the cache.
        dtype, device: of the weights.
    """

    def __init__(self, shape: DenoiserShape, context: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config = configuration(shape)
        self.decoder = _decoder(self.config, dtype, device)
        text = self.config.text_config
        cache = DynamicCache(config=text)
        for index, layer in enumerate(shape.layers):
            size = (1, layer.num_key_value_heads, context, layer.head_dim)
            cache.update(
                torch.randn(size, dtype=dtype, device=device), torch.randn(size, dtype=dtype, device=device), index
            )
        canvas = shape.canvas_length
        tokens = torch.randint(shape.vocab_size, (1, canvas), device=device)
        # Newer versions call it "cache".
        parameters = inspect.signature(DiffusionGemmaGenerationMixin._denoising_step).parameters
        cached = {"cache" if "cache" in parameters else "past_key_values": cache}
        masks = self.decoder.create_diffusion_decoder_attention_mask(
            config=text, inputs_embeds=torch.empty(1, canvas, 0, device=device), **cached
        )
        sampler = EntropyBoundSampler(EntropyBoundSamplerConfig(entropy_bound=0.1), canvas, shape.vocab_size, 48)
        self.arguments: dict[str, Any] = {
            "decoder_forward": self._forward,
            "current_canvas": tokens,
            "argmax_canvas": tokens,
            "input_ids": tokens,
            "decoder_position_ids": context + torch.arange(canvas, device=device)[None],
            "self_conditioning_logits": torch.randn(1, canvas, shape.vocab_size, dtype=dtype, device=device),
            "mask_mapping": masks,
            **cached,
            "finished_denoising": torch.zeros(1, dtype=torch.bool, device=device),
            "cur_step": 24,
            "sampler": sampler,
            "logits_processor": lambda _, logits, cur_step: logits / 0.6,
            "diffusion_stopping_criteria": None,
        }
        # What the step reads of the model that it is a method of.
        self.model = SimpleNamespace(config=self.config, model=SimpleNamespace(decoder=self.decoder))

    @property
    def description(self) -> str:
        """What runs, for the report."""
        text = self.config.text_config
        attention, experts = text._attn_implementation, text._experts_implementation
        return f"transformers {transformers_version}, not compiled, attention {attention}, experts {experts}"

    def _forward(self, **arguments: Any) -> Any:
        """What ``DiffusionGemmaForBlockDiffusion.forward`` does: the decoder, the head, the softcap."""
        hidden = self.decoder(**arguments).last_hidden_state
        cap = self.config.text_config.final_logit_softcapping
        logits = functional.linear(hidden, self.decoder.embed_tokens.weight).float() / cap
        return SimpleNamespace(logits=torch.tanh(logits) * cap)

    @torch.no_grad()
    def __call__(self) -> Any:
        """One denoising step: next canvas, argmax canvas, logits, finished."""
        return DiffusionGemmaGenerationMixin._denoising_step(self.model, **self.arguments)  # type: ignore[arg-type]


def configuration(shape: DenoiserShape) -> DiffusionGemmaConfig:
    """transformers' configuration of a model of this shape."""
    sliding = next(layer for layer in shape.layers if layer.window)
    full = next(layer for layer in shape.layers if not layer.window)
    return DiffusionGemmaConfig(
        canvas_length=shape.canvas_length,
        text_config={
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": len(shape.layers),
            "layer_types": ["sliding_attention" if layer.window else "full_attention" for layer in shape.layers],
            "sliding_window": sliding.window,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": sliding.num_key_value_heads,
            "head_dim": sliding.head_dim,
            "num_global_key_value_heads": full.num_key_value_heads,
            "global_head_dim": full.head_dim,
            "num_experts": shape.num_experts,
            "top_k_experts": shape.top_k_experts,
            "moe_intermediate_size": shape.moe_intermediate_size,
            "final_logit_softcapping": shape.final_logit_softcapping,
            "rms_norm_eps": shape.rms_norm_eps,
            "max_position_embeddings": 2**18,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": shape.full_rope_theta,
                    "partial_rotary_factor": shape.full_partial_rotary_factor,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": shape.sliding_rope_theta},
            },
        },
    )


def _decoder(config: DiffusionGemmaConfig, dtype: torch.dtype, device: torch.device) -> DiffusionGemmaDecoderModel:
    """The decoder alone, its random weights made where they stay: with its encoder it would be twice as large."""
    config._attn_implementation = "sdpa"
    # What transformers takes for a model that it loads; a decoder made alone has none.
    config.text_config._experts_implementation = "grouped_mm"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return DiffusionGemmaDecoderModel(config).train(False)
    finally:
        torch.set_default_dtype(before)
