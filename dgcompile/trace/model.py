"""The transformers model without its weights: shapes are traced, weights are referred to."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma import modeling_diffusion_gemma as modeling

from dgcompile.recipe import ActivationDType
from dgcompile.transformers_model import NO_VISION


def weightless_model(
    config: Mapping[str, Any], dtype: ActivationDType = "float32"
) -> tuple[DiffusionGemmaForBlockDiffusion, FakeTensorMode]:
    """Builds the model with fake parameters: no memory is taken, whatever the model's size.

    Buffers that are computed rather than stored (rotary frequencies, embedding scale) are real, and float32 as they are
    in transformers, whatever the parameters' dtype.

    Args:
        config: the parsed ``config.json``.
        dtype: of the parameters, and so of the activations.

    Returns:
        the model in eval mode, and the fake mode that its parameters belong to.
    """
    settings = copy.deepcopy({key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")})
    settings["vision_config"] = dict(NO_VISION)
    parsed = DiffusionGemmaConfig(**settings)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, _default_dtype(getattr(torch, dtype)):
        model = DiffusionGemmaForBlockDiffusion(parsed)
    model.train(False)
    for module in model.modules():
        looped_over: Any = getattr(module, "unique_layer_types", None)
        if isinstance(looped_over, set):
            # transformers loops over this set: the order of its strings, and of the traced nodes, differs between runs.
            module.__dict__["unique_layer_types"] = sorted(looped_over)
        if isinstance(module, modeling.DiffusionGemmaTextRotaryEmbedding):
            for name, buffer in modeling.DiffusionGemmaTextRotaryEmbedding(module.config).named_buffers():
                setattr(module, name, buffer)
        elif isinstance(module, modeling.DiffusionGemmaTextScaledWordEmbedding):
            module.register_buffer("embed_scale", torch.tensor(module.scalar_embed_scale), persistent=False)
    return model, fake


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating-point parameters get this dtype, as transformers creates a model of another dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
