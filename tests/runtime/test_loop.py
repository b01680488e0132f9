"""The generation loop against the toy model, whose right answers are known without any cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgcompile.errors import EngineError, RequestError
from dgcompile.generation_config import GenerationConfig
from dgcompile.model_spec import ModelSpec
from dgcompile.runtime.loop import CPU_ENCODE_CHUNK, ENCODE_CHUNK, GenerationResult, StepEvent, encode_prompts, generate
from dgcompile.runtime.onnxruntime_session import OnnxRuntimeSession
from dgcompile.runtime.session import Batch, Session
from tests.runtime.toy_model import CANVAS, SURE, VOCAB, WINDOW, toy_answer, toy_spec

CONFIG = GenerationConfig(
    max_new_tokens=3 * CANVAS, max_denoising_steps=9, confidence_threshold=0.01, eos_token_ids=(), entropy_bound=0.1
)
PROMPTS = [[5], [1, 2, 3], list(range(WINDOW + 5)), [31, 0, 31, 0], list(range(30))]


class WatchedSession:
    """A real session that writes down what it is asked to do."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.encoded: list[list[list[int]]] = []  # the real tokens of each row of each call
        self.steps: list[tuple[int, int, bool]] = []  # first row, last row, self-conditioning all zeros
        self.batches: list[tuple[int, int]] = []  # rows and capacity
        self.temperatures: list[float] = []
        self.bounds: list[float] = []

    @property
    def spec(self) -> ModelSpec:
        return self.session.spec

    @property
    def max_context(self) -> int:
        return self.session.max_context

    @property
    def max_batch(self) -> int | None:
        return self.session.max_batch

    def new_batch(self, rows: int, capacity: int) -> Batch:
        self.batches.append((rows, capacity))
        return self.session.new_batch(rows, capacity)

    def encode(
        self, batch: Batch, input_ids: npt.NDArray[np.int32], input_length: npt.NDArray[np.int32], first: int = 0
    ) -> None:
        self.encoded.append([row[:n].tolist() for row, n in zip(input_ids, input_length, strict=True)])
        self.session.encode(batch, input_ids, input_length, first)

    def denoise(self, batch: Batch, first: int, last: int) -> None:
        self.steps.append((first, last, not batch.self_conditioning[first : last + 1].any()))
        self.temperatures.append(float(batch.temperature[first]))
        self.bounds.append(float(batch.entropy_bound[last]))
        self.session.denoise(batch, first, last)


@pytest.fixture
def watched(toy_session: OnnxRuntimeSession) -> WatchedSession:
    return WatchedSession(toy_session)


def expected(prompt: Sequence[int], config: GenerationConfig, seed: int) -> tuple[list[int], str, list[int]]:
    """The toy model's answer, cut, its finish reason and its steps."""
    ids, steps = toy_answer(prompt, config, seed)
    ids = ids[: config.max_new_tokens]
    ends = [place for place, token in enumerate(ids) if token in config.eos_token_ids]
    return (ids[: ends[0] + 1], "eos", steps) if ends else (ids, "length", steps)


def summary(result: GenerationResult) -> tuple[list[int], str, list[int]]:
    return result.token_ids, result.finish_reason, result.steps_per_canvas


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    changes=st.fixed_dictionaries(
        {
            "max_new_tokens": st.integers(1, 4 * CANVAS),
            "max_denoising_steps": st.integers(1, 9),
            "stability_threshold": st.sampled_from([None, 0, 1, 2, 3]),
            "confidence_threshold": st.sampled_from([None, 0.0005, 0.01, 100.0]),
            "eos_token_ids": st.sampled_from([(), (3,), (3, 17, 30)]),
            "entropy_bound": st.sampled_from([0.0001, 0.1, 2.0]),
        }
    ),
)
def test_every_batch_gives_every_row_its_own_right_answer(
    toy_session: OnnxRuntimeSession, prompts: list[list[int]], seed: int, changes: dict[str, object]
) -> None:
    """Also: rows are independent (case 7), whatever their lengths and however many steps each takes."""
    config = CONFIG.replace(**changes)
    seeds = [seed + index for index in range(len(prompts))]
    results = generate(toy_session, prompts, config, seeds)
    assert [summary(result) for result in results] == [
        expected(prompt, config, seed) for prompt, seed in zip(prompts, seeds, strict=True)
    ]


