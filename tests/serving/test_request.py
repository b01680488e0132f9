"""Requests: what is refused, by name, and what becomes of what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgcompile.errors import RequestError
from dgcompile.generation_config import GenerationConfig
from dgcompile.runtime.pipeline import Pipeline
from dgcompile.serving.request import MAX_STOP_LENGTH, MAX_STOP_STRINGS, GenerateRequest, new_seed

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of text, messages, prompt, input_ids must be given, not none"),
        ({"text": "a", "prompt": "b"}, "not text and prompt"),
        ({"text": 7}, "text is 7"),
        ({"input_ids": [1, True]}, "input_ids.1 is True"),
        ({"input_ids": [1.0]}, "input_ids.0 is 1.0"),
        ({"text": "a", "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"text": "a", "max_new_tokens": 1.5}, "max_new_tokens is 1.5"),
        ({"text": "a", "max_new_tokens": True}, "max_new_tokens is True"),
        ({"text": "a", "max_denoising_steps": 10_001}, "max_denoising_steps is 10001"),
        ({"text": "a", "seed": -1}, "seed is -1"),
        ({"text": "a", "seed": 2**64}, "seed is 18446744073709551616"),
        ({"text": "a", "t_min": float("nan")}, "t_min is nan"),
        ({"text": "a", "t_min": -0.1}, "t_min is -0.1"),
        ({"text": "a", "t_max": 1e-38}, "t_max is 1e-38"),
        ({"text": "a", "t_max": 1e39}, "t_max is 1e+39"),
        ({"text": "a", "entropy_bound": 0}, "entropy_bound is 0"),
        ({"text": "a", "stop": [""]}, "stop.0 is ''"),
        ({"text": "a", "stop": ["x" * (MAX_STOP_LENGTH + 1)]}, "stop.0 is 'xxx"),
        ({"text": "a", "stop": ["x"] * (MAX_STOP_STRINGS + 1)}, "stop is "),
        ({"text": "a", "stop": "x"}, "stop is 'x': expected a list of strings"),
        ({"text": "a", "logprobs": 3}, "unknown key 'logprobs'"),
        ({"text": "a", "\x1b[31m": 3}, r"""unknown key "'\\x1b[31m'" """.strip()),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        GenerateRequest.from_values(values)
    assert message in str(raised.value) and str(raised.value).startswith("the request: ")


@given(values=st.dictionaries(st.sampled_from([*GenerateRequest.model_fields, "other"]), JSON, max_size=4))
def test_any_json_is_taken_or_refused(values: dict[str, Any]) -> None:
    try:
        request = GenerateRequest.from_values(values)
    except RequestError:
        return
    try:
        request.generation(GenerationConfig())
    except RequestError as error:
        assert "generation options" in str(error)


def test_options_replace_the_defaults() -> None:
    defaults = GenerationConfig(max_new_tokens=7, t_min=0.1, t_max=0.9)
    assert GenerateRequest(text="a").generation(defaults) == defaults
    given_ones = GenerateRequest(
        text="a", max_new_tokens=3, max_denoising_steps=2, t_min=0.2, t_max=0.3, entropy_bound=4.0
    )
    config = given_ones.generation(defaults)
    assert (config.max_new_tokens, config.max_denoising_steps) == (3, 2)
    assert (config.t_min, config.t_max, config.entropy_bound) == (0.2, 0.3, 4.0)
    with pytest.raises(RequestError, match="t_max must be the larger"):
        GenerateRequest(text="a", t_min=0.95).generation(defaults)


def test_each_source_becomes_a_prompt(bundle: Path) -> None:
    pipeline = Pipeline.open(bundle, threads=1)
    chat = pipeline.encode([{"role": "user", "content": "Hello"}])
    assert GenerateRequest(text="Hello").token_ids(pipeline) == chat
    assert GenerateRequest(messages=[{"role": "user", "content": "Hello"}]).token_ids(pipeline) == chat
    assert GenerateRequest(prompt="Hello").token_ids(pipeline) == pipeline.encode("Hello") != chat
    assert GenerateRequest(input_ids=[5, 6]).token_ids(pipeline) == [5, 6]
    for values in ({"messages": []}, {"messages": [{"content": "Hello"}]}, {"prompt": ""}, {"text": "\ud800"}):
        with pytest.raises(RequestError) as raised:
            GenerateRequest.from_values(values).token_ids(pipeline)
        str(raised.value).encode()  # can be sent


def test_seeds_are_drawn_from_all_there_are() -> None:
    seeds = {new_seed() for _ in range(100)}
    assert len(seeds) == 100 and max(seeds) > 2**63 and all(0 <= seed < 2**64 for seed in seeds)
