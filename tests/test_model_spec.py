"""ModelSpec against transformers: both forms of config.json, tensor names and shapes; and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from dgcompile.errors import CheckpointError
from dgcompile.model_spec import ModelSpec
from tests.tiny_checkpoint import tiny_config

VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "position_embedding_size": 16,
}
PUBLISHED_TEXT = {
    "model_type": "diffusion_gemma_text",
    "vocab_size": 262144,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "final_logit_softcapping": 30.0,
}


def transformers_config(config: dict[str, Any]) -> DiffusionGemmaConfig:
    copy = json.loads(json.dumps({**config, "image_token_id": 5, "boi_token_id": 6, "eoi_token_id": 7}))
    return DiffusionGemmaConfig(**{**copy, "vision_config": dict(VISION)})


def saved_by_transformers(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    transformers_config(config).save_pretrained(folder)
    saved: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return saved


def test_published_shape() -> None:
    spec = ModelSpec.from_config({"model_type": "diffusion_gemma", "text_config": PUBLISHED_TEXT})
    assert spec.canvas_length == 256
    assert [index for index, layer in enumerate(spec.layers) if layer.kind == "full_attention"] == [5, 11, 17, 23, 29]
    full, sliding = spec.layers[5], spec.layers[0]
    assert (full.head_dim, full.num_key_value_heads, full.window, full.has_v_proj) == (512, 2, 0, False)
    assert (sliding.head_dim, sliding.num_key_value_heads, sliding.window, sliding.has_v_proj) == (256, 8, 1024, True)
    tensors = spec.expected_tensors()
    assert tensors["model.decoder.layers.29.experts.gate_up_proj"] == (128, 1408, 2816)
    # The published count of the text model's parameters: 25.25 billion.
    assert sum(torch.Size(shape).numel() for shape in tensors.values()) == pytest.approx(25.25e9, rel=1e-3)


@pytest.mark.parametrize("layers", [2, 30])
def test_both_config_forms_give_one_spec(tmp_path: Path, layers: int) -> None:
    # With ten layers or more, transformers pads the keys of per_layer_config with zeros.
    kinds = (["sliding_attention", "full_attention"] * layers)[:layers]
    published = tiny_config(num_hidden_layers=layers, layer_types=kinds)
    saved = saved_by_transformers(published, tmp_path)
    assert "per_layer_config" in saved["text_config"]
    assert "global_head_dim" not in saved["text_config"]
    assert ModelSpec.from_config(saved) == ModelSpec.from_config(published)


def test_layers_that_do_not_differ(tmp_path: Path) -> None:
    # transformers leaves out what equals the global value, down to an empty per_layer_config.
    published = tiny_config(global_head_dim=4, num_global_key_value_heads=None)
    saved = saved_by_transformers(published, tmp_path)
    assert saved["text_config"]["per_layer_config"] == {}
    spec = ModelSpec.from_config(saved)
    assert spec == ModelSpec.from_config(published)
    assert {(layer.head_dim, layer.num_key_value_heads) for layer in spec.layers} == {(4, 2)}


def test_per_layer_config_wins_over_the_published_keys() -> None:
    config = tiny_config(per_layer_config={"1": {"head_dim": 8}}, global_head_dim=6, num_global_key_value_heads=1)
    text: Any = transformers_config(config).text_config
    in_transformers = text.per_layer_config[1]
    layer = ModelSpec.from_config(config).layers[1]
    assert (layer.head_dim, layer.num_key_value_heads) == (8, 2)
    assert (in_transformers.head_dim, in_transformers.num_key_value_heads) == (8, 2)


@pytest.mark.parametrize(
    "text",
    [
        {},
        {"num_global_key_value_heads": None},
        {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"per_layer_config": {"0": {"head_dim": 10}, "1": {"num_key_value_heads": 4}}},
    ],
    ids=["published", "equal_kv_heads", "three_layers", "per_layer_config"],
)
def test_expected_tensors_are_those_of_transformers(text: dict[str, Any]) -> None:
    config = tiny_config(**text)
    with torch.device("meta"):
        model = DiffusionGemmaForBlockDiffusion(transformers_config(config))
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    shared = [name for name in state if name.startswith("model.encoder.language_model.") and "layer_scalar" not in name]
    vision = [name for name in state if "vision" in name]
    for name in [*shared, *vision, "lm_head.weight"]:
        del state[name]
    assert ModelSpec.from_config(config).expected_tensors() == state


def test_softcap_that_transformers_drops() -> None:
    assert ModelSpec.from_config(tiny_config(final_logit_softcapping=None)).final_logit_softcapping == 30.0
    assert ModelSpec.from_config(tiny_config(final_logit_softcapping=7.5)).final_logit_softcapping == 7.5


def test_cache_capacity() -> None:
    spec = ModelSpec.from_config(tiny_config())
    assert [spec.cache_capacity(layer, 100) for layer in (0, 1)] == [12, 100]
    assert spec.cache_capacity(0, 5) == 5


@given(st.integers(0, 2), st.sampled_from(["as is", "json"]))
def test_a_spec_survives_its_own_serialisation(extra_layers: int, way: str) -> None:
    kinds = ["sliding_attention"] * extra_layers + ["sliding_attention", "full_attention"]
    spec = ModelSpec.from_config(tiny_config(num_hidden_layers=len(kinds), layer_types=kinds))
    if way == "json":
        assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec
    else:
        assert ModelSpec.model_validate(json.loads(spec.model_dump_json())) == spec


@pytest.mark.parametrize("other", ["gemma4", "llama", None])
def test_other_model_types_are_refused(other: str | None) -> None:
    with pytest.raises(CheckpointError, match=rf"a/config.json: model_type is {other!r}.*diffusion_gemma"):
        ModelSpec.from_config({**tiny_config(), "model_type": other}, source="a/config.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"hidden_size": None}, "text_config.hidden_size is missing"),
        ({"hidden_size": "8"}, "text_config.hidden_size is '8'"),
        ({"hidden_size": 8.0}, "text_config.hidden_size is 8.0"),
        ({"hidden_size": True}, "text_config.hidden_size is True"),
        ({"hidden_size": -8}, "text_config.hidden_size is -8"),
        ({"vocab_size": 2**31}, "text_config.vocab_size"),
        ({"head_dim": None}, "text_config.head_dim is missing"),
        ({"global_head_dim": None}, "global_head_dim"),
        ({"global_head_dim": 7}, "layer 1 has head_dim 7"),
        ({"num_global_key_value_heads": 3}, "layer 1 has 3 KV heads; expected a divisor of the 4 heads"),
        ({"layer_types": ["sliding_attention", "sliding_attention"]}, "the last layer is 'sliding_attention'"),
        ({"layer_types": ["mamba", "full_attention"]}, "text_config.layers.0.kind is 'mamba'"),
        ({"layer_types": "full_attention"}, "text_config.layer_types is 'full_attention'"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3 but layer_types has 2"),
        ({"top_k_experts": 4}, "top_k_experts is 4 but num_experts is 3"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"final_logit_softcapping": 0}, "text_config.final_logit_softcapping is 0"),
        ({"rms_norm_eps": float("nan")}, "text_config.rms_norm_eps is nan"),
        ({"per_layer_config": {"2": {}}}, "text_config.per_layer_config has the entry '2'"),
        ({"per_layer_config": {"9" * 5000: {}}}, "text_config.per_layer_config has the entry '999"),
        ({"per_layer_config": {"-1": {}}}, "text_config.per_layer_config has the entry '-1'"),
        ({"per_layer_config": [{}]}, "text_config.per_layer_config is"),
        ({"per_layer_config": {"1": {"intermediate_size": 12}}}, r"per_layer_config.1 has 'intermediate_size': 12"),
        ({"per_layer_config": {"0": {"skip": ["mlp"]}}}, r"per_layer_config.0 has 'skip'"),
    ],
)
def test_bad_text_configs_are_refused_by_key(text: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        ModelSpec.from_config(tiny_config(**text), source="a/config.json")
    assert str(raised.value).startswith("a/config.json: ")


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ({"canvas_length": 0}, "config.json: canvas_length is 0"),
        ({"canvas_length": None}, "config.json: canvas_length is None"),
        ({"text_config": None}, "text_config is missing"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is false"),
    ],
)
def test_bad_top_level_keys_are_refused(top: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelSpec.from_config({**tiny_config(), **top})