def test_answers_are_finite_and_never_all_padding(toy_session: OnnxRuntimeSession) -> None:
    """Case 1, with ten seeds and five prompts."""
    for seed in range(10):
        finite: list[bool] = []
        results = generate(
            toy_session,
            PROMPTS,
            CONFIG,
            [seed] * 5,
            lambda event: finite.append(bool(np.isfinite(event.entropy).all())),  # noqa: B023
        )
        assert all(finite)
        assert all(set(result.token_ids) != {CONFIG.pad_token_id} for result in results)


@pytest.mark.parametrize("threshold", [0, 1, 2, 3])
def test_convergence_needs_one_canvas_more_than_the_threshold(toy_session: OnnxRuntimeSession, threshold: int) -> None:
    """Case 2: with boundless confidence a canvas that always stays the same takes threshold + 1 steps."""
    config = CONFIG.replace(stability_threshold=threshold, confidence_threshold=1e9, max_new_tokens=CANVAS)
    events: list[StepEvent] = []
    (result,) = generate(toy_session, [[5, 6]], config, [3], events.append)
    canvases = [event.argmax_ids[0].tolist() for event in events]
    runs = [all(old == canvases[i] for old in canvases[max(0, i - threshold) : i]) for i in range(len(canvases))]
    first = next(i for i, run in enumerate(runs) if run and i >= threshold)
    assert result.steps_per_canvas == [first + 1]
    assert result.steps_per_canvas[0] >= threshold + 1
    assert [event.converged[0] for event in events] == [False] * first + [True]


class ScriptedSession(WatchedSession):
    """A real session whose argmax canvases are replaced, step by step, by canvases filled with one of ``tokens``."""

    def __init__(self, session: OnnxRuntimeSession, tokens: str) -> None:
        super().__init__(session)
        self.tokens = tokens

    def denoise(self, batch: Batch, first: int, last: int) -> None:
        super().denoise(batch, first, last)
        batch.argmax_ids.fill(ord(self.tokens[len(self.steps) - 1]) - ord("a"))


@pytest.mark.parametrize(
    ("threshold", "tokens", "steps"),
    [(0, "abc", 1), (1, "abaab", 4), (1, "aabb", 2), (2, "aabbabbba", 8), (2, "aabbaabbc", 9), (3, "aaabbbb", 7)],
)
def test_stable_means_equal_to_the_canvases_just_before(
    toy_session: OnnxRuntimeSession, threshold: int, tokens: str, steps: int
) -> None:
    config = CONFIG.replace(
        stability_threshold=threshold, confidence_threshold=1e9, max_new_tokens=1, max_denoising_steps=len(tokens)
    )
    (result,) = generate(ScriptedSession(toy_session, tokens), [[5]], config, [0])
    assert result.steps_per_canvas == [steps]
    assert result.token_ids == [ord(tokens[steps - 1]) - ord("a")]


def test_confident_means_below_the_threshold(toy_session: OnnxRuntimeSession) -> None:
    config = CONFIG.replace(max_new_tokens=1)
    sure = float(np.full(CANVAS, SURE, dtype=np.float32).mean())
    (at,) = generate(toy_session, [[5]], config.replace(confidence_threshold=sure), [0])
    (above,) = generate(toy_session, [[5]], config.replace(confidence_threshold=sure * 1.001), [0])
    assert at.steps_per_canvas == [config.max_denoising_steps]
    assert above.steps_per_canvas[0] < config.max_denoising_steps


