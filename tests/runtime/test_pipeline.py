"""The pipeline on a real bundle: traced graphs of a tiny random model, its tokenizer and its template."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from dgcompile.bundle import Bundle
from dgcompile.errors import BundleError, RequestError
from dgcompile.runtime.chat import ChatTemplate
from dgcompile.runtime.loop import encode_prompts, generate
from dgcompile.runtime.onnxruntime_session import OnnxRuntimeSession
from dgcompile.runtime.pipeline import Pipeline
from tests.runtime.test_loop import WatchedSession

TEXTS = ["a", "Why is the sky blue?", "one two three " * 3, "0123456789" * 5, "Ω not ascii"]
CHAT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "So?"},
]


@pytest.fixture(scope="module")
def pipeline(bundle: Path) -> Pipeline:
    return Pipeline.open(bundle, threads=1)


@pytest.fixture
def watched(pipeline: Pipeline) -> WatchedSession:
    assert isinstance(pipeline.session, OnnxRuntimeSession)
    return WatchedSession(pipeline.session)


def test_chats_are_tokenized_like_transformers_does(pipeline: Pipeline, checkpoint: Path) -> None:
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    template = (checkpoint / "chat_template.jinja").read_text()
    ids = theirs.apply_chat_template(CHAT, chat_template=template, add_generation_prompt=True, return_dict=False)
    assert pipeline.encode(CHAT) == ids
    assert pipeline.encode(TEXTS[1]) == theirs(TEXTS[1])["input_ids"]


def test_answers_are_finite_and_end_as_they_say(pipeline: Pipeline) -> None:
    """Case 1: ten seeds, five prompts; and what the results claim."""
    config = pipeline.bundle.generation
    finite: list[bool] = []
    prompts = [pipeline.encode(text) for text in TEXTS]
    for seed in range(10):
        results = pipeline.generate(
            prompts, seeds=[seed] * 5, on_step=lambda event: finite.append(bool(np.isfinite(event.entropy).all()))
        )
        for result in results:
            ends = [token in config.eos_token_ids for token in result.token_ids]
            assert not any(ends[:-1])
            assert result.finish_reason == ("eos" if ends[-1] else "length")
            assert ends[-1] or len(result.token_ids) == config.max_new_tokens
            assert ends[-1] or set(result.token_ids) != {config.pad_token_id}
            assert isinstance(pipeline.decode(result.token_ids), str)
    assert finite
    assert all(finite)


def test_a_batch_gives_each_row_what_it_gives_alone(pipeline: Pipeline) -> None:
    """Case 7."""
    prompts = [pipeline.encode(text) for text in TEXTS]
    seeds = [11, 12, 13, 14, 15]
    together = pipeline.generate(prompts, seeds=seeds)
    alone = [pipeline.generate([prompt], seeds=[seed])[0] for prompt, seed in zip(prompts, seeds, strict=True)]
    assert together == alone
    assert len({tuple(result.steps_per_canvas) for result in together}) > 1


def test_calls_of_three_canvases(pipeline: Pipeline, watched: WatchedSession) -> None:
    """Cases 4 and 5 on the real graphs."""
    config = pipeline.bundle.generation.replace(eos_token_ids=())
    prompt = pipeline.encode(TEXTS[1])
    (result,) = generate(watched, [prompt], config, [1])
    canvas = watched.spec.canvas_length
    assert config.max_new_tokens == 3 * canvas
    assert watched.encoded == [[prompt], [result.token_ids[:canvas]], [result.token_ids[canvas : 2 * canvas]]]
    first_steps = np.cumsum([0, *result.steps_per_canvas])[:-1].tolist()
    assert [index for index, (_, _, zero) in enumerate(watched.steps) if zero] == first_steps


def test_chunks_of_a_prompt_do_not_change_its_cache(watched: WatchedSession) -> None:
    """The prompt is several windows long, so chunks end inside, at and beyond the ring's end."""
    window = watched.spec.sliding_window
    generator = np.random.default_rng(0)
    prompts = [
        generator.integers(3, watched.spec.vocab_size - 3, length, dtype=np.int32)
        for length in (3 * window + 1, window)
    ]
    caches = []
    for chunk in (10**6, window, window // 2 + 1, 3):
        batch = watched.new_batch(2, len(prompts[0]))
        encode_prompts(watched, batch, prompts, chunk)
        caches.append(batch.cache)
    for cache in caches[1:]:
        for array, other in zip((*cache.keys, *cache.values), (*caches[0].keys, *caches[0].values), strict=True):
            np.testing.assert_allclose(array.astype(float), other.astype(float), rtol=1e-3, atol=1e-4)


def test_prompts_do_not_fit(pipeline: Pipeline) -> None:
    with pytest.raises(RequestError, match=f"at most {pipeline.bundle.max_context}, the bundle's max_context"):
        pipeline.generate([[5] * pipeline.bundle.max_context])


def test_without_tokenizer_or_template_ids_still_work(pipeline: Pipeline) -> None:
    bare = Pipeline(pipeline.bundle, pipeline.session, None, None)
    assert bare.generate([[5, 6]]) == pipeline.generate([[5, 6]])
    with pytest.raises(RequestError, match=r"has no tokenizer.json; expected token ids"):
        bare.encode("text")
    with pytest.raises(RequestError, match=r"has no tokenizer.json"):
        bare.decode([1])
    with pytest.raises(RequestError, match="has no chat template; expected plain text"):
        Pipeline(pipeline.bundle, pipeline.session, pipeline.tokenizer, None).encode(CHAT)


def test_a_template_that_needs_an_unknown_token_is_refused(pipeline: Pipeline) -> None:
    unknown = replace(pipeline.bundle, generation=pipeline.bundle.generation.replace(bos_token_id=None))
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}")
    with pytest.raises(RequestError, match=r"uses bos_token, which generation_config.json does not give"):
        Pipeline(unknown, pipeline.session, pipeline.tokenizer, template).encode(CHAT)
    # One that does not use it is fine, and a caller may give it.
    Pipeline(unknown, pipeline.session, pipeline.tokenizer, ChatTemplate("{{ messages[0].content }}")).encode(CHAT)


def test_an_empty_prompt_is_refused(pipeline: Pipeline) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        Pipeline(pipeline.bundle, pipeline.session, pipeline.tokenizer, ChatTemplate("{{ '' }}")).encode(CHAT)


def test_a_bundle_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(BundleError):
        Pipeline.open(tmp_path)


def test_another_canvas_length_in_the_manifest_is_refused(bundle: Path) -> None:
    """Case 8."""
    opened = Bundle.open(bundle)
    changed = opened.spec.model_copy(update={"canvas_length": opened.spec.canvas_length - 1})
    with pytest.raises(BundleError, match="runs only with the shapes it was trained with"):
        OnnxRuntimeSession(bundle, changed, 100)
