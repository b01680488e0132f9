"""GenerationConfig against transformers' own class, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers.models.diffusion_gemma import generation_diffusion_gemma

from dgcompile.errors import BundleError, CheckpointError, RequestError
from dgcompile.generation_config import GenerationConfig

# transformers' own classes, which are not annotated throughout.
transformers: Any = generation_diffusion_gemma

PUBLISHED = {
    "bos_token_id": 2,
    "confidence_threshold": 0.005,
    "eos_token_id": [1, 106, 50],
    "max_denoising_steps": 48,
    "max_new_tokens": 256,
    "pad_token_id": 0,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
    "stability_threshold": 1,
    "t_max": 0.8,
    "t_min": 0.4,
    "transformers_version": "5.24.0",
}

configs = st.builds(
    lambda low, span, **fields: GenerationConfig(t_min=low, t_max=low + span, **fields),
    low=st.floats(0, 2),
    span=st.floats(0.01, 2),
    max_new_tokens=st.integers(1, 10**6),
    max_denoising_steps=st.integers(1, 500),
    entropy_bound=st.floats(1e-6, 100),
    stability_threshold=st.integers(0, 9),
    confidence_threshold=st.floats(1e-9, 10),
    eos_token_ids=st.lists(st.integers(0, 300_000), min_size=1, max_size=4).map(tuple),
    pad_token_id=st.integers(0, 300_000),
    bos_token_id=st.none() | st.integers(0, 300_000),
)


def test_the_published_file() -> None:
    assert GenerationConfig.from_values(PUBLISHED) == GenerationConfig(eos_token_ids=(1, 106, 50), bos_token_id=2)


def test_defaults_are_those_of_transformers() -> None:
    theirs = transformers.DiffusionGemmaGenerationConfig._get_default_generation_params()
    sampler = theirs.pop("sampler_config")
    ours = GenerationConfig()
    assert ours.entropy_bound == sampler.entropy_bound
    assert {key: getattr(ours, key) for key in theirs} == theirs


def test_a_file_saved_by_transformers(tmp_path: Path) -> None:
    theirs = transformers.DiffusionGemmaGenerationConfig(
        max_new_tokens=7,
        sampler_config=transformers.EntropyBoundSamplerConfig(entropy_bound=0.25),
        t_min=0.1,
        t_max=0.2,
        eos_token_id=5,
        stability_threshold=3,
    )
    theirs.save_pretrained(tmp_path)
    config = GenerationConfig.from_file(tmp_path / "generation_config.json")
    # What transformers leaves at null has its default.
    assert config == GenerationConfig(
        max_new_tokens=7, entropy_bound=0.25, t_min=0.1, t_max=0.2, eos_token_ids=(5,), stability_threshold=3
    )


@given(configs)
def test_files_are_read_by_us_and_by_transformers_alike(config: GenerationConfig) -> None:
    values = json.loads(json.dumps(config.to_values()))
    assert GenerationConfig.from_values(values) == config
    theirs = transformers.DiffusionGemmaGenerationConfig(**values)
    assert theirs.sampler_config.entropy_bound == config.entropy_bound
    assert theirs.eos_token_id == list(config.eos_token_ids)
    assert (theirs.t_min, theirs.t_max, theirs.bos_token_id) == (config.t_min, config.t_max, config.bos_token_id)


@given(configs, st.data())
def test_the_temperature_is_that_of_transformers(config: GenerationConfig, data: st.DataObject) -> None:
    steps = config.max_denoising_steps
    left = data.draw(st.integers(1, steps))
    logits = torch.tensor([3.0], dtype=torch.float64)
    processor = transformers.LinearTemperatureScheduleLogitsProcessor(config.t_min, config.t_max, steps)
    expected = processor(torch.zeros(1, dtype=torch.long), logits, left)
    assert (logits / config.temperature(left)).item() == expected.item()


def test_the_first_step_is_the_hottest() -> None:
    config = GenerationConfig()
    assert config.temperature(48) == 0.8
    assert config.temperature(1) == pytest.approx(0.4 + 0.4 / 48)


def test_token_ids_come_from_the_defaults_where_the_file_has_none() -> None:
    defaults = GenerationConfig(eos_token_ids=(7,), pad_token_id=3)
    assert GenerationConfig.from_values({"eos_token_id": None}, defaults=defaults).eos_token_ids == (7,)
    assert GenerationConfig.from_values({"eos_token_id": 8}, defaults=defaults).eos_token_ids == (8,)
    assert GenerationConfig.from_values({}, defaults=defaults).pad_token_id == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0"),
        ({"max_new_tokens": "9"}, "max_new_tokens is '9'"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"max_denoising_steps": -1}, "max_denoising_steps is -1"),
        ({"t_min": -0.1}, "t_min is -0.1"),
        ({"t_min": 0.8}, "t_max is 0.8 and t_min is 0.8"),
        ({"t_max": float("inf")}, "t_max is inf"),
        ({"t_max": float("nan")}, "t_max is nan"),
        ({"stability_threshold": -1}, "stability_threshold is -1"),
        ({"confidence_threshold": 0}, "confidence_threshold is 0"),
        ({"eos_token_id": [-1]}, "eos_token_ids.0 is -1"),
        ({"eos_token_id": ["a"]}, "eos_token_ids.0 is 'a'"),
        ({"eos_token_id": {}}, "eos_token_ids.0 is {}"),
        ({"top_k": 64}, "unknown key 'top_k'"),
        ({"eos_token_ids": [1]}, "unknown key 'eos_token_ids'"),
        ({"entropy_bound": 0.1}, "unknown key 'entropy_bound'"),
        ({"max_length": 20}, "max_length is 20; expected max_new_tokens"),
        ({"sampler_config": 0.1}, "sampler_config is 0.1"),
        ({"sampler_config": {"entropy_bound": 0}}, "entropy_bound is 0"),
        ({"sampler_config": {"_cls_name": "Other", "entropy_bound": 0.1}}, "sampler_config._cls_name is 'Other'"),
        ({"sampler_config": {"entropy_bound": 0.1, "x": 1}}, "unknown key 'sampler_config.x'"),
        ({"sampler_config": {}}, "sampler_config.entropy_bound is missing"),
    ],
)
def test_bad_files_are_refused_by_file_and_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**PUBLISHED, **changes}))
    with pytest.raises(CheckpointError) as raised:
        GenerationConfig.from_file(file)
    assert str(raised.value).startswith(f"{file}: {message}")
    with pytest.raises(BundleError):
        GenerationConfig.from_file(file, error=BundleError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"t_max": 0.3}, "t_max is 0.3 and t_min is 0.4"),
        ({"temperature": 1.0}, "unknown key 'temperature'"),
    ],
)
def test_bad_options_are_requests_at_fault(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"generation options: {message}"):
        GenerationConfig().replace(**changes)


def test_replace_leaves_the_original_alone() -> None:
    config = GenerationConfig(eos_token_ids=(1,))
    changed = config.replace(max_new_tokens=600, stability_threshold=None)
    assert (changed.max_new_tokens, changed.stability_threshold, changed.eos_token_ids) == (600, None, (1,))
    assert config == GenerationConfig(eos_token_ids=(1,))
    with pytest.raises(ValidationError, match="frozen"):
        config.max_new_tokens = 3


def test_a_file_cannot_say_that_nothing_stops_early() -> None:
    with pytest.raises(RequestError, match="never stops early"):
        GenerationConfig(confidence_threshold=None).to_values()


def test_token_ids_must_be_in_the_vocabulary() -> None:
    config = GenerationConfig(eos_token_ids=(1, 63), bos_token_id=2)
    config.check_vocabulary(64, source="here")
    with pytest.raises(CheckpointError, match="here: eos_token_id 63 is not in the vocabulary; expected below 63"):
        config.check_vocabulary(63, source="here")
