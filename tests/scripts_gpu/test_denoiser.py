"""The plain-torch denoiser computes what the traced modules compute."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu.denoiser import Denoiser, rotary_frequencies
from gpu.shapes import PUBLISHED, DenoiserShape, LayerShape
from safetensors.torch import load_file
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma import DiffusionGemmaTextConfig
from transformers.models.diffusion_gemma import modeling_diffusion_gemma as modeling

from dgcompile.model_spec import ModelSpec
from dgcompile.plugins.block_attention.torch_op import block_attention
from dgcompile.plugins.moe.torch_op import mixture_of_experts
from dgcompile.trace.modules import DenoiserGraph, swap_modules

# Both are float32, through three layers: rounding gives 1e-6 of the largest value, a wrong formula 1e-2 or more.
RELATIVE = 2e-5


def shape_of(checkpoint: Path) -> DenoiserShape:
    spec = ModelSpec.from_config(json.loads((checkpoint / "config.json").read_text()))
    return DenoiserShape(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=spec.num_attention_heads,
        num_experts=spec.num_experts,
        top_k_experts=spec.top_k_experts,
        moe_intermediate_size=spec.moe_intermediate_size,
        canvas_length=spec.canvas_length,
        final_logit_softcapping=spec.final_logit_softcapping,
        rms_norm_eps=spec.rms_norm_eps,
        layers=tuple(LayerShape(layer.num_key_value_heads, layer.head_dim, layer.window) for layer in spec.layers),
    )


@pytest.fixture(scope="module")
def denoiser(checkpoint: Path) -> Denoiser:
    prefix = "model.decoder."
    stored = load_file(checkpoint / "model.safetensors")
    weights = {name.removeprefix(prefix): tensor.float() for name, tensor in stored.items() if name.startswith(prefix)}

    def attention(*tensors: Tensor, window: int) -> Tensor:
        output: Tensor = block_attention(*tensors, 1.0, window, False)
        return output

    def experts(layer: int, hidden: Tensor, ids: Tensor, expert_weights: Tensor) -> Tensor:
        names = [f"layers.{layer}.experts.{name}" for name in ("gate_up_proj", "down_proj")]
        output: Tensor = mixture_of_experts(hidden, ids, expert_weights, *(weights[name] for name in names))
        return output

    return Denoiser(shape_of(checkpoint), weights, attention, experts)


@pytest.fixture(scope="module")
def graph(checkpoint: Path) -> DenoiserGraph:
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(checkpoint, dtype=torch.float32).train(False)
    swap_modules(model)
    return DenoiserGraph(model)


def inputs(shape: DenoiserShape, past: list[int], seed: int) -> dict[str, object]:
    """Random inputs of one step; the first row's self-conditioning is zero, as on a canvas's first step."""
    generator = torch.Generator().manual_seed(seed)
    batch, canvas = len(past), shape.canvas_length

    def tokens() -> Tensor:
        return torch.randint(shape.vocab_size, (batch, canvas), generator=generator, dtype=torch.int32)

    signal = torch.randn(batch, canvas, shape.hidden_size, generator=generator)
    signal[0] = 0
    return {
        "canvas_ids": tokens(),
        "self_conditioning": signal,
        "past_length": torch.tensor(past, dtype=torch.int32),
        "temperature": torch.tensor([0.5, 0.8][:batch]),
        "entropy_bound": torch.tensor([1.0, 0.1][:batch]),
        "uniform": torch.rand(batch, canvas, generator=generator),
        "noise_ids": tokens(),
        "past_key_values": [
            tuple(
                torch.randn(batch, layer.window or 64, layer.num_key_value_heads, layer.head_dim, generator=generator)
                for _ in range(2)
            )
            for layer in shape.layers
        ],
    }


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    difference: float = ((actual - expected).abs().max() / expected.abs().max()).item()
    return difference


@pytest.mark.parametrize("past", [[0, 1], [23, 24], [40, 60]])
def test_a_step_is_the_traced_modules(denoiser: Denoiser, graph: DenoiserGraph, past: list[int]) -> None:
    given = inputs(denoiser.shape, past, seed=past[0])
    with torch.no_grad():
        expected = graph(**given)
        actual = denoiser.step(**given)  # type: ignore[arg-type]
    assert actual._fields == expected._fields
    for name in ("next_self_conditioning", "entropy"):
        assert largest_difference(getattr(actual, name), getattr(expected, name)) < RELATIVE, name
    for name in ("next_canvas_ids", "argmax_ids", "accepted"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert 0 < actual.accepted.sum() < actual.accepted.numel()


@pytest.mark.parametrize("change", ["softcap", "window", "router", "self-conditioning", "rope"])
def test_each_feature_matters(denoiser: Denoiser, change: str) -> None:
    """Without this, a part of the model that both sides left out would go unnoticed."""
    given = inputs(denoiser.shape, [40, 60], seed=7)
    other = dict(given)
    changed = Denoiser(denoiser.shape, denoiser.weights, denoiser.attention, denoiser.experts)
    if change == "softcap":
        changed.shape = replace(denoiser.shape, final_logit_softcapping=25.0)
    elif change == "window":
        attention = denoiser.attention
        changed.attention = lambda *tensors, window: attention(*tensors, window=max(window - 1, 0))  # type: ignore[assignment]
    elif change == "router":
        name = "layers.1.router.per_expert_scale"
        changed.weights = {**denoiser.weights, name: denoiser.weights[name].flip(0)}
    elif change == "self-conditioning":
        other["self_conditioning"] = given["self_conditioning"] * 0  # type: ignore[operator]
    else:
        other["past_length"] = given["past_length"] + 1  # type: ignore[operator]
    with torch.no_grad():
        before, after = denoiser.step(**given), changed.step(**other)  # type: ignore[arg-type]
    assert largest_difference(after.next_self_conditioning[1], before.next_self_conditioning[1]) > 50 * RELATIVE


@pytest.mark.parametrize(("layer", "kind"), [(0, "sliding_attention"), (5, "full_attention")])
def test_rotary_frequencies_of_the_published_sizes(checkpoint: Path, layer: int, kind: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    text = {**config["text_config"], "head_dim": 256, "global_head_dim": 512}
    rotary = modeling.DiffusionGemmaTextRotaryEmbedding(DiffusionGemmaTextConfig(**text))
    expected: Tensor = getattr(rotary, f"{kind}_inv_freq")
    torch.testing.assert_close(rotary_frequencies(PUBLISHED, PUBLISHED.layers[layer]), expected, rtol=1e-6, atol=0)