def test_temperatures_fall_from_t_max_towards_t_min(watched: WatchedSession) -> None:
    config = CONFIG.replace(t_min=0.3, t_max=0.7, max_denoising_steps=4, stability_threshold=None)
    generate(watched, [[5], [6]], config.replace(max_new_tokens=CANVAS + 1), [0, 1])
    np.testing.assert_allclose(watched.temperatures, 2 * [0.7, 0.6, 0.5, 0.4], rtol=1e-6)
    np.testing.assert_allclose(watched.bounds, 8 * [config.entropy_bound], rtol=1e-6)


@pytest.mark.parametrize("option", ["stability_threshold", "confidence_threshold"])
def test_without_a_threshold_all_steps_are_run(toy_session: OnnxRuntimeSession, option: str) -> None:
    config = CONFIG.replace(**{option: None, "max_new_tokens": CANVAS})
    (result,) = generate(toy_session, [[5]], config, [0])
    assert result.steps_per_canvas == [config.max_denoising_steps]


@pytest.mark.parametrize("count", [1, CANVAS - 1, CANVAS, CANVAS + 1, 2 * CANVAS + 3])
def test_max_new_tokens_is_exact(watched: WatchedSession, count: int) -> None:
    """Case 3: whole canvases are run, the answer is cut."""
    (result,) = generate(watched, [[7, 7]], CONFIG.replace(max_new_tokens=count), [1])
    assert len(result.token_ids) == count
    assert result.finish_reason == "length"
    assert len(result.steps_per_canvas) == -(-count // CANVAS)


def test_the_answer_ends_with_the_first_eos(watched: WatchedSession) -> None:
    """Case 3; no canvas is run and nothing is encoded after it."""
    whole, _ = toy_answer([7, 7], CONFIG, 1)
    eos = whole[CANVAS + 2]  # in the second canvas
    first = whole.index(eos)
    (result,) = generate(watched, [[7, 7]], CONFIG.replace(eos_token_ids=(eos,)), [1])
    assert result.token_ids == whole[: first + 1]
    assert result.finish_reason == "eos"
    assert len(result.steps_per_canvas) == first // CANVAS + 1
    assert len(watched.encoded) == first // CANVAS + 1


def test_an_eos_behind_the_cut_does_not_count(toy_session: OnnxRuntimeSession) -> None:
    whole, _ = toy_answer([7, 7], CONFIG, 1)
    eos = whole[CANVAS - 1]
    assert eos not in whole[: CANVAS - 1]
    config = CONFIG.replace(eos_token_ids=(eos,), max_new_tokens=CANVAS - 1)
    (result,) = generate(toy_session, [[7, 7]], config, [1])
    assert (result.token_ids, result.finish_reason) == (whole[: CANVAS - 1], "length")


def test_the_prompt_is_encoded_once_and_each_canvas_that_is_followed_once(watched: WatchedSession) -> None:
    """Case 4."""
    (result,) = generate(watched, [[1, 2, 3]], CONFIG, [4])
    ids = result.token_ids
    assert watched.encoded == [[[1, 2, 3]], [ids[:CANVAS]], [ids[CANVAS : 2 * CANVAS]]]
    assert result.encoder_calls == 3
    assert len(watched.steps) == sum(result.steps_per_canvas)
    # The last canvas is never committed, so the cache has no room for it.
    assert watched.batches == [(1, 3 + 2 * CANVAS)]


def test_self_conditioning_is_zero_on_the_first_step_of_every_canvas_only(watched: WatchedSession) -> None:
    """Case 5."""
    (result,) = generate(watched, [[1, 2, 3]], CONFIG, [4])
    first_steps = np.cumsum([0, *result.steps_per_canvas])[:-1].tolist()
    assert [index for index, (_, _, zero) in enumerate(watched.steps) if zero] == first_steps


def test_prompt_lengths(toy_session: OnnxRuntimeSession) -> None:
    """Case 6: one token, about the window's size, and all that fits."""
    room = toy_session.max_context - 3 * CANVAS
    for length in (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, room):
        prompt = [index % VOCAB for index in range(length)]
        (result,) = generate(toy_session, [prompt], CONFIG, [9])
        assert summary(result) == expected(prompt, CONFIG, 9)


def test_a_prompt_that_does_not_fit_is_refused_before_any_work(watched: WatchedSession) -> None:
    """Case 6."""
    room = watched.max_context - 3 * CANVAS
    message = r"prompt 1 has 111 tokens and 18 new ones take 3 canvases of 6: 129 tokens; expected at most 128"
    with pytest.raises(RequestError, match=message):
        generate(watched, [[1], [1] * (room + 1)], CONFIG, [0, 0])
    # 13 new tokens take three canvases as well.
    with pytest.raises(RequestError, match="13 new ones take 3 canvases"):
        generate(watched, [[1] * (room + 1)], CONFIG.replace(max_new_tokens=13), [0])
    assert (watched.batches, watched.encoded, watched.steps) == ([], [], [])


@pytest.mark.parametrize(
    ("prompts", "seeds", "message"),
    [
        ([], [], "no prompt"),
        ([[]], [0], "the prompt is empty"),
        ([[1], []], [0, 0], "prompt 1 is empty"),
        ([[1]], [], "0 seeds were given for 1 prompts"),
        ([[1, 32]], [0], "the prompt has 32 at position 1; expected token ids from 0 to 31"),
        ([[-1]], [0], "the prompt has -1 at position 0"),
        ([[1.0]], [0], "the prompt has 1.0 at position 0"),
        ([[True]], [0], "the prompt has True at position 0"),
        (["ab"], [0], "the prompt has 'a' at position 0"),
        ([[2**40]], [0], "the prompt has 1099511627776"),
        ([[1]], [-1], "the seed is -1"),
    ],
)
def test_malformed_requests_are_refused(
    watched: WatchedSession, prompts: list[list[int]], seeds: list[int], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        generate(watched, prompts, CONFIG, seeds)
    assert not watched.batches


def test_finished_and_converged_rows_cost_nothing_at_the_edges(watched: WatchedSession) -> None:
    """A row that ended leaves the batch; rows that converged leave the calls, unless they lie between others."""
    whole, _ = toy_answer([5], CONFIG, 2)
    config = CONFIG.replace(eos_token_ids=(whole[0],))
    prompts = [[5], [1, 2, 3], [8, 9]]
    results = generate(watched, prompts, config, [2, 3, 4])
    assert results[0].finish_reason == "eos"
    assert [summary(result) for result in results] == [
        expected(prompt, config, seed) for prompt, seed in zip(prompts, (2, 3, 4), strict=True)
    ]
    lengths = [len(call) for call in watched.encoded]
    assert lengths[0] == 3
    assert max(lengths[1:], default=0) < 3
    # The two rows' canvases take different numbers of steps, so that the last calls hold one row each.
    assert len({tuple(result.steps_per_canvas) for result in results}) > 1
    assert any(first == last for first, last, _ in watched.steps)
    longest = max(result.steps_per_canvas[0] for result in results)
    assert sum(last - first + 1 for first, last, _ in watched.steps[:longest]) < 3 * longest


def test_chunks_of_a_prompt_do_not_change_its_cache(watched: WatchedSession) -> None:
    prompts = [np.arange(n, dtype=np.int32) % VOCAB for n in (30, 17, 17, 1)]
    caches = []
    for chunk in (1, 4, WINDOW, 13, 64):
        watched.encoded.clear()
        batch = watched.new_batch(4, 40)
        encode_prompts(watched, batch, prompts, chunk)
        assert len(watched.encoded) == -(-30 // chunk)
        for row, prompt in enumerate(prompts):
            assert [token for call in watched.encoded if row < len(call) for token in call[row]] == prompt.tolist()
        caches.append(batch.cache)
    for cache in caches[1:]:
        assert cache.past_length.tolist() == [30, 17, 17, 1]
        for array, other in zip((*cache.keys, *cache.values), (*caches[0].keys, *caches[0].values), strict=True):
            assert np.array_equal(array, other)


def test_events_tell_each_step(toy_session: OnnxRuntimeSession) -> None:
    events: list[StepEvent] = []
    prompts = [[5], [1, 2, 3], [8, 9]]
    results = generate(toy_session, prompts, CONFIG, [2, 3, 4], events.append)
    for row, result in enumerate(results):
        own = [event for event in events if row in event.rows]
        assert [(event.canvas, event.step) for event in own] == [
            (canvas, step + 1) for canvas, steps in enumerate(result.steps_per_canvas) for step in range(steps)
        ]
        last = [event for event in own if event.step == result.steps_per_canvas[event.canvas]]
        answer = [token for event in last for token in event.argmax_ids[event.rows.index(row)].tolist()]
        assert answer == result.token_ids
        for event in own:
            place = event.rows.index(row)
            kept = event.accepted[place]
            assert np.array_equal(event.next_canvas_ids[place][kept], event.argmax_ids[place][kept])
            assert np.array_equal(kept, event.entropy[place] <= np.float32(CONFIG.entropy_bound))
    # Copies: a later step must not change what a watcher keeps.
    assert all(event.argmax_ids.base is None for event in events)


def test_numbers_that_are_not_finite_are_an_error(toy_session: OnnxRuntimeSession) -> None:
    class Spoilt(WatchedSession):
        def denoise(self, batch: Batch, first: int, last: int) -> None:
            super().denoise(batch, first, last)
            if len(self.steps) == 2:
                batch.entropy[0, 3] = np.nan

    with pytest.raises(EngineError, match="entropy is nan in step 2 of canvas 0"):
        generate(Spoilt(toy_session), [[5]], CONFIG, [0])


def test_seeds_decide(toy_session: OnnxRuntimeSession) -> None:
    results = generate(toy_session, [[5]] * 3, CONFIG, [1, 2, 1])
    assert results[0] == results[2]
    assert results[0] != results[1]


class SmallSession(WatchedSession):
    """A real session that takes two rows at a time."""

    @property
    def max_batch(self) -> int:
        return 2


def test_more_prompts_than_a_batch_holds_are_generated_in_groups(toy_session: OnnxRuntimeSession) -> None:
    """Texts and events are those of one large batch."""
    config, seeds = CONFIG.replace(eos_token_ids=(3, 17)), [1, 2, 3, 4, 5]
    together: list[StepEvent] = []
    expected_results = generate(toy_session, PROMPTS, config, seeds, together.append)
    small, grouped = SmallSession(toy_session), list[StepEvent]()
    assert generate(small, PROMPTS, config, seeds, grouped.append) == expected_results
    assert [rows for rows, _ in small.batches] == [2, 2, 1]
    canvases = [
        {
            (row, event.canvas, event.step): event.argmax_ids[place].tolist()
            for event in events
            for place, row in enumerate(event.rows)
        }
        for events in (together, grouped)
    ]
    assert canvases[0] == canvases[1]


def test_an_engine_for_gpus_takes_longer_chunks(toy_folder: Path) -> None:
    session = OnnxRuntimeSession(toy_folder, toy_spec(), max_context=1024, threads=1)
    prompt = [1] * (ENCODE_CHUNK + 1)
    for kind, chunk in ((WatchedSession, CPU_ENCODE_CHUNK), (SmallSession, ENCODE_CHUNK)):
        watched = kind(session)
        (result,) = generate(watched, [prompt], CONFIG.replace(max_new_tokens=1), [0])
        lengths = [len(call[0]) for call in watched.encoded]
        assert lengths == [chunk] * (ENCODE_CHUNK // chunk) + [1]
        assert result.encoder_calls == len(lengths)


def test_a_bad_prompt_of_a_later_group_is_refused_before_any_work(toy_session: OnnxRuntimeSession) -> None:
    small = SmallSession(toy_session)
    with pytest.raises(RequestError, match="prompt 4 is empty"):
        generate(small, [[1], [2], [3], [4], []], CONFIG, [0] * 5)
    assert small.batches == []
